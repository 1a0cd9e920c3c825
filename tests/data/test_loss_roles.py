"""The loss on messages of chosen roles, and what each message's tokens count."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from helpers.chat_families import FAMILIES
from helpers.tool_templates import WITH_TOOLS
from postgrad.core.errors import UsageError
from postgrad.data.answer_spans import BLANK
from postgrad.data.chat_format import LossTurns, Role
from postgrad.data.conversations import ConversationSet, load_conversations
from postgrad.data.settings import DataSettings
from postgrad.models.fresh import END, PAD, PRINTABLE, START

Load = Callable[..., ConversationSet]
CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "thanks"},
]
CALL = {"id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather"}
EPISODE = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {**RESULT, "content": 'no "rain"'},
    {"role": "assistant", "content": "No."},
]
GROUPED = (  # several results of tools in one turn of the user, as Qwen's templates write them
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RESULTS = [CHAT[0], {"role": "assistant", "content": "look"}, {"role": "tool", "content": "one."},
           {"role": "tool", "content": "two."}, {"role": "assistant", "content": "3"}]  # fmt: skip


@pytest.fixture
def load(write_rows: Callable[..., str]) -> Load:
    """load(tokenizer, [messages, ...], **settings)"""

    def read(tokenizer: Any, chats: list[list[dict[str, Any]]], **more: Any) -> ConversationSet:
        path = write_rows([{"messages": chat} for chat in chats])
        data = DataSettings(path=path, messages="messages", max_len=10**6, **more)
        return load_conversations(data, tokenizer)

    return read


def runs(conversations: ConversationSet, tokenizer: Any) -> list[list[tuple[str, float]]]:
    """Of each training row, the runs of tokens of one weight, decoded."""
    rows: list[list[tuple[str, float]]] = []
    for row in conversations.all():
        weights = row.loss_mask.astype(np.float32)
        if row.loss_weights is not None:
            assert np.array_equal(row.loss_weights > 0, row.loss_mask)
            weights = row.loss_weights
        cuts = np.flatnonzero(np.diff(weights)) + 1
        edges = [0, *cuts.tolist(), len(weights)]
        rows.append([
            (tokenizer.decode(row.token_ids[begin:end].tolist()), float(weights[begin]))
            for begin, end in pairwise(edges)
            if weights[begin]
        ])  # fmt: skip
    return rows


def learned(
    load: Load, tokenizer: Any, chat: list[dict[str, Any]], turns: LossTurns
) -> list[list[str]]:
    conversations = load(tokenizer, [chat], loss_turns=turns)
    return [[text for text, _ in row] for row in runs(conversations, tokenizer)]


def merging(texts: list[str]) -> Any:
    """A tokenizer that joins punctuation with what follows it, line breaks too."""
    backend = Tokenizer(BPE())
    split = Split(Regex(r"[^\\w]+|\\w+"), "isolated")
    backend.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    special = [PAD, START, END]
    trainer = BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, chat_template=GROUPED
    )


ENDS = {"chatml": "<|im_end|>", "phi3": "<|end|>", "llama3": "<|eot_id|>", "mistral": " [/INST]",
        "gemma": "<end_of_turn>"}  # fmt: skip


@pytest.mark.parametrize("family", sorted(ENDS))
def test_a_turn_of_the_user_is_its_content_and_the_token_that_ends_it(
    family: str, load: Load, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer, end = make_tokenizer(*FAMILIES[family][:2]), ENDS[family]
    asked = [f"{text}{end}" for text in ("1 + 1?", "and 2 + 2?", "thanks")]
    blank = " " if family == "mistral" else ""  # of "[INST] "; tokenizers join it with a word
    assert learned(load, tokenizer, CHAT, ("user",)) == [[blank + text for text in asked]]
    (both,) = learned(load, tokenizer, CHAT, ("assistant", "user"))
    (answers,) = learned(load, tokenizer, CHAT, "all")
    assert sorted("".join(both)) == sorted("".join([*(blank + text for text in asked), *answers]))


TOOL_ENDS = {
    "qwen": 'no "rain"\n</tool_response><|im_end|>',
    "llama": '"no \\"rain\\""<|eot_id|>',  # the template writes JSON
    "mistral": 'no "rain"[/TOOL_RESULTS]',
    "deepseek": 'no "rain"<｜tool▁output▁end｜>',
    "gpt_oss": '"no \\"rain\\""<|end|>',
    "phi": 'no "rain"<|end|>',
    "olmo": 'no "rain"<|im_end|>',
}


@pytest.mark.parametrize("family", sorted(TOOL_ENDS))
def test_results_of_tools_are_learned_as_templates_write_them(
    family: str, load: Load, make_tokenizer: Callable[..., Any]
) -> None:
    """Of gpt-oss, whose earlier answers change, each in the row of the answer behind it."""
    tokenizer = make_tokenizer(*WITH_TOOLS[family])
    rows = learned(load, tokenizer, EPISODE, ("tool",))
    assert rows == [[TOOL_ENDS[family]]]
    apart = learned(load, tokenizer, EPISODE, ("assistant", "tool"))
    assert sum(TOOL_ENDS[family] in run for row in apart for run in row) == 1


def test_results_in_one_turn_are_learned_together(
    load: Load, make_tokenizer: Callable[..., Any]
) -> None:
    """Also where a token lies across the edge of a content, as "." and a line break here do."""
    pairs = merging(["one.\n</tool_response>\n<tool_response>\ntwo.\n</tool_response>\n"] * 9)
    assert ".\n" in "|".join(map(pairs.decode, pairs("one.\n</tool_response>")["input_ids"]))
    for tokenizer in (make_tokenizer(GROUPED), pairs):
        (row,) = learned(load, tokenizer, RESULTS, ("tool",))
        joined = "one.\n</tool_response>\n<tool_response>\ntwo.\n</tool_response><|im_end|>"
        assert row == [joined]


def test_results_in_one_turn_may_differ_in_weight(
    load: Load, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer(GROUPED)
    first, second = ({**RESULTS[2], "weight": 0.5}, {**RESULTS[3], "weight": 2})
    chats = [
        [*RESULTS[:2], first, second, RESULTS[4]],
        [*RESULTS[:2], first, {**second, "weight": 0}],
    ]
    conversations = load(tokenizer, chats, loss_turns=("tool",))
    assert runs(conversations, tokenizer) == [
        [
            ("one.\n</tool_response>\n<tool_response>\n", 0.5),
            ("two.\n</tool_response><|im_end|>", 2.0),
        ],
        [("one.\n</tool_response>", 0.5)],
    ]


def test_each_message_is_learned_once_where_answers_are_rows_of_their_own(
    load: Load, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer(*FAMILIES["qwen3"][:2])
    end, thought = "<|im_end|>", "<think>\n\n</think>\n\n"
    assert learned(load, tokenizer, CHAT, ("user", "assistant")) == [
        [f"1 + 1?{end}", f"{thought}2{end}"],
        [f"and 2 + 2?{end}", f"{thought}It is 4.{end}"],
        [f"thanks{end}"],
    ]
    assert learned(load, tokenizer, CHAT, ("user",)) == [
        [f"1 + 1?{end}", f"and 2 + 2?{end}", f"thanks{end}"]
    ]


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    roles=st.sets(st.sampled_from(["system", "user", "assistant"]), min_size=1),
    texts=st.lists(
        st.tuples(
            st.text(alphabet=PRINTABLE, min_size=1).filter(lambda t: "<|" not in t and t.strip()),
            st.sampled_from([0, 0.5, 1, 3]),
        ),
        min_size=3, max_size=7,
    ),
)  # fmt: skip
def test_any_conversation_is_learned_as_roles_and_weights_say(
    roles: set[Any], texts: list[tuple[str, float]], load: Load, tokenizer: Any
) -> None:
    order = ["system", *["user", "assistant"] * 3]
    chat = [
        {"role": role, "content": text, **({"weight": weight} if role in roles else {})}
        for role, (text, weight) in zip(order, texts, strict=False)
    ]
    other = [{"role": role, "content": "a"} for role in order[:3]]
    conversations = load(tokenizer, [chat, other], loss_turns=tuple(roles))
    wanted = [
        (f"{text}<|im_end|>", float(weight))
        for role, (text, weight) in zip(order, texts, strict=False)
        if role in roles and weight
    ]
    assert runs(conversations, tokenizer)[:-1] == ([wanted] if wanted else [])


def test_answers_alone_are_what_all_answers_are(load: Load, tokenizer: Any) -> None:
    all_answers, named = (
        load(tokenizer, [CHAT], loss_turns=turns).all()[0] for turns in ("all", ("assistant",))
    )
    assert np.array_equal(all_answers.loss_mask, named.loss_mask)


def test_a_system_message_inside_the_turn_of_the_user_is_its_content(
    load: Load, make_tokenizer: Callable[..., Any]
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' }}"
        "{{ '<<' + messages[0].content + '>>' if loop.index0 == 1 }}{{ m.content + '[/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(template, ("</s>", "[INST]", "[/INST]"))
    chat = [{"role": "system", "content": "add"}, *CHAT[:2]]
    assert learned(load, tokenizer, chat, ("system", "user")) == [["add", "1 + 1?[/INST]"]]


def test_the_first_token_of_a_text_bears_no_loss_because_nothing_predicts_it(
    load: Load, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    chats = [[CHAT[0]], [{**CHAT[0], "weight": 0.5}, CHAT[1]], [{"role": "user", "content": "a"}]]
    conversations = load(tokenizer, chats, loss_turns=("user",))
    assert runs(conversations, tokenizer) == [[(" + 1?", 1.0)], [(" + 1?", 0.5)]]
    assert conversations.account.fates == {"kept": 2, "no_loss": 1}


@pytest.mark.parametrize(
    ("template", "chat", "why"),
    [
        (
            "{% for m in messages %}{{ m.role + ':' + m.content | upper + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}",
            CHAT[2:3],
            "does not write what the user says once and as it is",
        ),
        (
            "{% if messages[-1].role == 'system' %}{{ raise_exception('no question') }}{% endif %}"
            "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}",
            [{"role": "system", "content": "add"}, *CHAT[:1]],
            "the chat template refuses it: no question: of the messages up to each learned one",
        ),
        ("", [*CHAT[:1], {"role": "assistant", "content": BLANK}, CHAT[2]], "as it is"),
        ("", [{"role": "assistant", "content": "2"}], "there is no message to learn from"),
    ],
    ids=["changed", "refused alone", "blank", "nobody"],
)
def test_a_template_that_does_not_show_the_messages_of_a_role_is_refused(
    template: str, chat: list[dict[str, str]], why: str, load: Load, tokenizer: Any,
    make_tokenizer: Callable[..., Any],
) -> None:  # fmt: skip
    role_tokenizer = make_tokenizer(template) if template else tokenizer
    with pytest.raises(UsageError, match=f"rows.jsonl:1: .* of row 0 cannot be marked: .*{why}"):
        load(role_tokenizer, [chat], loss_turns=("system", "user"))


def test_rows_without_what_is_learned_are_counted(load: Load, tokenizer: Any) -> None:
    blank = {"role": "user", "content": " "}
    chats = [CHAT, [{**CHAT[0], "weight": 0}], [blank], [blank, *CHAT[1:3]]]
    conversations = load(tokenizer, chats, loss_turns=("user",))
    assert conversations.account.fates == {"kept": 2, "no_loss": 1, "empty": 1}
    assert [text for text, _ in runs(conversations, tokenizer)[1]] == ["and 2 + 2?<|im_end|>"]


def test_a_key_that_names_no_role_is_an_error() -> None:
    for wrong in (("User",), (), "user"):
        with pytest.raises(
            UsageError, match=r"loss_turns.*: it is one of all, .* roles: sys"
        ) as error:
            DataSettings(path="rows.jsonl", loss_turns=wrong)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
    every = DataSettings(path="rows.jsonl", loss_turns=get_args(Role))
    assert every.loss_turns == get_args(Role)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "end"),
    [("qwen2_5", "<|im_end|>"), ("qwen3", "<|im_end|>"), ("qwen3_6", "<|im_end|>"),
     ("llama3_1", "<|eot_id|>"), ("gemma3", "<end_of_turn>"), ("gemma4", "<turn|>"),
     ("phi3_5", "<|end|>"), ("gptoss", "<|end|>"), ("glm4moe", ""), ("deepseek_r1_distill", ""),
     ("lfm2", "<|im_end|>"), ("nemotron_3_nano", "<|im_end|>"),
     ("cohere2", "<|END_OF_TURN_TOKEN|>")],
)  # fmt: skip
def test_users_are_learned_under_the_templates_that_models_come_with(
    name: str, end: str, load: Load, make_tokenizer: Callable[..., Any]
) -> None:
    """TRL has copies of them. A turn that no token ends is its content."""
    trl = pytest.importorskip("trl", reason="TRL is a peer: pip install --group peers")
    file = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    if not file.exists():
        pytest.skip(f"this version of TRL has no {name}.jinja")
    template = file.read_text("utf-8")
    marks = r"<\|[\w]+\|>|<｜[^｜'\"]+｜>|<(?:start|end)_of_turn>|<\|turn>|<turn\|>"
    tokenizer = make_tokenizer(template, ("</s>", *sorted({*re.findall(marks, template)})))
    asked = [f"{text}{end}" for text in ("1 + 1?", "and 2 + 2?", "thanks")]
    assert learned(load, tokenizer, CHAT, ("user",)) == [asked]
