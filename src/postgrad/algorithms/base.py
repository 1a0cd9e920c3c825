"""The base classes of algorithms: frozen settings with methods; no state, no I/O.

    credit       rollouts -> advantages and other columns that the losses read  (controller, NumPy)
    experience   pairs or labelled answers -> the columns that a loss reads     (controller, NumPy)
    policy_loss  logprobs of one layout's entries -> its share of the loss      (learner, torch)
    score_loss   the same for scores of a critic's or reward model's head       (learner, torch)

torch is named only in annotations, so that a recipe can be read without importing it.

Shapes: S sequences, E loss entries of one layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.core.settings import Settings
from postgrad.ops.advantages import over_segments

if TYPE_CHECKING:
    from torch import Tensor

    from postgrad.ops.preferences import AnswerSums

LossLevel = Literal["token", "step", "sequence", "pair", "group"]
ADAPTED = ("kl_coef", "entropy_coef")  # of an algorithm's state


@dataclass(frozen=True, slots=True)
class Needs:
    """What has to be computed for an algorithm before or beside its loss."""

    reference: bool = False  # logprobs of the reference
    old_logprobs: bool = False  # of the policy before the step, for credit, also of one update
    # The loss takes the sampler's logprobs for those of the policy before the step.
    sampled_is_old: bool = False
    ratio: bool = True  # the loss reads logprobs of the policy before the step
    entropy: bool = False  # of the policy's distribution at each loss entry
    old_entropy: bool = False  # of the policy's before the step, at each loss token, for credit
    critic: bool = False  # values of a critic, which is trained too
    greedy: bool = False  # sample 0 of each prompt is greedy: a baseline, which is not trained on
    # Of a preference: the temperatures of the policy's logprobs of an update, before it.
    own_temperatures: tuple[float, ...] = ()
    components: bool = False  # the rewards' components apart, each with its weight
    mismatched: bool = False  # logprobs of each prompt with another sample's answer (KTO)
    teacher: bool = False  # what the model of [teacher] says of the same tokens
    # Who says that in its place, reading the hints of data.hint too.
    self_graded: Literal["policy", "reference"] | None = None
    # Reward from which on a sample is a right answer, which hints of its group may show.
    correct_at: float = 1.0
    own_answers: float = 0.0  # share of SFT's rows that the policy answers itself
    embedding_noise: float = 0.0  # alpha of the noise on embeddings in updates; 0: none

    def reads_old(self, updates: int) -> bool:
        """Whether credit gets the policy's logprobs before a step of so many updates. One update
        begins with the policy itself: its old logprobs are the current ones.
        """
        return self.old_logprobs or (self.ratio and updates > 1 and not self.sampled_is_old)

    @property
    def loads_reference(self) -> bool:
        """Whether there is a reference, for its logprobs of the samples or for its grades."""
        return self.reference or self.self_graded == "reference"


@dataclass(frozen=True, slots=True)
class Credit:
    """The result of `credit`."""

    experience: Experience
    rows: NDArray[np.int64]  # [S of the experience] indices of its samples in the batch
    state: Mapping[str, Any]  # JSON values for the next step's credit; kept in checkpoints
    metrics: Mapping[str, float]
    length_penalty: NDArray[np.float64] | None = None  # [S] taken off the rewards; None: nothing


@dataclass(frozen=True, slots=True)
class Grades:
    """What a grader says of the S samples of a batch."""

    # float64 [N] nats over the samples' tokens; zeros where loss_mask is False, and behind the
    # first token of a segment, which has the logprob of all of it
    logprobs: Ragged
    graded: NDArray[np.bool_]  # [S] False: its hint had nothing to show, and it has no say
    # int64 [N] numbers of segments of text that were graded as one, rising in a sample; below 0:
    # not graded. None: each token was graded alone.
    segments: Ragged | None = None

    def take(self, rows: NDArray[np.int64]) -> Grades:
        """Those of samples `rows`, in this order."""
        segments = None if self.segments is None else self.segments.take(rows)
        return Grades(self.logprobs.take(rows), self.graded[rows], segments)

    def above(
        self, before: Ragged, loss_mask: Ragged, most: float | None
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """float64 [N]: how much more likely the grader finds each loss token of a graded sample
        than `before`, or all of its segment, within +-most; else 0. Also the metrics of this, of
        which there are none where there are no such tokens.
        """
        asked = loss_mask.values & loss_mask.spread(self.graded).values
        read = asked if self.segments is None else asked & (self.segments.values >= 0)
        grades = self.logprobs.values.astype(np.float64)
        alone = (grades - before.values) * read
        gap, lengths = over_segments(alone, self.segments)
        bounded = gap if most is None else gap.clip(-most, most)
        metrics: dict[str, float] = {}
        if len(self.graded):
            metrics["teacher/graded_fraction"] = float(self.graded.mean())
        if self.segments is not None and (tokens := int(asked.sum())):
            metrics["teacher/alone_fraction"] = float((read & (lengths == 1)).sum()) / tokens
            metrics["teacher/segment_fraction"] = float((read & (lengths > 1)).sum()) / tokens
            metrics["teacher/unread_fraction"] = float((asked & ~read).sum()) / tokens
        if tokens := int(read.sum()):
            metrics["teacher/reverse_kl"] = -float(alone.sum()) / tokens
            metrics["teacher/logprob"] = float((grades * read).sum()) / tokens
            if most is not None:
                metrics["teacher/clipped_fraction"] = float((bounded != gap).sum()) / tokens
        return bounded, metrics


@dataclass(frozen=True, slots=True)
class CreditInputs:
    """The S samples of a step with their rewards, from which advantages are computed."""

    sequences: Sequences
    rewards: NDArray[np.float64]  # [S] scaled and clipped, turn rewards included
    turn_rewards: Ragged  # float64 per token, scaled
    charges: Ragged  # float64 per token: beta * KL, to be subtracted; zeros without KL in rewards
    truncated: NDArray[np.bool_]  # [S] cut off by the token limit
    values: Ragged | None  # float32 per token, the critic's; None without a critic
    greedy: NDArray[np.bool_]  # [S] the baselines that needs().greedy asks for
    components: Mapping[str, NDArray[np.float64]]  # [S] each, as of RolloutBatch
    written: Ragged  # bool per token: the policy's, also of samples that bear no loss


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The E loss entries of one layout, for a policy's loss. Tensors are float32 where not stated
    otherwise.
    """

    logprobs: Tensor  # [E] nats, with gradient, at the sampling temperature
    entropy: Tensor | None  # [E] nats, with gradient; None where needs().entropy is False
    columns: Mapping[str, Tensor]  # [E] each: the experience's columns at these entries
    sequence: Tensor  # [E] int64, number of the entry's sequence in this layout
    n_sequences: int  # sequences of this layout
    weight: Tensor  # [E] from `entry_weights`
    # [E] 1 / loss tokens that the update computes. Metrics are sums weighted with it, so that
    # adding them over layouts gives means over the update.
    token_weight: Tensor

    def at(self, entries: Tensor) -> LossInputs:
        """Those of some entries, int64."""
        return replace(
            self,
            logprobs=self.logprobs.index_select(0, entries),
            entropy=None if self.entropy is None else self.entropy.index_select(0, entries),
            columns={name: each.index_select(0, entries) for name, each in self.columns.items()},
            sequence=self.sequence.index_select(0, entries),
            weight=self.weight.index_select(0, entries),
            token_weight=self.token_weight.index_select(0, entries),
        )


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """The E loss entries of one layout, for the loss of a scalar head. Fields without a comment are
    those of `LossInputs`.
    """

    # [E] float32 with gradient: a critic's value of the state before each loss token, or a reward
    # model's score: at the last token of each sequence, or of each step.
    scores: Tensor
    columns: Mapping[str, Tensor]
    sequence: Tensor
    n_sequences: int
    weight: Tensor  # [E] from `score_weights`
    token_weight: Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A layout's share of an update's loss and metrics; shares are added over layouts."""

    loss: Tensor  # scalar with gradient
    metrics: Mapping[str, Tensor]  # detached scalars by name: "policy/ratio"


class Algorithm(Settings, ABC):
    """A loss over loss entries. `level`: what has to stay together in one forward pass.

    With "pair" the sequences of an experience come in pairs, the preferred one first, both in one
    group. A layout holds whole pairs in order: sequence 2k is the chosen one, 2k + 1 the rejected.
    """

    level: ClassVar[LossLevel] = "token"

    def needs(self) -> Needs:
        """The roles and columns that it needs beyond the policy's logprobs."""
        return Needs()

    @abstractmethod
    def entry_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        """Weight of every token in the loss of the update that trains on `rows`, float32.

        Over the same tokens as `sequences`, zero outside `rows` and without loss: ops/losses.py.
        """

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """An update's metrics from their sums over all its layouts. Overridden to compute those
        that are not sums, such as a standard deviation.
        """
        return dict(metrics)


class PolicyAlgorithm(Algorithm):
    """An algorithm whose loss reads a policy's logprobs. Its metrics start with "policy/"."""

    @abstractmethod
    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """The loss of one layout's entries."""


class ScoreAlgorithm(Algorithm):
    """An algorithm whose loss reads the scores of a linear head.

    Its metrics start with "critic/" where the head is a critic's, else with "reward_model/".
    """

    def score_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        """`entry_weights` of the score loss, where they are not the policy loss's."""
        return self.entry_weights(sequences, rows)

    @abstractmethod
    def score_loss(self, inputs: ScoreInputs) -> LossOutput:
        """The loss of one layout's entries."""


class RolloutAlgorithm(PolicyAlgorithm):
    """An algorithm that learns from scored rollouts: reinforcement learning."""

    min_group_size: ClassVar[int] = 1  # a prompt with fewer samples is dropped

    def for_rollout(
        self, max_new_tokens: int, reward_weights: Mapping[str, float] | None = None
    ) -> Self:
        """These settings, completed where they need it with the rollout's max_new_tokens and with
        the weights of the rewards' components.
        """
        return self

    def trained_samples(self, sampled: int, of_prompt: int) -> int:
        """How many of `sampled` samples, `of_prompt` of each prompt, are trained on where none was
        dropped.
        """
        return sampled

    @abstractmethod
    def credit(
        self,
        batch: RolloutBatch,
        old: Ragged | None,
        ref: Ragged | None,
        values: Ragged | None,
        state: Mapping[str, Any],
        entropy: Ragged | None = None,
    ) -> Credit:
        """The experience of a batch: advantages and other columns of the losses.

        old, ref: logprobs of the policy before the step and of the reference; values: of the
        critic; entropy: of the policy before the step. All float32 over the batch's tokens; None
        where needs() does not ask for them. An algorithm that needs a teacher, or is self-graded,
        has a parameter `teacher` too: the grader's `Grades`.
        state: that of the last step's Credit; {} at the start of a run.
        """


class PreferenceAlgorithm(PolicyAlgorithm):
    """An algorithm that learns which answers people prefer, without a reward model."""

    @abstractmethod
    def reward(self, answers: AnswerSums) -> Tensor:
        """[n] the implicit reward of each answer, with gradient where `answers` has one."""

    @abstractmethod
    def experience(
        self,
        sequences: Sequences,
        preferred: NDArray[np.bool_],
        ref: Ragged | None,
        mismatched: NDArray[np.float64] | None,
    ) -> Experience:
        """The answers of one update with the columns that the loss reads.

        preferred: [S] True for chosen or desirable answers; with level "pair" True, False, True,
        False, ... ref: the reference's logprobs, float32 over the tokens; None where
        needs().reference is False. mismatched: [S] sum(logp - logp_ref) of each sample's prompt
        with another sample's answer; None where needs().mismatched is False. A missing or wrong
        column is a ValueError.
        """

    def with_own(self, experience: Experience, before: Sequence[Ragged]) -> Experience:
        """The experience of an update with the columns that follow from the policy's logprobs
        before it. before: at needs().own_temperatures, float32 over the tokens.
        """
        return experience


def one_each(values: Any, count: int, of: str, made_by: str) -> NDArray[Any]:
    """`values` as an array [count]. of: "samples"; made_by: the method, "GRPO.advantages".

    Raises RunError where there are not as many: a user's algorithm may return anything.
    """
    column = np.asarray(values)
    if column.shape != (count,):
        got = f"{len(column)}" if column.ndim == 1 else f"an array of shape {column.shape}"
        raise RunError(f"{made_by} gives {got} for {count} {of}: one for each is needed")
    return column


RequiredColumn = TypeVar("RequiredColumn", Ragged, Grades)


def required(column: RequiredColumn | None, name: str) -> RequiredColumn:
    """`column`; a ValueError where it is None."""
    if column is None:
        raise ValueError(f"credit needs {name}, see needs()")
    return column


def without_loss(sequences: Sequences, rows: NDArray[np.bool_]) -> Sequences:
    """The same sequences; those where `rows` [S] is True have no loss tokens any more."""
    if not rows.any():
        return sequences
    mask = sequences.loss_mask
    kept = mask.like(mask.values & ~mask.spread(rows).values)
    return replace(sequences, loss_mask=kept)


def masked_columns(
    columns: Mapping[str, NDArray[np.float64]], mask: Ragged, algorithm: str
) -> dict[str, Ragged]:
    """Columns over all tokens, float32, with zeros where `mask` has no loss token. algorithm: its
    name, for messages.

    Raises RunError where a column has not one number for each token, or one that is not finite: its
    gradient would blame the model.
    """
    for name, tokens in columns.items():
        one_each(
            tokens, len(mask.values), "tokens", f"{algorithm}: the column {name!r} of `credit`"
        )
        if not np.isfinite(tokens).all():
            bad = np.count_nonzero(~np.isfinite(tokens))
            raise RunError(
                f"the algorithm's {name} are not finite at {bad} of {len(tokens)} tokens: its "
                "`credit` has to return finite numbers"
            )
    return {
        name: mask.like((tokens * mask.values).astype(np.float32))
        for name, tokens in columns.items()
    }


class RewardAlgorithm(ScoreAlgorithm):
    """An algorithm that learns a reward model: from pairs, or from steps with labels."""

    @abstractmethod
    def experience(self, sequences: Sequences, targets: NDArray[np.float64]) -> Experience:
        """The samples of one update, with loss where the model scores alone.

        With level "pair" that is the last token of each sequence, and targets [S / 2] say by how
        much each chosen answer is better, in the data's units; zeros where the data has none. With
        level "step" it is the last token of each labelled step, where sequences.loss_mask is True
        already, and targets [N] are the labels there. Anything else is a ValueError.
        """


def adapted(
    before: Mapping[str, Any], after: Mapping[str, Any], *, learned: bool
) -> Mapping[str, Any]:
    """An algorithm's state after a step. The coefficients of KL and entropy follow how the policy
    moves, so they stay where it did not learn, as while only the critic warms up.
    """
    if learned:
        return after
    others = {name: value for name, value in after.items() if name not in ADAPTED}
    return others | {name: before[name] for name in ADAPTED if name in before}
