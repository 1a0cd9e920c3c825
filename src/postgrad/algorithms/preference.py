"""What preference losses share: sums over each answer, implicit rewards, their margin, an NLL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms.base import LossInputs, LossLevel, LossOutput, Needs, PreferenceAlgorithm
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.ops import kl
from postgrad.ops.losses import entry_weights, sequence_sums
from postgrad.ops.preferences import AnswerSums, answer_sums

if TYPE_CHECKING:
    from torch import Tensor


COMPUTED = "computed_pairs"  # the share of an update's pairs that have a gradient
OF_PAIRS = (  # metrics that are means over pairs
    "reward_chosen", "reward_rejected", "reward_margin", "accuracy", "logprob_chosen",
    "logprob_rejected", "nll",
)  # fmt: skip


class PairPreference(PreferenceAlgorithm):
    """A loss of the implicit rewards of the two answers of a pair, mostly of their difference.

    Subclasses define the reward of an answer and the loss of two rewards. The NLL term is the mean
    over pairs of the mean over the chosen answer's tokens.
    """

    level: ClassVar[LossLevel] = "pair"
    with_reference: ClassVar[bool] = True

    nll_coef: float = Field(0.0, ge=0.0)

    @abstractmethod
    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """The loss [P] of pairs, from the rewards [P] of the chosen and of the rejected answers."""

    def pair_losses(self, inputs: LossInputs, chosen: Tensor, rejected: Tensor) -> Tensor:
        """The losses [P] of a layout's pairs. Overridden by those that read columns too."""
        return self.pair_loss(chosen, rejected)

    def needs(self) -> Needs:
        return Needs(reference=self.with_reference)

    def experience(
        self,
        sequences: Sequences,
        preferred: NDArray[np.bool_],
        ref: Ragged | None,
        mismatched: NDArray[np.float64] | None,
    ) -> Experience:
        """The sequences of pairs, chosen first. Pairs of which a side has no loss tokens have no
        gradient and are not counted.
        """
        check_pairs(sequences)
        if not np.array_equal(preferred, np.arange(len(sequences)) % 2 == 0):
            raise ValueError("the preferred answer of a pair comes first: True, False, ...")
        columns = with_reference(sequences, ref) if self.with_reference else {}
        full = sequences.loss_mask.sums() > 0
        return Experience(sequences, columns, np.repeat(full[0::2] & full[1::2], 2))

    def entry_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        return entry_weights(sequences.loss_mask, rows, "pair")

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """Metrics are means over pairs, except "policy/kl" over tokens. `report` divides them by
        "policy/computed_pairs": pairs that count in the denominator may be without a gradient.
        """
        both, weights = answers_of(inputs)
        (chosen, rejected), weight = both.sides(), weights[0::2]
        good, bad = self.reward(chosen), self.reward(rejected)
        nll = -chosen.logprob / chosen.tokens
        loss = self.pair_losses(inputs, good, bad)
        if self.nll_coef > 0:
            loss = loss + self.nll_coef * nll
        means = {
            "reward_chosen": good, "reward_rejected": bad, "reward_margin": good - bad,
            "accuracy": good > bad, "logprob_chosen": chosen.logprob,
            "logprob_rejected": rejected.logprob, "nll": nll,
        }  # fmt: skip
        metrics = {f"policy/{name}": (weight * each.detach()).sum() for name, each in means.items()}
        metrics[f"policy/{COMPUTED}"] = weight.sum()
        if self.with_reference:
            metrics |= distance(inputs)
        return LossOutput((weight * loss).sum(), metrics)

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        reported = dict(metrics)
        if share := reported.pop(f"policy/{COMPUTED}", 0.0):
            for name in OF_PAIRS:
                reported[f"policy/{name}"] /= share
        return reported


def answers_of(inputs: LossInputs) -> tuple[AnswerSums, Tensor]:
    """The answers of a layout, and the weight [n_sequences] of each: the sum over its entries."""
    sequence, n = inputs.sequence, inputs.n_sequences
    sums = answer_sums(inputs.logprobs, inputs.columns, sequence, n)
    return sums, sequence_sums(inputs.weight, sequence, n)


def mean_of(inputs: LossInputs, column: str) -> Tensor:
    """[n_sequences] of a column that is the same at all entries of a sequence."""
    values = inputs.columns[column]
    counts = sequence_sums(values.new_ones(len(values)), inputs.sequence, inputs.n_sequences)
    return sequence_sums(values, inputs.sequence, inputs.n_sequences) / counts.clamp(min=1)


def distance(inputs: LossInputs) -> dict[str, Tensor]:
    """Metrics of the distance from the reference: the mean k3 per loss token. It is not the
    policy's KL, because the policy did not sample these answers.
    """
    d = (inputs.logprobs - inputs.columns["ref_logprobs"]).detach()
    return {
        "policy/kl": (inputs.token_weight * kl.estimate("k3", d)).sum(),
        "policy/bounded_exponents": kl.overflows("k3", d).sum().to(d.dtype),
    }


def with_reference(sequences: Sequences, ref: Ragged | None) -> dict[str, Ragged]:
    """{"ref_logprobs": ref}; a ValueError where it is missing, not finite or of other sequences."""
    if ref is None:
        raise ValueError("the loss needs the reference's logprobs, see needs()")
    if not np.array_equal(ref.offsets, sequences.tokens.offsets):
        raise ValueError("the reference's logprobs are not over these sequences")
    if not np.isfinite(ref.values[sequences.loss_mask.values]).all():
        raise ValueError("the reference gave a logprob that is not finite")
    return {"ref_logprobs": ref}


def check_pairs(sequences: Sequences) -> None:
    """ValueError unless sequences 2k and 2k + 1 are of one group and none is empty."""
    if len(sequences) % 2 or np.any(sequences.group[0::2] != sequences.group[1::2]):
        raise ValueError("sequences 2k and 2k + 1 have to be a pair, in one group")
    if np.any(sequences.tokens.lengths == 0):
        raise ValueError("a sequence without tokens")


def without_absent(metrics: Mapping[str, float], labels: Sequence[str]) -> dict[str, float]:
    """Metrics without those of a label that no answer has ("policy/LABEL" is 0), and then without
    the margin between the labels.
    """
    absent = [f"_{label}" for label in labels if metrics.get(f"policy/{label}") == 0]
    left_out = (*absent, "_margin") if absent else ()
    return {name: value for name, value in metrics.items() if not name.endswith(left_out)}
