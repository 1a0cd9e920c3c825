"""An experience cut into layouts, and losses added up over them, as a learner does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postgrad.algorithms.base import Algorithm, LossInputs, LossOutput, ScoreInputs
from postgrad.core.records import Experience


def undivided(experience: Experience) -> list[list[int]]:
    """All sequences that have a gradient in one layout."""
    return [[int(row) for row in np.flatnonzero(experience.has_gradient)]]


def split(experience: Experience, seed: int, of: int = 1) -> list[list[int]]:
    """The same in layouts of random size and order; `of` sequences stay together."""
    rng = np.random.default_rng(seed)
    (rows,) = undivided(experience)
    units = rng.permutation([rows[i : i + of] for i in range(0, len(rows), of)]).tolist()
    cuts = sorted(rng.integers(0, len(units) + 1, 2))
    parts = units[: cuts[0]], units[cuts[0] : cuts[1]], units[cuts[1] :]
    return [[row for unit in part for row in unit] for part in parts]  # one may be empty


def total(
    algorithm: Any,
    experience: Experience,
    layouts: Sequence[Sequence[int]],
    values: np.ndarray,
    kind: str = "policy",
) -> tuple[float, np.ndarray, dict[str, float]]:
    """The update's loss, its gradient on `values` [N] (logprobs or scores), its summed metrics.
    Weights are rounded to float32, as a learner's are.
    """
    sequences = experience.sequences
    rows = np.arange(len(sequences))
    weigh = algorithm.entry_weights if kind == "policy" else algorithm.score_weights
    weight = torch.from_numpy(weigh(sequences, rows).values.astype(np.float64))
    computed = sum(sequences.loss_mask.row(i).sum() for part in layouts for i in part)
    token_weight = float(np.float32(1.0 / max(1, computed)))
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    loss, metrics = torch.zeros(()), dict[str, float]()
    for part in layouts:
        places = [
            sequences.tokens.offsets[i] + np.flatnonzero(sequences.loss_mask.row(i)) for i in part
        ]
        at = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *places]))
        lengths = torch.tensor([len(place) for place in places], dtype=torch.int64)
        output = _call(algorithm, kind)(
            leaf[at],
            {
                name: torch.from_numpy(column.values.astype(np.float64))[at]
                for name, column in experience.columns.items()
            },
            torch.repeat_interleave(torch.arange(len(part)), lengths),
            len(part),
            weight[at],
            torch.full((len(at),), token_weight, dtype=torch.float64),
        )
        loss = loss + output.loss
        for name, value in output.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad.numpy(), metrics


def _call(algorithm: Algorithm, kind: str) -> Callable[..., LossOutput]:
    def policy(logprobs: Tensor, columns: Mapping[str, Tensor], *rest: Any) -> LossOutput:
        return algorithm.policy_loss(LossInputs(logprobs, None, columns, *rest))  # pyright: ignore[reportAttributeAccessIssue]

    def score(scores: Tensor, columns: Mapping[str, Tensor], *rest: Any) -> LossOutput:
        return algorithm.score_loss(ScoreInputs(scores, columns, *rest))  # pyright: ignore[reportAttributeAccessIssue]

    return policy if kind == "policy" else score


def slope(function: Callable[[np.ndarray], float], at: np.ndarray, step: float) -> np.ndarray:
    """The gradient by central differences."""
    gradient = np.zeros_like(at)
    for i in range(len(at)):
        up, down = at.copy(), at.copy()
        up[i] += step
        down[i] -= step
        gradient[i] = (function(up) - function(down)) / (2 * step)
    return gradient


def has_corner(
    function: Callable[[np.ndarray], float], at: np.ndarray, step: float, atol: float
) -> bool:
    """Whether the function bends within `step`: there half the step has other central differences,
    and neither is the gradient. atol: what rounding may do to them.
    """
    slopes, closer = slope(function, at, step), slope(function, at, step / 2)
    return not np.allclose(slopes, closer, rtol=1e-5, atol=atol)
