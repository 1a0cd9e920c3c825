"""The Responses API: items as messages, an answer as items, and the order of its events."""

import json
from typing import Any

import pytest

from postgrad.rollout.environments.responses import Responses
from postgrad.rollout.environments.wire import ChatAnswer, require_possible

API = Responses()
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
ANSWER = ChatAnswer(
    {"role": "assistant", "content": "so", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    read=10,
    written=3,
)


def messages(items: Any, **more: Any) -> list[dict[str, Any]]:
    return API.request({"input": items, **more}, {})["messages"]


def test_a_text_is_a_message_of_the_user_behind_the_instructions() -> None:
    assert messages("hi", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_instructions_and_first_messages_of_the_developer_are_one_message_of_the_system() -> None:
    part = {"type": "input_text", "text": "Be kind."}
    developer = {"type": "message", "role": "developer", "content": [part]}
    user = {"role": "user", "content": "hi"}
    first, second, third = messages([developer, user, developer], instructions="Be brief.")
    texts = [piece["text"] for piece in first["content"]]
    assert (first["role"], "".join(texts)) == ("system", "Be brief.\n\nBe kind.")
    assert (second, third) == (user, {"role": "system", "content": [part]})


def test_the_items_of_an_answer_are_one_message_again() -> None:
    output = API.reply({}, ANSWER)["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": "a", "output": "7"}
    thinking_answer, tool, again = messages([*output, result, *output])
    for message in (thinking_answer, again):
        (text,) = message["content"]
        assert (message["role"], text["text"]) == ("assistant", "so")
        assert (message["reasoning_content"], message["tool_calls"]) == ("Hm.", [CALL])
    assert tool == {"role": "tool", "tool_call_id": "a", "content": "7"}


def test_answers_next_to_each_other_stay_apart() -> None:
    first_answer = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert messages([first_answer, {**first_answer, "content": "b"}]) == [
        first_answer,
        {**first_answer, "content": "b"},
    ]
    first, second = messages([first_answer, thought, {**first_answer, "content": "b"}])
    assert (first, second) == (
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "Hm."},
    )


def test_thoughts_that_a_client_has_taken_out_are_none() -> None:
    (message,) = messages([{"type": "reasoning", "summary": [], "encrypted_content": "x"}])
    assert message["reasoning_content"] == ""


def test_tools_have_the_form_of_chat_completions_without_what_only_the_service_reads() -> None:
    about = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    other = {"type": "web_search"}
    tools = [{"type": "function", **about, "strict": True}, other]
    request = API.request({"input": "hi", "tools": tools}, {})
    assert request["tools"] == [{"type": "function", "function": about}, other]


def test_a_response_tells_its_tokens() -> None:
    reply = API.reply({"instructions": "Be brief."}, ANSWER)
    assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "policy")
    assert (reply["instructions"], reply["error"]) == ("Be brief.", None)
    usage = {key: reply["usage"][f"{key}_tokens"] for key in ("input", "output", "total")}
    assert usage == {"input": 10, "output": 3, "total": 13}


def test_the_events_of_a_stream_come_in_the_order_of_the_interface() -> None:
    reply = API.reply({}, ANSWER)
    texts = list(API.events({}, reply))
    heads = [text.splitlines()[0].removeprefix("event: ") for text in texts]
    events = [json.loads(text.splitlines()[1].removeprefix("data: ")) for text in texts]
    assert all(text.endswith("\n\n") for text in texts)
    assert heads == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    part = ["output_item.added", "content_part.added"]
    ended = ["content_part.done", "output_item.done"]
    assert [head.removeprefix("response.") for head in heads] == [
        "created", "in_progress",
        *part, "reasoning_text.delta", "reasoning_text.done", *ended,
        *part, "output_text.delta", "output_text.done", *ended,
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0]["response"]["output"] == []
    assert events[-1]["response"] == reply
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == reply["output"]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert deltas == ["Hm.", "so", '{"n": 1}']


def test_a_request_may_go_on_from_a_response_that_is_kept() -> None:
    earlier: dict[str, Any] = {}
    body: dict[str, Any] = {"input": "hi", "instructions": "Be brief."}
    first = API.reply(body, ANSWER)
    API.keep(body, first, earlier)
    more = {"type": "function_call_output", "call_id": "a", "output": "7"}
    body = {"input": [more], "previous_response_id": first["id"], "store": False}
    items = [{"role": "user", "content": "hi"}, *first["output"], more]
    assert API.request(body, earlier) == API.request({"input": items}, {})
    API.keep(body, API.reply(body, ANSWER), earlier)
    assert list(earlier) == [first["id"]]  # the second is not to be stored
    with pytest.raises(ValueError, match="'resp_0' is of no response that this sample keeps"):
        API.request({"input": "on", "previous_response_id": "resp_0"}, earlier)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"text": {"format": {"type": "json_schema"}}}, "'text.format' is not possible here: set"),
        ({"include": ["message.output_text.logprobs"]}, "'include' is not possible here: samples"),
        ({"background": True}, "'background' is not possible here: a request waits"),
        ({"conversation": "conv_1"}, "'conversation' is not possible here: send the items"),
        ({"prompt": {"id": "pmpt_1"}}, "'prompt' is not possible here: send the items"),
        ({"tool_choice": "required"}, "'tool_choice' is not possible here: the policy chooses"),
        ({"input": None}, "the input of a request is a text or a list of items"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "item 0 .* of type 'item_reference'"),
        ({"input": [{"role": "tool", "content": "7"}]}, "item 0 of the input has the role 'tool'"),
        ({"instructions": 5}, "the content of a message is no text and no list of parts: 5"),
    ],
)
def test_what_cannot_be_done_is_refused_under_its_own_name(more: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        require_possible(API.request({"input": "hi", **more}, {}), API, frozenset())


def test_what_agents_send_by_default_is_taken() -> None:
    body = {
        "input": "hi", "text": {"format": {"type": "text"}, "verbosity": "low"}, "store": False,
        "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"},
        "tool_choice": "auto", "max_output_tokens": 5, "truncation": "auto", "metadata": {"a": "b"},
        "prompt_cache_key": "a", "client_metadata": {}, "parallel_tool_calls": True,
    }  # fmt: skip
    require_possible(API.request(body, {}), API, frozenset())
