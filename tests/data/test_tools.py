"""Conversations with tools and thoughts: read whole, marked to the token, or refused by name."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from helpers.tool_templates import GEMMA, GPT_OSS, QWEN, WITH_TOOLS
from postgrad.core.errors import UsageError
from postgrad.data.conversations import load_conversations
from postgrad.data.overlap import Selection
from postgrad.data.pairs import load_pairs
from postgrad.data.prompts import load_prompts
from postgrad.data.settings import DataSettings, PairSettings

TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
ARGUMENTS = '{"city": "end Zurich", "days": 2}'
CALL = {"id": "call00001", "function": {"name": "weather", "arguments": ARGUMENTS}}
ROW = {
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": "no"}', "tool_call_id": "call00001"},
        {"role": "assistant", "content": "No rain."},
    ],
}
ANSWERS = {  # what is learned of ROW's two answers
    "qwen": [
        '\n<tool_call>\n{"name": "weather", "arguments": '
        + ARGUMENTS
        + "}\n</tool_call><|im_end|>",
        "No rain.<|im_end|>",
    ],
    "llama": [
        '{"name": "weather", "parameters": ' + ARGUMENTS + "}<|eot_id|>",
        "No rain.<|eot_id|>",
    ],
    "mistral": ["[TOOL_CALLS]weather[ARGS]" + ARGUMENTS + "</s>", "No rain.</s>"],
    "mistral_list": [
        '[TOOL_CALLS] [{"name": "weather", "arguments": ' + ARGUMENTS + ', "id": "call00001"}]</s>',
        "No rain.</s>",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        + ARGUMENTS
        + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "No rain.<｜end▁of▁sentence｜>",
    ],
    "deepseek_plain": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        + ARGUMENTS
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "No rain.<｜end▁of▁sentence｜>",
    ],
    "gpt_oss": [
        " to=functions.weather<|channel|>commentary json<|message|>" + ARGUMENTS + "<|call|>",
        "<|channel|>final<|message|>No rain.<|return|>",
    ],
    "kimi": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        "<|tool_call_argument_begin|>"
        + ARGUMENTS
        + "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        "No rain.<|im_end|>",
    ],
    "phi": [
        '<|tool_call|>{"name": "weather", "arguments": ' + ARGUMENTS + "}<|/tool_call|><|end|>",
        "No rain.<|end|>",
    ],
    "olmo": [
        '<function_calls>weather(city="end Zurich", days=2)</function_calls><|im_end|>',
        "No rain.<|im_end|>",
    ],
}
ANSWERS["smollm"] = ANSWERS["qwen"]

Load = Callable[..., Any]


@pytest.fixture
def load(make_tokenizer: Callable[..., Any], write_rows: Callable[..., str]) -> Load:
    """load(rows, template and special tokens, settings): the conversations, and their tokenizer."""

    def conversations(
        rows: list[dict[str, Any]], family: tuple[str, tuple[str, ...]], **settings: Any
    ) -> tuple[Any, Any]:
        tokenizer = make_tokenizer(*family)
        data = DataSettings(path=write_rows(rows), messages="messages", **settings)
        return load_conversations(data, tokenizer), tokenizer

    return conversations


def learned(conversations: Any, tokenizer: Any) -> list[str]:
    """The runs of tokens that bear loss, of all training rows."""
    runs: list[str] = []
    for row in conversations.all():
        changes = (row.loss_mask[1:] != row.loss_mask[:-1]).nonzero()[0] + 1
        for start, end in pairwise([0, *changes, len(row.token_ids)]):
            if row.loss_mask[start]:
                runs.append(tokenizer.decode(row.token_ids[start:end].tolist()))
    return runs


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize(
    "tools",
    [[TOOL], json.dumps([TOOL]), [{**TOOL, "strict": None}]],
    ids=["list", "text", "null"],
)
def test_tools_of_the_first_message_are_those_of_a_column(
    load: Load, tools: Any, system: str | None
) -> None:
    """As `generate` writes them, and as other tools do, in any form that a column may have."""
    settings = {"system": system} if system else {}
    first, *rest = ROW["messages"]
    column, _ = load([ROW], WITH_TOOLS["qwen"], **settings)
    apart = {"messages": [{**first, "tools": tools}, *rest]}
    within, _ = load([apart], WITH_TOOLS["qwen"], **settings)
    (within_messages,), (other,) = within.all(), column.all()
    assert within_messages.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize(
    ("place", "tools", "why"),
    [
        (0, "weather", "tools of message 0 are not a list of functions"),
        (0, [{"parameters": {}}], "tools of message 0 are not a list of functions"),
        (2, [TOOL], "message 2 has tools, which the first message has"),
    ],
)
def test_tools_of_a_message_that_would_be_lost_are_refused(
    load: Load, place: int, tools: Any, why: str
) -> None:
    messages = [dict(message) for message in ROW["messages"]]
    messages[place]["tools"] = tools
    with pytest.raises(UsageError, match=why):
        load([{"messages": messages}], WITH_TOOLS["qwen"])


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_calls_are_learned_with_the_token_that_ends_them(load: Load, family: str) -> None:
    row = ROW
    if family == "kimi":  # its ids are what names a function
        row = json.loads(json.dumps(ROW).replace("call00001", "functions.weather:0"))
    conversations, tokenizer = load([row], WITH_TOOLS[family])
    assert learned(conversations, tokenizer) == ANSWERS[family]
    text = tokenizer.decode(conversations.all()[-1].token_ids.tolist())
    assert '"properties": {"city": {}}' in text  # the functions were read
    assert "rain" in text.split("weather")[-1]  # and the result of the call


def test_what_a_template_ignores_is_counted(load: Load) -> None:
    rows = [{**ROW, "messages": [{**m, "uid": n} for n, m in enumerate(ROW["messages"])]}] * 2
    account = load(rows, WITH_TOOLS["qwen"])[0].account
    assert account.notes == (
        "2 rows have 'tool_call_id' in a message: the chat template does not read it",
        "2 rows have 'uid' in a message: the chat template does not read it",
    )


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_thoughts_are_learned_before_their_answer(load: Load, key: str) -> None:
    family = (QWEN if key == "reasoning_content" else GPT_OSS, WITH_TOOLS["gpt_oss"][1])
    family = (family[0], ("<|im_end|>", "<|im_start|>")) if family[0] == QWEN else family
    answer = {"role": "assistant", "content": "4", key: "2 + 2 = 4, so it is 4"}
    rows = [{"messages": [{"role": "user", "content": "2 + 2?"}, answer]}]
    (text,) = learned(*load(rows, family))
    if key == "reasoning_content":
        assert text == "<think>\n2 + 2 = 4, so it is 4\n</think>\n\n4<|im_end|>"
    else:
        thought, _, final = text.partition("<|end|>")
        assert thought == "<|channel|>analysis<|message|>2 + 2 = 4, so it is 4"
        assert final == "<|start|>assistant<|channel|>final<|message|>4<|return|>"


def test_thoughts_that_are_dropped_later_make_a_training_row_for_each_answer(load: Load) -> None:
    messages = [
        {"role": role, "content": text, **({"reasoning_content": f"so {text}"} if n % 2 else {})}
        for n, (role, text) in enumerate(
            [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
        )
    ]
    conversations, tokenizer = load([{"messages": messages}], WITH_TOOLS["qwen"])
    assert learned(conversations, tokenizer) == [
        "<think>\nso b\n</think>\n\nb<|im_end|>",
        "<think>\nso d\n</think>\n\nd<|im_end|>",
    ]
    assert len(conversations.all()) == 2


@pytest.mark.parametrize(
    ("template", "change", "error"),
    [
        (GEMMA, {"tools": None}, "roles are user and assistant"),
        (GEMMA, {}, "row 0 has tools, and the chat template does not read them"),
        (QWEN.replace("tool_calls", "calls"), {}, "drops a call of message 1: .*weather"),
        (QWEN.replace("(call.function.arguments | tojson)", "'{}'"), {}, "drops a call of mess"),
        (QWEN.replace("m.content + '\n</tool", "'\n</tool"), {}, "drops the tool's result in mess"),
        (
            GEMMA,
            {"tools": None, "messages": [ROW["messages"][0],
             {"role": "assistant", "content": "no", "reasoning_content": "dry"}]},
            "drops reasoning_content of message 1: 'dry'",
        ),
    ],
)  # fmt: skip
def test_what_a_template_cannot_write_is_refused(
    load: Load, template: str, change: dict[str, Any], error: str
) -> None:
    special = ("<|im_end|>", "<|im_start|>", "<start_of_turn>", "<end_of_turn>", "<bos>")
    with pytest.raises(UsageError, match=error) as raised:
        load([{**ROW, **change}], (template, special))
    assert "rows.jsonl:1" in str(raised.value)


def test_answers_with_a_weight_of_0_bear_no_loss(load: Load) -> None:
    chat = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in chat]
    for key in ("weight", "loss", "train"):
        rows = [
            {"messages": [*messages[:1], {**messages[1], key: 0}, *messages[2:]]},
            {"messages": [m if n % 2 == 0 else {**m, key: False} for n, m in enumerate(messages)]},
        ]
        conversations, tokenizer = load(rows, WITH_TOOLS["qwen"])
        assert learned(conversations, tokenizer) == ["d<|im_end|>"]
        assert conversations.account.fates == {"kept": 1, "no_loss": 1}


@pytest.mark.parametrize("stored", [json.dumps, lambda value: value], ids=["text", "objects"])
def test_tools_and_messages_may_be_stored_as_json_text(load: Load, stored: Any) -> None:
    row = {"messages": stored(ROW["messages"]), "tools": stored(ROW["tools"])}
    assert learned(*load([row], WITH_TOOLS["qwen"])) == ANSWERS["qwen"]


def test_prompts_have_the_tools_and_the_calls_so_far(
    make_tokenizer: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    tokenizer = make_tokenizer(*WITH_TOOLS["qwen"])
    data = DataSettings(path=write_rows([ROW]), messages="messages")
    (prompt,) = load_prompts(data, tokenizer, max_prompt_tokens=1000).all()
    text = tokenizer.decode(prompt.token_ids.tolist())
    assert text.count("weather") == 2
    assert text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
    silent = make_tokenizer(QWEN.replace("tool_calls", "calls"), *WITH_TOOLS["qwen"][1:])
    with pytest.raises(UsageError, match=r"drops a call of message 1: .*weather"):
        load_prompts(data, silent, max_prompt_tokens=1000)  # its list of tools has the name
    without = data.model_copy(update={"tools": ""})
    (prompt,) = load_prompts(without, tokenizer, max_prompt_tokens=1000).all()
    assert "# Tools" not in tokenizer.decode(prompt.token_ids.tolist())


def test_pairs_differ_by_a_call(
    make_tokenizer: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    tokenizer = make_tokenizer(*WITH_TOOLS["qwen"])
    other = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    answers = [[{"role": "assistant", "content": None, "tool_calls": [c]}] for c in (CALL, other)]
    row = {"tools": [TOOL], "prompt": "Rain?", "chosen": answers[0], "rejected": answers[1]}
    (pair,) = load_pairs(PairSettings(path=write_rows([row])), tokenizer).all()
    assert tokenizer.decode(pair.chosen[pair.chosen_mask].tolist()) == ANSWERS["qwen"][0]
    rejected = tokenizer.decode(pair.rejected[pair.rejected_mask].tolist())
    assert rejected == ANSWERS["qwen"][0].replace(ARGUMENTS, '{"city": "Bern"}')


def test_rows_that_differ_in_calls_alone_are_no_duplicates() -> None:
    selection = Selection(dedup="exact")
    chat = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert not selection.repeats(chat)
    assert not selection.repeats([{"role": "assistant", "content": ""}])
    assert selection.repeats(chat)
