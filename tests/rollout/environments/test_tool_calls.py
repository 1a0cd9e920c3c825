"""Tool calls in the formats that models write."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.chat import HERMES, LLAMA, QWEN_XML
from postgrad.models.fresh import TEMPLATE
from postgrad.rollout.environments.tool_calls import Call, Malformed, calls_in, format_of

ADD = {"a": 1, "b": [2.5, None]}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_the_chat_template_says_which_format_a_model_writes():
    assert format_of(HERMES) == "hermes"
    assert format_of(LLAMA) == "llama"
    assert format_of(TEMPLATE) is None
    glm = "<tool_call>name<arg_key>key</arg_key></tool_call>{{ tool_call.arguments }}"
    assert format_of(glm) == "glm"
    assert format_of(QWEN_XML) == "qwen_xml"
    assert format_of('<tool_call>[{"name": "f"}]</tool_call>') is None


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
    (found,) = calls_in(text, "hermes", {})
    assert isinstance(found, Malformed)
    assert reason in found.reason


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
    (found,) = calls_in(text, "llama", {})
    assert isinstance(found, Malformed)
    assert reason in found.reason


def test_calls_and_broken_ones_keep_their_order():
    good = json.dumps({"name": "add", "arguments": ADD})
    found = calls_in(f"<tool_call>{good}</tool_call><tool_call>{{</tool_call>", "hermes", {})
    assert found[0] == Call("add", ADD)
    assert isinstance(found[1], Malformed)


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
