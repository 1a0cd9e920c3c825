"""Preferences without a reward model: an update on the next pairs, or labelled answers."""

from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray

from postgrad.algorithms.base import PreferenceAlgorithm
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.data.draws import Drawn, Draws
from postgrad.data.pairs import Labelled, Pair
from postgrad.jobs import pairs as paired
from postgrad.jobs.pairs import PairEvaluator
from postgrad.jobs.results import Result
from postgrad.jobs.run import Run
from postgrad.jobs.supervised import SupervisedJob
from postgrad.learner.protocols import PolicyRole
from postgrad.learner.reference_logprobs import ReferenceLogprobs
from postgrad.ops.preferences import AnswerSums


class PreferenceJob(SupervisedJob[Drawn], Generic[Drawn]):
    """Trains a policy on preferences. reference: None where the loss needs none."""

    def __init__(
        self,
        run: Run,
        algorithm: PreferenceAlgorithm,
        policy: PolicyRole,
        draws: Draws[Drawn],
        read: Callable[[Sequence[Drawn]], tuple[Sequences, NDArray[np.bool_]]],
        reference: ReferenceLogprobs | None,
        evaluator: PairEvaluator | None,
    ) -> None:
        """read: turns drawn samples into sequences and a mask [S] of the preferred ones."""
        super().__init__(run, policy, algorithm, draws)
        self._preference = algorithm
        self._policy = policy
        self._read = read
        self._reference = reference
        self._evaluator = evaluator

    def experience(self, drawn: list[Drawn]) -> Experience:
        sequences, preferred = self._read(drawn)
        return self._preference.experience(
            sequences, preferred, self._of_reference(sequences), self._mismatched(sequences)
        )

    def evaluate(self) -> list[Result]:
        """Evaluates pairs: the score of a sequence is its implicit reward."""
        assert self._evaluator is not None
        with self._run.phase("evaluate"):
            return self._evaluator(self._score)

    def _score(self, sequences: Sequences) -> NDArray[np.float64]:
        logprobs = self._policy.logprobs(sequences).result()
        return implicit_rewards(
            self._preference, sequences, logprobs, self._of_reference(sequences)
        )

    def _of_reference(self, sequences: Sequences) -> Ragged | None:
        return None if self._reference is None else self._reference.of(sequences)

    def _mismatched(self, sequences: Sequences) -> NDArray[np.float64] | None:
        if not self._preference.needs().mismatched:
            return None
        crossed = mismatched(sequences)
        ref = self._of_reference(crossed)
        assert ref is not None  # what needs a reference point needs a reference
        return self._policy.logprobs(crossed).result().sums() - ref.sums()


def implicit_rewards(
    algorithm: PreferenceAlgorithm, sequences: Sequences, logprobs: Ragged, ref: Ragged | None
) -> NDArray[np.float64]:
    """[S] the implicit reward of each answer, as the loss defines it.

    logprobs, ref: of each token, by policy and reference; ref: None where the loss needs none.
    """
    ratio = logprobs.like(logprobs.values - (logprobs if ref is None else ref).values)
    tokens = np.maximum(sequences.loss_mask.sums(), 1)
    sums = [torch.as_tensor(column) for column in (logprobs.sums(), ratio.sums(), tokens)]
    return algorithm.reward(AnswerSums(*sums)).numpy()


def of_pairs(pairs: Sequence[Pair]) -> tuple[Sequences, NDArray[np.bool_]]:
    """The sequences of pairs, chosen and rejected in turn, and the mask of the chosen ones."""
    return paired.sequences_of(pairs), np.tile([True, False], len(pairs))


def of_labelled(samples: Sequence[Labelled]) -> tuple[Sequences, NDArray[np.bool_]]:
    """Sequences of labelled answers, each a group of its own, and the mask of desirable ones."""
    sequences = Sequences(
        tokens=Ragged.of([sample.token_ids for sample in samples], np.int32),
        loss_mask=Ragged.of([sample.loss_mask for sample in samples], np.bool_),
        group=np.arange(len(samples), dtype=np.int64),
    )
    return sequences, np.array([sample.desirable for sample in samples], np.bool_)


def mismatched(sequences: Sequences) -> Sequences:
    """Each prompt with the answer of the next sample, the last with the first's (KTO,
    arXiv:2402.01306). An answer begins at its first loss token. What is over the token limit in
    its new place is no longer than the longest prompt and answer together.
    """
    tokens = list(sequences.tokens)
    masks = list(sequences.loss_mask)
    starts = [int(np.argmax(mask)) for mask in masks]
    following = np.roll(np.arange(len(tokens)), -1).tolist()
    crossed = [
        (
            np.concatenate([tokens[i][: starts[i]], tokens[j][starts[j] :]]),
            np.concatenate([masks[i][: starts[i]], masks[j][starts[j] :]]),
        )
        for i, j in enumerate(following)
    ]
    return Sequences(
        tokens=Ragged.of([ids for ids, _ in crossed], np.int32),
        loss_mask=Ragged.of([mask for _, mask in crossed], np.bool_),
        group=np.arange(len(tokens), dtype=np.int64),
    )
