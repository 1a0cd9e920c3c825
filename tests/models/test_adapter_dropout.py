"""Dropout from counters: its statistics, and that nothing but tokens and counters decides it."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from postgrad.core import seeds
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import Layout, lay_out, row_keys
from postgrad.models.adapter_dropout import CounterDropout, RowMasks
from postgrad.models.adapters import Adapter, add_adapter
from postgrad.models.attention import hidden_states
from postgrad.models.head import target_logprobs
from postgrad.models.load import load_model
from postgrad.models.settings import LoraSettings
from postgrad.models.tree import TreeAttention

CPU = torch.device("cpu")
KEYS = torch.from_numpy(seeds.bits(7, "test", np.arange(1000)).view(np.int64))
WORD = 2**64


def dropped(
    p: float, *, seed: int = 0, update: int = 0, layer: str = "x", keys: Tensor = KEYS, n: int = 203
) -> Tensor:
    """[rows, n] where the outputs are zero."""
    masks = RowMasks(seed, p)
    with masks.of(keys, update):
        return CounterDropout(masks, layer, n, CPU)(torch.ones(len(keys), n)) == 0


def mix(x: int) -> int:
    """SplitMix64's finaliser in Python's own integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def test_a_mask_is_the_hash_that_it_is_said_to_be() -> None:
    mask = dropped(0.3, seed=5, update=9, layer="up_proj")
    update = int(seeds.bits(5, "lora dropout", 9))
    for row, feature in [(0, 0), (0, 1), (17, 202), (999, 6), (500, 131)]:
        number = zlib.crc32(b"up_proj")
        column = int(seeds.bits(5, "lora dropout feature", number, feature // 4))
        lanes = mix(mix(int(KEYS[row]) % WORD ^ update) ^ column)
        lane = lanes >> 16 * (feature % 4) & 0xFFFF
        signed = lane - 2**16 if lane >= 2**15 else lane
        assert bool(mask[row, feature]) == (signed + 2**15 < round(0.3 * 2**16))


@pytest.mark.parametrize("p", [0.001, 0.05, 0.1, 0.5, 0.9])
def test_the_fraction_is_p_in_rows_columns_and_lanes(p: float) -> None:
    mask = dropped(p, n=1001).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(float(mask.mean()) - p) < 4 * sigma / 1001000**0.5
    for axis in (0, 1):
        assert float((mask.mean(axis) - p).abs().max()) < 5.5 * sigma / 1000**0.5
    for lane in range(4):
        assert abs(float(mask[:, lane::4].mean()) - p) < 4 * sigma / 250_000**0.5


def test_masks_of_neighbours_rows_layers_updates_and_seeds_are_independent() -> None:
    mask = dropped(0.5).double() - 0.5
    others = {
        "row": mask.roll(1, 0),
        "feature": mask.roll(1, 1),
        "lane": mask.roll(4, 1),
        "layer": dropped(0.5, layer="y").double() - 0.5,
        "update": dropped(0.5, update=1).double() - 0.5,
        "seed": dropped(0.5, seed=1).double() - 0.5,
        "keys": dropped(0.5, keys=KEYS + 1).double() - 0.5,
    }
    for variant, other in others.items():
        correlation = float((mask * other).mean()) * 4
        assert abs(correlation) < 4 / mask.numel() ** 0.5, variant
    assert torch.equal(dropped(0.5), dropped(0.5))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.99999])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(p: float) -> None:
    """The probability is a multiple of 2**-16, and the scale is of that one."""
    masks = RowMasks(0, p)
    x = torch.full((1000, 8), 3.0, requires_grad=True)
    with masks.of(KEYS, 0):
        out = CounterDropout(masks, "x", 8, CPU)(x)
    out.sum().backward()
    keep = 1 - min(round(p * 65536), 65535) / 65536
    kept = out != 0
    assert torch.allclose(out[kept], torch.tensor(3.0 / keep))
    assert torch.equal(x.grad, kept / torch.tensor(keep))


def test_dropout_is_off_outside_and_needs_a_key_for_every_row() -> None:
    masks = RowMasks(0, 0.5)
    layer = CounterDropout(masks, "x", 8, CPU).train()
    x = torch.ones(3, 8)
    assert layer(x) is x
    with masks.of(KEYS, 0), pytest.raises(ValueError, match="1000 rows, the forward has 3"):
        layer(x)
    assert layer(x) is x


ROWS = [[5, 17, 40, 8, 66, 23, 9, 31], [5, 17, 40, 8, 11, 12], [70, 71, 72], [5, 17, 33]]


@pytest.fixture
def adapted(fresh: Callable[[str], Path]) -> Callable[..., tuple[Any, Adapter]]:
    def make(*, checkpointing: bool = False, p: float = 0.4) -> tuple[Any, Adapter]:
        lm: Any = load_model(
            str(fresh("llama")), dtype=torch.float32, gradient_checkpointing=checkpointing
        ).lm
        adapter = add_adapter(lm, LoraSettings(rank=4, alpha=16, dropout=p), seed=0)
        generator = torch.Generator().manual_seed(0)
        adapter.load({
            name: torch.randn(parameter.shape, generator=generator) / 4
            for name, parameter in adapter.parameters().items()
        })  # fmt: skip
        return lm, adapter

    return make


def layout_of(rows: list[int], *, min_shared: int) -> Layout:
    chosen = [ROWS[row] for row in rows]
    tokens = Ragged.of(chosen, np.int32)
    masks = Ragged.of([[False] + [True] * (len(row) - 1) for row in chosen], np.bool_)
    group = np.array([[0, 0, 1, 0][row] for row in rows])
    return lay_out(Sequences(tokens, masks, group), np.arange(len(rows)), min_shared=min_shared)


def forward(lm: Any, layout: Layout) -> Tensor:
    hidden = hidden_states(
        lm,
        torch.from_numpy(layout.token_ids),
        torch.from_numpy(layout.positions),
        TreeAttention(plan_blocks(layout), CPU),
    )
    return target_logprobs(lm, hidden[layout.hidden_row], torch.from_numpy(layout.target))[0]


def keys_of(layout: Layout) -> Tensor:
    keys = row_keys(layout.token_ids, layout.positions, layout.segment_start, layout.parent)
    return torch.from_numpy(keys)


def logprobs_and_gradients(
    lm: Any, adapter: Adapter, cut: list[list[int]], *, min_shared: int, update: int = 3
) -> tuple[list[list[float]], Tensor]:
    """Logprobs of each of ROWS and the gradient of their squares, over the layouts of a cut."""
    logprobs_by_row: list[list[float]] = [[] for _ in ROWS]
    for rows in cut:
        layout = layout_of(rows, min_shared=min_shared)
        with adapter.dropping(keys_of(layout), update):
            logprobs = forward(lm, layout)
            logprobs.square().sum().backward()
        for number, row in enumerate(rows):
            places = layout.sequence == number
            order = np.argsort(layout.column[places])
            logprobs_by_row[row] = logprobs.detach()[torch.from_numpy(places)][order].tolist()
    gradients = torch.cat([p.grad.flatten() for p in adapter.parameters().values()])
    lm.zero_grad()
    return logprobs_by_row, gradients


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packing_sharing_order_and_checkpointing_change_nothing(
    checkpointing: bool, adapted: Callable[..., tuple[Any, Adapter]]
) -> None:
    lm, adapter = adapted()
    alone, gradients = logprobs_and_gradients(lm, adapter, [[0], [1], [2], [3]], min_shared=100)
    lm, adapter = adapted(checkpointing=checkpointing)
    torch.manual_seed(5)
    for cut, min_shared in [([[0, 1, 2, 3]], 1), ([[2, 3, 1, 0]], 100), ([[3, 2], [1, 0]], 2)]:
        logprobs_by_row, other = logprobs_and_gradients(lm, adapter, cut, min_shared=min_shared)
        for row, expected in zip(logprobs_by_row, alone, strict=True):
            np.testing.assert_allclose(row, expected, atol=3e-5, rtol=1e-5)
        assert float((other - gradients).norm()) < 1e-5 * float(gradients.norm())
    assert layout_of([0, 1, 2, 3], min_shared=1).n_tokens < sum(map(len, ROWS))


def test_another_update_has_other_masks_and_evaluation_none(
    adapted: Callable[..., tuple[Any, Adapter]],
) -> None:
    lm, adapter = adapted()
    cut = [[0, 1, 2, 3]]
    masked, _ = logprobs_and_gradients(lm, adapter, cut, min_shared=1)
    other, _ = logprobs_and_gradients(lm, adapter, cut, min_shared=1, update=4)
    again, _ = logprobs_and_gradients(lm, adapter, cut, min_shared=1)
    assert masked == again
    assert np.abs(np.concatenate(masked) - np.concatenate(other)).max() > 0.01
    layout = layout_of([0, 1, 2, 3], min_shared=1)
    off = forward(lm, layout)
    plain_lm, plain = adapted(p=0.0)
    with plain.dropping(keys_of(layout), 3):
        assert torch.equal(forward(plain_lm, layout), off)


def test_a_backward_outside_its_masks_is_an_error_where_activations_are_checkpointed(
    adapted: Callable[..., tuple[Any, Adapter]],
) -> None:
    """Computed again without dropout, they would be of another forward."""
    lm, adapter = adapted(checkpointing=True)
    layout = layout_of([0], min_shared=1)
    with adapter.dropping(keys_of(layout), 0):
        loss = forward(lm, layout).sum()
    with pytest.raises(CheckpointError):
        loss.backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_masks_on_a_gpu_are_those_on_a_cpu() -> None:
    masks = RowMasks(0, 0.3)
    layer = CounterDropout(masks, "x", 203, torch.device("cuda"))
    with masks.of(KEYS.cuda(), 0):
        out = layer(torch.ones(1000, 203, device="cuda"))
    assert torch.equal(out.cpu() == 0, dropped(0.3))
