"""The lines of samples.jsonl: every sample of a step once, trained on or not."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import Credit
from postgrad.core.records import RolloutBatch, ScoredGroup
from postgrad.rollout.records_json import Decode, Json, group_to_json, nine_digits


def step_samples(
    groups: Sequence[ScoredGroup],
    reasons: Mapping[int, str],
    step: int,
    decode: Decode,
    batch: RolloutBatch,
    credit: Credit,
    learner_logprobs: NDArray[np.float32],
) -> Iterator[Json]:
    """One line a sample, in the order of the groups. reasons: why a ticket's group was filtered.

    learner_logprobs: over the experience's flat tokens, from before the step, NaN where nothing was
    computed. Samples that were trained on have advantages, a mask, and where known the learner's
    logprobs, one value a response token; the others have none.
    """
    columns = _Columns(credit, learner_logprobs)
    place = {
        (ticket, sample): number
        for number, (ticket, sample) in enumerate(
            zip(batch.ticket[credit.rows].tolist(), batch.sample[credit.rows].tolist(), strict=True)
        )
    }
    sampled = _sampled(groups)
    for group in groups:
        prompt = len(group.prompt.token_ids)
        known: list[dict[str, list[Any]]] = []
        for rollout in group.rollouts:
            number = place.get((rollout.ticket, rollout.sample))
            known.append({} if number is None else columns.of(number, prompt))
            known[-1]["logprobs"] = next(sampled)
        lines = group_to_json(group, step=step, decode=decode, columns=known)
        if reason := reasons.get(group.prompt.ticket):
            for line in lines:
                line["filtered"] = reason
        yield from lines


class _Columns:
    """What the step made of the samples that were trained on, as JSON has it, rounded all at
    once.
    """

    def __init__(self, credit: Credit, learner_logprobs: NDArray[np.float32]) -> None:
        sequences = credit.experience.sequences
        mask = sequences.loss_mask
        missing = np.isnan(learner_logprobs)
        self._ends = sequences.tokens.offsets.tolist()
        self._known = (mask.like(missing & mask.values).sums() == 0).tolist()
        known = np.where(missing, np.float32(0), learner_logprobs)  # 0 where there is no loss
        self._columns: dict[str, NDArray[Any]] = {"mask": mask.values.astype(np.int8)}
        if (advantages := credit.experience.columns.get("advantages")) is not None:
            self._columns["advantages"] = nine_digits(advantages.values)
        self._learned = nine_digits(known)

    def of(self, number: int, prompt: int) -> dict[str, list[Any]]:
        """The columns of a sequence, of its response."""
        response = slice(self._ends[number] + prompt, self._ends[number + 1])
        found = {name: values[response].tolist() for name, values in self._columns.items()}
        if self._known[number]:
            found["learner_logprobs"] = self._learned[response].tolist()
        return found


def _sampled(groups: Sequence[ScoredGroup]) -> Iterator[list[float]]:
    """The sampler's logprobs of each rollout in order, all turns."""
    turns = [
        [turn.logprobs for turn in rollout.turns] for group in groups for rollout in group.rollouts
    ]
    lengths = [sum(len(one) for one in own) for own in turns]
    flat = [one for own in turns for one in own]
    values: list[float] = nine_digits(np.concatenate(flat)).tolist() if flat else []
    end = 0
    for length in lengths:
        end += length
        yield values[end - length : end]
