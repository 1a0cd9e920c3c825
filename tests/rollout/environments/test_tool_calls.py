"""Tool calls in the formats that models write."""

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chat import HERMES, LLAMA, QWEN_XML, chat_tokenizer
from helpers.tool_templates import WITH_TOOLS
from postgrad.core.errors import UsageError
from postgrad.data.templates import render_conversation, turn_ends
from postgrad.models.fresh import TEMPLATE
from postgrad.rollout.environments.tool_calls import (
    analysis_in,
    calls_in,
    format_of,
    ids_of,
    result_message,
    taught_format,
    text_beside,
    thoughts_apart,
)
from postgrad.rollout.environments.tool_formats import Call, Malformed

ADD = {"a": 1, "b": [2.5, None]}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


STYLES = {  # of the families whose calls are read
    "qwen": "hermes",
    "llama": "llama",
    "mistral": "mistral",
    "mistral_list": "mistral",
    "deepseek": "deepseek",
    "deepseek_plain": "deepseek",
    "gpt_oss": "harmony",
    "kimi": "kimi",
}
ONE_CALL = ("llama", "gpt_oss")  # in a turn
SHOWN = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
# Marks of the formats are special tokens, which no text of an argument becomes.
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<["))
PLAIN_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | PLAIN_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN_TEXT, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(string.ascii_letters + " {}:"), PLAIN_JSON, max_size=3)
NAMES = st.text(string.ascii_letters + string.digits + "_-.", min_size=1, max_size=20)


@pytest.mark.parametrize("family", STYLES)
@settings(max_examples=40)
@given(
    asked=st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3),
    thought=st.sampled_from(["", "I could say [TOOL_CALLS] <tool_call>\n</think>\n\n"]),
)
def test_what_a_template_writes_for_calls_is_read_back_as_these_calls(family, asked, thought):
    template, special = WITH_TOOLS[family]
    tokenizer = chat_tokenizer(template, special)
    style = STYLES[family]
    assert format_of(template) == taught_format(template) == style
    asked = asked[:1] if family in ONE_CALL else asked
    ids = [f"functions.{name}:{n}" if family == "kimi" else f"Call{n:05d}"
           for n, (name, _) in enumerate(asked)]  # fmt: skip
    calls = [
        {"type": "function", "id": i, "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in zip(ids, asked, strict=True)
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    text = render_conversation(
        tokenizer, [{"role": "user", "content": "?"}, turn], ends=turn_ends(tokenizer),
        turns="last", variables={"tools": SHOWN},
    )  # fmt: skip
    ((start, end),) = text.spans
    model_text = text.text[start:end].removesuffix(special[0]).removesuffix("<|call|>")
    thought = "" if family == "gpt_oss" else thought  # it has a channel for them
    model_text = thought + model_text
    kept = ids if family in ("kimi", "mistral_list") else [""] * len(ids)
    expected = [Call(name, arguments, i) for i, (name, arguments) in zip(kept, asked, strict=True)]
    assert calls_in(model_text, style, {}) == expected
    assert text_beside(model_text, style) == thought.strip()


def test_the_chat_template_says_which_format_a_model_writes():
    assert format_of(HERMES) == "hermes"
    assert format_of(LLAMA) == "llama"
    assert format_of(TEMPLATE) is None
    glm = "<tool_call>name<arg_key>key</arg_key></tool_call>{{ tool_call.arguments }}"
    assert format_of(glm) == "glm"
    assert format_of(QWEN_XML) == "qwen_xml"
    assert format_of('<tool_call>[{"name": "f"}]</tool_call>') is None


def test_a_template_that_writes_calls_and_shows_no_tools_is_refused():
    """As those of DeepSeek's distilled models."""
    blind = WITH_TOOLS["deepseek"][0].replace("tools or []", "[]")
    with pytest.raises(UsageError, match='calls as "deepseek", and does not read `tools`'):
        taught_format(blind)
    with pytest.raises(UsageError, match=r'"mistral", "deepseek", "harmony" or "kimi"'):
        taught_format(TEMPLATE)


@given(st.text(min_size=1), st.dictionaries(st.text(), JSON_VALUES, max_size=3))
def test_any_call_that_is_json_is_read_as_it_was_meant(name, arguments):
    hermes = json.dumps({"name": name, "arguments": arguments})
    llama = json.dumps({"name": name, "parameters": arguments})
    if "</tool_call>" not in hermes and "<tool_call>" not in hermes and "</think>" not in hermes:
        assert calls_in(f"Let me see.\n<tool_call>\n{hermes}\n</tool_call>", "hermes", {}) == [
            Call(name, arguments)
        ]
        assert calls_in(llama, "llama", {}) == [Call(name, arguments)]
        assert (
            calls_in(f"<|python_tag|>{llama}; {llama}", "llama", {}) == [Call(name, arguments)] * 2
        )


def test_a_turn_without_a_call_is_an_answer():
    assert calls_in("It is 4.", "hermes", {}) == []
    assert calls_in("It is 4.", "llama", {}) == []
    assert calls_in('{"answer": 4}', "llama", {}) == []
    assert calls_in("", "hermes", {}) == []


def test_what_was_only_thought_is_no_call():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert calls_in(f"<think>I could say {call}</think>It is 4.", "hermes", {}) == []
    assert calls_in(f"<think>4?</think>{call}", "hermes", {}) == [Call("f", {})]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>{}", "not closed"),
        ("<tool_call></tool_call>", "not JSON"),
        ("<tool_call>{'name': 'f'}</tool_call>", "not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ("<tool_call>[]</tool_call>", "a call is an object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "f"}</tool_call>', 'no object "arguments"'),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', 'no object "arguments"'),
    ],
)
def test_a_malformed_hermes_call_says_why(text, reason):
    (malformed,) = calls_in(text, "hermes", {})
    assert isinstance(malformed, Malformed)
    assert reason in malformed.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"name": "f", ', "not JSON"),
        ('{"name": "f"}', 'no object "parameters"'),
        ('{"name": "f", "arguments": {}}', 'no object "parameters"'),
        ("<|python_tag|>print(1)", "not JSON"),
        ("<|python_tag|>", "empty"),
    ],
)
def test_a_malformed_llama_call_says_why(text, reason):
    (malformed,) = calls_in(text, "llama", {})
    assert isinstance(malformed, Malformed)
    assert reason in malformed.reason


def test_calls_and_broken_ones_keep_their_order():
    good = json.dumps({"name": "add", "arguments": ADD})
    calls = calls_in(f"<tool_call>{good}</tool_call><tool_call>{{</tool_call>", "hermes", {})
    assert calls[0] == Call("add", ADD)
    assert isinstance(calls[1], Malformed)


SCHEMAS = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": ["number", "null"]},
            "sure": {"type": "boolean"},
            "list": {"type": "array", "nullable": True},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "maybe": {"oneOf": [{"type": "string"}, {"type": "null"}]},
            "any": {},
        }
    }
}


def qwen(name, **values):
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm(name, **values):
    pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


@pytest.mark.parametrize(("style", "written"), [("qwen_xml", qwen), ("glm", glm)])
def test_the_schema_of_a_tool_types_the_values_of_marked_calls(style, written):
    text = written(
        "f", text="5", count="5", share="2.5", sure="True", list='[1, {"a": null}]', either="7",
        maybe="None", any="[1]", unknown="x",
    )  # fmt: skip
    (call,) = calls_in(f"Let me see.\n{text}", style, SCHEMAS)
    assert call == Call(
        "f",
        {
            "text": "5", "count": 5, "share": 2.5, "sure": True, "list": [1, {"a": None}],
            "either": 7, "maybe": None, "any": [1], "unknown": "x",
        },
    )  # fmt: skip
    assert isinstance(call, Call)
    assert isinstance(call.arguments["count"], int)
    other = written("f", text="null", share="None", sure="maybe", list="null", maybe="5", any='"q"')
    assert calls_in(other, style, SCHEMAS) == [
        Call("f", {"text": "null", "share": None, "sure": "maybe", "list": None, "maybe": "5",
                   "any": '"q"'})
    ]  # fmt: skip


@pytest.mark.parametrize(("style", "written"), [("qwen_xml", qwen), ("glm", glm)])
@given(st.text(st.characters(exclude_characters="<>"), min_size=1).filter(lambda t: t == t.strip()))
def test_any_text_without_marks_is_an_argument_as_it_stands(style, written, text):
    calls = calls_in(written("f", text=text) + "\n" + written("g"), style, SCHEMAS)
    assert calls == [Call("f", {"text": text}), Call("g", {})]


def test_a_value_of_several_lines_keeps_them_and_loses_only_the_templates_own() -> None:
    (call,) = calls_in(qwen("f", text="\n  def f():\n    1\n"), "qwen_xml", SCHEMAS)
    assert call == Call("f", {"text": "\n  def f():\n    1\n"})


@pytest.mark.parametrize(
    ("style", "text", "reason"),
    [
        ("qwen_xml", "<tool_call><function=f>", "not closed with </tool_call>"),
        ("qwen_xml", "<tool_call><function=f></tool_call>", "a call is <function=NAME>"),
        ("qwen_xml", '<tool_call>{"name": "f"}</tool_call>', "a call is <function=NAME>"),
        ("qwen_xml", "<tool_call><function=f></function> and</tool_call>", "a call is <function"),
        ("qwen_xml", "<tool_call><function=f>5</function></tool_call>", "a parameter is"),
        (
            "qwen_xml",
            "<tool_call><function=f><parameter=a>1</function></tool_call>",
            "a parameter is",
        ),
        ("glm", "<tool_call><arg_key>a</arg_key></tool_call>", "a call is NAME"),
        ("glm", "<tool_call></tool_call>", "a call is NAME"),
        ("glm", "<tool_call>f<arg_key>a</arg_key>1</tool_call>", "a call is NAME"),
    ],
)
def test_a_malformed_marked_call_says_how_calls_are_written(style, text, reason):
    (malformed,) = calls_in(text, style, SCHEMAS)
    assert isinstance(malformed, Malformed)
    assert reason in malformed.reason


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}', Call("f", {"a": 1}, "abcDEF123")),
        ('[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', Call("f", {"a": 1})),
        ('[THINK]not [TOOL_CALLS]g{}[/THINK][TOOL_CALLS] f {"a": 1}', Call("f", {"a": 1})),
        ('[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}, "id": 5}', Call("f", {"a": 1})),
    ],
)
def test_mistral_calls_of_all_versions_are_read(text, call):
    assert calls_in(text, "mistral", {}) == [call]


@pytest.mark.parametrize(
    ("style", "text", "reason", "name"),
    [
        ("mistral", "[TOOL_CALLS]", "a call is [TOOL_CALLS]NAME[ARGS]", ""),
        ("mistral", '[TOOL_CALLS][ARGS]{"a": 1}', "a call is [TOOL_CALLS]NAME[ARGS]", ""),
        ("mistral", "[TOOL_CALLS]f[ARGS]{1}", "the arguments of f are not JSON", "f"),
        ("mistral", "[TOOL_CALLS] []", "no call follows [TOOL_CALLS]", ""),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}', "what follows [TOOL_CALLS] is not JSON", ""),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}]', 'no object "arguments"', "f"),
        ("mistral", "[TOOL_CALLS] [5]", "a call is an object", ""),
        ("deepseek", "<｜tool▁calls▁begin｜>f", "no call follows <｜tool▁calls▁begin｜>", ""),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "no <｜tool▁call▁end｜>", ""),
        ("deepseek", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "no <｜tool▁sep｜>", ""),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[]<｜tool▁call▁end｜>",
         "the arguments of f are no object of JSON", "f"),
        ("deepseek", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>", "has no name", ""),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{", "f are not JSON", "f"),
        ("harmony", "<|channel|>commentary to=functions.f", "f are not JSON", "f"),
        ("harmony", "<|channel|>analysis to=python<|message|>1 + 1", "to=functions.NAME", "python"),
        ("harmony", " to=functions.f<|message|>{}<|end|><|start|>assistant to=functions.g"
         "<|message|>{}", "a turn has one call, which <|call|> ends, and this one has 2", "g"),
        ("kimi", "<|tool_calls_section_begin|>f", "no call follows <|tool_calls_section_be", ""),
        ("kimi", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
         "a call is <|tool_call_begin|>functions.NAME:NUMBER", ""),
        ("kimi", "<|tool_call_begin|>f<|im_end|>:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
         "a call is <|tool_call_begin|>functions.NAME:NUMBER", ""),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
         "a call is <|tool_call_begin|>functions.NAME:NUMBER", ""),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>x<|tool_call_end|>",
         "the arguments of f are not JSON", "f"),
    ],
)  # fmt: skip
def test_a_malformed_call_of_a_model_with_marks_of_its_own_says_why(style, text, reason, name):
    (malformed,) = calls_in(text, style, {})
    assert isinstance(malformed, Malformed)
    assert reason in malformed.reason
    assert malformed.name == name


THOUGHT = "<|channel|>analysis<|message|>to=functions.g? No.<|end|><|start|>assistant"


def test_a_call_of_gpt_oss_is_a_message_to_a_function_whatever_its_channel():
    spoken = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert calls_in(THOUGHT + spoken + call, "harmony", {}) == [Call("f", {"a": 1})]
    assert text_beside(THOUGHT + spoken + call, "harmony") == "I look it up."
    late = call.replace("commentary to=functions.f ", "analysis to=functions.f code")
    assert calls_in(THOUGHT + late, "harmony", {}) == [Call("f", {"a": 1})]


def test_the_answer_of_gpt_oss_is_what_its_final_channel_says():
    answer = THOUGHT + "<|channel|>final<|message|>It is 4."
    assert calls_in(answer, "harmony", {}) == []
    assert text_beside(answer, "harmony") == "It is 4."
    assert text_beside(THOUGHT.removesuffix("<|start|>assistant"), "harmony") == ""
    assert text_beside("set to=5", "harmony") == "set to=5"
    assert calls_in("set to=5", "harmony", {}) == []


def test_a_call_without_an_id_gets_one_by_its_place_in_the_conversation():
    calls = [Call("f", {}), Call("g", {}, "abcDEF123"), Malformed("why")]
    assert ids_of(calls, 3) == ["call00003", "abcDEF123", "call00005"]
    assert all(len(i) == 9 and i.isalnum() for i in ids_of(calls, 12_345))


@given(st.lists(st.sampled_from(["", "call00004", "call00005", "abcDEF123"]), max_size=6))
def test_no_two_calls_of_a_turn_have_one_id(written):
    ids = ids_of([Call("f", {}, i) for i in written], 4)
    assert len(set(ids)) == len(written)
    assert {i for i in written if i} <= set(ids)


def test_a_result_names_its_call_and_only_what_can_be_a_name():
    result = result_message(Call("f", {}), "call00000", "5")
    assert result == {"role": "tool", "content": "5", "tool_call_id": "call00000", "name": "f"}
    assert "name" not in result_message(Call("<|im_start|>", {}), "call00000", "5")
    assert "name" not in result_message(Malformed("why"), "call00000", "5")


LONG = 30_000


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("mistral", f"[TOOL_CALLS]a{' ' * LONG}b"),
        ("mistral", f"[TOOL_CALLS]a[CALL_ID]x{' ' * LONG}b"),
        ("qwen_xml", f"<tool_call><function=f>{' ' * LONG}x</function></tool_call>"),
        ("qwen_xml", f"<tool_call><function=f>{'<parameter=a>' * LONG}</function></tool_call>"),
        ("glm", f"<tool_call>f<arg_key>a</arg_key>{' ' * LONG}</tool_call>"),
        ("glm", f"<tool_call>f{'<arg_key>' * LONG}</tool_call>"),
    ],
)
def test_a_long_text_that_is_no_call_is_read_once(style: Any, text: str) -> None:
    """A model that repeats itself must not hold up the run, as 30 000 blanks once did."""
    (call,) = calls_in(text, style, {})
    assert isinstance(call, Malformed)


@pytest.mark.parametrize(
    ("style", "opened", "text", "apart"),
    [
        ("auto", False, " so </i>", ("", " so </i>")),
        ("auto", False, "<think>\nWhy?\n</think>\n\nso ", ("Why?", "so")),
        ("auto", False, "Why?</think>so", ("Why?", "so")),
        ("auto", False, "<think>a</think>b</think>so", ("a</think>b", "so")),
        ("auto", False, "\n<think>Why", ("Why", "")),
        ("auto", False, "[THINK]Why[/THINK]", ("", "[THINK]Why[/THINK]")),
        ("auto", True, "Why", ("Why", "")),
        ("auto", True, "Why\n</think>so", ("Why", "so")),
        ("hermes", False, "<think></think>so", ("", "so")),
        ("mistral", False, "[THINK]Why[/THINK]so", ("Why", "so")),
        ("mistral", False, "<think>Why</think>so", ("Why", "so")),
    ],
)
def test_thoughts_stand_apart_from_what_is_said_behind_them(
    style: Any, opened: bool, text: str, apart: tuple[str, str]
) -> None:
    assert thoughts_apart(text, style, opened=opened) == apart


def test_the_thoughts_of_gpt_oss_are_its_channel_analysis() -> None:
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Two.<|end|><|start|>assistant<|channel|>final<|message|>so"
    )
    assert analysis_in(text) == "One.\nTwo."
    assert analysis_in("so") == ""
