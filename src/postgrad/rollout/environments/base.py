"""Environments that speak in messages: what most people write. No torch, no tokenizer.

chat.py turns their messages into tokens with the chat template.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol, Self

from pydantic import ValidationError

from postgrad.core.errors import PostgradError, SettingsError, UsageError, described
from postgrad.core.records import Behind, EpisodeFailure, Prompt
from postgrad.core.settings import Settings, problem_of_table
from postgrad.core.text import resolve
from postgrad.data.chat_format import Message
from postgrad.rewards.settings import EnvironmentRewards
from postgrad.rewards.verifier import LARGEST_SCORE
from postgrad.rollout.environments.tool_formats import Call
from postgrad.rollout.settings import EnvironmentSets, EnvironmentSettings

ENVIRONMENTS = {
    "agent": "postgrad.rollout.environments.agent:Agent",
    "guess_number": "postgrad.rollout.environments.guess_number:GuessNumber",
    "openenv": "postgrad.rollout.environments.openenv:OpenEnv",
    "tools": "postgrad.rollout.environments.tools:Tools",
    "verifiers": "postgrad.rollout.environments.verifiers:VerifiersTasks",
}
# What the run counts of every episode, whatever its environment.
COUNTED = ("turns", "out_of_turns", "conversations")
_HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Reply:
    """The environment's reply to one turn of the policy, or what it begins with."""

    # In the chat format, what the policy reads next. A content is text or a list of parts, such as
    # {"type": "text", "text": "See: "}, {"type": "image", "image": its file as bytes or base64}.
    messages: tuple[Message, ...] = ()
    done: bool = False  # whether the episode ends here; then no messages are read
    reward: float = 0.0  # for this turn alone
    # For metrics, {"calls": 1.0}; summed over the episode.
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    # What the policy reads before the messages. "newest": its newest turn, and what it read there.
    # A number: its turn with this number, from 0 on, and what it read there. "nothing": the
    # messages are a conversation of their own, as a prompt is. Before its first turn "newest" means
    # the row's messages.
    behind: Behind = "newest"
    # Of a conversation that begins here ("nothing"): JSON schemas that the chat template shows in
    # it. None: those of the environment.
    tools: Sequence[Mapping[str, Any]] | None = None


def wrong_with(reply: Any, turns: int) -> str | None:
    """Why what a step returned cannot be read as a reply, or None where it can. The code is of
    others, so no type is certain. turns: of the policy so far; before the first it is what `begin`
    returned.
    """
    if not isinstance(reply, Reply):
        method = "the step" if turns else "begin"
        return f"{method} returned a {type(reply).__name__} in place of a Reply"
    if not isinstance(reply.reward, Real):
        return f"the reward of a Reply is {reply.reward!r}, which is no number"
    if not abs(reply.reward) <= LARGEST_SCORE:
        return f"the reward of a Reply is {reply.reward}, which is no finite number of 32 bits"
    try:
        bool(reply.done)
    except ValueError:  # an array of NumPy
        return f"done of a Reply is {reply.done!r}, which is neither true nor false"
    if not isinstance(reply.counts, Mapping):
        return f"the counts of a Reply are a {type(reply.counts).__name__}, which is no dict"
    for name, count in reply.counts.items():
        if not isinstance(name, str):
            return f"a count of a Reply is named {name!r}, which is no text"
        if name in COUNTED:
            return f"a count of a Reply is named {name!r}, which the run counts itself"
        if not isinstance(count, Real) or not math.isfinite(count):
            return f"the count {name!r} of a Reply is {count!r}, which is no finite number"
    if not isinstance(reply.messages, tuple | list):
        return f"the messages of a Reply are a {type(reply.messages).__name__}, which is no tuple"
    if (wrong := _wrong_place(reply, turns)) is not None:
        return wrong
    if reply.tools is not None and (wrong := _wrong_tools(reply)) is not None:
        return wrong
    return next((wrong for m in reply.messages if (wrong := _wrong_message(m)) is not None), None)


def _wrong_place(reply: Reply, turns: int) -> str | None:
    behind: Any = reply.behind
    if not turns and (reply.done or reply.reward or reply.counts):
        return "the Reply of begin is done, or has a reward or counts: the policy has had no turn"
    if reply.done:
        return None
    if isinstance(behind, str) and behind in ("newest", "nothing"):
        alone = behind == "nothing" and not reply.messages
        return "a Reply behind nothing has no messages" if alone else None
    is_number = isinstance(behind, Integral) and not isinstance(behind, bool)  # NumPy's are too
    if is_number and 0 <= int(behind) < turns:
        return None
    return (
        f"a Reply stands behind {behind!r}: it may be 'newest', 'nothing', or the number of one of "
        f"the policy's {turns} turns, from 0 on"
    )


def _wrong_tools(reply: Reply) -> str | None:
    tools: Any = reply.tools
    if not isinstance(tools, tuple | list) or not all(isinstance(tool, dict) for tool in tools):
        return f"the tools of a Reply are {repr(tools)[:100]}, which is no list of schemas"
    if not _is_json(tools):
        return f"the tools of a Reply are {repr(tools)[:100]}, which is no JSON"
    if reply.done or reply.behind != "nothing":
        return "a Reply has tools and does not begin a conversation with behind = 'nothing'"
    return None


def _wrong_message(message: Any) -> str | None:
    texts: list[Any] = []
    if isinstance(message, dict):
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [message.get("role")]
        texts += [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
    if not texts or not all(isinstance(text, str) for text in texts):
        return (
            f"a message of a Reply is {repr(message)[:100]}, which is no dict with texts under "
            "'role' and 'content'"
        )
    if "images" in message:
        return "a message of a Reply has images beside its content: they are parts of it"
    if any(_HALF_PAIR.search(text) for text in texts):
        return "a message of a Reply has half a surrogate pair, which is no character"
    for key, value in message.items():
        if key != "content" and not _is_json(value):
            return f"a message of a Reply has under {key!r} {repr(value)[:100]}, which is no JSON"
    return None


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


class StepFailed(Exception):
    """A course could not reply, by a fault that is not the policy's: its sample gets no reward.

    cause: one word, "error", "wall_clock" or "crash". message: for people.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def failure_of(error: BaseException) -> EpisodeFailure:
    """What a step raised, as the record of a failure. Errors of postgrad's own are raised again:
    they end the run.
    """
    if isinstance(error, PostgradError):
        raise error
    if isinstance(error, StepFailed):
        return EpisodeFailure(error.cause, str(error))
    return EpisodeFailure("error", described(error))


@dataclass(frozen=True, slots=True)
class HeardTurn:
    """A turn of the policy, with more than its text."""

    text: str  # as `step` gets it, without special tokens
    marked: str  # special tokens included, but for the one that ends the turn
    read: int  # tokens of its conversation before the turn, other turns of the policy included
    written: int  # tokens of the turn
    thinking: bool = False  # whether its prompt has opened the thoughts that it begins with


class Course(Protocol):
    """One sample's way through the environment: its state between turns.

    A course may have a method `begin`, of the kind of `step` but without a text: its reply is what
    the policy reads before its first turn, in place of the row's messages, or behind them.

    A course may have a method `close`: called where an environment that waits has to end an episode
    before a reply did, for a limit of turns or tokens, or a failure.
    """

    def step(self, text: str) -> Reply | Awaitable[Reply]:
        """The reply to a turn of the policy. It is not called for a turn cut by its token limit.

        A plain function runs in the run's process while everything else stands still. Where the
        environment `waits` it is an `async def`. What it raises is recorded as a failure of its
        sample.
        """
        ...


class HearingCourse(Protocol):
    """A course that gets more of a turn than its text, by a method in place of `step`.

    It may have a method `measured_by`, which is called first, with a function that says how many
    tokens the policy would have read if a Reply were the next one: of texts alone.
    """

    def hear(self, turn: HeardTurn) -> Reply | Awaitable[Reply]:
        """The reply to a turn, as of Course.step."""
        ...


class _NotStarted:
    """The course of a sample for which the environment could not start or continue one."""

    def __init__(self, failure: EpisodeFailure) -> None:
        self._failure = failure

    def begin(self) -> Reply:
        raise StepFailed(self._failure.cause, self._failure.message)

    def step(self, text: str) -> Reply:
        del text
        return self.begin()


NO_COURSE = _NotStarted(
    EpisodeFailure("error", "start returned a NoneType, which has no method `step`")
)


def course_of(method: str, begin: Callable[[], Any]) -> Course | HearingCourse | None:
    """The course that a method of the environment returns. What it raises, and a return value that
    is no course, become the failure of its sample.
    """
    try:
        course = begin()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # code of others: recorded with its cause
        return _NotStarted(failure_of(error))
    replies = any(callable(getattr(course, name, None)) for name in ("step", "hear"))
    if course is not None and not replies:
        message = f"{method} returned a {type(course).__name__}, which has no method `step`"
        return _NotStarted(EpisodeFailure("error", message))
    return course


class ChatEnvironment(Settings, ABC):
    """Starts courses. An environment *is* its settings: its fields are keys of [environment].

    deterministic: the same prompt and the same turns always give the same replies: no clock, no
    generator of random numbers, nothing remembered from other samples. Only then a run is exact.
    waits: its steps are `async def` and wait for something, so that they run side by side, while
    the engine decodes other samples; all of them in one thread, in the context `running`.
    """

    role: ClassVar[str] = "user"  # of its messages in the chat template
    special_tokens: ClassVar[bool] = False  # whether `text` of Course.step keeps special tokens
    deterministic: ClassVar[bool] = True
    waits: ClassVar[bool] = False

    @property
    def gives_rewards(self) -> bool:
        """Whether turns have rewards; if not, only [[rewards]] score the samples."""
        return True

    def variables(self) -> Mapping[str, Any]:
        """Variables that the chat template needs beyond the recipe's, such as `tools`."""
        return {}

    def for_template(self, template: str) -> Self:
        """The environment with the settings filled in that follow from the text of the tokenizer's
        chat template. Raises UsageError where it cannot work with the template.
        """
        del template
        return self

    def examples(self) -> Sequence[Message]:
        """A message of each kind that its replies have: a chat template that cannot write one of
        them is refused at the start.
        """
        return [{"role": self.role, "content": "0"}]

    def read(
        self, turn: HeardTurn, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Sequence[Call]]:
        """The text and the calls of a turn, as a message of the chat format has them. tools: that
        its conversation shows.
        """
        del tools
        return turn.text, ()

    def for_policy(self, *, reads_images: bool) -> Self:
        """The environment for a policy whose messages may have images, or for one of text alone."""
        del reads_images
        return self

    def check(self, prompt: Prompt) -> str | None:
        """Why no course can start from the prompt's row, or None where it can."""
        del prompt
        return None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Around all steps of an environment that waits: opens and closes what they share."""
        yield

    def resume(
        self, prompt: Prompt, sample: int, turns: Sequence[str]
    ) -> Course | HearingCourse | None:
        """A course behind `turns` of the policy, which another process has replied to; None where
        that is not possible: then the sample is drawn from its start. Asked only where the
        environment is not deterministic; a deterministic one is stepped again.
        """
        del prompt, sample, turns
        return None

    @abstractmethod
    def start(self, prompt: Prompt, sample: int) -> Course | HearingCourse:
        """A new course for a sample. `prompt.metadata`: the other columns of its row."""


def build(settings: EnvironmentSettings) -> ChatEnvironment:
    """The environment that `settings` name. Raises SettingsError for an unknown name, key or
    value.
    """
    try:
        kind = resolve(settings.type, ENVIRONMENTS, "environment")
    except UsageError as error:
        raise SettingsError("environment", [(("type",), str(error))]) from error
    if not (isinstance(kind, type) and issubclass(kind, ChatEnvironment)):
        why = (
            f"{settings.type!r} is not a subclass of "
            "postgrad.rollout.environments.base.ChatEnvironment"
        )
        raise SettingsError("environment", [(("type",), why)])
    if kind.__abstractmethods__:
        missing = ", ".join(sorted(kind.__abstractmethods__))
        why = f"{settings.type!r} has no method {missing}"
        raise SettingsError("environment", [(("type",), why)])
    try:
        return kind.model_validate_json(
            json.dumps(settings.extra_settings, default=str), strict=True
        )
    except ValidationError as error:
        accepted = [*kind.model_fields, *EnvironmentSettings.model_fields]
        problems = [
            problem_of_table(problem, repr(settings.type), accepted) for problem in error.errors()
        ]
        raise SettingsError("environment", problems) from error


def environment_rewards(settings: EnvironmentSets | None) -> dict[str | None, EnvironmentRewards]:
    """What becomes of the rewards of each environment of a recipe, by name. Raises the errors of
    `build`.
    """
    if settings is None:
        return {}
    return {
        name: EnvironmentRewards(
            environment.weight if build(environment).gives_rewards else None, environment.on_failure
        )
        for name, environment in settings.by_name.items()
    }
