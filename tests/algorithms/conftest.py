"""Small batches of rollouts and loss inputs with chosen numbers."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from postgrad.algorithms.base import LossInputs
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.core.rollout_batch import RolloutBatch

PROMPT = 2  # tokens before every response


@pytest.fixture
def make_batch() -> Callable[..., RolloutBatch]:
    """Samples of `group` with `rewards`, whose responses have `lengths` tokens (3 each)."""

    def make(
        group: Sequence[int], rewards: Sequence[float], lengths: Sequence[int] | None = None
    ) -> RolloutBatch:
        lengths = lengths or [3] * len(group)
        mask = Ragged.of([[0] * PROMPT + [1] * n for n in lengths], np.bool_)
        tokens = mask.like(np.arange(len(mask.values), dtype=np.int32))
        return RolloutBatch(
            sequences=Sequences(tokens, mask, np.array(group, np.int64)),
            sampled_logprobs=mask.like(np.where(mask.values, -1.0, 0.0).astype(np.float32)),
            turn_rewards=mask.like(np.zeros(len(mask.values))),
            rewards=np.array(rewards, np.float64),
            ticket=np.array(group, np.int64),
            sample=np.arange(len(group)),
            truncated=np.zeros(len(group), np.bool_),
        )

    return make


@pytest.fixture
def over_responses() -> Callable[..., Ragged]:
    """A float32 column over a batch's tokens: `rows` over the responses, zeros over the prompts."""

    def make(rows: Sequence[Sequence[float]]) -> Ragged:
        return Ragged.of([[0.0] * PROMPT + list(row) for row in rows], np.float32)

    return make


@pytest.fixture
def make_inputs() -> Callable[..., LossInputs]:
    """Loss inputs in float64, so that gradients can be compared with NumPy's to the last digits."""

    def make(
        logprobs: torch.Tensor,
        weight: Sequence[float],
        entropy: torch.Tensor | None = None,
        token_weight: float | None = None,
        sequence: Sequence[int] | None = None,
        **columns: Sequence[float],
    ) -> LossInputs:
        def tensor(values: Sequence[float]) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, np.float64))

        entries = len(logprobs)
        of_entries = [0] * entries if sequence is None else list(sequence)
        each = 1.0 / max(1, entries) if token_weight is None else token_weight
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            columns={name: tensor(values) for name, values in columns.items()},
            sequence=torch.tensor(of_entries, dtype=torch.int64),
            n_sequences=max(of_entries, default=0) + 1,
            weight=tensor(weight),
            token_weight=torch.full((entries,), each, dtype=torch.float64),
        )

    return make
