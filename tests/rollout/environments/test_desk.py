"""The server that agents ask: what OpenAI's clients send, and what they do when nobody answers."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from postgrad.rollout.environments.desk import Desk
from postgrad.rollout.environments.wire import ChatAnswer, Ignorable

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


class Policy:
    """Answers requests in their order, once it may."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.may_answer = asyncio.Event()

    async def __call__(self, body: Mapping[str, Any]) -> ChatAnswer:
        self.asked.append(body)
        number = len(self.asked)
        await self.may_answer.wait()
        if body["messages"][0]["content"] == "\ud800":
            raise ValueError("no answer to \ud800")
        message: dict[str, Any] = {"role": "assistant", "content": f"answer {number}"}
        if body.get("tools"):
            message["tool_calls"] = [CALL]
        return ChatAnswer(message, read=10 + number, written=number)

    async def count(self, body: Mapping[str, Any]) -> int:
        return sum(len(part["text"]) for part in parts_of(body))


def played(scene: Any, ignored: Sequence[Ignorable] = ()) -> None:
    """scene(policy, post, url): post(body, retry) sends a request as OpenAI's client does."""

    async def play() -> None:
        desk, policy = Desk(ignored), Policy()
        async with desk.open(), httpx.AsyncClient(timeout=60) as client:
            with desk.seat(policy, policy.count) as key:

                async def post(body: Any, retry: int = 0, **more: Any) -> httpx.Response:
                    headers = {"Authorization": f"Bearer {key}"}
                    headers["x-stainless-retry-count"] = str(retry)
                    content = body if isinstance(body, bytes) else json.dumps(body).encode()
                    url = f"{desk.url}/chat/completions"
                    return await client.post(url, headers=headers, content=content, **more)

                await scene(policy, post, f"{desk.url} {key}")

    asyncio.run(play())


def content(reply: httpx.Response) -> str:
    return reply.json()["choices"][0]["message"]["content"]


def test_options_that_are_null_are_as_left_out() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        nulls = dict.fromkeys(["n", "stream", "stop", "seed", "tools", "logprobs", "user"])
        assert content(await post({**BODY, **nulls})) == "answer 1"
        for wrong in ({"n": 2}, {"n": "1"}, {"logprobs": True}):
            assert (await post({**BODY, **wrong})).status_code == 400

    played(scene)


def test_an_answer_counts_its_tokens() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        answer = (await post({**BODY, "tools": [{}]})).json()
        assert answer["usage"] == {
            "prompt_tokens": 11, "completion_tokens": 1, "total_tokens": 12
        }  # fmt: skip
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["tool_calls"]) == ("tool_calls", [CALL])

    played(scene)


@pytest.mark.parametrize("usage", [False, True])
def test_an_answer_may_be_a_stream(usage: bool) -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        options = {"stream_options": {"include_usage": True}} if usage else {}
        reply = await post({**BODY, "stream": True, "tools": [{}], **options})
        assert reply.headers["content-type"].startswith("text/event-stream")
        *events, end = reply.text.strip().split("\n\n")
        assert end == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        (first,), (last,) = (chunk["choices"] for chunk in chunks[:2])
        assert first["delta"] == {
            "role": "assistant", "content": "answer 1", "tool_calls": [{"index": 0, **CALL}]
        }  # fmt: skip
        assert (first["finish_reason"], last["finish_reason"]) == (None, "tool_calls")
        assert [chunk["usage"]["total_tokens"] for chunk in chunks[2:]] == [12] * usage

    played(scene)


def test_programs_may_ask_which_models_there_are() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        url, _ = where.split()
        async with httpx.AsyncClient() as client:
            models = (await client.get(f"{url}/models")).json()
        assert [model["id"] for model in models["data"]] == ["policy"]

    played(scene)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("stop", ["Observation:"], "set rollout.stop"),
        ("response_format", {"type": "json_object"}, "set rollout.json_schema"),
        ("tool_choice", "required", "the policy chooses"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "the policy chooses"),
    ],
)
def test_an_option_that_would_be_ignored_in_silence_is_refused(
    option: str, value: Any, why: str
) -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        reply = await post({**BODY, option: value})
        assert reply.status_code == 400
        assert f"'{option}' is not possible here: {why}" in reply.json()["error"]["message"]

    played(scene)


AS_SMOLAGENTS = {"stop": ["Observation:"], "tool_choice": "required"}


def test_all_options_that_are_refused_are_told_together_with_the_key_that_ignores_them() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        reply = await post({**BODY, **AS_SMOLAGENTS, "functions": [{"name": "look"}]})
        assert (reply.status_code, reply.json()["error"]["message"]) == (
            400,
            "'functions' is not possible here: send tools; "
            "'stop' is not possible here: set rollout.stop in the recipe; "
            "'tool_choice' is not possible here: the policy chooses; "
            'environment.ignored = ["stop", "tool_choice"] takes what the agent need not have',
        )

    played(scene)


def test_options_that_the_recipe_ignores_are_taken_and_no_others() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        assert content(await post({**BODY, **AS_SMOLAGENTS})) == "answer 1"
        reply = await post({**BODY, **AS_SMOLAGENTS, "response_format": {"type": "json_object"}})
        assert reply.status_code == 400
        assert "'response_format' is not possible here" in reply.json()["error"]["message"]

    played(scene, ("stop", "tool_choice"))


@pytest.mark.parametrize(("method", "path"), [("POST", "embeddings"), ("GET", "responses/resp_1")])
def test_a_program_that_asks_another_interface_is_told_which_ones_there_are(
    method: str, path: str
) -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        url, _ = where.split()
        async with httpx.AsyncClient() as client:
            reply = await client.request(method, f"{url}/{path}")
        assert reply.status_code == 404
        assert reply.json()["error"] == {
            "message": f"{method} /v1/{path} is not served, only /v1/chat/completions, "
            "/v1/responses, /v1/messages and /v1/models: let the agent use one of these",
            "type": "not_found_error",
        }

    played(scene)


ASKED = {
    "chat/completions": BODY,
    "responses": {"input": "hi"},
    "messages": {"messages": BODY["messages"], "max_tokens": 5},
}


@pytest.mark.parametrize("begin", ["", "/v1"])
@pytest.mark.parametrize("path", ASKED)
def test_every_protocol_is_served_where_its_clients_look_for_it(path: str, begin: str) -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        url, key = where.split()
        async with httpx.AsyncClient() as client:
            for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}"}):
                sent = {"headers": headers, "json": ASKED[path]}
                reply = await client.post(f"{url}{begin}/{path}", **sent)
                assert reply.status_code == 200
                streamed = {**ASKED[path], "stream": True}
                sent = {"headers": headers, "json": streamed}
                reply = await client.post(f"{url}{begin}/{path}", **sent)
                assert reply.headers["content-type"].startswith("text/event-stream")
            guessed = await client.post(f"{url}{begin}/{path}", json=ASKED[path])
        assert (guessed.status_code, guessed.json()["error"]["type"]) == (
            401,
            "authentication_error",
        )
        contents = [
            "".join(part["text"] for part in parts) for parts in map(parts_of, policy.asked)
        ]
        assert contents == ["hi"] * 4

    played(scene)


def parts_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = body["messages"][0]["content"]
    return [{"text": content}] if isinstance(content, str) else content


@pytest.mark.parametrize(
    ("path", "counted"),
    [
        ("messages/count_tokens", {"input_tokens": 2}),
        ("responses/input_tokens", {"object": "response.input_tokens", "input_tokens": 2}),
    ],
)
def test_the_tokens_of_a_request_are_counted_without_an_answer(path: str, counted: Any) -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        url, key = where.split()
        body = ASKED[path.partition("/")[0]]
        async with httpx.AsyncClient() as client:
            sent = {"headers": {"x-api-key": key}, "json": body}
            assert (await client.post(f"{url}/{path}", **sent)).json() == counted
        assert policy.asked == []

    played(scene)


def test_a_request_that_is_sent_again_in_another_protocol_is_none_that_was_sent() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        url, key = where.split()
        assert content(await post(BODY)) == "answer 1"
        headers = {"x-api-key": key, "x-stainless-retry-count": "1"}
        async with httpx.AsyncClient() as client:
            for answer in ("answer 2", "answer 2"):
                reply = await client.post(f"{url}/messages", headers=headers, json=BODY)
                assert reply.json()["content"][0]["text"] == answer

    played(scene)


def test_options_that_ask_for_what_is_done_anyway_are_taken() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        usual = {"response_format": {"type": "text"}, "tool_choice": "auto", "temperature": 0.3}
        assert content(await post({**BODY, **usual, "stop": []})) == "answer 1"

    played(scene)


def test_requests_that_are_open_together_may_each_be_sent_again() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        bodies = [{**BODY, "seed": seed} for seed in range(2)]
        for body in bodies:
            with pytest.raises(httpx.ReadTimeout):
                await post(body, timeout=httpx.Timeout(60, read=0.05))
        policy.may_answer.set()
        for number, body in enumerate(bodies, 1):
            assert content(await post(body, retry=1)) == f"answer {number}"
        assert len(policy.asked) == 2

    played(scene)


def test_a_request_that_is_sent_again_means_the_same_turn() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await post(BODY, timeout=httpx.Timeout(60, read=0.05))
        again = asyncio.create_task(post(BODY, retry=1))
        await asyncio.sleep(0.05)
        policy.may_answer.set()
        assert content(await again) == "answer 1"
        assert content(await post(BODY, retry=2)) == "answer 1"  # its reply was lost
        assert len(policy.asked) == 1

    played(scene)


def test_a_request_that_is_no_repetition_asks_the_policy() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        assert content(await post(BODY)) == "answer 1"
        assert content(await post(BODY)) == "answer 2"
        assert content(await post({**BODY, "seed": 1}, retry=1)) == "answer 3"

    played(scene)


@pytest.mark.parametrize("cancelled", ["__call__", "run_asgi"])
def test_a_request_that_is_open_at_the_end_is_answered_and_prints_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, cancelled: str
) -> None:
    replies: list[asyncio.Task[httpx.Response]] = []

    async def scene(policy: Policy, post: Any, where: str) -> None:
        replies.append(asyncio.create_task(post(BODY)))
        while not policy.asked:
            await asyncio.sleep(0.01)
        others = asyncio.all_tasks() - {asyncio.current_task(), *replies}
        for task in others:  # as SideBySide does, in any order
            if cancelled in repr(task.get_coro()):
                task.cancel()
        reply = await replies[0]
        assert (reply.status_code, reply.json()["error"]["message"]) == (
            400,
            "the sample has ended",
        )

    played(scene)
    assert (capfd.readouterr().err, caplog.text) == ("", "")


def test_an_error_that_quotes_half_a_surrogate_pair_is_told() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        reply = await post(b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "no answer to \\ud800"

    played(scene)


def test_what_a_reply_repeats_of_its_request_may_be_no_text() -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        policy.may_answer.set()
        url, key = where.split()
        body = b'{"input": "hi", "metadata": {"a": "\\ud800"}}'
        async with httpx.AsyncClient() as client:
            headers = {"x-api-key": key}
            reply = await client.post(f"{url}/responses", headers=headers, content=body)
        assert (reply.status_code, reply.json()["metadata"]) == (200, {"a": "\ud800"})

    played(scene)


def test_a_client_that_goes_in_the_middle_of_its_request_is_no_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def scene(policy: Policy, post: Any, where: str) -> None:
        url, key = where.split()
        port = int(url.split(":")[2].partition("/")[0])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: a", "Content-Length: 500"]
        lines += [f"Authorization: Bearer {key}", "", "{"]
        writer.write("\r\n".join(lines).encode())
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.sleep(0.1)
        policy.may_answer.set()
        assert content(await post(BODY)) == "answer 1"

    played(scene)
    assert capfd.readouterr().err == ""
