"""What the recipe that `postgrad translate` writes computes from pairs, labels and rows of SFT."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.peer_objectives.ours import Outcome
from benchmarks.peer_objectives.texts import Texts, rows_of, token_logprobs
from postgrad.algorithms.base import LossInputs, ScoreInputs
from postgrad.algorithms.registry import algorithm_class
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences


def logits_outcome(loss: Tensor, leaf: Tensor, texts: Texts) -> Outcome:
    """Of a loss of the logits [S, longest, WORDS]."""
    loss.backward()
    return Outcome(float(loss.detach()), {"logits": rows_of(leaf, texts)})


def scores_outcome(loss: Tensor, leaf: Tensor, texts: Texts) -> Outcome:
    """Of a loss of the scores [S]."""
    loss.backward()
    return Outcome(float(loss.detach()), {"scores": rows_of(leaf, texts)})


def _algorithm(table: Mapping[str, Any]) -> Any:
    knobs = {key: value for key, value in table.items() if key != "type"}
    return algorithm_class(str(table["type"]))(**knobs)


def preference_outcome(table: Mapping[str, Any], texts: Texts, temperature: float = 1.0) -> Outcome:
    """The loss of [algorithm] of a preference job, in float64 but for weights and constants.
    temperature: of all logprobs.
    """
    algorithm = _algorithm(table)
    pairs = algorithm.level == "pair"
    sequences, ids, leaf = texts.sequences(pairs), texts.ids, texts.leaf()
    preferred = np.arange(len(texts)) % 2 == 0 if pairs else texts.desirable
    needs = algorithm.needs()
    exact = _column(token_logprobs(texts.ref_logits(), ids, temperature), texts)
    ref = sequences.tokens.like(exact.astype(np.float32)) if needs.reference else None
    crossed = texts.crossed if needs.mismatched else None
    experience = algorithm.experience(sequences, preferred, ref, crossed)
    before = [
        sequences.tokens.like(_column(token_logprobs(leaf.detach(), ids, at), texts))
        for at in needs.own_temperatures
    ]
    experience = algorithm.with_own(experience, before)
    named_columns = {name: column.values for name, column in experience.columns.items()}
    if needs.reference:
        named_columns["ref_logprobs"] = exact
    inputs = _inputs(algorithm, experience, named_columns, leaf / temperature, ids)
    return logits_outcome(algorithm.policy_loss(inputs).loss, leaf, texts)


def sft_outcome(table: Mapping[str, Any], texts: Texts) -> Outcome:
    """The same of an SFT job without a teacher."""
    algorithm, leaf = _algorithm(table), texts.leaf()
    experience = algorithm.experience(texts.sequences(pairs=False))
    inputs = _inputs(algorithm, experience, {}, leaf, texts.ids)
    return logits_outcome(algorithm.policy_loss(inputs).loss, leaf, texts)


def reward_outcome(table: Mapping[str, Any], texts: Texts) -> Outcome:
    """The same of a reward job on pairs."""
    algorithm = _algorithm(table)
    leaf = torch.from_numpy(texts.scores.copy()).requires_grad_()
    experience = algorithm.experience(texts.sequences(pairs=True), texts.margins)
    entries, sequence, weight = _entries(algorithm, experience.sequences)
    columns = {name: torch.from_numpy(column.values[entries].astype(np.float64))
               for name, column in experience.columns.items()}  # fmt: skip
    share = torch.full_like(weight, 1.0 / len(entries))
    inputs = ScoreInputs(leaf[sequence], columns, sequence, len(texts), weight, share)
    return scores_outcome(algorithm.score_loss(inputs).loss, leaf, texts)


def _column(padded: Tensor, texts: Texts) -> NDArray[np.float64]:
    """The values of a column, of [S, longest]."""
    rows = zip(padded.numpy(), texts.tokens, strict=True)
    return np.concatenate([row[: len(tokens)] for row, tokens in rows])


def _entries(algorithm: Any, sequences: Sequences) -> tuple[NDArray[np.int64], Tensor, Tensor]:
    """Of an update of all sequences: its loss entries, the sequence and the weight of each."""
    mask = sequences.loss_mask
    weights: Ragged = algorithm.entry_weights(sequences, np.arange(len(sequences)))
    entries = np.flatnonzero(mask.values)
    sequence = torch.from_numpy(mask.rows[entries])
    return entries, sequence, torch.from_numpy(weights.values[entries].astype(np.float64))


def _inputs(
    algorithm: Any, experience: Experience, named_columns: Mapping[str, NDArray[Any]], leaf: Tensor,
    ids: Tensor,
) -> LossInputs:  # fmt: skip
    sequences = experience.sequences
    entries, sequence, weight = _entries(algorithm, sequences)
    lengths = sequences.tokens.lengths
    place = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])[entries])
    logprobs = token_logprobs(leaf, ids)[sequence, place]
    columns = {name: torch.from_numpy(values[entries].astype(np.float64))
               for name, values in named_columns.items()}  # fmt: skip
    share = torch.full_like(weight, 1.0 / len(entries))
    return LossInputs(logprobs, None, columns, sequence, len(sequences), weight, share)


def distilled_outcome(
    table: Mapping[str, Any], texts: Texts, *, as_cross_entropy: bool = True
) -> Outcome:
    """Of an SFT job with a teacher, which is the texts' reference. as_cross_entropy: of a peer
    whose divergence is that: the teacher's own entropy, without gradient, is added.
    """
    algorithm, leaf, teacher = _algorithm(table), texts.leaf(), texts.ref_logits()
    experience = algorithm.experience(texts.sequences(pairs=False))
    inputs = _inputs(algorithm, experience, {}, leaf, texts.ids)
    sequence, place = inputs.sequence, _places(experience.sequences)
    at = place - 1  # logits of the token before
    logits = leaf[sequence, at], teacher[sequence, at]
    apart = algorithm.compared.of(*logits)
    if as_cross_entropy:
        log_p = logits[1].log_softmax(-1)
        apart = apart - (log_p.exp() * log_p).sum(-1)
    inputs = replace(inputs, columns={**inputs.columns, "divergence": apart})
    return logits_outcome(algorithm.policy_loss(inputs).loss, leaf, texts)


def steps_outcome(
    table: Mapping[str, Any], texts: Texts, steps: Tensor, labels: NDArray[np.float32],
    tokens: tuple[int, int],
) -> Outcome:  # fmt: skip
    """Of a reward job on steps. steps, labels: [S, longest]; tokens: right and wrong, the
    difference of whose logits at a step's end is its score.
    """
    algorithm, leaf = _algorithm(table), texts.leaf()
    all_sequences = texts.sequences(pairs=False)
    flat = steps.float()
    mask = all_sequences.tokens.like(_column(flat, texts) > 0)
    targets = _column(torch.from_numpy(labels), texts)
    experience = algorithm.experience(replace(all_sequences, loss_mask=mask), targets)
    entries, sequence, weight = _entries(algorithm, experience.sequences)
    place = _places(experience.sequences)
    logits = leaf[sequence, place]
    columns = {name: torch.from_numpy(column.values[entries].astype(np.float64))
               for name, column in experience.columns.items()}  # fmt: skip
    share = torch.full_like(weight, 1.0 / len(entries))
    scores = logits[:, tokens[0]] - logits[:, tokens[1]]
    inputs = ScoreInputs(scores, columns, sequence, len(texts), weight, share)
    return logits_outcome(algorithm.score_loss(inputs).loss, leaf, texts)


def _places(sequences: Sequences) -> Tensor:
    """Of each loss entry, where in its sequence it lies."""
    lengths = sequences.tokens.lengths
    at = np.concatenate([np.arange(n) for n in lengths])
    return torch.from_numpy(at[np.flatnonzero(sequences.loss_mask.values)])
