"""The lines of samples.jsonl: every sample of a step once, trained on or not."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import Credit
from postgrad.core.records import RolloutBatch, ScoredGroup
from postgrad.rollout.records_json import Decode, Json, sample_to_json


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
    sequences = credit.experience.sequences
    place = {
        (int(batch.ticket[row]), int(batch.sample[row])): number
        for number, row in enumerate(credit.rows)
    }
    advantages = credit.experience.columns.get("advantages")
    for group in groups:
        prompt = len(group.prompt.token_ids)
        for i, rollout in enumerate(group.rollouts):
            columns: dict[str, Any] = {}
            number = place.get((rollout.ticket, rollout.sample))
            if number is not None:
                mask = sequences.loss_mask.row(number)[prompt:]
                columns["mask"] = mask
                if advantages is not None:
                    columns["advantages"] = advantages.row(number)[prompt:]
                known = sequences.tokens.like(learner_logprobs).row(number)[prompt:]
                if not np.isnan(known[mask]).any():
                    columns["learner_logprobs"] = np.nan_to_num(known)  # 0 where there is no loss
            line = sample_to_json(group, i, step=step, decode=decode, **columns)
            if rollout.ticket in reasons:
                line["filtered"] = reasons[rollout.ticket]
            yield line
