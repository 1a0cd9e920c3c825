"""An environment of messages as one of tokens: its episodes, and the images of its replies."""

import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError, UsageError
from postgrad.core.process import Handle, done
from postgrad.core.records import Behind, EpisodeFailure, PlacedImage, Prompt
from postgrad.data.chat_format import Message
from postgrad.models.named_templates import chat_template_of
from postgrad.rollout.engine import Completion
from postgrad.rollout.environment import Observation, Step, at_once
from postgrad.rollout.environments.base import (
    NO_COURSE,
    ChatEnvironment,
    Course,
    HeardTurn,
    HearingCourse,
    Reply,
    build,
    course_of,
    wrong_with,
)
from postgrad.rollout.environments.beside import SideBySide, Timed, at_once_replied
from postgrad.rollout.environments.episode_messages import EpisodeMessages, EpisodeRecords
from postgrad.rollout.environments.template import Template, with_images
from postgrad.rollout.settings import EnvironmentSettings

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch

NOT_EXACT = (
    "the environment is not deterministic: another run, or one that is killed and resumed, does "
    "not have the same bits"
)
_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)
LOOKS, BETWEEN_LOOKS = 50, 0.1  # at a working directory that has changed, and seconds


class Dialogue:
    """A ChatEnvironment as an Environment: messages outside, tokens inside.

    A turn that is cut by its token limit ends the episode and does not reach the environment. Turn
    number `max_turns` reaches it and ends the episode too. The thread and the processes of its
    steps end with `close`, or with the object.
    """

    def __init__(
        self,
        chat: ChatEnvironment,
        template: Template,
        settings: EnvironmentSettings,
        warn: Callable[[str], None] | None = None,
        records: EpisodeRecords | None = None,
    ) -> None:
        """warn: is told, from any thread, of what a course's `close` raises; None: a RuntimeWarning
        of Python's is. records: gets the messages of all episodes.
        """
        stated = settings.deterministic
        self._warn = warn
        self._directory = _directory()
        self.chat = chat
        self.template = template
        self.settings = settings
        self.records = records
        self.tools: Sequence[Mapping[str, Any]] = chat.variables().get("tools", ())
        self.deterministic = chat.deterministic if stated is None else stated
        self.concurrent = settings.concurrent if chat.waits else 0
        self.turn_tokens: Sequence[int] = settings.turn_tokens
        self.beside = SideBySide(chat.running, settings.concurrent)
        self.close = weakref.finalize(self, self.beside.close)

    def reset(self, prompt: Prompt, sample: int) -> "_Episode":
        """A new episode around a new course of the environment."""
        course = course_of("start", lambda: self.chat.start(prompt, sample))
        self.require_directory()
        episode = _Episode(self, course or NO_COURSE, prompt)
        if self.records is not None:
            episode.record = EpisodeMessages(prompt.messages, self.tools)
            self.records[prompt.ticket, sample] = episode.record
        return episode

    def resume(
        self,
        prompt: Prompt,
        sample: int,
        opening: Observation | None,
        recorded: Sequence[tuple[Completion, Observation]],
    ) -> "_Episode | None":
        """Environment.resume, where the chat environment can."""
        turns = [self.text(turn) for turn, _ in recorded]
        course = course_of("resume", lambda: self.chat.resume(prompt, sample, turns))
        self.require_directory()
        if course is None:
            return None
        episode = _Episode(self, course, prompt)
        if opening is not None:
            episode.recall(None, opening)
        for turn, observation in recorded:
            episode.recall(turn, observation)
        return episode

    def text(self, response: Completion) -> str:
        """A turn of the policy as the environment reads it."""
        if self.chat.special_tokens:
            return self.template.text(response.token_ids)
        return response.text

    def require_directory(self) -> None:
        """Raises RunError where a course has changed the directory that relative paths start from,
        which is the whole process's: the run would write and read elsewhere. A step that runs
        meanwhile may be back soon (contextlib.chdir).
        """
        for _ in range(LOOKS):
            now = _directory()
            if None in (now, self._directory) or now == self._directory:
                return
            time.sleep(BETWEEN_LOOKS)
        raise RunError(
            f"the environment {self.settings.type!r} changed the working directory (os.chdir) "
            f"from {self._directory} to {now}: all of the run would go on there; let it use "
            "absolute paths, or start what needs another directory as a process"
        )

    def close_failed(self, why: str) -> None:
        """Tells that a course's `close` failed."""
        text = (
            f"environment {self.settings.type!r}: close failed: {why}; what the episode holds may "
            "stay open"
        )
        if self._warn is None:
            warnings.warn(text, RuntimeWarning, stacklevel=1)
        else:
            self._warn(text)


def _directory() -> str | None:
    """The working directory; None where it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109  # a text to compare, for every reply
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class _PolicyTurn:
    """What a reply behind a turn of the policy has to know of it."""

    closed: bool  # whether it has its end token
    images: int  # of its conversation so far
    tokens: int  # of its conversation so far
    template: Template  # with the tools of its conversation


class _Episode:
    def __init__(self, dialogue: Dialogue, course: Course | HearingCourse, prompt: Prompt) -> None:
        self._dialogue = dialogue
        self._course: Any = course  # of others: which methods it has is looked up
        self._prompt = prompt
        self._turns: list[_PolicyTurn] = []  # of the policy
        self._anew = True  # whether the policy's next turn is the first of a conversation
        self._images = len(prompt.images)  # of the newest conversation
        self._tokens = len(prompt.token_ids)  # of the newest conversation
        self._template = dialogue.template  # of the newest conversation
        self._shown = 0  # images of all replies
        self.record: EpisodeMessages | None = None
        self._seconds = 0.0  # that replies have taken
        if (measured := getattr(course, "measured_by", None)) is not None:
            measured(self.measure)

    @property
    def begins(self) -> bool:
        """Whether the course has something to say before the policy's first turn."""
        return callable(getattr(self._course, "begin", None))

    def recall(self, response: Completion | None, observation: Observation) -> None:
        """Adds a turn and its reply as recorded; None: what stands before the first turn."""
        if response is not None:
            self._add(response)
        self._say(observation)

    def _add(self, response: Completion) -> None:
        closed = self._template.closed(response.token_ids)
        self._tokens += len(response.token_ids)
        self._turns.append(_PolicyTurn(closed, self._images, self._tokens, self._template))

    def _say(self, observation: Observation) -> None:
        """Takes note of what the policy reads next."""
        behind, images = observation.behind, len(observation.images)
        tokens = len(observation.token_ids)
        self._anew = behind != "newest" or not self._turns
        self._shown += images
        if behind == "nothing":
            self._images, self._tokens = images, tokens
            self._template = self._opening_template(observation.tools)
        elif self._turns:
            turn = self._turns[-1 if behind == "newest" else behind]
            self._images, self._tokens = turn.images + images, turn.tokens + tokens
            self._template = turn.template

    def _opening_template(self, tools: Sequence[Mapping[str, Any]] | None) -> Template:
        template = self._dialogue.template
        return template if tools is None else template.showing(tools)

    def begin(self) -> Step:
        """Begins what the policy reads before its first turn."""
        return Step(self._replied(self._course.begin), self._opened)

    def step(self, response: Completion) -> Step:
        """Begins the environment's reply, which becomes tokens where its result is asked for."""
        self._add(response)
        if self.record is not None:
            tools = self.record.conversations[-1].tools
            self.record.write(*self._dialogue.chat.read(self._heard_turn(response), tools))
        if response.finish_reason != "stop":
            self.close()
            return at_once(Observation(_TOKENS, done=True, counts=self._counts()))
        return Step(self._replied(self._heard(response)), self._observed)

    def _heard(self, response: Completion) -> Callable[[], Any]:
        """What replies to the policy's newest turn."""
        hear = getattr(self._course, "hear", None)
        if hear is None:
            text = self._dialogue.text(response)
            return lambda: self._course.step(text)
        turn = self._heard_turn(response)
        return lambda: hear(turn)

    def _heard_turn(self, response: Completion) -> HeardTurn:
        """The policy's newest turn with its marks and numbers of tokens."""
        template, written = self._template, len(response.token_ids)
        marked, thinking = template.text(response.token_ids), template.opens_thoughts
        return HeardTurn(response.text, marked, self._tokens - written, written, thinking)

    def _replied(self, step: Callable[[], Any]) -> Handle[Timed]:
        dialogue = self._dialogue
        if not dialogue.chat.waits:
            return done(at_once_replied(step))
        settings = dialogue.settings
        seconds, limit = settings.step_seconds, "environment.step_seconds"
        if settings.episode_seconds is not None:
            left = max(0.0, settings.episode_seconds - self._seconds)
            if left < seconds:
                seconds, limit = left, "environment.episode_seconds"
        return dialogue.beside.begin(step, seconds, limit)

    def close(self) -> None:
        """Calls the course's `close`, if it has one, where the environment waits."""
        close = getattr(self._course, "close", None)
        if close is not None and self._dialogue.chat.waits:
            self._dialogue.beside.later(close, self._dialogue.close_failed)

    def _reply(self, timed: Timed) -> Reply | EpisodeFailure:
        """The environment's reply, if it can be read."""
        self._dialogue.require_directory()
        reply, seconds = timed
        self._seconds += seconds
        if not isinstance(reply, EpisodeFailure) and (wrong := wrong_with(reply, len(self._turns))):
            return EpisodeFailure("error", wrong)
        return reply

    def _opened(self, timed: Timed) -> Observation:
        """What the course begins with, as tokens."""
        reply = self._reply(timed)
        if isinstance(reply, EpisodeFailure):
            return self._failed(reply)
        if reply.behind == "nothing":
            return self._seen(reply, "nothing")
        if not reply.messages:
            return Observation(_TOKENS, done=False)
        if not self._prompt.messages:
            why = "begin returned messages behind those of the row, whose prompt is text alone"
            return self._failed(EpisodeFailure("error", f'{why}: behind = "nothing" begins anew'))
        return self._seen(reply, "nothing", before=self._prompt.messages)

    def _observed(self, timed: Timed) -> Observation:
        """The environment's reply as tokens."""
        reply, turns = self._reply(timed), len(self._turns)
        if isinstance(reply, EpisodeFailure):
            return self._failed(reply)
        last = not reply.done and turns == self._dialogue.settings.max_turns
        # Numbers of NumPy become plain ones: checkpoints keep them as JSON.
        reward = float(reply.reward)
        counts = self._counts(last=last) | {name: float(n) for name, n in reply.counts.items()}
        if last:
            self.close()
        if reply.done or last:
            return Observation(_TOKENS, done=True, reward=reward, counts=counts)
        behind: Behind = reply.behind if isinstance(reply.behind, str) else int(reply.behind)
        seen = self._seen(reply, "newest" if behind == turns - 1 else behind)
        return seen if seen.done else replace(seen, reward=reward, counts=counts)

    def _seen(
        self, reply: Reply, behind: Behind, before: Sequence[Mapping[str, Any]] = ()
    ) -> Observation:
        """The messages of a reply as tokens. before: those of the row, behind which they stand."""
        reader = self._dialogue.template.reader
        room = self._dialogue.settings.max_images - self._shown
        try:
            messages = [*map(dict, before), *with_images(reply.messages, reader, room)]
            tokens, images = self._written(messages, behind, reply.tools)
        except (ValueError, UsageError) as error:  # a later reply may hold what no example did
            return self._failed(EpisodeFailure("error", f"its reply cannot be read: {error}"))
        tools = None if reply.tools is None else tuple(reply.tools)
        seen = Observation(tokens, done=False, images=images, behind=behind, tools=tools)
        self._say(seen)
        if self.record is not None:
            self.record.read(messages, behind, tools)
        return seen

    def _written(
        self, messages: Sequence[Message], behind: Behind, tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[NDArray[np.int32], tuple[PlacedImage, ...]]:
        if behind == "nothing":
            return self._opening_template(tools).opening(messages)
        turn = self._turns[-1 if behind == "newest" else behind]
        return turn.template.seen(messages, closed=turn.closed, before=turn.images)

    def measure(self, reply: Reply) -> int:
        """The tokens that the policy would have read, if this were the next reply. From any thread.

        Raises ValueError for images, UsageError where the template cannot write it.
        """
        if not reply.messages:  # before the first turn: what the row asks
            return len(self._prompt.token_ids)
        messages, behind = with_images(reply.messages, None, 0), reply.behind
        tokens, _ = self._written(messages, behind, reply.tools)
        if behind == "nothing":
            return len(tokens)
        return self._turns[-1 if behind == "newest" else behind].tokens + len(tokens)

    def _failed(self, failure: EpisodeFailure) -> Observation:
        self.close()
        return Observation(_TOKENS, done=True, counts=self._counts(), failure=failure)

    def _counts(self, *, last: bool = False) -> dict[str, float]:
        """What is counted of every turn (COUNTED). last: the policy may take no further one."""
        return {
            "turns": 1.0,
            "out_of_turns": float(last),
            "conversations": float(self._anew),
        }


def dialogue(
    settings: EnvironmentSettings,
    tokenizer: Any,
    variables: Mapping[str, Any],
    reader: "ImageReader | None" = None,
    warn: Callable[[str], None] | None = None,
    most: int | None = None,
    records: EpisodeRecords | None = None,
) -> Dialogue:
    """The environment that `settings` name, for a tokenizer. variables: of template_call. reader:
    of a policy that reads images. warn, records: as of Dialogue. most: as of Template.

    Raises UsageError where the chat template cannot write the environment's messages.
    """
    chat = build(settings)
    chat_variables = chat.variables()
    try:
        stated = variables.get("chat_template")
        text = chat_template_of(tokenizer, stated, chat_variables.get("tools"))
    except ValueError as error:
        raise UsageError(f"environment: the tokenizer has no chat template: {error}") from error
    chat = chat.for_template(text).for_policy(reads_images=reader is not None)
    template = Template(tokenizer, {**variables, **chat_variables}, reader, most)
    for message in chat.examples():  # refused here, if at all
        template.after([message], closed=True)
    return Dialogue(chat, template, settings, warn, records)
