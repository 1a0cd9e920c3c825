"""Agents that ask the policy over HTTP: tokens stay as sampled, whatever the agent does."""

import json
import re
import time

import numpy as np
import pytest

from helpers import agents
from helpers.chat import HERMES, chat_tokenizer
from helpers.tool_templates import WITH_TOOLS
from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.models.fresh import TEMPLATE
from postgrad.rollout.engine import Completion
from postgrad.rollout.environment import Environments, OpenSample, SamplingSpec
from postgrad.rollout.environments.base import build
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.settings import EnvironmentSettings, SamplingSettings

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
MESSAGES = ({"role": "user", "content": "begin"},)
PROMPT = Prompt(5, np.array([4], np.int32), "begin", "7", "rows", 0, {"level": 3}, MESSAGES)
TOKENIZER = chat_tokenizer()
SCHEMA = {
    "type": "function",
    "function": {
        "name": "next",
        "description": "The next number.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}


def world(agent, tokenizer=TOKENIZER, **options):
    settings = {"type": "agent", "agent": f"helpers.agents:{agent}", **options}
    return dialogue(EnvironmentSettings.model_validate(settings), tokenizer, {})


def turn(text, number=0, tokenizer=TOKENIZER, finish="stop", end=""):
    ids = tokenizer(text + (end or tokenizer.eos_token), add_special_tokens=False)["input_ids"]
    array = np.array(ids, np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    return Completion(5, 0, number, array, logprobs, finish, ((0, len(ids)),), text)


def begun(played, sample=0):
    """An episode whose agent has asked what its row asks."""
    episode = played.reset(PROMPT, sample)
    first = episode.begin().result()
    assert (len(first.token_ids), first.behind, first.failure) == (0, "newest", None)
    return episode


def opening(observation, tokenizer=TOKENIZER):
    return tokenizer.decode(observation.token_ids)


def test_an_agent_talks_with_the_policy_until_it_ends_and_says_the_reward():
    played = world("counts")
    assert (played.deterministic, played.concurrent) == (False, 16)
    episode = begun(played)
    first = episode.step(turn("a")).result()
    assert opening(first) == "\n<|im_start|>user\nheard 1<|im_end|>\n<|im_start|>assistant\n"
    assert (first.done, first.reward, first.failure) == (False, 0.0, None)
    last = episode.step(turn("stop", 1)).result()
    assert (last.done, last.reward, last.failure) == (True, 2.0, None)
    played.close()


def test_an_agent_may_begin_with_messages_that_are_not_those_of_its_row():
    played = world("instructs", branches=False)
    episode = played.reset(PROMPT, 0)
    first = episode.begin().result()
    assert (first.behind, first.done, first.reward, first.counts) == ("nothing", False, 0.0, {})
    assert opening(first) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTask: begin<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    seen = episode.step(turn("a")).result()
    assert (seen.behind, seen.counts["conversations"]) == ("newest", 1.0)
    assert opening(seen) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    last = episode.step(turn("b", 1)).result()
    assert (last.done, last.reward, last.counts["conversations"]) == (True, 1.0, 0.0)
    played.close()


def test_samples_of_several_agents_do_not_mix():
    played = world("counts")
    episodes = [begun(played, sample) for sample in range(4)]
    first = [episode.step(turn(f"{number}")) for number, episode in enumerate(episodes)]
    assert all("heard 1" in opening(step.result()) for step in first)
    steps = [episode.step(turn("stop", 1)) for episode in reversed(episodes[:2])]
    assert [step.result().reward for step in steps] == [2.0, 2.0]
    on = [episode.step(turn("x", 1)).result() for episode in episodes[2:]]
    assert all("heard 2" in opening(seen) for seen in on)
    played.close()


def test_an_agent_that_is_a_plain_function_has_a_process_of_its_own():
    played = world("plain")
    episode = begun(played)
    assert "and?" in opening(episode.step(turn("a")).result())
    last = episode.step(turn("b", 1)).result()
    assert (last.done, last.reward) == (True, 0.5)
    played.close()


NEXT = '{"n": 6}'
FAMILIES = {  # template, a call of `next`, the answer 7
    "hermes": (
        WITH_TOOLS["qwen"],
        f'So.<tool_call>{{"name": "next", "arguments": {NEXT}}}</tool_call>',
        "7",
    ),
    "mistral": (WITH_TOOLS["mistral"], f"So.[TOOL_CALLS]next[ARGS]{NEXT}", "7"),
    "mistral_list": (
        WITH_TOOLS["mistral_list"],
        f'[TOOL_CALLS] [{{"name": "next", "arguments": {NEXT}, "id": "abcDEF123"}}]',
        "7",
    ),
    "deepseek": (
        WITH_TOOLS["deepseek"],
        "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>next\n```json\n"
        f"{NEXT}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "7",
    ),
    "gpt_oss": (
        WITH_TOOLS["gpt_oss"],
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.next <|constrain|>json<|message|>{NEXT}",
        "<|channel|>analysis<|message|>8?<|end|><|start|>assistant<|channel|>final<|message|>7",
    ),
    "kimi": (
        WITH_TOOLS["kimi"],
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.next:0"
        f"<|tool_call_argument_begin|>{NEXT}<|tool_call_end|><|tool_calls_section_end|>",
        "7",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_tools_are_given_to_the_agent_and_results_come_back_through_the_template(family):
    shown, call, answer = FAMILIES[family]
    tokenizer = chat_tokenizer(*shown)
    played = world("uses_tools", tokenizer, tools=[SCHEMA])
    assert played.chat.variables() == {"tools": [SCHEMA]}
    episode = begun(played)
    end = "<|call|>" if family == "gpt_oss" else ""
    seen = episode.step(turn(call, 0, tokenizer, end=end)).result()
    assert seen.failure is None
    assert "7" in opening(seen, tokenizer)
    last = episode.step(turn(answer, 1, tokenizer)).result()
    assert (last.done, last.reward) == (True, 7.0)
    played.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_of_a_request_are_shown_where_the_recipe_states_none(family):
    shown, call, answer = FAMILIES[family]
    tokenizer = chat_tokenizer(*shown)
    played = world("brings_a_tool", tokenizer)
    assert played.chat.variables() == {}
    episode = played.reset(PROMPT, 0)
    first = episode.begin().result()
    assert (first.failure, first.behind, first.tools) == (None, "nothing", (SCHEMA,))
    wanted = tokenizer.apply_chat_template(
        [*MESSAGES], tools=[SCHEMA], tokenize=False, add_generation_prompt=True
    )
    assert opening(first, tokenizer) == wanted
    end = "<|call|>" if family == "gpt_oss" else ""
    seen = episode.step(turn(call, 0, tokenizer, end=end)).result()
    assert (seen.failure, seen.behind, seen.tools) == (None, "newest", None)
    assert "7" in opening(seen, tokenizer)
    seen = episode.step(turn(answer, 1, tokenizer)).result()
    assert (seen.failure, seen.behind) == (None, "nothing")
    assert seen.tools == ()  # the request has none
    assert "The next number." not in opening(seen, tokenizer)
    text = "<tool_call>so</tool_call>"  # no mark where no tools are
    seen = episode.step(turn(text, 2, tokenizer)).result()
    assert (seen.failure, seen.done, seen.reward) == (None, True, 7.0)
    played.close()


def test_tools_of_a_request_are_among_those_that_the_recipe_states():
    played = world("brings_tools", chat_tokenizer(HERMES), tools=[SCHEMA])
    seen = played.reset(PROMPT, 0).begin().result()
    assert seen.failure is not None
    assert "does not see: look; state their schemas in environment.tools" in seen.failure.message
    played.close()


def test_a_recipe_may_ignore_that_an_agent_demands_a_call():
    for ignored, seen in (((), (0.0, True)), (("tool_choice",), (1.0, False))):
        played = world("demands_a_call", ignored=ignored)
        episode = played.reset(PROMPT, 0)
        last = episode.begin().result()
        last = last if last.done else episode.step(turn("a")).result()
        assert (last.reward, last.failure is not None) == seen
        played.close()


def test_where_a_request_forbids_calls_they_stay_text_and_the_conversation_goes_on():
    tokenizer = chat_tokenizer(HERMES)
    played = world("forbids_calls", tokenizer)
    episode = played.reset(PROMPT, 0)
    assert episode.begin().result().failure is None
    call = '<tool_call>{"name": "next", "arguments": {}}</tool_call>'
    seen = episode.step(turn(call, 0, tokenizer)).result()
    assert (seen.failure, seen.behind) == (None, "newest")
    last = episode.step(turn(call, 1, tokenizer)).result()
    assert (last.failure, last.reward) == (None, 1.0)
    played.close()


def test_a_tool_that_is_no_function_is_refused():
    played = world("searches_the_web", chat_tokenizer(HERMES))
    seen = played.reset(PROMPT, 0).begin().result()
    assert seen.failure is not None
    assert "a tool is no function with a name: {'type': 'web_search'}" in seen.failure.message
    played.close()


def test_without_branches_a_request_with_other_tools_is_a_failure_of_its_sample():
    tokenizer = chat_tokenizer(HERMES)
    played = world("brings_a_tool", tokenizer, branches=False)
    episode = played.reset(PROMPT, 0)
    assert episode.begin().result().failure is None
    episode.step(turn(FAMILIES["hermes"][1], 0, tokenizer)).result()
    seen = episode.step(turn("7", 1, tokenizer)).result()
    assert seen.failure is not None
    assert "its tools are none, and were next" in seen.failure.message
    played.close()


def test_a_result_of_a_call_that_the_policy_has_not_made_is_a_failure_of_its_sample():
    tokenizer = chat_tokenizer(HERMES)
    played = world("answers_another_call", tokenizer, tools=[SCHEMA])
    seen = begun(played).step(turn(FAMILIES["hermes"][1], 0, tokenizer)).result()
    assert seen.failure is not None
    assert "the tool_call_id 'other', and the calls before it had call00000" in seen.failure.message
    played.close()


def test_an_agent_without_tools_hears_the_final_channel_of_gpt_oss_alone():
    tokenizer = chat_tokenizer(*WITH_TOOLS["gpt_oss"])
    played = world("counts", tokenizer)
    episode = begun(played)
    thought = "<|channel|>analysis<|message|>stop?<|end|><|start|>assistant"
    first = episode.step(turn(f"{thought}<|channel|>final<|message|>on", 0, tokenizer)).result()
    assert opening(first, tokenizer) == ("<|start|>user<|message|>heard 1<|end|><|start|>assistant")
    last = episode.step(turn(f"{thought}<|channel|>final<|message|>stop", 1, tokenizer)).result()
    assert (last.done, last.reward) == (True, 2.0)
    played.close()


def test_thoughts_are_part_of_the_content_where_the_recipe_says_nothing():
    played = world("without_thoughts")
    episode = begun(played)
    reply_text = "<think>\nWhy?\n</think>\n\nso"
    seen = episode.step(turn(reply_text)).result()
    assert seen.behind == "newest"
    assert opening(seen) == (
        f"\n<|im_start|>user\n{json.dumps([None, reply_text])}<|im_end|>\n<|im_start|>assistant\n"
    )
    played.close()


@pytest.mark.parametrize("opened", [False, True])
def test_an_agent_that_drops_thoughts_goes_on_as_sampled_where_it_gets_them_apart(opened):
    begin = "<think>\n"
    tokenizer = chat_tokenizer(TEMPLATE.replace("assistant\n' }}", f"assistant\n{begin}' }}}}"))
    assert begin in tokenizer.chat_template
    tokenizer, begin = (tokenizer, "") if opened else (TOKENIZER, begin)
    played = world("without_thoughts", tokenizer, thoughts="reasoning_content", branches=False)
    episode = begun(played)
    seen = episode.step(turn(f"{begin}Why?\n</think>\n\nso ", 0, tokenizer)).result()
    assert (seen.behind, seen.failure) == ("newest", None)
    assert '["Why?", "so"]' in opening(seen, tokenizer)
    seen = episode.step(turn(f"{begin}never ends", 1, tokenizer)).result()
    assert (seen.behind, seen.failure) == ("newest", None)
    assert '["never ends", ""]' in opening(seen, tokenizer)
    assert episode.step(turn("c", 2, tokenizer)).result().reward == 1.0
    played.close()


def test_thoughts_that_an_agent_sends_back_are_the_same_or_another_conversation():
    tokenizer = chat_tokenizer(*WITH_TOOLS["qwen"])
    played = world("writes_thoughts", tokenizer, thoughts="reasoning_content")
    episode = begun(played)
    seen = episode.step(turn("<think>Why?</think>so", 0, tokenizer)).result()
    assert (seen.behind, opening(seen, tokenizer).count("assistant")) == ("newest", 1)
    seen = episode.step(turn("b", 1, tokenizer)).result()
    assert (seen.behind, seen.failure) == ("nothing", None)
    assert "so" in opening(seen, tokenizer)
    assert episode.step(turn("c", 2, tokenizer)).result().reward == 1.0
    played.close()


@pytest.mark.parametrize("family", ["hermes", "gpt_oss", "mistral"])
def test_calls_without_the_thoughts_before_them_continue_the_conversation(family):
    template, call, _ = FAMILIES[family]
    begin = {"hermes": "<think>Hm.</think>", "mistral": "[THINK]Hm.[/THINK]"}.get(family, "")
    tokenizer = chat_tokenizer(*template)
    played = world("thinks_before_calls", tokenizer, thoughts="reasoning_content", branches=False)
    episode = played.reset(PROMPT, 0)
    assert episode.begin().result().failure is None
    seen = episode.step(turn(begin + call, 0, tokenizer)).result()
    assert (seen.behind, seen.failure) == ("newest", None)
    assert "Hm.: 7" in opening(seen, tokenizer)
    assert episode.step(turn("c", 1, tokenizer)).result().reward == 1.0
    played.close()


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        ("silent", "ended without asking"),
        ("leaves", r"SystemExit: bye \(agents.py:"),
        ("words", "returned str, no number"),
        ("asks_for_several", "HTTP Error 400"),
        (
            "brings_tools",
            "the policy can see none: .*teaches no format of tool calls",
        ),
        ("begins_an_answer", "its last one is an answer, and a turn is written whole"),
        ("misspells", r"^helpers.agents:misspells: KeyError: 'anwser' \(agents.py:\d+\)$"),
        ("groups", r"KeyError: 'part 0' \(agents.py:\d+\), and 1 more"),
    ],
)
def test_an_agent_that_does_something_else_is_a_failure_of_its_sample(agent, why):
    played = world(agent)
    episode = played.reset(PROMPT, 0)
    seen = episode.begin().result()
    if not seen.done:
        seen = episode.step(turn("a")).result()
    assert (seen.done, seen.failure is None) == (True, False)
    assert seen.failure.cause == "error"
    assert re.search(why, seen.failure.message)
    played.close()


def test_what_no_client_of_openai_sends_is_told_to_the_agent(capfd, caplog):
    played = world("malformed")
    seen = begun(played).step(turn("a")).result()
    assert seen.failure is not None
    assert seen.failure.message.count("400 ") == 6
    for why in (
        "tool_calls of a message are no list of calls: 5",
        "tool_calls of a message are no list of calls: [{'function': 'look'}]",
        "the content of a message is no text and no list of parts: 5",
        "tools are no list: 5",
        "message 0 has a part of type 'input_audio', and only text and images are read",
        "message 0 has an image that cannot be read: it is elsewhere, and nothing is fetched: give",
    ):
        assert why in seen.failure.message
    played.close()
    assert (capfd.readouterr().err, caplog.text) == ("", "")


def test_without_branches_an_agent_that_rewrites_what_was_said_is_a_failure_of_its_sample():
    played = world("forgets", branches=False)
    seen = begun(played).step(turn("a")).result()
    assert seen.failure is not None
    assert re.search(
        r"does not continue the conversation: message 1 is .*other.*, and was .*\"a\".*branches",
        seen.failure.message,
    )
    played.close()


def test_an_agent_that_rewrites_what_was_said_begins_another_conversation():
    played = world("forgets")
    episode = begun(played)
    seen = episode.step(turn("a")).result()
    assert (seen.behind, seen.failure) == ("nothing", None)
    assert opening(seen) == (
        "<|im_start|>user\nbegin<|im_end|>\n<|im_start|>assistant\nother<|im_end|>\n"
        "<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    )
    assert episode.step(turn("b", 1)).result().counts["conversations"] == 1.0
    played.close()


def test_an_agent_may_go_on_behind_an_earlier_turn_whose_tokens_stay_as_sampled():
    played = world("explores")
    episode = begun(played)
    answers = ["a", "b", "c", "d"]
    seen = [episode.step(turn(text, number)).result() for number, text in enumerate(answers)]
    assert [each.behind for each in seen[:3]] == ["newest", 0, 1]
    assert [opening(each).count("assistant") for each in seen[:3]] == [1, 1, 1]
    assert "left" in opening(seen[0])
    assert "right" in opening(seen[1])
    assert "left again" in opening(seen[2])
    assert (seen[3].done, seen[3].reward) == (True, 4.0)
    played.close()


def test_requests_at_the_same_time_are_answered_one_after_the_other():
    played = world("delegates")
    episode = begun(played)
    seen = [episode.step(turn("plan", 0)).result()]
    while not seen[-1].done:
        assert seen[-1].failure is None
        seen.append(episode.step(turn(f"{len(seen)}", len(seen))).result())
    assert [each.behind for each in seen[:3]] == ["nothing"] * 3
    assert sorted(opening(each).partition("user\n")[2][:5] for each in seen[:3]) == [
        "job 0", "job 1", "job 2",
    ]  # fmt: skip
    assert (seen[-1].reward, len(seen)) == (6.0, 4)  # 1 + 2 + 3: each job has its own answer
    played.close()


@pytest.mark.parametrize("family", ["hermes", "kimi"])
def test_calls_and_results_of_a_history_that_an_agent_has_shortened_come_through_the_template(
    family,
):
    shown, call, answer = FAMILIES[family]
    tokenizer = chat_tokenizer(*shown)
    played = world("shortens", tokenizer, tools=[SCHEMA])
    episode = begun(played)
    seen = episode.step(turn(call, 0, tokenizer)).result()
    assert (seen.failure, seen.behind) == (None, "nothing")
    text = opening(seen, tokenizer)
    assert "briefly" in text
    assert "begin<|im_end|>" not in text
    assert text.index("next") < text.rindex("7")
    assert episode.step(turn(answer, 1, tokenizer)).result().reward == 7.0
    played.close()


def test_results_are_of_the_calls_of_their_own_conversation():
    tokenizer = chat_tokenizer(*WITH_TOOLS["gpt_oss"])  # whose results name the function
    tools = [SCHEMA, {**SCHEMA, "function": {**SCHEMA["function"], "name": "last"}}]
    played = world("uses_tools_in_two_ways", tokenizer, tools=tools)
    episode = begun(played)
    call = FAMILIES["gpt_oss"][1]  # both calls have the same id
    texts = [call, call.replace("functions.next", "functions.last")]
    seen = [
        episode.step(turn(text, number, tokenizer, end="<|call|>")).result()
        for number, text in enumerate(texts)
    ]
    assert [each.behind for each in seen] == ["nothing", 0]
    assert opening(seen[1], tokenizer).startswith("<|start|>functions.next to=assistant")
    answer = turn(FAMILIES["gpt_oss"][2], 2, tokenizer)
    assert episode.step(answer).result().reward == 1.0
    played.close()


def test_an_agent_that_ends_while_a_request_waits_ends_its_sample():
    played = world("hurries")
    episode = begun(played)
    seen = episode.step(turn("a")).result()
    while not seen.done:
        seen = episode.step(turn("b", 1)).result()
    assert (seen.reward, seen.failure) == (0.25, None)
    played.close()


def test_tokens_are_counted_as_the_policy_reads_them_and_a_refused_count_fails_no_sample():
    played = world("counts_tokens", branches=False)
    episode = played.reset(PROMPT, 0)
    assert episode.begin().result().failure is None
    for number in range(3):
        seen = episode.step(turn("<think>never mind", number)).result()
    assert (seen.failure, seen.done, seen.reward) == (None, True, 2.0)
    played.close()


def test_an_agent_ends_where_the_episode_does():
    played = world("counts", max_turns=1)
    before = len(agents.ENDED)
    seen = begun(played).step(turn("a")).result()
    assert (seen.done, seen.counts["out_of_turns"], seen.failure) == (True, 1.0, None)
    deadline = time.monotonic() + 30.0
    while len(agents.ENDED) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(agents.ENDED) == before + 1
    played.close()


def test_an_agent_ends_where_what_it_says_does_not_fit():
    played = world("counts")
    before = len(agents.ENDED)
    spec = SamplingSpec(1, SamplingSettings(max_new_tokens=8), 0, Environments({None: played}), 8)
    sample = OpenSample(PROMPT, 0, spec)
    assert sample.observe(sample.begin().result()) is not None
    assert sample.observe(sample.take(turn("a")).result()) is None
    assert sample.rollout(TOKENIZER).finish_reason == "length"
    deadline = time.monotonic() + 30.0
    while len(agents.ENDED) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(agents.ENDED) == before + 1
    played.close()


def test_an_agent_that_asks_behind_the_end_of_its_episode_is_told_so_at_once(capfd, caplog):
    played = world("sums_up", max_turns=2)
    before, episode = len(agents.ENDED), begun(played)
    while not episode.step(turn("a")).result().done:
        pass
    deadline = time.monotonic() + 30.0
    while len(agents.ENDED) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "the sample has ended" in agents.ENDED[before]
    played.close()
    assert (capfd.readouterr().err, caplog.text) == ("", "")


def test_only_a_sample_that_is_played_has_a_key():
    played = world("counts")
    begun(played).step(turn("a")).result()
    url = played.chat._desk.url
    assert url.startswith("http://127.0.0.1:")
    with pytest.raises(Exception, match="401"):
        agents.ask(url, "guessed", list(MESSAGES))
    played.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"agent": "helpers.agents:nobody"}, "has no 'nobody'"),
        ({"agent": "helpers.agents:ENDED"}, "is no Python function"),
        ({}, "environment.agent: 'agent' needs it, and it is missing"),
    ],
)
def test_settings_that_are_wrong_are_told(options, why):
    with pytest.raises(UsageError, match=why):
        build(EnvironmentSettings.model_validate({"type": "agent", **options}))
