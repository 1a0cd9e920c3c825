"""One call of a verifier: its return value as a score, its exception as one line of text."""

import math
import os
import traceback
from numbers import Real
from typing import Any

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


def as_score(returned: Any) -> tuple[float, Any]:
    """(score, detail) from the return value of a verifier, a number or a Score.

    Raises ValueError where the score is not a finite number.
    """
    value, detail = (
        (returned.value, returned.detail) if isinstance(returned, Score) else (returned, None)
    )
    if not isinstance(value, Real):
        raise ValueError(f"returned {_short(value)}, which is no number")
    if not math.isfinite(value):
        raise ValueError(f"returned {float(value)}, which is no score")
    return float(value), detail


def describe(error: BaseException) -> str:
    """One line of text: type, message, and the file and line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f" ({os.path.basename(last.filename)}:{last.lineno})" if last else ""  # noqa: PTH119
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001  # its __str__ is code of others too
        text = f"its message cannot be made: {type(second).__name__}"
    return f"{type(error).__name__}: {text[:MAX_MESSAGE]}{where}"


def _short(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, str | None) else f"a {type(value).__name__}"
