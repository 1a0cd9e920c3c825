"""Tool calls in the two formats that models write."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.chat import HERMES, LLAMA
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
    xml = "<tool_call>name<arg_key>key</arg_key></tool_call>{{ tool_call.arguments }}"  # as GLM
    assert format_of(xml) is None


@given(st.text(min_size=1), st.dictionaries(st.text(), JSON_VALUES, max_size=3))
def test_any_call_that_is_json_is_read_as_it_was_meant(name, arguments):
    hermes = json.dumps({"name": name, "arguments": arguments})
    llama = json.dumps({"name": name, "parameters": arguments})
    if "</tool_call>" not in hermes and "<tool_call>" not in hermes and "</think>" not in hermes:
        assert calls_in(f"Let me see.\n<tool_call>\n{hermes}\n</tool_call>", "hermes") == [
            Call(name, arguments)
        ]
        assert calls_in(llama, "llama") == [Call(name, arguments)]
        assert calls_in(f"<|python_tag|>{llama}; {llama}", "llama") == [Call(name, arguments)] * 2


def test_a_turn_without_a_call_is_an_answer():
    assert calls_in("It is 4.", "hermes") == []
    assert calls_in("It is 4.", "llama") == []
    assert calls_in('{"answer": 4}', "llama") == []
    assert calls_in("", "hermes") == []


def test_what_was_only_thought_is_no_call():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert calls_in(f"<think>I could say {call}</think>It is 4.", "hermes") == []
    assert calls_in(f"<think>4?</think>{call}", "hermes") == [Call("f", {})]


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
    (found,) = calls_in(text, "hermes")
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
    (found,) = calls_in(text, "llama")
    assert isinstance(found, Malformed)
    assert reason in found.reason


def test_calls_and_broken_ones_keep_their_order():
    good = json.dumps({"name": "add", "arguments": ADD})
    found = calls_in(f"<tool_call>{good}</tool_call><tool_call>{{</tool_call>", "hermes")
    assert found[0] == Call("add", ADD)
    assert isinstance(found[1], Malformed)
