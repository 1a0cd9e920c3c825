"""What the policy reads between its turns: exactly what the chat template writes there."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.chat import HERMES, LLAMA, LLAMA_SPECIAL, chat_tokenizer
from helpers.tool_templates import WITH_TOOLS
from postgrad.core.errors import RunError, UsageError
from postgrad.core.records import Prompt
from postgrad.models.fresh import PRINTABLE, TEMPLATE
from postgrad.rollout.engine import Completion
from postgrad.rollout.environment import Environments, OpenSample, SamplingSpec
from postgrad.rollout.environments import chat as chat_module
from postgrad.rollout.environments import template as template_module
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.template import Template
from postgrad.rollout.settings import EnvironmentSettings, SamplingSettings

FAMILIES = {
    "chatml": (chat_tokenizer(), ("user",)),
    "hermes": (chat_tokenizer(HERMES), ("user", "tool")),
    "llama": (chat_tokenizer(LLAMA, LLAMA_SPECIAL), ("user", "tool")),
}
PROMPT = Prompt(5, np.array([4], np.int32), "?", None, "rows", 0)
LOUD = {"type": "my_environments:Echo"}


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def completion(tokenizer, text, end=True, finish="stop"):
    ids = np.array(ids_of(tokenizer, text + tokenizer.eos_token * end), np.int32)
    return Completion(5, 0, 0, ids, np.zeros(len(ids), np.float32), finish, ((0, len(ids)),), text)


def started(tokenizer, max_turns=8, **options):
    chat_settings = EnvironmentSettings.model_validate({**LOUD, "max_turns": max_turns, **options})
    return dialogue(chat_settings, tokenizer, {}).reset(PROMPT, 0)


@pytest.fixture(autouse=True)
def _mine_on_path(monkeypatch):
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_prompt_turns_and_observations_are_the_templates_own_tokens(family, data):
    tokenizer, roles = FAMILIES[family]
    text = (
        st.text(alphabet=PRINTABLE, min_size=1).map(str.strip).filter(lambda t: t and "<" not in t)
    )
    template = Template(tokenizer, {})
    messages = [{"role": "user", "content": data.draw(text)}]

    def rendered(**more):
        return tokenizer.apply_chat_template(messages, tokenize=False, **more)

    tokens = ids_of(tokenizer, rendered(add_generation_prompt=True))
    for _ in range(data.draw(st.integers(1, 3))):
        turn, role = data.draw(text), data.draw(st.sampled_from(roles))
        reply = [
            {"role": role, "content": content}
            for content in data.draw(st.lists(text, min_size=1, max_size=2))
        ]
        turn_ids = ids_of(tokenizer, turn + tokenizer.eos_token)
        assert template.closed(np.array(turn_ids, np.int32))
        tokens += [*turn_ids, *template.after(reply, closed=True).tolist()]
        messages += [{"role": "assistant", "content": turn}, *reply]
    assert tokens == ids_of(tokenizer, rendered(add_generation_prompt=True))


SHOWN = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    "family", ["qwen", "mistral", "mistral_list", "deepseek", "deepseek_plain", "gpt_oss", "kimi"]
)
@settings(max_examples=20)
@given(data=st.data())
def test_calls_and_their_results_are_the_templates_own_tokens(family, data):
    tokenizer = chat_tokenizer(*WITH_TOOLS[family])
    template = Template(tokenizer, {"tools": SHOWN})
    text = st.text(alphabet=PRINTABLE, min_size=1).map(str.strip).filter(bool)
    messages = [{"role": "user", "content": data.draw(text)}]

    def rendered(**more):
        return tokenizer.apply_chat_template(messages, tools=SHOWN, tokenize=False, **more)

    start = rendered(add_generation_prompt=True)
    tokens, answered = ids_of(tokenizer, start), 0
    for _ in range(data.draw(st.integers(1, 3))):
        results = data.draw(st.lists(text, min_size=1, max_size=1 if family == "gpt_oss" else 3))
        names = [f"call{n:05d}" for n in range(answered, answered + len(results))]
        names = [f"functions.f:{name[4:]}" if family == "kimi" else name for name in names]
        answered += len(results)
        asked = '{"a": 1}' if family == "deepseek_plain" else {"a": 1}  # which it joins to text
        calls = [
            {"type": "function", "id": i, "function": {"name": "f", "arguments": asked}}
            for i in names
        ]
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}]
        turn = rendered().removeprefix(start)
        turn_ids = np.array(ids_of(tokenizer, turn.removesuffix("\n")), np.int32)
        assert template.closed(turn_ids)
        replies = [
            {"role": "tool", "content": content, "tool_call_id": i, "name": "f"}
            for i, content in zip(names, results, strict=True)
        ]
        messages += replies
        tokens += [*turn_ids.tolist(), *template.after(replies, closed=True).tolist()]
        start = rendered(add_generation_prompt=True)
    assert tokens == ids_of(tokenizer, start)


def test_a_call_of_gpt_oss_is_closed_and_its_thoughts_stay_as_sampled():
    tokenizer = chat_tokenizer(*WITH_TOOLS["gpt_oss"])
    template = Template(tokenizer, {"tools": SHOWN})
    result = [{"role": "tool", "content": "5", "tool_call_id": "call00000", "name": "f"}]
    seen = '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"5"<|end|>'
    assert tokenizer.decode(template.after(result, closed=True)) == seen + "<|start|>assistant"
    opened = tokenizer.decode(template.after(result, closed=False))
    assert opened == f"<|call|>{seen}<|start|>assistant"
    user = template.after([{"role": "user", "content": "on"}], closed=True)
    assert tokenizer.decode(user) == "<|start|>user<|message|>on<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("family", "result", "why"),
    [
        ("mistral_list", {"tool_call_id": "call_1"}, "ids of calls have 9 letters or digits"),
        ("gpt_oss", {}, "a result has no call before it"),
    ],
)
def test_a_result_that_a_template_demands_more_of_is_refused_in_its_words(family, result, why):
    template = Template(chat_tokenizer(*WITH_TOOLS[family]), {"tools": SHOWN})
    with pytest.raises(UsageError, match=f"cannot write a message of role 'tool'.*{why}"):
        template.after([{"role": "tool", "content": "5", **result}], closed=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_a_stop_string_ended_is_closed_by_the_template(family):
    tokenizer, _ = FAMILIES[family]
    template = Template(tokenizer, {})
    reply = [{"role": "user", "content": "on"}]
    assert not template.closed(np.array(ids_of(tokenizer, "abc"), np.int32))
    opened, closed = (template.after(reply, closed=is_closed) for is_closed in (False, True))
    assert tokenizer.decode(opened) == tokenizer.eos_token + tokenizer.decode(closed)


def test_variables_reach_every_observation():
    thinks = TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n' + start }}{% endif %}")
    template = Template(chat_tokenizer(thinks), {"start": "<think>"})
    seen = template.after([{"role": "user", "content": "on"}], closed=True)
    text = chat_tokenizer(thinks).decode(seen)
    assert text == "\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n<think>"


def test_an_episode_answers_until_it_is_done():
    tokenizer = FAMILIES["chatml"][0]
    episode = started(tokenizer)
    first = episode.step(completion(tokenizer, "hello")).result()
    assert tokenizer.decode(first.token_ids) == (
        "\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (first.done, first.reward) == (False, 0.5)
    assert first.counts == {"turns": 1.0, "out_of_turns": 0.0, "conversations": 1.0, "heard": 5.0}
    last = episode.step(completion(tokenizer, "bye")).result()
    assert (last.done, last.reward, len(last.token_ids)) == (True, 1.0, 0)


def test_the_last_turn_that_is_allowed_is_heard_and_ends_the_episode():
    tokenizer = FAMILIES["chatml"][0]
    episode = started(tokenizer, max_turns=2)
    assert not episode.step(completion(tokenizer, "a")).result().done
    last = episode.step(completion(tokenizer, "b")).result()
    assert (last.done, last.reward, last.counts["out_of_turns"]) == (True, 0.5, 1.0)


@pytest.mark.parametrize("finish", ["length", "dead_end"])
def test_a_turn_that_was_cut_ends_the_episode_unheard(finish):
    tokenizer = FAMILIES["chatml"][0]
    cut = completion(tokenizer, "bye", end=False, finish=finish)
    seen = started(tokenizer).step(cut).result()
    assert (seen.done, seen.reward) == (True, 0.0)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("nothing", "the step returned a NoneType in place of a Reply"),
        ("text", "the step returned a str in place of a Reply"),
        ("reward", "the reward of a Reply is '1', which is no number"),
        ("nan", "the reward of a Reply is nan, which is no finite number"),
        ("infinity", "the reward of a Reply is -inf, which is no finite number"),
        ("huge", "the reward of a Reply is 1e+39, which is no finite number of 32 bits"),
        ("count", "the count 'hits' of a Reply is nan, which is no finite number"),
        ("no counts", "the counts of a Reply are a NoneType, which is no dict"),
        ("count name", "a count of a Reply is named 3, which is no text"),
        ("counted", "a count of a Reply is named 'turns', which the run counts itself"),
        ("no JSON", "a message of a Reply has under 'more' {1, 2}, which is no JSON"),
        ("letter", "its reply cannot be read: environment: the chat template cannot write"),
        ("exit", "SystemExit: bye (my_environments.py:"),
        ("one message", "the messages of a Reply are a dict, which is no tuple"),
        ("no text", "{'role': 'user', 'content': None}, which is no dict with texts"),
        ("half a pair", "a message of a Reply has half a surrogate pair"),
        ("places", "a Reply stands behind array([0, 1]): it may be 'newest', 'nothing', or"),
        ("ends", "done of a Reply is array([ True, False]), which is neither true nor false"),
        ("start", "KeyError: 'level' (my_environments.py:"),
        ("no course", "start returned a NoneType, which has no method `step`"),
    ],
)
def test_what_is_no_reply_is_a_failure_of_its_sample(kind, why):
    tokenizer = FAMILIES["chatml"][0]
    episode = started(tokenizer, type="my_environments:Wrong", kind=kind)
    seen = episode.step(completion(tokenizer, "a")).result()
    assert seen.done
    assert seen.failure is not None
    assert seen.failure.cause == "error"
    assert why in seen.failure.message


def test_numbers_of_numpy_become_plain_ones_which_a_checkpoint_can_keep():
    tokenizer = FAMILIES["chatml"][0]
    episode = started(tokenizer, type="my_environments:Gym")
    first, seen = [episode.step(completion(tokenizer, "a")).result() for _ in range(2)]
    assert first.behind == "newest"
    assert (type(seen.behind), seen.behind) == (int, 0)
    assert (type(seen.reward), seen.reward) == (float, 0.5)
    assert first.counts == {"turns": 1.0, "out_of_turns": 0.0, "conversations": 1.0, "hits": 2.0}
    assert {type(count) for count in seen.counts.values()} == {float}


@pytest.mark.parametrize(
    ("resumes", "why"),
    [
        ("raises", "ConnectionError: the sandbox is gone (my_environments.py:"),
        ("wrong", "resume returned a str, which has no method `step`"),
    ],
)
def test_an_environment_that_fails_to_resume_is_a_failure_of_that_sample_alone(resumes, why):
    tokenizer = FAMILIES["chatml"][0]
    world = dialogue(
        EnvironmentSettings.model_validate({"type": "my_environments:Gym", "resumes": resumes}),
        tokenizer,
        {},
    )
    reply_completion = completion(tokenizer, "a")
    recorded = [(reply_completion, world.reset(PROMPT, 0).step(reply_completion).result())]
    episode = world.resume(PROMPT, 0, None, recorded)
    assert episode is not None
    failure = episode.step(reply_completion).result().failure
    assert failure is not None
    assert why in failure.message


def test_long_replies_are_not_kept_for_the_next_like_them():
    template = Template(FAMILIES["chatml"][0], {})
    for text in ("on", "on", "x" * 5000, "x" * 5000):
        template.after([{"role": "user", "content": text}], closed=True)
    kept = template._after.cache_info()
    assert (kept.currsize, kept.hits) == (1, 1)


@pytest.mark.parametrize("at", ["start", "step"])
def test_an_environment_that_changes_the_working_directory_ends_the_run(at, tmp_path, monkeypatch):
    """Its relative paths would be others from then on: those of logs and checkpoints too."""
    before = tmp_path / "before"
    before.mkdir()
    monkeypatch.chdir(before)
    tokenizer = FAMILIES["chatml"][0]
    settings = {"type": "my_environments:Moving", "at": at, "to": str(tmp_path)}
    monkeypatch.setattr(chat_module, "LOOKS", 3)
    played = dialogue(EnvironmentSettings.model_validate(settings), tokenizer, {})
    with pytest.raises(
        RunError,
        match=rf"'my_environments:Moving' changed the working directory \(os.chdir\) from {before} "
        rf"to {tmp_path}: ",
    ):
        played.reset(PROMPT, 0).step(completion(tokenizer, "hello")).result()


def test_a_step_that_is_elsewhere_for_a_moment_ends_no_run(tmp_path, monkeypatch):
    """A tool in a thread of its own may work in a directory, and leave it."""
    monkeypatch.chdir(tmp_path)
    tokenizer = FAMILIES["chatml"][0]
    episode = started(tokenizer)
    os.chdir("/")
    looks = iter([lambda: None, lambda: os.chdir(tmp_path)])
    monkeypatch.setattr(chat_module.time, "sleep", lambda seconds: next(looks)())
    assert episode.step(completion(tokenizer, "hello")).result().failure is None
    assert next(looks, None) is None


def test_a_working_directory_that_is_removed_ends_nothing(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    tokenizer = FAMILIES["chatml"][0]
    episode = started(tokenizer)
    gone.rmdir()
    assert episode.step(completion(tokenizer, "hello")).result().failure is None
    assert started(tokenizer).step(completion(tokenizer, "hello")).result().failure is None


def test_the_end_of_a_reply_that_nothing_has_room_for_is_not_tokenised(monkeypatch):
    """Such a reply ends its episode: 50 MB of it took minutes for nothing."""
    tokenizer, seen = FAMILIES["chatml"][0], []
    message = [{"role": "user", "content": "so " * 4000}]
    every = Template(tokenizer, {}).after(message, closed=True)
    encode = template_module.encode

    def counted(tokenizer, texts, **more):
        seen.append(max(map(len, texts)))
        return encode(tokenizer, texts, **more)

    monkeypatch.setattr(template_module, "encode", counted)
    begin = Template(tokenizer, {}, most=50).after(message, closed=True)
    assert max(seen) == 16 * 50
    assert len(begin) > 2 * 50 - 2
    assert begin.tolist() == every[: len(begin)].tolist()
    for most, characters in ((len(every), 16), (50, 1)):  # room for it, or tokens so long
        monkeypatch.setattr(template_module, "LONG_TOKEN", characters)
        text = Template(tokenizer, {}, most=most).after(message, closed=True)
        assert text.tolist() == every.tolist()


def test_a_reply_that_is_far_too_long_ends_its_episode_for_its_length():
    chat_settings = EnvironmentSettings.model_validate(LOUD)
    played = dialogue(chat_settings, FAMILIES["chatml"][0], {}, most=40)
    spec = SamplingSpec(1, SamplingSettings(max_new_tokens=8), 0, Environments({None: played}), 40)
    sample = OpenSample(PROMPT, 0, spec)
    seen = sample.take(completion(FAMILIES["chatml"][0], "so " * 4000)).result()
    assert seen.failure is None
    assert sample.observe(seen) is None
    assert sample.rollout(FAMILIES["chatml"][0]).finish_reason == "length"


def test_an_environment_without_start_is_refused_by_name():
    with pytest.raises(UsageError, match="'my_environments:NoStart' has no method start"):
        started(FAMILIES["chatml"][0], type="my_environments:NoStart")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        (
            "{% for m in messages %}{% if loop.first %}{{ m.content }}{% endif %}{% endfor %}",
            "drops",
        ),
        (TEMPLATE.replace("+ message['content']", "+ 'x'"), "drops the text '@turn@'"),
    ],
    ids=["raises", "drops turns", "drops text"],
)
def test_a_template_without_a_place_for_replies_is_refused_at_the_start(template, why):
    with pytest.raises(UsageError, match=rf"cannot write a message of role 'user'.*{why}"):
        started(chat_tokenizer(template))


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UsageError, match="no chat template"):
        started(chat_tokenizer(None))


def test_a_reply_with_a_character_that_the_tokenizer_lacks_is_told():
    tokenizer = FAMILIES["chatml"][0]
    with pytest.raises(UsageError, match="the tokenizer cannot write it"):
        Template(tokenizer, {}).after([{"role": "user", "content": "é"}], closed=True)


def test_a_conversation_that_the_template_writes_without_a_message_is_refused():
    template = Template(chat_tokenizer(*WITH_TOOLS["qwen"]), {})
    user = {"role": "user", "content": "hi"}
    for role, messages in (
        ("developer", [{"role": "developer", "content": "Be brief."}, user]),
        ("system", [user, {"role": "system", "content": "Be brief."}]),
    ):
        with pytest.raises(UsageError, match=f"it drops the text 'Be brief.' of '{role}'"):
            template.opening(messages)


def test_a_template_may_take_flags_out_of_instructions_and_thoughts_out_of_answers():
    written = TEMPLATE.replace(
        "+ message['content']",
        "+ message['content'].replace('/no_think', '').split('</think>')[-1]",
    )
    template = Template(chat_tokenizer(written), {})
    tokens, _ = template.opening(
        [
            {"role": "system", "content": "/no_think"},
            {"role": "user", "content": "Be /no_think brief"},
            {"role": "assistant", "content": "<think>hm</think>so"},
            {"role": "user", "content": "on"},
        ]
    )
    text = chat_tokenizer().decode(tokens)
    assert "user\nBe  brief<|im_end|>" in text
    assert "assistant\nso<|im_end|>" in text
