"""Generalised advantage estimation over the tokens that the policy wrote. NumPy, float64.

Columns are [N] over the tokens of `mask`, which is True where the policy wrote the token. Tokens of
the environment are not steps: the recursion goes from one policy token to the next and skips the
tokens between them.
"""

import numpy as np
from numpy.typing import NDArray

from postgrad.core.ragged import Ragged
from postgrad.ops.advantages import Floats

Flags = NDArray[np.bool_]


def token_rewards(rewards: Floats, turn_rewards: Ragged, charges: Ragged, mask: Ragged) -> Ragged:
    """The reward of each token, float64; sums to reward - charges over each sequence.

    rewards: [S], turn rewards included; the part that is no turn's goes to the last policy token.
    charges: per token (beta * KL), subtracted where they arise. Tokens without loss get 0, and so
    does a sequence without loss tokens.
    """
    here = np.flatnonzero(mask.values)
    ends = _ends(mask)
    earned = turn_rewards.like(turn_rewards.values * mask.values)
    tokens = earned.values - charges.values * mask.values
    some = ends >= 0
    tokens[here[ends[some]]] += (rewards - earned.sums())[some]
    return mask.like(tokens)


def gae(
    rewards: Ragged, values: Ragged, mask: Ragged, gamma: float, lam: float, bootstrap: Flags
) -> tuple[Floats, Floats]:
    """Advantages and returns, zeros where `mask` is False (Schulman et al. 2015, arXiv:1506.02438).

        delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  returns = A + V

    values: V of the state before each policy token. bootstrap: [S] True for sequences that were cut
    off: the value after their last token, which the critic did not compute, is taken to be that of
    the last token; elsewhere it is 0. A value or reward that is not finite is a ValueError.
    """
    here = np.flatnonzero(mask.values)
    counts = mask.sums().astype(np.int64)
    r, v = rewards.values[here].astype(np.float64), values.values[here].astype(np.float64)
    if not (np.isfinite(r).all() and np.isfinite(v).all()):
        raise ValueError("a token's reward or the critic's value of it is not finite")
    ends = _ends(mask)[counts > 0]
    following = np.append(v[1:], 0.0)[: len(v)]
    following[ends] = np.where(bootstrap[counts > 0], v[ends], 0.0)
    advantages = r + gamma * following - v
    counts = counts[counts > 0]
    longest_first = np.argsort(-counts, kind="stable")
    counts, ends = counts[longest_first], ends[longest_first]
    for back in range(1, int(counts[0]) if len(counts) else 0):  # all sequences at once, from ends
        tokens = ends[: np.searchsorted(-counts, -back)] - back
        advantages[tokens] += gamma * lam * advantages[tokens + 1]
    spread = np.zeros((2, len(mask.values)))
    spread[:, here] = advantages, advantages + v
    return spread[0], spread[1]


def _ends(mask: Ragged) -> NDArray[np.int64]:
    """[S] place of each sequence's last policy token among all policy tokens; -1 without one."""
    counts = mask.sums().astype(np.int64)
    return np.where(counts > 0, np.cumsum(counts) - 1, -1)
