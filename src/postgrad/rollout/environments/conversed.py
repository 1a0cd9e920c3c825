"""What asks the policy through an address, as if it were a service: agents, and tasks of verifiers.

    agent --POST, in a protocol of wire.py--> this process --Request--> the run's engine

The agent holds the conversation in messages, the run in tokens. A request that repeats a
conversation up to a turn of the policy, word for word, and adds messages to it goes on there: only
these messages are rendered and tokenised, and the policy's own turns stay the tokens that were
sampled. Any other request is a conversation of its own, which is rendered whole.
"""

import asyncio
import importlib.util
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import PrivateAttr

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.data.chat_format import Message
from postgrad.data.images import sent_message
from postgrad.rewards.verifier import LARGEST_SCORE
from postgrad.rollout.environments.base import (
    ChatEnvironment,
    HeardTurn,
    HearingCourse,
    Reply,
    StepFailed,
)
from postgrad.rollout.environments.chat_requests import (
    AgentTurn,
    ShownTools,
    answer_message,
    calls_of,
    plain_message,
    repeats,
    tool_name,
    tool_names,
)
from postgrad.rollout.environments.desk import ENDED, Desk
from postgrad.rollout.environments.tool_calls import (
    MARKED,
    analysis_in,
    calls_in,
    ids_of,
    result_example,
    result_message,
    taught_format,
    text_beside,
    thoughts_apart,
    written_call,
)
from postgrad.rollout.environments.tool_formats import Call, Calls, ToolFormat
from postgrad.rollout.environments.wire import ChatAnswer, Ignorable

Ended = tuple[Any, Mapping[str, float]]  # how a sample ended: its reward or None, what is counted


class Conversed(ChatEnvironment):
    """Something that asks the policy, and says the sample's reward in the end.

    `tools`: JSON schemas that the chat template shows to the policy in prompts and conversations;
    left out, each conversation shows those of its requests. Calls are given as `tool_calls`.
    `env`: names of the environment variables that its processes get. `rewards`: false leaves the
    rewards to [[rewards]]. `branches`: false makes a sample a failure whose requests are more than
    one conversation. `ignored`: options of requests that do nothing, and are refused otherwise.
    `thoughts`: where an answer has what the policy thinks, up to </think>: in its content, or apart
    as `reasoning_content`, which the agent need not send back.
    """

    deterministic: ClassVar[bool] = False
    waits: ClassVar[bool] = True

    tools: tuple[dict[str, Any], ...] = ()
    tool_format: Literal["auto", ToolFormat] = "auto"
    env: tuple[str, ...] = ()
    rewards: bool = True
    branches: bool = True
    ignored: tuple[Ignorable, ...] = ()
    thoughts: Literal["content", "reasoning_content"] = "content"

    _desk: Desk | None = PrivateAttr(default=None)
    _untaught: str = PrivateAttr(default="")  # why no request may have tools, where none may

    @abstractmethod
    async def converse(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Ended:
        """Plays one sample, by requests with this key to this address. Returns its reward, if it
        has one, and what is counted.
        """

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
        try:
            return self.model_copy(update={"tool_format": taught_format(template)})
        except UsageError as error:
            if self.tools:
                raise
            self._untaught = str(error)
        return self

    def examples(self) -> Sequence[Message]:
        return [*super().examples(), *([result_example("get")] if self.tools else [])]

    def shown(self, tools: Sequence[Any]) -> ShownTools:
        """The tools that a conversation shows, for those of a request. Raises ValueError where the
        policy would not see one of these.
        """
        if not self.tools:
            if tools and self._untaught:
                raise ValueError(
                    f"the request has tools, and the policy can see none: {self._untaught}"
                )
            if odd := [tool for tool in tools if tool_name(tool) is None]:
                raise ValueError(f"a tool is no function with a name: {repr(odd[0])[:200]}")
            return tuple(tools)
        stated = {tool_name(tool) for tool in self.tools}
        if hidden := [tool for tool in tools if tool_name(tool) not in stated]:
            raise ValueError(
                f"the request has tools that the policy does not see: {tool_names(hidden)[:200]}; "
                "state their schemas in environment.tools too, or none there"
            )
        return self.tools

    def read(
        self, turn: HeardTurn, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Sequence[Call]]:
        """A call that is none is text."""
        style, every = self.tool_format, Calls()
        if style == "auto":
            return turn.text, ()
        # The marks of calls and thoughts may be special tokens.
        text = turn.marked if tools or style in MARKED else turn.text
        if not tools and style != "harmony":
            return text, ()
        if tools:
            functions = [tool.get("function", {}) for tool in tools]
            schemas = {tool.get("name"): tool.get("parameters", {}) for tool in functions}
            every = calls_in(text, style, schemas)
        calls = [call for call in every if isinstance(call, Call)]
        return text if every and not calls else text_beside(text, style), calls

    def apart(self, turn: HeardTurn, content: str) -> tuple[str, str]:
        """The thoughts of an answer that the agent gets apart from its content, and the content
        without them.
        """
        if self.thoughts == "content":
            return "", content
        if self.tool_format == "harmony":
            return analysis_in(turn.marked), content
        return thoughts_apart(content, self.tool_format, opened=turn.thinking)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """With the server that is asked."""
        self._desk = Desk(self.ignored)
        async with self._desk.open():
            yield

    def start(self, prompt: Prompt, sample: int) -> HearingCourse:
        return _Conversation(self, prompt)

    async def play(self, conversation: "_Conversation", row: Mapping[str, Any]) -> Ended:
        """Plays one sample. Returns its reward, 0 where it has none, and what is counted."""
        assert self._desk is not None  # within `running`
        with self._desk.seat(conversation.ask, conversation.count) as key:
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


@dataclass(frozen=True, slots=True)
class _AgentRequest:
    """A request of the agent."""

    messages: list[dict[str, Any]]  # in one form
    sent: list[Any]  # as they came
    tools: ShownTools  # that its conversation shows
    calls: bool  # whether the answer may have calls; else they stay text
    answer: asyncio.Future[ChatAnswer]


class _Conversation:
    """One sample's requests and turns. Everything happens in one event loop."""

    def __init__(self, rules: Conversed, prompt: Prompt) -> None:
        self._rules = rules
        self._row = {
            "question": prompt.question,
            "answer": prompt.answer,
            "messages": [sent_message(message) for message in prompt.messages],
            **prompt.metadata,
        }
        self._prompt = [plain_message(each, n) for n, each in enumerate(prompt.messages)]
        self._turns: list[AgentTurn] = []
        self._agent: asyncio.Task[Ended] | None = None
        self._queue: asyncio.Queue[_AgentRequest] = asyncio.Queue()
        self._open: _AgentRequest | None = None  # what the policy's next turn answers
        self._calls: dict[str, Call] = {}  # of what stands before that turn
        self._closed = False
        self._measure: Callable[[Reply], int] | None = None

    async def begin(self) -> Reply:
        """Starts the agent, and waits for its first request."""
        self._agent = asyncio.create_task(self._rules.play(self, self._row))
        reply = await self._next()
        if reply is None:
            raise StepFailed("error", "the agent has ended without asking the policy")
        return reply

    async def hear(self, turn: HeardTurn) -> Reply:
        """Answers the agent's request with a turn of the policy, and waits for its next one."""
        assert self._agent is not None  # `begin` has ended
        assert self._open is not None
        message, calls = self._message(turn)
        read = self._open.messages
        messages = [*read, plain_message(message, len(read))]
        self._turns.append(AgentTurn(messages, {**self._calls, **calls}, self._open.tools))
        if not self._open.answer.done():
            self._open.answer.set_result(ChatAnswer(message, turn.read, turn.written))
        self._open = None
        reply = await self._next()
        if reply is None:
            reward, counts = self._agent.result()
            return Reply(done=True, reward=reward, counts=counts)
        return reply

    def close(self) -> None:
        """The episode has ended without the agent: ends it."""
        self._closed = True
        if self._agent is not None:
            self._agent.cancel()
        waiting = [] if self._open is None else [self._open]
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        for asked in waiting:
            if not asked.answer.done():
                asked.answer.set_exception(ValueError(ENDED))

    async def ask(self, body: Mapping[str, Any]) -> ChatAnswer:
        """The policy's next turn, for a request; those that come meanwhile wait. Raises
        ValueError where it is none that can be answered; the sample is a failure then.
        """
        asked = self._read(body)
        await self._queue.put(asked)
        return await asked.answer

    async def count(self, body: Mapping[str, Any]) -> int:
        """The tokens that the policy would have read for a request. Raises ValueError where they
        cannot be counted.
        """
        assert self._measure is not None  # since the episode began
        try:
            reply, _ = self._placed(self._read(body))
            return await asyncio.to_thread(self._measure, reply)
        except (StepFailed, UsageError) as error:  # of this request, which the policy does not get
            raise ValueError(str(error)) from error

    def measured_by(self, measure: Callable[[Reply], int]) -> None:
        """Takes what counts the tokens of a reply (HearingCourse)."""
        self._measure = measure

    def _read(self, body: Mapping[str, Any]) -> _AgentRequest:
        if self._closed:  # an agent that was cancelled may ask all the same
            raise ValueError(ENDED)
        tools = self._rules.shown(body.get("tools") or ())
        messages = [plain_message(each, n) for n, each in enumerate(body["messages"])]
        answer = asyncio.get_running_loop().create_future()
        calls = body.get("tool_choice") != "none"
        return _AgentRequest(messages, body["messages"], tools, calls, answer)

    async def _next(self) -> Reply | None:
        """Opens the agent's next request. Returns what the policy reads of it; None where the agent
        has ended.
        """
        assert self._agent is not None
        asking = asyncio.ensure_future(self._queue.get())
        try:
            await asyncio.wait({asking, self._agent}, return_when=asyncio.FIRST_COMPLETED)
            self._open = asking.result() if asking.done() else None
            if self._open is None or self._agent.done():
                self.close()  # requests that nobody waits for
                self._agent.result()  # raises what the agent raised
                return None
            reply, self._calls = self._placed(self._open)
            return reply
        except BaseException:
            self.close()
            raise
        finally:
            asking.cancel()

    def _placed(self, asked: _AgentRequest) -> tuple[Reply, dict[str, Call]]:
        """The messages of a request that the policy has not read, and what they stand behind; the
        calls of all its messages by their ids.
        """
        messages, sent = asked.messages, asked.sent
        if not messages or messages[-1]["role"] == "assistant":
            raise StepFailed(
                "error",
                "the agent's request has no message for the policy to answer: its last one is "
                f"{'an answer' if messages else 'not there'}, and a turn is written whole",
            )
        if not self._turns and self._asks_what_the_row_does(asked):
            return Reply(), {}
        newest = len(self._turns) - 1
        turn = max(
            (n for n, turn in enumerate(self._turns) if turn.goes_on_in(messages, asked.tools)),
            key=lambda n: (len(self._turns[n].messages), n),
            default=None,
        )
        if self._turns and turn != newest and not self._rules.branches:
            wrong = self._turns[newest].difference(messages, asked.tools)
            wrong = wrong or "it answers for the policy"
            raise StepFailed(
                "error",
                f"the agent's request does not continue the conversation: {wrong}; without "
                "environment.branches = false it is another one",
            )
        calls = {} if turn is None else dict(self._turns[turn].calls)
        begin = 0 if turn is None else len(self._turns[turn].messages)
        pairs = zip(messages[begin:], sent[begin:], strict=True)
        new = tuple(self._shown(message, raw, calls, asked.tools) for message, raw in pairs)
        if turn is not None:
            return Reply(new, behind=turn), calls
        tools = None if self._rules.tools else asked.tools
        return Reply(new, behind="nothing", tools=tools), calls

    def _asks_what_the_row_does(self, asked: _AgentRequest) -> bool:
        same = len(asked.messages) == len(self._prompt) and asked.tools == self._rules.tools
        return same and all(map(repeats, asked.messages, self._prompt))

    def _shown(
        self,
        message: Mapping[str, Any],
        raw: Mapping[str, Any],
        calls: dict[str, Call],
        tools: ShownTools,
    ) -> Message:
        """An agent's message as the chat template gets it; its parts, where it has images, are read
        as those of any reply. raw: the message as it came. calls: those before it; gets its own.
        """
        shown = {"role": message["role"], "content": message["content"]}
        if "thoughts" in message:
            key = "thinking" if self._rules.tool_format == "harmony" else "reasoning_content"
            shown[key] = message["thoughts"]
        if new := calls_of(message, raw):
            calls |= new
            asked = [written_call(identifier, call) for identifier, call in new.items()]
            return {**shown, "tool_calls": asked}
        content = raw["content"] if "images" in message else message["content"]
        identifier = message.get("tool_call_id", "")
        if message["role"] == "tool" and identifier in calls:
            return result_message(calls[identifier], identifier, content)
        if message["role"] == "tool" and tools:
            raise StepFailed(
                "error",
                f"the agent's result of a tool has the tool_call_id {identifier[:60]!r}, and the "
                f"calls before it had {', '.join(calls)[:200] or 'none'}",
            )
        return {**shown, "content": content}

    def _message(self, turn: HeardTurn) -> tuple[dict[str, Any], dict[str, Call]]:
        """A turn of the policy as an assistant's message of OpenAI's interface, and its calls."""
        assert self._open is not None
        content, calls = self._rules.read(turn, self._open.tools if self._open.calls else ())
        thoughts, content = self._rules.apart(turn, content)
        number = sum(len(message.get("calls", ())) for message in self._open.messages)
        by_id = dict(zip(ids_of(calls, number), calls, strict=True))
        return answer_message(content, thoughts, by_id), by_id
