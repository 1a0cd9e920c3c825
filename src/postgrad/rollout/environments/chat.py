"""From an environment's messages to the tokens that the policy reads, by the chat template.

The policy's own tokens stay as they were sampled: only the messages after them are rendered, as the
template writes them after an assistant's turn, and tokenised once.
"""

import json
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.process import Handle, done
from postgrad.core.records import EpisodeFailure, Prompt
from postgrad.data.answer_spans import Unmarkable
from postgrad.data.chat_format import Message
from postgrad.data.templates import (
    Unencodable,
    encode,
    render,
    render_conversation,
    turn_ends,
)
from postgrad.rollout.engine import Completion
from postgrad.rollout.environment import Observation, Step, at_once
from postgrad.rollout.environments.base import (
    ChatEnvironment,
    Course,
    Reply,
    StepFailed,
    build,
    failure_of,
    wrong_with,
)
from postgrad.rollout.environments.beside import SideBySide, Timed, at_once_replied
from postgrad.rollout.settings import EnvironmentSettings

NOT_EXACT = (
    "the environment is not deterministic: another run, or one that is killed and resumed, does "
    "not have the same bits"
)
_QUESTION: Message = {"role": "user", "content": "?"}
_TURN = "@turn@"  # stands for what the policy wrote
_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)


class Template:
    """Renders messages as a chat template writes them after an assistant's turn."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._variables = variables
        self._ends = turn_ends(tokenizer)
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        special = {token_id for token_id, added_token in added.items() if added_token.special}
        self._special = special | set(tokenizer.all_special_ids)
        self._after = lru_cache(maxsize=4096)(self._tokens_after)  # games have few replies

    def closed(self, token_ids: NDArray[np.int32]) -> bool:
        """Whether the policy's turn ends with a special token; after a stop string it does not."""
        return len(token_ids) > 0 and int(token_ids[-1]) in self._special

    def text(self, token_ids: NDArray[np.int32]) -> str:
        """The text of a turn, special tokens included, but without the one that ends it."""
        ids = token_ids[:-1] if self.closed(token_ids) else token_ids
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def after(self, messages: Sequence[Message], *, closed: bool) -> NDArray[np.int32]:
        """[O] int32: the tokens between the policy's turn and its next one.

        closed: whether the turn has its end token already. Raises UsageError where the template
        refuses the messages or drops their text.
        """
        return self._after(tuple(tuple(message.items()) for message in messages), closed)

    def _tokens_after(
        self, messages: tuple[tuple[tuple[str, str], ...], ...], closed: bool
    ) -> NDArray[np.int32]:
        replies = [dict(message) for message in messages]
        try:
            rest = self._rest(replies)
        except Unmarkable as error:
            raise _refused(replies, str(error)) from error
        for content in (message["content"].strip() for message in replies):
            escaped = json.dumps(content, ensure_ascii=False)[1:-1]  # as Llama 3 writes results
            if content not in rest and escaped not in rest:
                raise _refused(replies, f"it drops the text {content[:60]!r}")
        end = self._ends.match(rest)
        mark = end[0] if end else ""
        try:
            if not closed or not mark:
                return self._ids(rest)
            # Tokenised behind the end mark: some tokenizers encode the begin of a text differently.
            return self._ids(rest)[len(self._ids(mark)) :]
        except Unencodable as error:
            raise _refused(replies, f"the tokenizer cannot write it: {error}") from error

    def _rest(self, replies: Sequence[Message]) -> str:
        """What the template writes from the end token of the policy's turn on.

        The turn is plain text, whatever the policy wrote. Some templates refuse a tool's result
        behind it, since they write the function's name before the result, as gpt-oss's: these see a
        turn with the calls that the results name. Raises Unmarkable.
        """
        try:
            text = self._text([_QUESTION, {"role": "assistant", "content": _TURN}, *replies])
        except Unmarkable:
            calls = [_call_of(reply) for reply in replies if "tool_call_id" in reply]
            if not calls:
                raise
        else:
            _, separator, rest = text.partition(_TURN)
            if not separator:
                raise Unmarkable(f"it drops the text {_TURN!r}")
            return rest
        asked = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        alone = render_conversation(
            self._tokenizer, asked, ends=self._ends, turns="last", variables=self._variables
        )
        written = alone.text[: alone.spans[-1][1]]
        ends = [match for match in self._ends.finditer(written) if match.end() == len(written)]
        turn = written[: ends[-1].start()] if ends else written
        text = self._text([*asked, *replies])
        if not text.startswith(turn):
            raise Unmarkable("it writes a call otherwise where a result follows")
        return text[len(turn) :]

    def _text(self, messages: Sequence[Message]) -> str:
        return render(self._tokenizer, messages, generation=True, variables=self._variables)

    def _ids(self, text: str) -> NDArray[np.int32]:
        return np.array(encode(self._tokenizer, [text])["input_ids"][0], np.int32)


class Dialogue:
    """A ChatEnvironment as an Environment: messages outside, tokens inside.

    A turn that is cut by its token limit ends the episode and does not reach the environment. Turn
    number `max_turns` reaches it and ends the episode too. The thread and the processes of its
    steps end with `close`, or with the object.
    """

    def __init__(
        self, chat: ChatEnvironment, template: Template, settings: EnvironmentSettings
    ) -> None:
        stated = settings.deterministic
        self.chat = chat
        self.template = template
        self.settings = settings
        self.deterministic = chat.deterministic if stated is None else stated
        self.concurrent = settings.concurrent if chat.waits else 0
        self.turn_tokens: Sequence[int] = settings.turn_tokens
        self.beside = SideBySide(chat.running, settings.concurrent)
        self.close = weakref.finalize(self, self.beside.close)

    def reset(self, prompt: Prompt, sample: int) -> "_Episode":
        """A new episode around a new course of the environment."""
        return _Episode(self, _started(self.chat, prompt, sample))

    def resume(
        self, prompt: Prompt, sample: int, recorded: Sequence[tuple[Completion, Observation]]
    ) -> "_Episode | None":
        """Environment.resume, where the chat environment can."""
        course = self.chat.resume(prompt, sample, [self.text(turn) for turn, _ in recorded])
        return None if course is None else _Episode(self, course, len(recorded))

    def text(self, response: Completion) -> str:
        """A turn of the policy as the environment reads it."""
        if self.chat.special_tokens:
            return self.template.text(response.token_ids)
        return response.text


class _NotStarted:
    """The course of a sample for which the environment could not start one."""

    def __init__(self, failure: EpisodeFailure) -> None:
        self._failure = failure

    def step(self, text: str) -> Reply:
        del text
        raise StepFailed(self._failure.cause, self._failure.message)


def _started(chat: ChatEnvironment, prompt: Prompt, sample: int) -> Course:
    """A new course. What `start` raises becomes the failure of the sample's first step."""
    try:
        course: Any = chat.start(prompt, sample)
    except Exception as error:  # noqa: BLE001  # code of others: recorded with its cause
        return _NotStarted(failure_of(error))
    if not callable(getattr(course, "step", None)):
        message = f"start returned a {type(course).__name__}, which has no method `step`"
        return _NotStarted(EpisodeFailure("error", message))
    return course


class _Episode:
    def __init__(self, dialogue: Dialogue, course: Course, turns: int = 0) -> None:
        self._dialogue = dialogue
        self._course = course
        self._turns = turns
        self._seconds = 0.0  # that replies have taken

    def step(self, response: Completion) -> Step:
        """Begins the environment's reply, which becomes tokens where its result is asked for."""
        self._turns += 1
        if response.finish_reason != "stop":
            self._close()
            counts = {"turns": 1.0, "out_of_turns": 0.0}
            return at_once(Observation(_TOKENS, done=True, counts=counts))
        text = self._dialogue.text(response)
        replied = self._replied(text)
        return Step(replied, lambda answer: self._observed(response, answer))

    def _replied(self, text: str) -> Handle[Timed]:
        dialogue, step = self._dialogue, self._course.step
        if not dialogue.chat.waits:
            return done(at_once_replied(step, text))
        settings = dialogue.settings
        seconds, limit = settings.step_seconds, "environment.step_seconds"
        if settings.episode_seconds is not None:
            left = max(0.0, settings.episode_seconds - self._seconds)
            if left < seconds:
                seconds, limit = left, "environment.episode_seconds"
        return dialogue.beside.begin(lambda: step(text), seconds, limit)

    def _close(self) -> None:
        close = getattr(self._course, "close", None)
        if close is not None and self._dialogue.chat.waits:
            self._dialogue.beside.later(close)

    def _observed(self, response: Completion, timed: Timed) -> Observation:
        """The environment's reply as tokens."""
        template = self._dialogue.template
        reply, seconds = timed
        self._seconds += seconds
        if not isinstance(reply, EpisodeFailure) and (wrong := wrong_with(reply)) is not None:
            reply = EpisodeFailure("error", wrong)
        if isinstance(reply, EpisodeFailure):
            self._close()
            counts = {"turns": 1.0, "out_of_turns": 0.0}
            return Observation(_TOKENS, done=True, counts=counts, failure=reply)
        last = not reply.done and self._turns == self._dialogue.settings.max_turns
        counts = {"turns": 1.0, "out_of_turns": float(last), **reply.counts}
        if last:
            self._close()
        if reply.done or last:
            return Observation(_TOKENS, done=True, reward=reply.reward, counts=counts)
        seen = template.after(reply.messages, closed=template.closed(response.token_ids))
        return Observation(seen, done=False, reward=reply.reward, counts=counts)


def dialogue(
    settings: EnvironmentSettings, tokenizer: Any, variables: Mapping[str, Any]
) -> Dialogue:
    """The environment that `settings` name, for a tokenizer. variables: of template_call.

    Raises UsageError where the chat template cannot write the environment's messages.
    """
    chat = build(settings)
    chat_variables = chat.variables()
    try:
        stated = variables.get("chat_template")
        text = tokenizer.get_chat_template(stated, chat_variables.get("tools"))
    except ValueError as error:
        raise UsageError(f"environment: the tokenizer has no chat template: {error}") from error
    chat = chat.for_template(text)
    template = Template(tokenizer, {**variables, **chat_variables})
    for message in chat.examples():  # refused here, if at all
        template.after([message], closed=True)
    return Dialogue(chat, template, settings)


def _call_of(result: Message) -> dict[str, Any]:
    """The call that a tool's result answers, as far as the result says."""
    named = {"name": result.get("name", result["role"]), "arguments": {}}
    return {"type": "function", "id": result["tool_call_id"], "function": named}


def _refused(messages: Sequence[Message], why: str) -> UsageError:
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    return UsageError(
        f"environment: the chat template cannot write a message of role {roles!r} after an "
        f"assistant's turn: {why}; take a tokenizer whose template can"
    )
