"""An agent as the environment: it asks the policy through an address with OpenAI's interface.

    agent --POST /v1/chat/completions--> this process --Request--> the run's engine

The agent holds the conversation in messages, the run in tokens. A request must repeat the
conversation so far, word for word, and add messages to it: only these are rendered and tokenised.
The policy's own turns stay the tokens that were sampled. An agent that rewrites what was said
before, or talks on another branch, is told so, and its sample is a failure.
"""

import asyncio
import importlib.util
import inspect
import json
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Literal, Self

from pydantic import PrivateAttr, field_validator

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.core.text import resolve
from postgrad.data.chat_format import Message
from postgrad.data.images import sent_message
from postgrad.rewards.verifier import LARGEST_SCORE
from postgrad.rollout.environments.base import (
    ChatEnvironment,
    Course,
    Reply,
    StepFailed,
    failure_of,
)
from postgrad.rollout.environments.desk import MODEL, Desk, plain_message
from postgrad.rollout.environments.tool_calls import (
    calls_in,
    format_of,
    ids_of,
    result_example,
    result_message,
    taught_format,
    text_beside,
)
from postgrad.rollout.environments.tool_formats import Call, Calls, ToolFormat
from postgrad.rollout.environments.workers import FunctionWorkers

Ended = tuple[Any, Mapping[str, float]]  # how a sample ended: its reward or None, what is counted


class Conversed(ChatEnvironment):
    """Something that asks the policy, and says the sample's reward in the end.

    `tools`: JSON schemas that the chat template shows to the policy, whose calls are given as
    `tool_calls`. `env`: names of the environment variables that its processes get. `rewards`: false
    leaves the rewards to [[rewards]].
    """

    deterministic: ClassVar[bool] = False
    waits: ClassVar[bool] = True

    tools: tuple[dict[str, Any], ...] = ()
    tool_format: Literal["auto", ToolFormat] = "auto"
    env: tuple[str, ...] = ()
    rewards: bool = True

    _desk: Desk | None = PrivateAttr(default=None)

    @abstractmethod
    async def converse(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Ended:
        """Plays one sample, by requests with this key to this address. Returns its reward, if it
        has one, and what is counted.
        """

    @property
    def special_tokens(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Marks of tool calls may be special tokens, and those of gpt-oss's channels are."""
        return bool(self.tools) or self.tool_format == "harmony"

    @property
    def gives_rewards(self) -> bool:
        return self.rewards

    def variables(self) -> Mapping[str, Any]:
        return {"tools": [dict(tool) for tool in self.tools]} if self.tools else {}

    def for_template(self, template: str) -> Self:
        for package in ("starlette", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                raise UsageError(
                    f"an environment that asks the policy needs {package}: "
                    "pip install 'postgrad[serve]'"
                )
        if self.tool_format != "auto":
            return self
        if self.tools:
            return self.model_copy(update={"tool_format": taught_format(template)})
        if format_of(template) == "harmony":  # an answer has channels too
            return self.model_copy(update={"tool_format": "harmony"})
        return self

    def examples(self) -> Sequence[Message]:
        return [*super().examples(), *([result_example("get")] if self.tools else [])]

    def read(self, text: str) -> tuple[str, list[Call]]:
        """What a turn of the policy says, and its calls. A call that is none is text."""
        style, every = self.tool_format, Calls()
        if style == "auto" or not (self.tools or style == "harmony"):
            return text, []
        if self.tools:
            functions = [tool.get("function", {}) for tool in self.tools]
            schemas = {tool.get("name"): tool.get("parameters", {}) for tool in functions}
            every = calls_in(text, style, schemas)
        calls = [call for call in every if isinstance(call, Call)]
        return text if every and not calls else text_beside(text, style), calls

    def check(self, prompt: Prompt) -> str | None:
        return None if prompt.messages else "an agent needs a prompt of chat messages"

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """With the server that is asked."""
        self._desk = Desk()
        async with self._desk.open():
            yield

    def start(self, prompt: Prompt, sample: int) -> Course:
        return _Conversation(self, prompt)

    async def play(self, conversation: "_Conversation", row: Mapping[str, Any]) -> Ended:
        """Plays one sample. Returns its reward, 0 where it has none, and what is counted."""
        assert self._desk is not None  # within `running`
        with self._desk.seat(conversation.ask) as key:
            returned, counts = await self.converse(self._desk.url, key, row)
        if returned is None or not self.rewards:
            return 0.0, counts
        if isinstance(returned, bool) or not isinstance(returned, int | float):
            raise StepFailed("error", f"the agent returned {type(returned).__name__}, no number")
        if not abs(returned) <= LARGEST_SCORE:
            raise StepFailed(
                "error", f"the agent returned {returned}, which is no finite number of 32 bits"
            )
        return float(returned), counts


class Agent(Conversed):
    """`agent`: "package.module:function", called for every sample with the keywords base_url,
    api_key, model and row ({"question", "answer", "messages", and the row's other columns}).

    An `async def` runs in the run's process, any other function in a process of its own, with the
    variables that `env` names. It returns the sample's reward, or None.
    """

    agent: str

    _workers: FunctionWorkers | None = PrivateAttr(default=None)

    @field_validator("agent")
    @classmethod
    def _resolvable(cls, name: str) -> str:
        try:
            function = resolve(name, {}, "agent")
        except UsageError as error:
            raise ValueError(str(error)) from error
        if not inspect.isfunction(function):
            raise ValueError(f"{name!r} is no Python function")
        return name

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Also with processes for agents that are plain functions."""
        self._workers = FunctionWorkers(self.env)
        try:
            async with super().running():
                yield
        finally:
            self._workers.close()

    async def converse(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Ended:
        """Calls the function, here or in a process of its own."""
        assert self._workers is not None  # within `running`
        function: Callable[..., Any] = resolve(self.agent, {}, "agent")
        asked = {"base_url": base_url, "api_key": api_key, "model": MODEL, "row": dict(row)}
        if inspect.iscoroutinefunction(function):
            try:
                return await function(**asked), {}
            except SystemExit as error:  # it would end the loop that all samples share
                raise StepFailed("error", failure_of(error).message) from error
        return await self._workers.call(self.agent, asked), {}


class _Conversation:
    """One sample's conversation with the agent. Everything happens in one event loop."""

    def __init__(self, rules: Conversed, prompt: Prompt) -> None:
        self._rules = rules
        self._row = {
            "question": prompt.question,
            "answer": prompt.answer,
            "messages": [sent_message(message) for message in prompt.messages],
            **prompt.metadata,
        }
        self._said: list[dict[str, Any]] = [plain_message(message) for message in prompt.messages]
        self._agent: asyncio.Task[Ended] | None = None
        # Of each request the messages in one form, and as they came.
        self._asked: asyncio.Queue[tuple[list[dict[str, Any]], list[Any]]] = asyncio.Queue()
        self._answer: asyncio.Future[dict[str, Any]] | None = None  # of the request that waits
        self._turns = 0  # of the policy
        self._calls: dict[str, Call] = {}  # of the policy, by their ids

    async def step(self, text: str) -> Reply:
        """Answers the agent's request with a turn of the policy, and waits for its next one."""
        if self._agent is None:
            self._agent = asyncio.create_task(self._rules.play(self, self._row))
            await self._next()  # the prompt, which the policy has read
        if self._answer is None:
            raise StepFailed("error", "the agent has ended without asking the policy")
        message = self._message(text)
        self._said.append(plain_message(message))
        self._turns += 1
        answer, self._answer = self._answer, None
        if not answer.done():
            answer.set_result(message)
        new = await self._next()
        if new is None:
            reward, counts = self._agent.result()
            return Reply(done=True, reward=reward, counts=counts)
        return Reply(tuple(new))

    def close(self) -> None:
        """The episode has ended without the agent: ends it."""
        if self._agent is not None:
            self._agent.cancel()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ValueError("the sample has ended"))

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The policy's next message, for a request. Raises ValueError where it is none that can be
        answered; the sample is a failure then.
        """
        if self._answer is not None:
            raise ValueError("a request of this sample is already open: ask one after the other")
        self._require_shown(body.get("tools") or ())
        messages = [plain_message(message) for message in body["messages"]]
        self._answer = asyncio.get_running_loop().create_future()
        answer = self._answer
        await self._asked.put((messages, body["messages"]))
        return await answer

    def _require_shown(self, tools: Sequence[Any]) -> None:
        """Raises ValueError for tools of a request that the chat template does not show."""
        shown = {_name_of(tool) for tool in self._rules.tools}
        if hidden := [name for name in map(_name_of, tools) if name not in shown]:
            raise ValueError(
                f"the request has tools that the policy does not see: {', '.join(hidden)[:200]}; "
                "state their schemas in environment.tools"
            )

    async def _next(self) -> list[Message] | None:
        """The messages that the agent's next request adds; None where the agent has ended."""
        assert self._agent is not None
        asking = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait({asking, self._agent}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                self._agent.result()  # raises what the agent raised
                return None
            return self._added(*asking.result())
        except BaseException:
            self.close()
            raise
        finally:
            asking.cancel()

    def _added(self, messages: list[dict[str, Any]], sent: list[Any]) -> list[Message]:
        for place, message in enumerate(self._said):
            if place >= len(messages) or messages[place] != message:
                has = json.dumps(messages[place])[:200] if place < len(messages) else "nothing"
                raise StepFailed(
                    "error",
                    f"the agent's request does not continue the conversation: message {place} is "
                    f"{has}, and was {json.dumps(message)[:200]}",
                )
        new = messages[len(self._said) :]
        if not self._turns and new:
            raise StepFailed("error", "the agent's first request is not the row's messages alone")
        if self._turns and (not new or any(m["role"] == "assistant" for m in new)):
            raise StepFailed("error", "the agent's request adds no messages of its own to the last")
        before = len(self._said)
        self._said += new
        return [self._shown(m, raw) for m, raw in zip(new, sent[before:], strict=True)]

    def _shown(self, message: Mapping[str, Any], raw: Mapping[str, Any]) -> Message:
        """An agent's message as the chat template gets it; its parts, where it has images, are read
        as those of any reply. raw: the message as it came.
        """
        content = raw["content"] if "images" in message else message["content"]
        if message["role"] != "tool" or not self._rules.tools:
            return {"role": message["role"], "content": content}
        identifier = message.get("tool_call_id", "")
        if identifier not in self._calls:
            raise StepFailed(
                "error",
                f"the agent's result of a tool has the tool_call_id {identifier[:60]!r}, and the "
                f"policy's calls had {', '.join(self._calls) or 'none'}",
            )
        return result_message(self._calls[identifier], identifier, content)

    def _message(self, text: str) -> dict[str, Any]:
        """A turn of the policy as an assistant's message of OpenAI's interface."""
        content, calls = self._rules.read(text)
        if not calls:
            return {"role": "assistant", "content": content}
        number = sum(len(message.get("calls", ())) for message in self._said)
        by_id = dict(zip(ids_of(calls, number), calls, strict=True))
        self._calls |= by_id
        return {
            "role": "assistant",
            "content": content or None,
            "tool_calls": [
                {
                    "id": identifier,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for identifier, call in by_id.items()
            ],
        }


def _name_of(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return str(function.get("name") if isinstance(function, Mapping) else None)
