"""GiGPO: group-in-group policy optimisation (Feng et al. 2025, arXiv:2505.10978)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms.base import CreditInputs
from postgrad.algorithms.grpo import GRPO
from postgrad.ops.advantages import group_sizes
from postgrad.ops.losses import Aggregation
from postgrad.ops.turns import PolicyTurn, numbered_states, policy_turns


class GiGPO(GRPO):
    """A turn's advantage is that of its episode, as in GRPO, plus `step_weight` times how much
    better it ended than other turns of the group that answered the same state.

    The state is what the policy read since its turn before: the reply of the environment, and for
    the first turn the prompt. What a turn is measured by is its discounted return: the rewards from
    it on, each times gamma for every turn in between. The reward of an episode that belongs to no
    turn comes with the last one.
    """

    aggregation: Aggregation = "token"
    step_weight: float = Field(1.0, ge=0.0)  # of the advantage of a turn among those of its state
    gamma: float = Field(0.95, ge=0.0, le=1.0)

    def token_credit(
        self, inputs: CreditInputs, state: Mapping[str, Any]
    ) -> tuple[dict[str, NDArray[np.float64]], Mapping[str, Any], dict[str, float]]:
        sequences = inputs.sequences
        turns = [*policy_turns(sequences, inputs.written)]
        states = numbered_states(sequences, turns)
        gains = self.advantages(self._returns(inputs, turns), states)
        of_steps = np.zeros(len(sequences.tokens.values))
        for turn, gain in zip(turns, gains.tolist(), strict=True):
            at = sequences.tokens.offsets[turn.row]
            of_steps[at + turn.begin : at + turn.end] = gain
        advantages = self.token_advantages(inputs) + self.step_weight * of_steps
        later = np.array([turn.read > 0 for turn in turns], np.bool_)
        metrics: dict[str, float] = {}
        if later.any():
            metrics["groups/shared_state_fraction"] = float((group_sizes(states) > 1)[later].mean())
        return {"advantages": advantages}, state, metrics

    def _returns(self, inputs: CreditInputs, turns: list[PolicyTurn]) -> NDArray[np.float64]:
        """[turns] the discounted return of each."""
        of_no_turn = inputs.rewards - inputs.turn_rewards.sums()
        returns = np.zeros(len(turns))
        following = None
        for number in reversed(range(len(turns))):
            row, begin, end, _ = turns[number]
            rest = self.gamma * returns[number + 1] if following == row else of_no_turn[row]
            earned = inputs.turn_rewards.row(row)[begin:end].sum()
            returns[number] = earned - inputs.charges.row(row)[begin:end].sum() + rest
            following = row
        return returns
