"""Messages of OpenAI, the hub and ShareGPT in one form; what is no message says why."""

from typing import Any

import pytest

from postgrad.data.chat_format import REASONING, SHAPE, messages_of, says_nothing, tools_of

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ({"role": "user", "content": " a "}, {"role": "user", "content": " a "}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": None},
            {"role": "user", "content": "ab"},
        ),
        ({"from": "human", "value": "a"}, {"role": "user", "content": "a"}),
        ({"from": "gpt", "value": "a", "weight": 0},
         {"role": "assistant", "content": "a", "weight": 0}),
        ({"role": "assistant", "content": "a", "weight": 1}, {"role": "assistant", "content": "a"}),
        ({"role": "assistant", "content": "a", "weight": 0.5, "train": None},
         {"role": "assistant", "content": "a", "weight": 0.5}),
        ({"role": "assistant", "content": "a", "training": False, "weight": 0},
         {"role": "assistant", "content": "a", "weight": 0}),
        ({"role": "user", "content": "a", "weight": 1}, {"role": "user", "content": "a"}),
        (
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        ({"from": "observation", "value": "3"}, {"role": "tool", "content": "3"}),
        ({"role": "function", "name": "add", "content": "3"},
         {"role": "tool", "content": "3", "name": "add"}),
        (
            {"role": "assistant", "content": None,
             "function_call": {"name": "add", "arguments": '{"a": 1}'}},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (  # a table fills in what other calls have
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": None, "function": {"name": "add", "arguments": {"a": 1, "city": None}}}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (  # JSON text keeps its nulls
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "function": {"name": "add", "arguments": '{"a": null}'}}]},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "1", "type": "function",
                 "function": {"name": "add", "arguments": {"a": None}}}]},
        ),
        ({"role": "assistant", "content": None, "thinking": "hm"},
         {"role": "assistant", "content": "", "thinking": "hm"}),
    ],
)  # fmt: skip
def test_every_form_of_a_message_is_read_into_one(
    stored: dict[str, Any], read: dict[str, Any]
) -> None:
    assert messages_of([stored], strip=False) == [read]


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        ("hello", SHAPE),
        ([], SHAPE),
        ([{"role": "user"}], SHAPE),
        ([{"role": "user", "content": None}], SHAPE),
        ([{"role": "user", "content": [{"type": "audio", "audio": "x"}]}],
         "message 0 has a part of type 'audio', and only text and images are read"),
        ([{"role": "assistant", "content": [{"type": "image", "image": "x"}]}],
         "message 0 is by the assistant and has an image: it writes text"),
        ([{"role": "user", "content": "a", "images": ["x"]}],
         "message 0 has images beside its content"),
        ([{"role": "user", "content": ["\ufffc", {"type": "image", "image": "x"}]}],
         "message 0 has U+FFFC in its text"),
        ([{"from": "narrator", "value": "a"}], "message 0 is from 'narrator'; read are system, "),
        *(([{"role": "assistant", "content": "a", "weight": weight}],
           f"message 0 has weight = {weight!r}: it has to be 0, or a number from 1e-06 to 1e+06")
          for weight in (-1, 1e-7, 2e6, "1", float("nan"), float("inf"))),
        ([{"role": "user", "content": "a", "train": True}],
         "message 0 is by the user and has train = True: only messages of the assistant are "),
        ([{"role": "user", "content": "a", "weight": 0.5}],
         "message 0 is by the user and has weight = 0.5: only messages of the assistant are "),
        ([{"role": "assistant", "content": "a", "weight": 1, "train": False}],
         "message 0 has weight = 1 and train = False, which differ: keep one of them"),
        ([{"role": "assistant", "content": ["a", {"text": "b", "train": False}]}],
         "message 0 has a part with a weight of its own, and weights are of whole messages"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}],
         "a call in message 0 names no function"),
        ([{"role": "assistant", "content": None,
           "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
         "arguments of a call in message 0 are not JSON"),
        ([{"role": "assistant", "content": None,
           "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
         "arguments of a call in message 0 are no JSON object"),
    ],
)  # fmt: skip
def test_what_is_no_message_says_why(stored: Any, why: str) -> None:
    with pytest.raises(ValueError) as raised:
        messages_of(stored, strip=False)
    assert str(raised.value).startswith(why)


def test_messages_of_the_roles_that_are_learned_may_have_weights() -> None:
    user = {"role": "user", "content": "a"}
    for key, weight, read in [("train", True, {}), ("weight", 2.5, {"weight": 2.5})]:
        (message,) = messages_of([{**user, key: weight}], strip=False, learned=("user",))
        assert message == {**user, **read}
    with pytest.raises(ValueError, match=r"the system and the tool are learned, and data\.loss"):
        messages_of([{**user, "weight": 2.5}], strip=False, learned=("system", "tool"))


def test_strip_takes_white_space_off_contents() -> None:
    chat = [{"role": "user", "content": " a\n"}]
    assert messages_of(chat, strip=True) == [{"role": "user", "content": "a"}]


def test_functions_are_wrapped_as_templates_want_them() -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    wrapped = [{"type": "function", "function": function}]
    assert tools_of([function]) == wrapped
    assert tools_of(wrapped) == wrapped
    assert tools_of([{"type": "function", "function": {**function, "strict": None}}]) == wrapped
    assert tools_of(None) == tools_of("") == tools_of([]) == []
    for wrong in ("x", [1], [{"parameters": {}}], {"name": "add"}):
        with pytest.raises(ValueError, match="a list of functions"):
            tools_of(wrong)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"role": "user", "content": "a", "content": "b"}]', "an object has 'content' twice"),
        ('[{"role": "user", "content": "\\ud800"}]', "surrogates not allowed"),
        ("[" * 200 + "]" * 200, "nested deeper than 100 levels"),
        ("[" * 100_000, "nested deeper than 100 levels"),
    ],
)
def test_messages_as_json_text_are_read_as_strictly_as_a_file(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"as JSON text it cannot be read: .*{problem}"):
        messages_of(text, strip=False)


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (None, "; it is null"),
        ([], "; the list is empty"),
        ([7], "message 0 is a number"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
         "the content of message 1 is null"),
        ([{"role": "user", "content": {"text": "a"}}], "the content of message 0 is an object"),
        ([{"role": "user", "content": True}], "the content of message 0 is a bool"),
        ([{"content": "a"}], "the role of message 0 is null"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_named_with_its_message(stored: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        messages_of(stored, strip=False)


@pytest.mark.parametrize("stored", [True, 7, ["a"], {"effort": "high"}])
@pytest.mark.parametrize("key", REASONING)
def test_a_key_of_thoughts_that_is_no_text_says_nothing(key: str, stored: Any) -> None:
    asked = {"role": "user", "content": "a"}
    blank, called = (
        messages_of([asked, {"role": "assistant", "content": "", key: stored, **more}], strip=False)
        for more in ({}, {"tool_calls": [{"name": "f", "arguments": {}}]})
    )
    assert says_nothing(blank[1])
    assert not says_nothing(called[1])
    assert not says_nothing({**blank[1], "content": "b"})
