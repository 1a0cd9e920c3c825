"""Verifiers of others as a shut-in worker calls them, so that no sample's text can do any harm."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.rewards.call import MAX_MESSAGE, Ended, Scored, as_score, call, describe
from postgrad.rewards.sandbox.enclosure import Enclosure
from postgrad.rewards.sandbox.guard import Guard
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier


def shut_in(
    enclosure: Enclosure, verifiers: Sequence[Verifier], rewards: Sequence[RewardSettings]
) -> list[Callable[[PromptView, RolloutView | None], Scored]]:
    """Shuts this process in; what to call for each of the verifiers from here on.

    Raises UsageError where one of them needs walls for every score and the machine has none.
    """
    for verifier, reward in zip(verifiers, rewards, strict=True):
        if enclosure.layer == "none" and verifier.formulas() is None:
            raise UsageError(
                f"rewards: {reward.type!r} has sandbox = true, and this machine has no sandbox for "
                f"it: {enclosure.missing}"
            )
    guard = Guard()
    enclosure.shut(_packages(rewards))
    return [
        Enclosed(verifier, reward.cpu_seconds, enclosure, guard)
        for verifier, reward in zip(verifiers, rewards, strict=True)
    ]


class Enclosed:
    """A verifier of others. Where all the code that it makes of a sample's text has to be a formula
    (`Verifier.formulas`), it is called in this process; else each score has a process of its own.
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
        """As `call`. Raises Ended where the process of a score ended without one."""
        self._verifier.look_up(prompt)
        if self._names is not None:
            work = partial(call, self._verifier, prompt, rollout)
            (value, detail), refused = self._guard.formulas(self._names, work)
            return value, detail if refused is None else {"score": detail, "refused": refused}
        end = self._enclosure.apart(partial(self._work, prompt, rollout), self._cpu_seconds)
        if end.cause == "crash":  # as the pool does: once more, since memory may have been short
            end = self._enclosure.apart(partial(self._work, prompt, rollout), self._cpu_seconds)
        if end.cause is not None:
            raise Ended(end.cause, end.message)
        return _believed(end.answer, rollout is None)

    def _work(self, prompt: PromptView, rollout: RolloutView | None) -> dict[str, Any]:
        """In the process of its own: the score, or the error, as JSON."""
        try:
            value, detail = call(self._verifier, prompt, rollout)
            json.dumps(detail, allow_nan=False)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # recorded with its cause
            return {"error": describe(error)}
        return {"value": value, "detail": detail}


def _believed(answer: Any, is_check: bool) -> Scored:
    """(value, detail) of an answer that a process wrote in which text may have run."""
    if not isinstance(answer, dict):
        raise Ended("error", "the process of the score answered with no object")
    if "error" in answer:
        raise Ended("error", str(answer["error"])[: 2 * MAX_MESSAGE])
    detail = answer.get("detail")
    if is_check:
        return None, None if detail is None else str(detail)
    return as_score(Score(answer.get("value"), detail))  # pyright: ignore[reportArgumentType]


def _packages(rewards: Sequence[RewardSettings]) -> list[str]:
    """Where the code of others is that the recipe names: a package's folders, a module's file."""
    paths: list[str] = []
    for reward in rewards:
        module = sys.modules.get(reward.type.partition(":")[0].partition(".")[0])
        folders = list(getattr(module, "__path__", []))
        paths += folders or [getattr(module, "__file__", None) or ""]
    return [path for path in paths if path]
