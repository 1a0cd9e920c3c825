"""Losses by token, before any aggregation: of the policy, its corrections for samples that another
engine or older weights drew, and of the critic. Tensors are [E], one value per loss entry.

Weights aggregate them: a loss is the sum of weight * token loss over all loss entries of all
micro-batches and ranks. They carry the denominators of the whole update, so that accumulation,
packing, sharing and the number of ranks cannot change it (as they did in TRL PR#6024 and
open-instruct#1728).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.ragged import Ragged
from postgrad.ops.kl import MAX_EXPONENT, estimate

if TYPE_CHECKING:
    from torch import Tensor

Correction = Literal["off", "metrics", "tis", "icepop", "sequence_mask"]
CORRECTION_BOUNDS: dict[str, tuple[float, float]] = {  # low, high, where a recipe leaves them out
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.99, 1.01),
}
# What a rejection looks at: w of a token, of all tokens of a response, or how far they are from 1.
Ratio = Literal["token", "any_token", "geometric_mean", "product"]
Distance = Literal["mean_k2", "mean_k3", "sum_k2", "sum_k3", "mean_error"]


def bounded_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logp - logp_old) with the exponent bounded at +-MAX_EXPONENT; no gradient beyond."""
    return bounded_exp(logprobs - old_logprobs)


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp of [E], bounded at +-MAX_EXPONENT; no gradient beyond."""
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347).

    Separate bounds are DAPO's clip-higher (arXiv:2503.14476).
    """
    return -(ratio * advantages).minimum(ratio.clamp(1.0 - low, 1.0 + high) * advantages)


def clipped_low(ratio: Tensor, advantages: Tensor, low: float) -> Tensor:
    """True where the lower bound stops the gradient: r < 1 - low and A < 0."""
    return (ratio < 1.0 - low) & (advantages < 0)


def clipped_high(ratio: Tensor, advantages: Tensor, high: float) -> Tensor:
    """True where the upper bound stops the gradient: r > 1 + high and A > 0."""
    return (ratio > 1.0 + high) & (advantages > 0)


def moved(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """1 + p - p_old: like a ratio it is 1 where nothing has moved."""
    return 1.0 + (logprobs.exp() - old_logprobs.exp())


def dppo(ratio: Tensor, moved: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-r A, and 0 where `moved` has left [1 - low, 1 + high] in the direction of A (DPPO with
    binary total variation, arXiv:2602.04879).
    """
    left = clipped_low(moved, advantages, low) | clipped_high(moved, advantages, high)
    return (-ratio * advantages).where(~left, 0.0)


def dual_clip(loss: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """PPO's loss, at most bound * |A| where A < 0: a ratio that exploded there pushes no further
    (Ye et al. 2020, arXiv:1912.09729). bound > 1.
    """
    return loss.where(advantages >= 0, loss.minimum(-bound * advantages))


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-A * stopgrad(clip(r, 1 - low, 1 + high)) * logp: the weight is bounded, the gradient of no
    token is lost (MiniMax-M1, arXiv:2506.13585, with low 1: no lower bound).
    """
    return -advantages * ratio.detach().clamp(1.0 - low, 1.0 + high) * logprobs


def soft_gate(ratio: Tensor, temperature: Tensor) -> Tensor:
    """4 sigmoid(t (r - 1)) / t, whose slope at r = 1 is 1 and falls to both sides (SAPO,
    arXiv:2511.20347). temperature: [E], above 0.
    """
    return 4.0 * (temperature * (ratio - 1.0)).sigmoid() / temperature


def gamma_weight(log_ratio: Tensor, shape: Tensor, rate: Tensor) -> Tensor:
    """w^k exp(rate (1 - w)) of w = exp(log_ratio), which is 1 at w = 1 and 0 at both ends (VESPO,
    arXiv:2602.10693). shape (k) and rate: as log_ratio, above 0.
    """
    return (rate + shape * log_ratio - rate * bounded_exp(log_ratio)).exp()


def clipped_change(change: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Log-ratios, at most `high` where A > 0 and at least -`low` elsewhere: PPO's one-sided clip in
    logarithms (GMPO, arXiv:2507.20673).
    """
    return change.clamp(max=high).where(advantages > 0, change.clamp(min=-low))


def sequence_sums(values: Tensor, sequence: Tensor, n_sequences: int) -> Tensor:
    """[n_sequences] the sum over the entries of each sequence; sequence: [E] int64."""
    return values.new_zeros(n_sequences).index_add(0, sequence, values)


def sequence_means(values: Tensor, sequence: Tensor, n_sequences: int) -> Tensor:
    """[E] the mean over the entries of each entry's sequence; sequence: [E] int64."""
    sums = sequence_sums(values, sequence, n_sequences)
    counts = sequence_sums(values.detach().new_ones(len(values)), sequence, n_sequences)
    return (sums / counts.clamp(min=1)).index_select(0, sequence)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """0.5 * max((V - R)^2, (V_old + clip(V - V_old, +-c) - R)^2); without c 0.5 * (V - R)^2.

    A value that has already moved more than c towards its return gets no gradient (OpenAI
    baselines' PPO; Huang et al. 2022, "The 37 Implementation Details of PPO").
    """
    loss = (values - returns).square()
    if clip is not None:
        loss = loss.maximum((_near(values, old, clip) - returns).square())
    return 0.5 * loss


def value_clipped(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """True where the clip stops the gradient: beyond its range, and nowhere within it, where
    old + (V - old) may round to a number beside V.
    """
    if clip is None:
        return values.new_zeros(len(values)).bool()
    larger = (_near(values, old, clip) - returns).square() > (values - returns).square()
    return larger & ((values - old).abs() > clip)


def _near(values: Tensor, old: Tensor, clip: float) -> Tensor:
    return old + (values - old).clamp(-clip, clip)


def explained_variance(
    error: float, error_square: float, returns: float, returns_square: float
) -> float:
    """1 - Var(R - V) / Var(R), from the means of R - V and R and of their squares.

    1: values equal returns; 0: as good as a constant; negative: worse than a constant. 0 where all
    returns are equal.
    """
    spread = returns_square - returns * returns
    if spread <= 1e-12 * returns_square:  # what rounding leaves of equal returns
        return 0.0
    return 1.0 - (error_square - error * error) / spread


def truncated_importance(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """w, bounded to [low, high]: truncated importance sampling (TIS)."""
    return bounded_exp(log_ratio).clamp(low, high)


def masked_importance(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """w where it lies in [low, high], else 0 (IcePop)."""
    w = bounded_exp(log_ratio)
    return w * ((w >= low) & (w <= high))


def sequence_masked_importance(
    log_ratio: Tensor, sequence: Tensor, n_sequences: int, low: float, high: float
) -> Tensor:
    """1 for the sequences whose geometric mean of w lies in [low, high], else 0."""
    kept = within("geometric_mean", log_ratio, sequence, n_sequences, low, high)
    return kept.to(log_ratio.dtype)


def mean_importance(
    log_ratio: Ragged, mask: Ragged, low: float, high: float, *, masked: bool, by_sequence: bool
) -> float:
    """The mean of `truncated_importance`, or with `masked` of `masked_importance`, over the tokens
    of `mask`; by_sequence: of the products of sequences, over those with such tokens. 1 where it is
    0, or nothing is there. log_ratio: over all tokens.
    """
    exponents = log_ratio.values.astype(np.float64) * mask.values
    each = exponents[mask.values]
    if by_sequence:
        each = log_ratio.like(exponents).sums()[mask.sums() > 0]
    w = np.exp(each.clip(-MAX_EXPONENT, MAX_EXPONENT))
    w = w * ((w >= low) & (w <= high)) if masked else w.clip(low, high)
    return float(w.mean()) if w.any() else 1.0


def within(
    statistic: Ratio | Distance,
    log_ratio: Tensor,
    sequence: Tensor,
    n_sequences: int,
    low: float,
    high: float,
) -> Tensor:
    """[E] True where a statistic of importance weights w lies in [low, high].

    "token": w of the token. The others are the same at each token of a response: "any_token": all
    of its w lie there; "geometric_mean", "product" of w; mean or sum of the KL(sampler || learner)
    of its tokens by k2 = (log w)^2 / 2 or k3 = w - 1 - log w; "mean_error": the mean of
    exp(|log w|), which is max(w, 1 / w).
    """
    if statistic in ("token", "any_token"):
        w = bounded_exp(log_ratio)
        inside = (w >= low) & (w <= high)
        if statistic == "token":
            return inside
        outside = sequence_sums((~inside).to(log_ratio.dtype), sequence, n_sequences)
        return outside.index_select(0, sequence) == 0
    if statistic == "geometric_mean":
        value = bounded_exp(sequence_means(log_ratio, sequence, n_sequences))
    elif statistic == "product":
        sums = sequence_sums(log_ratio, sequence, n_sequences)
        value = bounded_exp(sums.index_select(0, sequence))
    elif statistic == "mean_error":
        value = sequence_means(bounded_exp(log_ratio.abs()), sequence, n_sequences)
    else:
        token_kl = estimate("k2" if statistic.endswith("k2") else "k3", -log_ratio)
        value = sequence_means(token_kl, sequence, n_sequences)
        if statistic.startswith("sum"):
            sums = sequence_sums(token_kl, sequence, n_sequences)
            value = sums.index_select(0, sequence)
    return (value >= low) & (value <= high)


Aggregation = Literal["token", "sequence", "constant"]  # what a recipe can choose


def entry_weights(
    loss_mask: Ragged,
    rows: NDArray[np.int64],
    aggregation: Aggregation | Literal["pair"],
    constant_length: int | None = None,
    *,
    token_weights: Ragged | None = None,
) -> Ragged:
    """The weight of every token, float32, over the same tokens as `loss_mask`.

    Zero outside the sequences `rows` of the update and at tokens without loss. "token": 1 / loss
    tokens of the update. "sequence": 1 / (sequences * loss tokens of this sequence); a sequence
    without loss tokens is not counted. Both sum to 1. "constant": 1 / (sequences *
    constant_length), where a missing `constant_length` is a ValueError. "pair": 1 / (pairs * loss
    tokens of this sequence), which sums to 1 over the chosen ones; a pair with a side without loss
    tokens is not counted, half a pair among `rows` is a ValueError.

    token_weights: what each loss token counts, above 0: as so many loss tokens, in place of 1.
    """
    each = loss_mask if token_weights is None else token_weights
    each = each.like(each.values.astype(np.float64) * loss_mask.values)
    lengths = each.sums()
    in_update = np.zeros(len(loss_mask), np.bool_)
    in_update[rows] = True
    counted = in_update & (lengths > 0)
    if aggregation == "pair":
        counted = _of_whole_pairs(in_update, counted)
    tokens, sequences = lengths[counted].sum() or 1.0, max(1, int(counted.sum()))
    per_sequence = np.zeros(len(loss_mask), np.float64)
    if aggregation == "token":
        per_sequence[counted] = 1.0 / tokens
    elif aggregation == "sequence":
        per_sequence[counted] = 1.0 / (sequences * lengths[counted])
    elif aggregation == "pair":
        per_sequence[counted] = 2.0 / (sequences * lengths[counted])
    elif constant_length is None:
        raise ValueError("aggregation 'constant' needs constant_length, the tokens to divide by")
    else:
        per_sequence[counted] = 1.0 / (sequences * constant_length)
    return loss_mask.like((loss_mask.spread(per_sequence).values * each.values).astype(np.float32))


def _of_whole_pairs(in_update: NDArray[np.bool_], counted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[S] True where both sides of the pair are counted: sequences 2k and 2k + 1."""
    if len(in_update) % 2 or np.any(in_update[0::2] != in_update[1::2]):
        raise ValueError("aggregation 'pair' needs sequences in twos, and both of a pair in `rows`")
    return np.repeat(counted[0::2] & counted[1::2], 2)
