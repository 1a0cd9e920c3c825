"""Losses of pairs and of labelled answers, and of reward models: one value a pair or an answer.

Tensors are [P] pairs or [S] answers. A logistic loss is taken through log-sigmoid as one function:
log(sigmoid(x)) overflows, and clamping would lose the gradient at 0, where every run starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from postgrad.ops.losses import bounded_exp, sequence_sums

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
PairLoss = Literal[
    "sigmoid", "hinge", "robust", "exo", "discopop", "nca", "bco", "sppo", "apo_zero", "apo_down"
]
OF_DIFFERENCES = ("sigmoid", "hinge", "robust", "exo", "discopop")  # a constant in both cancels

SMOOTHED: tuple[PairLoss, ...] = ("sigmoid", "robust", "exo")  # they read label_smoothing

LARGEST_MEAN = -1e-6  # of logprobs, where odds are taken: those of probability 1 are infinite


@dataclass(frozen=True, slots=True)
class AnswerSums:
    """Sums over the loss tokens of n answers, [n] each."""

    logprob: Tensor  # sum of logp, nats
    log_ratio: Tensor  # sum of logp - logp_ref, nats; zeros without a reference
    tokens: Tensor  # number of loss tokens, at least 1

    def sides(self) -> tuple[AnswerSums, AnswerSums]:
        """The sums of the chosen and of the rejected answers; pairs lie as chosen, rejected, ..."""
        chosen, rejected = (
            AnswerSums(self.logprob[side::2], self.log_ratio[side::2], self.tokens[side::2])
            for side in (0, 1)
        )
        return chosen, rejected


def answer_sums(
    logprobs: Tensor, columns: Mapping[str, Tensor], sequence: Tensor, n_sequences: int
) -> AnswerSums:
    """Sums token logprobs [E] and, where there is one, the column "ref_logprobs" by answer.

    logp - logp_ref is taken per token, before the sum: the difference of two sums of hundreds of
    nats would be lost to rounding in float32.
    """
    ratio = logprobs - columns.get("ref_logprobs", logprobs)
    tokens = sequence_sums(logprobs.detach().new_ones(len(logprobs)), sequence, n_sequences)
    return AnswerSums(
        sequence_sums(logprobs, sequence, n_sequences),
        sequence_sums(ratio, sequence, n_sequences),
        tokens.clamp(min=1),
    )


def logistic(difference: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) logsigmoid(x) - e logsigmoid(-x): each label is wrong with chance e.

    With x = beta * (log-ratio of chosen - of rejected) it is DPO (Rafailov et al. 2023,
    arXiv:2305.18290), with e > 0 conservative DPO (Mitchell 2023).
    """
    from torch.nn.functional import logsigmoid

    loss = -(1.0 - label_smoothing) * logsigmoid(difference)
    return loss - label_smoothing * logsigmoid(-difference) if label_smoothing else loss


def pair_loss(
    kind: PairLoss,
    chosen: Tensor,
    rejected: Tensor,
    beta: float,
    label_smoothing: float,
    tau: float,
) -> Tensor:
    """The loss [P] of pairs whose answers have implicit rewards `chosen` and `rejected`, [P] each.

    With c and r the rewards, beta * log-ratio, x = c - r, e the label smoothing, s the sigmoid:

        sigmoid   -(1 - e) log s(x) - e log s(-x)            DPO and cDPO
        hinge     max(0, 1 - x)                              SLiC (arXiv:2305.10425)
        robust    (-(1 - e) log s(x) + e log s(-x)) / (1 - 2e)    arXiv:2403.00409
        exo       KL((s(x), s(-x)) || (1 - e, e))            arXiv:2402.00856, eq. 16
        discopop  (1 - s(x / tau)) (-log s(x)) + s(x / tau) exp(-x)    arXiv:2406.08414, eq. 5
        nca       -log s(c) - (log s(-c) + log s(-r)) / 2    arXiv:2402.05369
        bco       -log s(c) - log s(-r)                      arXiv:2404.04656, without its shift
        sppo      ((c - 1/2)^2 + (r + 1/2)^2) / beta^2       arXiv:2405.00675, P of 1 and 0
        apo_zero  1 - s(c) + s(r)                            arXiv:2408.06266, eq. 7
        apo_down  s(c) + 1 - s(x)                            arXiv:2408.06266, eq. 8
    """
    from torch.nn.functional import logsigmoid

    x = chosen - rejected
    match kind:
        case "sigmoid":
            return logistic(x, label_smoothing)
        case "hinge":
            return (1.0 - x).relu()
        case "robust":
            return _unbiased(x, label_smoothing)
        case "exo":
            return _divergence_from_labels(x, label_smoothing)
        case "discopop":
            share = (x / tau).sigmoid()
            return (1.0 - share) * -logsigmoid(x) + share * bounded_exp(-x)
        case "nca":
            return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2
        case "bco":
            return -logsigmoid(chosen) - logsigmoid(-rejected)
        case "sppo":
            return ((chosen - 0.5).square() + (rejected + 0.5).square()) / beta**2
        case "apo_zero":
            return (-chosen).sigmoid() + rejected.sigmoid()
        case "apo_down":
            return chosen.sigmoid() + (-x).sigmoid()


def _unbiased(x: Tensor, e: float) -> Tensor:
    """The logistic loss that has the expectation of clean labels where a share e of them is
    flipped.
    """
    from torch.nn.functional import logsigmoid

    return (e * logsigmoid(-x) - (1.0 - e) * logsigmoid(x)) / (1.0 - 2.0 * e)


def _divergence_from_labels(x: Tensor, e: float) -> Tensor:
    """The KL of the policy's preference (s(x), s(-x)) from the labels' (1 - e, e); e > 0."""
    from torch.nn.functional import logsigmoid

    better = x.sigmoid() * (logsigmoid(x) - math.log1p(-e))
    return better + (-x).sigmoid() * (logsigmoid(-x) - math.log(e))


def divergence_score(log_ratio: Tensor, kind: Divergence, alpha: float | None = None) -> Tensor:
    """f'(u) at u = policy / reference, the reward that DPO has under another divergence, without
    beta; constants, which cancel in a difference, are such that it is 0 at u = 1.

    reverse_kl: log u; forward_kl: 1 - 1/u; js: log(2u / (1 + u)); alpha: (1 - u^-alpha) / alpha,
    between the two KLs (Wang et al. 2023, arXiv:2309.16240). log_ratio: log u, [n].
    """
    from torch.nn.functional import logsigmoid

    match kind:
        case "reverse_kl":
            return log_ratio
        case "js":
            return math.log(2.0) + logsigmoid(log_ratio)
        case "forward_kl":
            alpha = 1.0
        case "alpha":
            if alpha is None:
                raise ValueError("the divergence 'alpha' needs its alpha")
    return (1.0 - bounded_exp(-alpha * log_ratio)) / alpha


def log_exp(chosen: Tensor, rejected: Tensor) -> Tensor:
    """log(1 + exp(r_rejected - r_chosen)) of a reward model's scores: `logistic` of their
    difference, computed in another way.
    """
    from torch import logaddexp

    return logaddexp(chosen.new_zeros(()), rejected - chosen)


def log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(mean logprob). Means over LARGEST_MEAN are taken as it, without
    gradient.
    """
    bounded = logprobs.clamp(max=LARGEST_MEAN)
    return bounded - (-bounded.expm1()).log()


def kto(advantage: Tensor, desirable: Tensor, weights: tuple[float, float]) -> Tensor:
    """w_d (1 - sigmoid(x)) of desirable answers, w_u (1 - sigmoid(-x)) of the others, x = advantage
    (Ethayarajh et al. 2024, arXiv:2402.01306). desirable: [S] bool.
    """
    good, bad = weights
    return (good * (-advantage).sigmoid()).where(desirable, bad * advantage.sigmoid())
