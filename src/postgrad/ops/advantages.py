"""Advantages of samples relative to their group, and of tokens relative to the batch. NumPy,
float64.

rewards: [S]; group: [S] integers, samples with the same number answer the same prompt, in any
order. Functions return [S], or [N] over tokens. A group whose rewards are all equal gives exactly
0, which subtracting a rounded mean would not: three rewards of 0.1 have a mean of
0.10000000000000002.
"""

from collections.abc import Mapping
from math import comb
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.ragged import Ragged

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Amount = Literal["output_tokens", "input_tokens", "turns"]  # of a sample

WHITE_EPS = 1e-8  # added to a variance


def group_sizes(group: Ints) -> Ints:
    """How many samples the group of each sample has."""
    _, place, count = np.unique(group, return_inverse=True, return_counts=True)
    return count[place]


def group_means(rewards: Floats, group: Ints) -> Floats:
    """The mean reward of each sample's group; of equal rewards exactly that reward."""
    lowest, highest = _extremes(rewards, group)
    _, place, count = np.unique(group, return_inverse=True, return_counts=True)
    mean = np.bincount(place, weights=rewards, minlength=len(count))[place] / count[place]
    return np.where(lowest == highest, lowest, mean)


def group_stds(rewards: Floats, group: Ints) -> Floats:
    """The sample standard deviation (n - 1) of each sample's group; 0 for a group of one."""
    squares = np.square(rewards - group_means(rewards, group))
    size = group_sizes(group)
    return np.sqrt(group_means(squares, group) * size / np.maximum(size - 1, 1))


def step_std(rewards: Floats) -> float:
    """The sample standard deviation (n - 1) of all rewards, whatever their group; 0 for one."""
    return float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0


def relative_penalties(
    rewards: Floats,
    amounts: Mapping[Amount, Floats],
    coefficients: Mapping[Amount, float],
    group: Ints,
) -> Floats:
    """What each sample loses for what it took: the mean reward of its group, times the sum over
    `coefficients` of coefficient * amount / the largest amount in its group.

    amounts: [S] each, 0 or more; where all of a group are 0 nothing is lost. A mean below 0 counts
    as 0: it would reward length. So a group without success loses nothing, and one of right answers
    alone the most.
    """
    share = np.zeros(len(rewards))
    for name, coefficient in coefficients.items():
        _, largest = _extremes(amounts[name], group)
        share += coefficient * amounts[name] / np.maximum(largest, 1.0)
    return np.maximum(group_means(rewards, group), 0.0) * share


def centred(rewards: Floats, group: Ints) -> Floats:
    """R - mean(R) over the group (Dr. GRPO, arXiv:2503.20783)."""
    return rewards - group_means(rewards, group)


def normalised(rewards: Floats, group: Ints, eps: float = 1e-6) -> Floats:
    """(R - mean(R)) / (std(R) + eps) over the group, n - 1 in std (GRPO, arXiv:2402.03300)."""
    return centred(rewards, group) / (group_stds(rewards, group) + eps)


def left_one_out(rewards: Floats, group: Ints) -> Floats:
    """R - mean of the other samples' R (RLOO, arXiv:2402.14740). A group of one is a ValueError.

    Computed as (R - mean(R)) * n / (n - 1), which is the same number.
    """
    size = group_sizes(group)
    if np.any(size < 2):
        lonely = sorted({int(g) for g in group[size < 2]})
        raise ValueError(f"no sample to leave out: groups of one: {lonely[:5]}")
    return centred(rewards, group) * size / (size - 1)


def against_others(rewards: Floats, group: Ints, eps: float | None = 1e-6) -> Floats:
    """(R - m) / (s + eps), with m the mean and s the sample standard deviation (n - 2) of the other
    samples of the group (NeMo RL's leave-one-out baseline). R - m where s is 0, because the others
    are all equal or there is one other, and where eps is None; 0 for a group of one.
    """
    result = np.zeros(len(rewards))
    for number in np.unique(group):
        places = np.flatnonzero(group == number)
        if (n := len(places)) < 2:
            continue
        every = np.broadcast_to(rewards[places], (n, n))
        others = every[~np.eye(n, dtype=np.bool_)].reshape(n, n - 1)
        lowest: Floats = others.min(1)
        equal: NDArray[np.bool_] = lowest == others.max(1)
        mean: Floats = others.mean(1)
        gain = rewards[places] - np.where(equal, lowest, mean)
        if eps is not None and n > 2:
            gain = gain / np.where(equal, 1.0, others.std(1, ddof=1) + eps)
        result[places] = gain
    return result


def relative(rewards: Floats, group: Ints) -> Floats:
    """(R - mean(R)) / mean(R) over the group, 0 where the mean is not above 0: with rewards of 0
    and 1 the gradient of log(pass rate), to the group's size as order (MaxRL, arXiv:2602.02710).
    """
    mean = group_means(rewards, group)
    return np.divide(centred(rewards, group), mean, out=np.zeros_like(mean), where=mean > 0)


def weighted_centred(rewards: Floats, lengths: Floats, group: Ints) -> Floats:
    """R - sum(l R) / sum(l) over the group: the baseline of least variance where a gradient grows
    with the length l of its response (OPO, arXiv:2505.23585). lengths: [S], above 0.
    """
    _, place = np.unique(group, return_inverse=True)
    baseline = np.bincount(place, lengths * rewards) / np.bincount(place, lengths)
    return np.where(equal_groups(rewards, group), 0.0, rewards - baseline[place])


def share_valid(rewards: Floats, group: Ints) -> float:
    """The fraction of samples whose group has different rewards; 1 where no group has."""
    moving = float(1.0 - equal_groups(rewards, group).mean()) if len(rewards) else 1.0
    return moving or 1.0


def pass_at_k(right: NDArray[np.bool_], group: Ints, k: int) -> Floats:
    """The mean, over all sets of k samples of the group with a sample among them, of the set's
    normalised reward, which is 1 where any of its samples is right (arXiv:2508.10751).

    With N samples, W of them wrong, the mean reward of a set is m = 1 - C(W, k) / C(N, k). A right
    sample has (1 - m) / s, a wrong one (1 - m - C(W - 1, k - 1) / C(N - 1, k - 1)) / s, with
    s = sqrt(m (1 - m)); 0 where s is 0. Groups of fewer than k samples are a ValueError.
    """
    numbers, place = np.unique(group, return_inverse=True)
    each = np.zeros((len(numbers), 2))  # of a wrong sample and of a right one
    for g, n in enumerate(np.bincount(place)):
        wrong = int(n - right[place == g].sum())
        if n < k:
            raise ValueError(f"pass@{k} of a group of {n} samples")
        none_right = comb(wrong, k) / comb(n, k)  # 1 - m
        if not 0.0 < none_right < 1.0:
            continue
        deviation = np.sqrt(none_right * (1.0 - none_right))
        with_wrong = comb(wrong - 1, k - 1) / comb(n - 1, k - 1)
        each[g] = (none_right - with_wrong) / deviation, none_right / deviation
    return each[place, right.astype(np.int64)]


def equal_groups(rewards: Floats, group: Ints) -> NDArray[np.bool_]:
    """True for samples of a group whose rewards are all equal."""
    lowest, highest = _extremes(rewards, group)
    return lowest == highest


def _extremes(rewards: Floats, group: Ints) -> tuple[Floats, Floats]:
    numbers, place = np.unique(group, return_inverse=True)
    lowest = np.full(len(numbers), np.inf)
    highest = np.full(len(numbers), -np.inf)
    np.minimum.at(lowest, place, rewards)
    np.maximum.at(highest, place, rewards)
    return lowest[place], highest[place]


def best_and_worst(rewards: Floats, group: Ints) -> Ints:
    """[2 groups] of each group of at least two samples the first with the highest reward, then the
    first other one with the lowest. Groups in ascending order.
    """
    rows: list[int] = []
    for number in np.unique(group):
        places = np.flatnonzero(group == number)
        if len(places) < 2:
            continue
        best = places[np.argmax(rewards[places])]
        others = places[places != best]
        rows += [int(best), int(others[np.argmin(rewards[others])])]
    return np.array(rows, np.int64)


def to_go(rewards: Floats, charges: Ragged, turn_rewards: Ragged) -> Floats:
    """The reward to go at each token: the sequence's reward, minus the turn rewards before the
    token and the charges from it on.

    rewards: [S], turn rewards included; charges: per token, such as beta * KL. Returns [N] over the
    tokens of `charges`.
    """
    from_here = charges.spread(charges.sums()).values - _before(charges)
    return charges.spread(rewards).values - _before(turn_rewards) - from_here


def over_segments(values: Floats, segments: Ragged | None) -> tuple[Floats, Ints]:
    """[N] each: the sum of the values of a token's segment, and how many tokens it has. segments:
    [N] their numbers, equal in tokens side by side of a sample; None: each token is one.
    """
    if segments is None or not len(values):
        return values, np.ones(len(values), np.int64)
    first = np.diff(segments.values, prepend=0) != 0
    first[segments.offsets[:-1][segments.lengths > 0]] = True
    starts = np.flatnonzero(first)
    lengths = np.diff(starts, append=len(values))
    return np.repeat(np.add.reduceat(values, starts), lengths), np.repeat(lengths, lengths)


def _before(column: Ragged) -> Floats:
    """[N] the sum over the tokens of the sequence before each; exactly 0 where all of them are."""
    running = np.concatenate([[0.0], np.cumsum(column.values, dtype=np.float64)])
    return running[:-1] - column.spread(running[column.offsets[:-1]]).values


def whitened(
    values: Floats, mask: NDArray[np.bool_], *, std_norm: bool = True, shift_mean: bool = True
) -> Floats:
    """(x - mean) / sqrt(variance + 1e-8) over the values [N] where `mask` is True, 0 elsewhere.

    The population variance (REINFORCE++, arXiv:2501.03262). std_norm False: x - mean. shift_mean
    False: the mean is added again, so that only the distances from it are scaled (Ziegler et al.
    2019, arXiv:1909.08593). Values that are all equal are exactly 0, or stay as they are.
    """
    kept = values[mask]
    white = np.zeros_like(values)
    if not len(kept):
        return white
    equal = kept.min() == kept.max()
    mean = kept[0] if equal else kept.mean()
    scale = np.sqrt(kept.var() + WHITE_EPS) if std_norm else 1.0
    white[mask] = (kept - mean) / scale + (0.0 if shift_mean else mean)
    return white
