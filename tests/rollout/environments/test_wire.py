"""Requests of any protocol: whatever JSON they are, they are asked or refused with one message."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.chat import chat_tokenizer
from helpers.tool_templates import WITH_TOOLS
from postgrad.core.records import Prompt
from postgrad.rollout.engine import Completion
from postgrad.rollout.environment import Observation
from postgrad.rollout.environments.agent import Agent
from postgrad.rollout.environments.base import StepFailed
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.desk import Desk
from postgrad.rollout.environments.wire import ChatAnswer
from postgrad.rollout.settings import EnvironmentSettings

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
PROMPT = Prompt(5, np.array([4], np.int32), "begin", "7", "rows", 0, {}, ())
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
MESSAGE = {"role": "assistant", "content": "so", "reasoning_content": "Hm.", "tool_calls": [CALL]}
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
IMAGE = "AAAA"  # read where the policy reads images
URL = f"data:image/png;base64,{IMAGE}"
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "image_url", "image_url": {"url": URL}},
            ],
        },
        MESSAGE,
        {"role": "tool", "tool_call_id": "a", "content": "7"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "stop": None,
    "n": 1,
}
RESPONSES = {
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": "Be kind."},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "hi"},
                {"type": "input_image", "image_url": URL},
            ],
        },
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "so"}],
        },
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "7"}],
        },
    ],
    "tools": [{"type": "function", **TOOL}],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "previous_response_id": None,
    "store": False,
    "stream": True,
}
ANTHROPIC = {
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": IMAGE},
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "a", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "7"}],
                },
                {"type": "text", "text": "on"},
            ],
        },
        {"role": "system", "content": "Be kind."},
    ],
    "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": [],
    "output_config": {"format": None},
    "thread": {"type": "create"},
    "stream": True,
}
ASKED = {
    "chat/completions": CHAT,
    "responses": RESPONSES,
    "responses/input_tokens": RESPONSES,
    "messages": ANTHROPIC,
    "messages/count_tokens": ANTHROPIC,
}
WORDS = ("user", "assistant", "tool", "text", "image", "tool_result", "continue", "a", "\ud800", "")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(("type", "text", "content", "id")), inner, max_size=2)
    ),
    max_leaves=4,
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value within a value."""
    yield place
    within: Any = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else within:
        yield from places(inner, (*place, key))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a place; without the place, where that is None."""
    if not place:
        return new
    key, *rest = place
    copy = value.copy()
    copy[key] = changed(copy[key], tuple(rest), new)
    if not rest and new is None:
        del copy[key]
    return copy


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    """A path, and a request to it with up to three values that are others."""
    path = draw(st.sampled_from(sorted(ASKED)))
    body: Any = ASKED[path]
    for _ in range(draw(st.integers(0, 3))):
        body = changed(body, draw(st.sampled_from(list(places(body)))), draw(VALUES))
    return path, body


class Episode:
    """What answers the requests of a sample, each with the same turn."""

    def __init__(self) -> None:
        rules = Agent(agent="helpers.agents:plain").for_template(WITH_TOOLS["qwen"][0])
        self.conversation: Any = rules.start(PROMPT, 0)
        self.conversation.measured_by(lambda reply: len(reply.messages))

    async def ask(self, body: Mapping[str, Any]) -> ChatAnswer:
        try:
            self.conversation._placed(self.conversation._read(body))
        except StepFailed as error:
            raise ValueError(str(error)) from error
        return ChatAnswer(MESSAGE, read=1, written=1)


def test_any_json_is_answered_or_refused_with_one_message() -> None:
    with asyncio.Runner() as runner:
        episode, desk, opened = Episode(), Desk(), AsyncExitStack()
        runner.run(opened.enter_async_context(desk.open()))
        client = runner.run(opened.enter_async_context(httpx.AsyncClient(timeout=60)))
        key = opened.enter_context(desk.seat(episode.ask, episode.conversation.count))

        @given(requests())
        def answered(request: tuple[str, Any]) -> None:
            path, body = request
            sent = {"headers": {"x-api-key": key}, "content": json.dumps(body)}
            reply = runner.run(client.post(f"{desk.url}/{path}", **sent))
            assert reply.status_code in (200, 400), reply.text
            if reply.status_code == 400:
                error_body = reply.json()
                assert (error_body["type"], error_body["error"]["type"]) == (
                    "error",
                    "invalid_request_error",
                )
                assert error_body["error"]["message"]

        answered()
        runner.run(opened.aclose())


TOKENIZER = chat_tokenizer(*WITH_TOOLS["qwen"])
CALLED = '<tool_call>{"name": "next", "arguments": {"n": 6}}</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
TURNS = (
    f"{THOUGHT}So.{CALLED}{CALLED}",
    f"{THOUGHT}ok",
    f"{THOUGHT}So.{CALLED}{CALLED}",
    f"{THOUGHT}So.{CALLED}{CALLED}",
    f"{THOUGHT}7 end",
)
RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("recorded_agents.jsonl").read_text().splitlines()
]


def completion(text: str, number: int) -> Completion:
    ids = TOKENIZER(text + TOKENIZER.eos_token, add_special_tokens=False)["input_ids"]
    array, logprobs = np.array(ids, np.int32), np.zeros(len(ids), np.float32)
    return Completion(5, 0, number, array, logprobs, "stop", ((0, len(ids)),), text)


def seen(agent: str, turns: Sequence[str], row: Mapping[str, Any]) -> list[Observation]:
    """What the policy reads where an agent may hold one conversation alone."""
    about = {"type": "agent", "agent": agent, "branches": False, "thoughts": "reasoning_content"}
    played = dialogue(EnvironmentSettings.model_validate(about), TOKENIZER, {})
    asked = {"role": "user", "content": "begin"}
    prompt = Prompt(5, np.array([4], np.int32), "begin", "7", "rows", 0, row, (asked,))
    episode = played.reset(prompt, 0)
    observed = [episode.begin().result()]
    for number, text in enumerate(turns):
        if not observed[-1].done:
            observed.append(episode.step(completion(text, number)).result())
    played.close()
    return observed


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["agent"])
def test_every_request_of_a_loop_with_tools_and_thoughts_goes_on_with_the_tokens_as_sampled(
    recorded: dict[str, Any],
) -> None:
    asked = [path for path, _ in recorded["requests"] if not path.endswith("count_tokens")]
    observed = seen("helpers.agents:repeats_requests", TURNS[: len(asked)], recorded)
    assert observed[-1].failure is None
    assert (observed[-1].done, observed[-1].reward) == (True, len(asked))
    assert [each.behind for each in observed] == ["nothing", *["newest"] * len(asked)]
    for each in observed[1:-1]:
        text = TOKENIZER.decode(each.token_ids)
        assert "So." not in text  # nothing of the policy is tokenised again
        assert "7" in text or "and now?" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "agent", "streamed"),
    [
        ("openai", "openai_asks", False),
        ("openai", "openai_asks", True),
        ("openai", "openai_names_the_previous_response", False),
        ("agents", "openai_agents", False),
        ("agents", "openai_agents", True),
        ("anthropic", "anthropic_asks", False),
        ("anthropic", "anthropic_asks", True),
        ("anthropic", "anthropic_tool_runner", False),
    ],
)
def test_official_packages_hold_one_conversation(package: str, agent: str, streamed: bool) -> None:
    pytest.importorskip(package)
    turns = [TURNS[0], TURNS[0], f"{THOUGHT}7"]
    observed = seen(f"helpers.sdk_agents:{agent}", turns, {"streamed": streamed})
    assert observed[-1].failure is None
    assert (observed[-1].reward, len(observed)) == (7.0, 4)
