"""Sentinels: cheap checks, always on, each with a threshold and an action."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError
from postgrad.observe.settings import Action, SentinelSettings
from postgrad.observe.sinks import Logs

Floats = NDArray[np.float32]


class Warns(Protocol):
    """The part of a console that a sentinel needs."""

    def warn(self, text: str) -> None:
        """Tell a person."""
        ...


class Sentinels:
    """Measures, records, and acts where a threshold is passed."""

    def __init__(self, settings: SentinelSettings, logs: Logs, console: Warns) -> None:
        self._settings = settings
        self._logs = logs
        self._console = console

    def mismatch(
        self, learner: Floats, sampled: Floats, mask: NDArray[np.bool_]
    ) -> dict[str, float]:
        """Learner's against sampled logprobs [N] of the same tokens where `mask` is True.

        A ratio compared with itself proves nothing: these were computed by two pieces of code. {}
        where no token was computed.
        """
        found = differences(learner[mask], sampled[mask])
        if not found:
            return {}
        difference, ratio = found["sentinel/prob_difference"], found["sentinel/ratio_excess"]
        settings = self._settings
        agree = difference <= settings.prob_difference and ratio <= settings.ratio_excess
        if not agree:  # NaN is no agreement
            self._act(
                "mismatch",
                settings.mismatch,
                f"learner and sampler disagree on the same tokens: mean |p - p'| {difference:.4g} "
                f"(limit {settings.prob_difference:g}), mean exp|log p - log p'| {ratio:.4g} "
                f"(limit {settings.ratio_excess:g}); compare their dtypes (rollout.dtype)",
            )
        return found

    def published(
        self, before: Sequence[Floats], engine: Sequence[Floats], learner: Sequence[Floats]
    ) -> dict[str, float]:
        """The probe's logprobs by the engine before and after weights were sent, and the learner's.

        A stale engine lies where it was: as far from the learner as the policy has moved, which a
        fixed limit would miss at small learning rates.
        """
        settings = self._settings
        difference, moved = _distance(engine, learner), _distance(before, learner)
        stale = moved > settings.publish_noise and difference > moved / 2
        if stale or not difference <= settings.publish_difference:  # NaN is no agreement
            self._act(
                "publish",
                settings.publish,
                "the rollout engine does not have the policy's weights: mean logprob difference "
                f"{difference:.4g} on the same tokens (limit {settings.publish_difference:g}), "
                f"while the policy moved by {moved:.4g}; what it samples is another policy's",
            )
        return {"sentinel/publish_difference": difference, "sentinel/policy_moved": moved}

    def _act(self, name: str, action: Action, message: str) -> None:
        self._logs.event("sentinel", message, sentinel=name, action=action)
        if action == "stop":
            raise RunError(f"sentinel {name}: {message}")
        if action == "warn":
            self._console.warn(f"sentinel {name}: {message}")


def _distance(one: Sequence[Floats], two: Sequence[Floats]) -> float:
    return float(np.abs(np.concatenate(one) - np.concatenate(two)).mean())


def differences(learner: Floats, sampled: Floats) -> dict[str, float]:
    """Mean |p - p'| and mean exp|log p - log p'| over tokens, in float64."""
    if not len(learner):
        return {}
    one, two = learner.astype(np.float64), sampled.astype(np.float64)
    return {
        "sentinel/prob_difference": float(np.abs(np.exp(one) - np.exp(two)).mean()),
        "sentinel/ratio_excess": float(np.exp(np.minimum(np.abs(one - two), 20.0)).mean()),
    }
