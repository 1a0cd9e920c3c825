"""What the recipe that `postgrad translate` writes computes from samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer_objectives.samples import LONGEST, PROMPT, Rows, Samples
from postgrad.algorithms.base import Grades, LossInputs, ScoreInputs
from postgrad.algorithms.registry import algorithm_class
from postgrad.core.records import Sequences


@dataclass(frozen=True)
class Outcome:
    """A loss with its gradient: rows over the responses of each leaf that a loss reads."""

    loss: float
    gradients: Mapping[str, Rows]  # "logprobs", "entropy", "values"


def outcome_of(loss: Tensor, leaves: Mapping[str, Tensor], samples: Samples) -> Outcome:
    """Of a loss of padded leaves [S, LONGEST]."""
    loss.backward()
    gradients = {
        name: [
            np.zeros(len(row)) if leaf.grad is None else leaf.grad[i, : len(row)].numpy()
            for i, row in enumerate(samples.mask)
        ]
        for name, leaf in leaves.items()
    }
    return Outcome(float(loss.detach()), gradients)


def outcome(table: Mapping[str, Any], samples: Samples) -> Outcome:
    """Our loss with the settings of [algorithm]: advantages, weights, the losses of the policy and
    of the critic where there is one, all in float64 but advantages and weights.
    """
    knobs = {key: value for key, value in table.items() if key != "type"}
    algorithm: Any = algorithm_class(str(table["type"]))(**knobs)
    weights = dict.fromkeys(samples.components, 1.0)
    algorithm = algorithm.for_rollout(LONGEST, weights)
    batch = samples.batch()
    needs = algorithm.needs()
    columns = [samples.column(rows, np.float32) for rows in
               (samples.old, samples.ref, samples.old_values, samples.entropy)]  # fmt: skip
    old, ref, values, entropy = columns
    more = {"teacher": Grades(ref, np.ones(len(ref), np.bool_))} if needs.teacher else {}
    values = values if needs.critic else None
    credit = algorithm.credit(batch, old, ref, values, {}, entropy, **more)
    experience, rows = credit.experience, credit.rows
    sequences = experience.sequences
    weight = algorithm.entry_weights(sequences, np.arange(len(rows))).values
    weight = weight * experience.has_gradient[sequences.loss_mask.rows]  # others are not computed
    leaves = {name: samples.padded(getattr(samples, name)).requires_grad_()
              for name in ("logprobs", "entropy", "values")}  # fmt: skip
    named_columns = dict(experience.columns)
    of_sampler = getattr(algorithm, "old_logprobs", "") == "sampled"
    before = samples.sampled if of_sampler else samples.old
    exact = {"old": before, "ref": samples.ref, "sampled": samples.sampled}
    for name, logprobs in exact.items():
        if f"{name}_logprobs" in named_columns:
            named_columns[f"{name}_logprobs"] = samples.column(logprobs).take(rows)
    loss = _loss(algorithm, sequences, rows, weight, leaves, named_columns, needs)
    return outcome_of(loss, leaves, samples)


def _loss(
    algorithm: Any, sequences: Sequences, rows: Any, weight: Any, leaves: Mapping[str, Tensor],
    named_columns: Mapping[str, Any], needs: Any,
) -> Tensor:  # fmt: skip
    mask = sequences.loss_mask
    lengths = mask.lengths
    at = np.concatenate([np.arange(n) for n in lengths]) - PROMPT
    entries = np.flatnonzero(mask.values)
    row, place = (torch.from_numpy(column[entries]) for column in (rows[mask.rows], at))
    sequence = torch.from_numpy(mask.rows[entries])
    share = torch.full((len(entries),), 1.0 / len(entries), dtype=torch.float64)
    columns = {name: torch.from_numpy(column.values[entries].astype(np.float64))
               for name, column in named_columns.items()}  # fmt: skip
    weights = torch.from_numpy(weight[entries].astype(np.float64))
    same = (columns, sequence, len(rows), weights, share)
    entropy = leaves["entropy"][row, place] if needs.entropy else None
    loss = algorithm.policy_loss(LossInputs(leaves["logprobs"][row, place], entropy, *same)).loss
    if needs.critic:
        scored = algorithm.score_weights(sequences, np.arange(len(rows))).values[entries]
        scores = (columns, sequence, len(rows), torch.from_numpy(scored.astype(np.float64)), share)
        loss = loss + algorithm.score_loss(ScoreInputs(leaves["values"][row, place], *scores)).loss
    return loss
