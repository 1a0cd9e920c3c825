"""Losses of pairs and of labelled answers, and of reward models: one value a pair or an answer.

Tensors are [P] pairs or [S] answers. A logistic loss is taken through log-sigmoid as one function:
log(sigmoid(x)) overflows, and clamping would lose the gradient at 0, where every run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from postgrad.ops.losses import sequence_sums

if TYPE_CHECKING:
    from torch import Tensor

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
