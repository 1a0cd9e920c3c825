"""One call of a verifier: its return value as scores, its exception as one line of text; in a
sandbox where the verifier may run a sample's text as code.
"""

import json
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.rewards.protocol import Returned
from postgrad.rewards.sandbox.enclosure import ChildEnd, Enclosure
from postgrad.rewards.sandbox.guard import Guard
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import (
    LARGEST_SCORE,
    PromptView,
    RolloutView,
    Score,
    Verifier,
)

MAX_MESSAGE = 500  # characters of an error
# The samples of a job; None: check the reference answer; none: give a right answer.
Rollouts = Sequence[RolloutView] | None


class ScoringFailed(Exception):
    """The child process of one job ended without scores.

    cause: "error", "cpu_time" or "crash", as in the worker's answer (protocol.py).
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(cause, message)
        self.cause = cause
        self.message = message


def call(verifier: Verifier, prompt: PromptView, rollouts: Rollouts) -> Returned:
    """What a verifier gives for samples; where `rollouts` is None, the answer of its `check`, and
    of its `right_answer` where there are none.

    Exceptions of the verifier pass through. Raises NoScore where it gave something else than a
    score for each sample.
    """
    if rollouts is None:
        return Returned(text=verifier.check(prompt))
    if not rollouts:
        return Returned(text=verifier.right_answer(prompt))
    return Returned(_as_scores(verifier.score_group(prompt, rollouts), rollouts))


class NoScore(ValueError):
    """A verifier returned no finite number of 32 bits; where it went wrong is not known."""


def _as_scores(returned: Any, rollouts: Sequence[RolloutView]) -> list[tuple[float, Any]]:
    """(score, detail) of each sample from the return value of `score_group`: a list, tuple or
    array, of numbers or Scores.
    """
    is_list = hasattr(returned, "__len__") and hasattr(returned, "__getitem__")
    if not is_list or isinstance(returned, str | bytes | Mapping):
        raise NoScore(f"returned {_short(returned)}, which is no list of scores")
    scores = list(returned)
    if len(scores) != len(rollouts):
        raise NoScore(f"returned {len(scores)} scores for {len(rollouts)} samples")
    if len(rollouts) == 1:
        return [_as_score(scores[0])]
    pairs = zip(scores, rollouts, strict=True)
    return [_as_score(score, f" for sample {rollout.sample}") for score, rollout in pairs]


def _as_score(returned: Any, which: str = "") -> tuple[float, Any]:
    """(score, detail) from a number or a Score. which: the sample, for a message.

    Raises NoScore where the score is not a finite number of 32 bits.
    """
    value, detail = (
        (returned.value, returned.detail) if isinstance(returned, Score) else (returned, None)
    )
    if not isinstance(value, Real) and not _is_numpy_bool(value):
        raise NoScore(f"returned {_short(value)}{which}, which is no number")
    size: Any = abs(value)
    if not size <= LARGEST_SCORE:  # NaN too; float() of a longer integer would raise
        raise NoScore(f"returned {_shown(value)}{which}, which is no score")
    return float(value), detail


def _shown(number: Any) -> str:
    """A number that is no score: an integer of thousands of digits has no text in Python."""
    try:
        text = str(float(number))
    except OverflowError:
        text = "a longer integer"
    return text if text in ("nan", "inf", "-inf") else f"{text}, more than 32 bits hold"


def _is_numpy_bool(value: Any) -> bool:
    """Whether it is what comparing numbers of NumPy gives; its other numbers are Real."""
    numpy = sys.modules.get("numpy")  # without it there is none
    return numpy is not None and isinstance(value, numpy.bool_)


def describe(error: BaseException) -> str:
    """One line of text: type, message, and the file and line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames and not isinstance(error, NoScore) else None
    where = f" ({os.path.basename(last.filename)}:{last.lineno})" if last else ""  # noqa: PTH119
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001  # its __str__ is code of others too
        text = f"its message cannot be formatted: {type(second).__name__}"
    return f"{type(error).__name__}: {text[:MAX_MESSAGE]}{where}"


def _short(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, str | None) else f"a {type(value).__name__}"


def sandboxed_scorers(
    enclosure: Enclosure, verifiers: Sequence[Verifier], rewards: Sequence[RewardSettings]
) -> list[Callable[[PromptView, Rollouts], Returned]]:
    """Puts the sandbox around this process. Returns for each verifier what to call from here on.

    Raises UsageError where a verifier needs the sandbox for every score and this machine has none.
    """
    for verifier, reward in zip(verifiers, rewards, strict=True):
        if enclosure.layer == "none" and verifier.formulas() is None:
            raise UsageError(
                f"rewards: {reward.type!r} has sandbox = true, and this machine has no sandbox for "
                f"it: {enclosure.missing}"
            )
    guard = Guard()
    enclosure.isolate(_packages(rewards))
    return [
        Enclosed(verifier, reward.cpu_seconds, enclosure, guard)
        for verifier, reward in zip(verifiers, rewards, strict=True)
    ]


class Enclosed:
    """A sandboxed verifier, called as `call` is.

    A verifier that runs a sample's text as formulas only (`Verifier.formulas`) is called in this
    process under the guard; any other gets a child process for each sample, or for each group
    where it scores groups.
    """

    def __init__(
        self, verifier: Verifier, cpu_seconds: float, enclosure: Enclosure, guard: Guard
    ) -> None:
        self._verifier = verifier
        self._cpu_seconds = cpu_seconds
        self._enclosure = enclosure
        self._guard = guard
        self._names = verifier.formulas()

    def __call__(self, prompt: PromptView, rollouts: Rollouts) -> Returned:
        """As `call`. Raises ScoringFailed where the child process ended without scores."""
        self._verifier.look_up(prompt)
        if self._names is not None:
            work = partial(call, self._verifier, prompt, rollouts)
            returned, refused = self._guard.formulas(self._names, work)
            return returned if refused is None else _with_refusal(returned, refused, rollouts)
        end = self._in_child(prompt, rollouts)
        if end.cause == "crash":  # as the pool does: once more, since memory may have been short
            end = self._in_child(prompt, rollouts)
        if end.cause is not None:
            raise ScoringFailed(end.cause, end.message)
        return _believed(end.answer, rollouts)

    def _in_child(self, prompt: PromptView, rollouts: Rollouts) -> ChildEnd:
        work = partial(self._work, prompt, rollouts)
        return self._enclosure.run_in_child(work, self._cpu_seconds, len(rollouts or (None,)))

    def _work(self, prompt: PromptView, rollouts: Rollouts) -> dict[str, Any]:
        """In the child process: the scores, or the error, as JSON."""
        try:
            returned = call(self._verifier, prompt, rollouts)
            answer = {"scores": returned.scores, "text": returned.text}
            json.dumps(answer, allow_nan=False)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # recorded with its cause
            return {"error": describe(error)}
        return answer


def _with_refusal(returned: Returned, refused: str, rollouts: Rollouts) -> Returned:
    """With the refusal beside each detail, or beside the reason of a check."""

    def noted(note: Any) -> dict[str, Any]:
        return {"score": note, "refused": refused}

    if rollouts is None:
        return Returned(text=noted(returned.text))
    return Returned([(value, noted(detail)) for value, detail in returned.scores], returned.text)


def _believed(answer: Any, rollouts: Rollouts) -> Returned:
    """What a child answered. A sample's text may have written it, so every field is checked."""
    if not isinstance(answer, dict):
        raise ScoringFailed("error", "the process of the score answered with no object")
    if "error" in answer:
        raise ScoringFailed("error", str(answer["error"])[: 2 * MAX_MESSAGE])
    if not rollouts:
        text = answer.get("text")
        return Returned(text=None if text is None else str(text))
    pairs = answer.get("scores")
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise ScoringFailed("error", "the process of the score answered with no scores")
    return Returned(_as_scores([Score(value, detail) for value, detail in pairs], rollouts))


def _packages(rewards: Sequence[RewardSettings]) -> list[str]:
    """Where the code of the recipe's verifiers is: a package's folders, a module's file."""
    paths: list[str] = []
    for reward in rewards:
        module = sys.modules.get(reward.type.partition(":")[0].partition(".")[0])
        folders = list(getattr(module, "__path__", []))
        paths += folders or [getattr(module, "__file__", None) or ""]
    return [path for path in paths if path]


def by_text(prompt: PromptView, rollout: RolloutView) -> float:
    """A hash of the sample's text, from 0 to 1; it says nothing about quality."""
    del prompt
    return zlib.crc32(rollout.text.encode()) / 2**32
