"""Anthropic's Messages API: blocks as messages, an answer as blocks, and events in their order."""

import json
from typing import Any

import pytest

from postgrad.rollout.environments.anthropic_messages import AnthropicMessages
from postgrad.rollout.environments.wire import ChatAnswer, require_possible

API = AnthropicMessages()
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
ANSWER = ChatAnswer(
    {"role": "assistant", "content": "so", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    read=10,
    written=3,
)
USER = {"role": "user", "content": "hi"}
CACHED = {"cache_control": {"type": "ephemeral"}}


def messages(*sent: Any, **more: Any) -> list[dict[str, Any]]:
    return API.request({"messages": list(sent), **more}, {})["messages"]


def text(*words: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": word} for word in words]


def test_a_text_is_the_same_as_a_block_of_it_and_the_system_stands_first() -> None:
    asked = [
        {"role": "system", "content": text("Be brief.")},
        {"role": "user", "content": text("hi")},
    ]
    assert messages(USER, system="Be brief.") == asked
    assert messages({"role": "user", "content": text("hi")}, system=text("Be brief.")) == asked


def test_marks_for_a_cache_and_a_bill_change_no_message_and_no_tool() -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "7"}
    plain: dict[str, Any] = {
        "system": "Be brief.", "tools": [tool],
        "messages": [USER, {"role": "user", "content": [result]}],
    }  # fmt: skip
    bill = "x-anthropic-billing-header: cc_version=2; cch=1a;\n"
    marked: dict[str, Any] = {
        "system": [*text(bill), {**text("Be brief.")[0], **CACHED}],
        "tools": [{**tool, **CACHED, "strict": True, "type": "custom"}],
        "messages": [
            {"role": "user", "content": [{**text("hi")[0], **CACHED}]},
            {"role": "user", "content": [{**result, **CACHED, "is_error": False}]},
        ],
        "metadata": {"user_id": "5"}, **CACHED,
    }  # fmt: skip
    plain_request, other = (API.request(body, {}) for body in (plain, marked))
    for request in (plain_request, other):  # parts are read as one text
        for message in request["messages"]:
            message["content"] = "".join(part["text"] for part in message["content"])
    assert plain_request == other
    assert other["messages"][0] == {"role": "system", "content": "Be brief."}


def test_results_of_tools_are_messages_of_their_own_before_the_words_of_the_user() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": text("7", "8")},
        {"type": "tool_result", "tool_use_id": "b"},
    ]
    assert messages({"role": "user", "content": [*results, *text("and?")]}) == [
        {"role": "tool", "tool_call_id": "a", "content": text("7", "8")},
        {"role": "tool", "tool_call_id": "b", "content": text("")},
        {"role": "user", "content": text("and?")},
    ]


def test_images_are_data_urls_in_words_and_in_results() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    tool, user = messages({"role": "user", "content": [result, image]})
    assert (tool["content"], user["content"]) == ([shown], [shown])


def test_the_blocks_of_an_answer_are_one_message_again() -> None:
    content = API.reply({}, ANSWER)["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    (message,) = messages({"role": "assistant", "content": content})
    assert (message["content"], message["reasoning_content"]) == (text("so"), "Hm.")
    assert message["tool_calls"] == [CALL]


@pytest.mark.parametrize(
    ("message", "content", "reason"),
    [
        ({"content": ""}, text(""), "end_turn"),
        ({"content": None, "tool_calls": [CALL]}, [], "tool_use"),
    ],
)
def test_an_answer_says_why_it_ends(message: Any, content: Any, reason: str) -> None:
    reply = API.reply({}, ChatAnswer({"role": "assistant", **message}, read=10, written=3))
    blocks = [block for block in reply["content"] if block["type"] == "text"]
    assert (reply["type"], reply["stop_reason"], blocks) == ("message", reason, content)
    assert reply["usage"] == {"input_tokens": 10, "output_tokens": 3}


def test_the_events_of_a_stream_come_in_the_order_of_the_interface() -> None:
    reply = API.reply({}, ANSWER)
    lines = [event.splitlines() for event in API.events({}, reply)]
    events = [json.loads(data.removeprefix("data: ")) for _, data, *_ in lines]
    names = [name.removeprefix("event: ") for name, *_ in lines]
    assert names == [event["type"] for event in events]
    block, end = "content_block_start", "content_block_stop"
    assert names == [
        "message_start",
        block, "content_block_delta", "content_block_delta", end,
        block, "content_block_delta", end,
        block, "content_block_delta", end,
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"] == {"input_tokens": 10, "output_tokens": 0}
    assert [event["index"] for event in events if "index" in event] == [0] * 4 + [1] * 3 + [2] * 3
    assert [event["delta"] for event in events if event["type"] == "content_block_delta"] == [
        {"type": "thinking_delta", "thinking": "Hm."},
        {"type": "signature_delta", "signature": "policy"},
        {"type": "text_delta", "text": "so"},
        {"type": "input_json_delta", "partial_json": '{"n": 1}'},
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == {"output_tokens": 3}


def test_a_thread_keeps_what_it_has_been_sent() -> None:
    earlier: dict[str, Any] = {}
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body: dict[str, Any] = {"system": "Be brief.", "tools": [tool], "messages": [USER]}
    created = {**body, "thread": {"type": "create"}}
    reply = API.reply(created, ANSWER)
    API.keep(created, reply, earlier)
    on = {"role": "user", "content": "on"}
    thread = {"type": "continue", "previous_message_id": reply["id"]}
    assistant_message = {"role": "assistant", "content": reply["content"]}
    sent = API.request({"messages": [on], "thread": thread}, earlier)
    assert sent == API.request({**body, "messages": [USER, assistant_message, on]}, {})
    thread["previous_message_id"] = "msg_0"
    with pytest.raises(ValueError, match="goes on from no message that this sample keeps"):
        API.request({"messages": [on], "thread": thread}, earlier)
    API.keep(body, API.reply(body, ANSWER), earlier)
    assert list(earlier) == [reply["id"]]  # what belongs to no thread is not kept


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"stop_sequences": ["x"]}, "'stop_sequences' is not possible here: set rollout.stop"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice' is not possible here: the policy"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "'output_config.format' is not possible here: set rollout.json_schema",
        ),
        ({"mcp_servers": [{}]}, "'mcp_servers' is not possible here: send the servers' tools"),
        ({"compaction": {"type": "summary"}}, "'compaction' is not possible here: ask for"),
        ({"messages": 5}, "a request is an object with messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "message 0 .* only those with the role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "type 'document'"),
        ({"system": [{"type": "image"}]}, "type 'image', and only text of role system"),
    ],
)
def test_what_cannot_be_done_is_refused_under_its_own_name(more: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        require_possible(API.request({"messages": [USER], **more}, {}), API, frozenset())


def test_what_agents_send_by_default_is_taken() -> None:
    body = {
        "messages": [USER], "max_tokens": 5, "temperature": 1.0, "stop_sequences": [],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "a"},
        "context_management": {"edits": []}, "output_config": {"effort": "low"},
    }  # fmt: skip
    require_possible(API.request(body, {}), API, frozenset())
