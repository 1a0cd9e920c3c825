"""GDPO: each reward normalised apart before they are added (Liu et al. 2026, arXiv:2601.05242)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import CreditInputs, Needs
from postgrad.algorithms.grpo import GRPO
from postgrad.ops.advantages import whitened


class GDPO(GRPO):
    """Each component of the reward is normalised in its group, and their weighted sum over the
    step, so that a component with a small spread has as much of a say as its weight.

    A component that does not apply to a prompt, or failed on a sample that is kept all the same, is
    no part of the sum, nor of the component's mean.
    """

    unread: ClassVar[tuple[str, ...]] = ("length_penalty", "reward_scaling", "reward_clip", "kl_in")

    component_weights: Mapping[str, float] | None = None  # None: those of [[rewards]]

    def needs(self) -> Needs:
        return replace(super().needs(), components=True)

    def for_rollout(
        self, max_new_tokens: int, reward_weights: Mapping[str, float] | None = None
    ) -> Self:
        completed = super().for_rollout(max_new_tokens, reward_weights)
        if self.component_weights is not None or reward_weights is None:
            return completed
        return completed.model_copy(update={"component_weights": dict(reward_weights)})

    def token_advantages(self, inputs: CreditInputs) -> NDArray[np.float64]:
        sequences, weights = inputs.sequences, self.component_weights or {}
        if missing := inputs.components.keys() - weights.keys():
            raise ValueError(f"no weight of the rewards {', '.join(sorted(missing))}")
        total = np.zeros(len(sequences))
        for name, values in inputs.components.items():
            total += weights[name] * self._apart(values, sequences.group)
        trained = sequences.loss_mask.sums() > 0
        each = whitened(total, trained, std_norm=bool(self.std_norm))
        return sequences.loss_mask.spread(each).values

    def _apart(self, values: NDArray[np.float64], group: NDArray[np.int64]) -> NDArray[np.float64]:
        """[S] the advantages of GRPO from one component; 0 where it is NaN."""
        each, measured = np.zeros(len(values)), ~np.isnan(values)
        each[measured] = self.advantages(values[measured], group[measured])
        return each
