"""States and tensors for the tests of this room."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from postgrad.checkpoint.state import RunState
from postgrad.core.cursor import Cursor
from postgrad.models.stored import real


@pytest.fixture
def make_state() -> Callable[..., RunState]:
    """make_state(step, **other fields)."""

    def make(step: int, **fields: Any) -> RunState:
        defaults: dict[str, Any] = {
            "step": step,
            "update": 2 * step,
            "episodes": 8 * step,
            "cursor": Cursor(3 * step, frozenset({3 * step + 2})),
            "algorithm": {"kl_coef": 0.125},
            "evaluations": {"eval/accuracy": 0.5},
            "best": None,
            "choices": {"threads": 1},
            "log_offsets": {"metrics.jsonl": 100},
        }
        return RunState(**{**defaults, **fields})

    return make


@pytest.fixture
def make_tensors() -> Callable[[int], dict[str, dict[str, Tensor]]]:
    """make_tensors(seed): weights in two dtypes, and an optimizer's state."""

    def make(seed: int) -> dict[str, dict[str, Tensor]]:
        drawn = torch.Generator().manual_seed(seed)
        return {
            "policy.weights": {
                "a": torch.randn(3, 4, generator=drawn),
                "b": torch.randn(5, generator=drawn).bfloat16(),
            },
            "policy.optimizer": {"a.exp_avg": torch.randn(3, 4, generator=drawn)},
        }

    return make


@pytest.fixture
def same() -> Callable[[dict[str, Tensor], dict[str, Tensor]], bool]:
    """same(one, two): True where names, dtypes, shapes and bits are equal."""

    def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        raw = real(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
        return tensor.dtype, tensor.shape, bytes(raw.tolist())

    def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
        return {n: bits(t) for n, t in first.items()} == {n: bits(t) for n, t in second.items()}

    return equal
