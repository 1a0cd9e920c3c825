"""One call of a verifier: its return value as a score, its exception as one line of text; in a
sandbox where the verifier may run a sample's text as code.
"""

import json
import math
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.rewards.sandbox.enclosure import Enclosure
from postgrad.rewards.sandbox.guard import Guard
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

MAX_MESSAGE = 500  # characters of an error
Scored = tuple[float | None, Any]  # the score (None for a check), and its detail


class ScoringFailed(Exception):
    """The child process of one score ended without a score.

    cause: "error", "cpu_time" or "crash", as in the worker's answer (protocol.py).
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(cause, message)
        self.cause = cause
        self.message = message


def call(verifier: Verifier, prompt: PromptView, rollout: RolloutView | None) -> Scored:
    """(score, detail) of a sample; where `rollout` is None, (None, the answer of `check`).

    Exceptions of the verifier pass through.
    """
    if rollout is None:
        return None, verifier.check(prompt)
    return as_score(verifier.score(prompt, rollout))


class NoScore(ValueError):
    """A verifier returned no finite number; where it went wrong is not known."""


def as_score(returned: Any) -> tuple[float, Any]:
    """(score, detail) from the return value of a verifier, a number or a Score.

    Raises NoScore where the score is not a finite number.
    """
    value, detail = (
        (returned.value, returned.detail) if isinstance(returned, Score) else (returned, None)
    )
    if not isinstance(value, Real):
        raise NoScore(f"returned {_short(value)}, which is no number")
    if not math.isfinite(value):
        raise NoScore(f"returned {float(value)}, which is no score")
    return float(value), detail


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
) -> list[Callable[[PromptView, RolloutView | None], Scored]]:
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
    process under the guard; any other gets a child process for each score.
    """

    def __init__(
        self, verifier: Verifier, cpu_seconds: float, enclosure: Enclosure, guard: Guard
    ) -> None:
        self._verifier = verifier
        self._cpu_seconds = cpu_seconds
        self._enclosure = enclosure
        self._guard = guard
        self._names = verifier.formulas()

    def __call__(self, prompt: PromptView, rollout: RolloutView | None) -> Scored:
        """As `call`. Raises ScoringFailed where the child process ended without a score."""
        self._verifier.look_up(prompt)
        if self._names is not None:
            work = partial(call, self._verifier, prompt, rollout)
            (value, detail), refused = self._guard.formulas(self._names, work)
            return value, detail if refused is None else {"score": detail, "refused": refused}
        end = self._enclosure.run_in_child(partial(self._work, prompt, rollout), self._cpu_seconds)
        if end.cause == "crash":  # as the pool does: once more, since memory may have been short
            end = self._enclosure.run_in_child(
                partial(self._work, prompt, rollout), self._cpu_seconds
            )
        if end.cause is not None:
            raise ScoringFailed(end.cause, end.message)
        return _believed(end.answer, rollout is None)

    def _work(self, prompt: PromptView, rollout: RolloutView | None) -> dict[str, Any]:
        """In the child process: the score, or the error, as JSON."""
        try:
            value, detail = call(self._verifier, prompt, rollout)
            json.dumps(detail, allow_nan=False)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # recorded with its cause
            return {"error": describe(error)}
        return {"value": value, "detail": detail}


def _believed(answer: Any, is_check: bool) -> Scored:
    """(score, detail) of a child's answer. A sample's text may have written it, so every field is
    checked.
    """
    if not isinstance(answer, dict):
        raise ScoringFailed("error", "the process of the score answered with no object")
    if "error" in answer:
        raise ScoringFailed("error", str(answer["error"])[: 2 * MAX_MESSAGE])
    detail = answer.get("detail")
    if is_check:
        return None, None if detail is None else str(detail)
    return as_score(Score(answer.get("value"), detail))  # pyright: ignore[reportArgumentType]


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
