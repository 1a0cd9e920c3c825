"""Noise on embeddings: its numbers by hand, its statistics beside transformers', where it acts."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

from postgrad.core import seeds
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import Layout, lay_out, plain_layout
from postgrad.models.embedding_noise import EmbeddingNoise

WIDTH, WORD = 22, 2**64
LENGTHS = (5, 300, 17)


class Model(nn.Module):
    """What noise reads of a model, with embeddings of 0 or another number."""

    def __init__(self, number: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, dtype=dtype)
        nn.init.constant_(self.embedding.weight, number)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding


def sequences(lengths: tuple[int, ...] = LENGTHS) -> Sequences:
    """All of token 1, so that nothing but their place tells them apart."""
    tokens = Ragged.of([np.ones(length, np.int32) for length in lengths])
    mask = Ragged.of([np.arange(length) > 0 for length in lengths])
    return Sequences(tokens, mask, np.arange(len(lengths)))


def noise_of(
    layout: Layout, batch: Sequences, *, alpha: float = 5.0, seed: int = 0, update: int = 0,
    rows: range | None = None, model: Model | None = None,
) -> Tensor:  # fmt: skip
    """[T, d] what embeddings become."""
    model = model or Model()
    noise = EmbeddingNoise(model, alpha, seed)
    ids = torch.from_numpy(layout.token_ids)
    if rows is not None:
        ids = ids[rows.start : rows.stop]
    with noise.of_update(batch.tokens, update), noise.over(layout, rows):
        return model.embedding(ids[None])[0].detach()


def mix(x: int) -> int:
    """SplitMix64's finaliser in Python's own integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def by_hand(sequence: int, position: int, feature: int, length: int) -> float:
    """For alpha = 5, seed 7, update 9, in float64."""
    row = int(seeds.bits(7, "embedding noise", 9, sequence, position))
    column = int(seeds.bits(7, "embedding noise feature", feature // 4))
    lane = mix(row ^ column) >> 16 * (feature % 4) & 0xFFFF
    number = lane - 2**16 if lane >= 2**15 else lane
    return (number + 0.5) / 2**15 * 5.0 / (length * WIDTH) ** 0.5


def test_noise_is_the_hash_that_it_is_said_to_be() -> None:
    batch = sequences()
    noise = noise_of(lay_out(batch, np.arange(3)), batch, seed=7, update=9)
    starts = (0, 5, 305)
    for sequence, position, feature in [(0, 0, 0), (0, 4, 21), (1, 0, 1), (1, 299, 3), (2, 16, 18)]:
        expected = by_hand(sequence, position, feature, LENGTHS[sequence])
        value = float(noise[starts[sequence] + position, feature])
        assert value == pytest.approx(expected, rel=1e-6)


def test_noise_has_the_distribution_of_transformers_noise_on_each_sequence_alone() -> None:
    batch = sequences((6000,))
    ours = noise_of(lay_out(batch, np.arange(1)), batch).double()
    module: Any = nn.Embedding(1, 1)
    module.neftune_noise_alpha = 5.0
    torch.manual_seed(0)
    theirs = neftune_post_forward_hook(module.train(), None, torch.zeros(1, 6000, WIDTH)).double()
    bound = 5.0 / (6000 * WIDTH) ** 0.5
    for noise in (ours, theirs):
        assert bound * 0.9999 < float(noise.abs().max()) < bound
        assert float(noise.std()) == pytest.approx(bound / 3**0.5, rel=0.01)
        assert abs(float(noise.mean())) < 4 * bound / 3**0.5 / noise.numel() ** 0.5
        assert float(noise.norm()) == pytest.approx(5.0 / 3**0.5, rel=0.01)


def test_bounds_are_those_of_each_sequence_in_a_pack() -> None:
    batch = sequences()
    noise = noise_of(lay_out(batch, np.arange(3)), batch)
    for part, length in zip(noise.split(LENGTHS), LENGTHS, strict=True):
        bound = 5.0 / (length * WIDTH) ** 0.5
        assert bound * 0.97 < float(part.abs().max()) < bound


def test_numbers_of_neighbours_sequences_updates_and_seeds_are_independent() -> None:
    batch = sequences((2000, 2000))
    layout = lay_out(batch, np.arange(2))
    noise = noise_of(layout, batch).double()
    others = {
        "row": noise.roll(1, 0),
        "feature": noise.roll(1, 1),
        "lane": noise.roll(4, 1),
        "sequence": noise.roll(2000, 0),
        "update": noise_of(layout, batch, update=1).double(),
        "seed": noise_of(layout, batch, seed=1).double(),
    }
    variance = float(noise.square().mean())
    for variant, other in others.items():
        correlation = float((noise * other).mean()) / variance
        assert abs(correlation) < 4 / noise.numel() ** 0.5, variant


def test_noise_does_not_depend_on_packing_order_padding_or_a_ranks_share() -> None:
    batch = sequences()
    expected = noise_of(lay_out(batch, np.arange(3)), batch)
    first, second, third = expected.split(LENGTHS)
    for rows, part in [([1], second), ([2, 0], torch.cat([third, first]))]:
        assert torch.equal(noise_of(lay_out(batch, np.array(rows)), batch), part)
    padded = lay_out(batch, np.arange(3)).padded(4)
    shares = [noise_of(padded, batch, rows=range(start, start + 81)) for start in range(0, 324, 81)]
    assert torch.equal(torch.cat(shares)[:322], expected)
    assert torch.equal(torch.cat(shares)[322:], torch.zeros(2, WIDTH))


def test_noise_is_added_in_float32_and_rounded_once() -> None:
    batch = sequences()
    layout = lay_out(batch, np.arange(3))
    model = Model(1.0, torch.bfloat16)
    expected = (1.0 + noise_of(layout, batch)).bfloat16()
    assert torch.equal(noise_of(layout, batch, model=model), expected)


def test_embeddings_stay_as_they_are_outside_an_update_and_of_no_batch() -> None:
    batch, model = sequences(), Model(2.0)
    layout = lay_out(batch, np.arange(3))
    noise = EmbeddingNoise(model, 5.0, 0)
    ids = torch.ones(1, 322, dtype=torch.long)
    with noise.over(layout, None):
        assert (model.embedding(ids) == 2.0).all()
    with noise.of_update(batch.tokens, 0):
        assert (model.embedding(ids) == 2.0).all()
        with noise.over(layout, None):
            assert (model.embedding(ids) != 2.0).all()
            with noise.over(plain_layout(2, 16), None):  # that layers are compiled with
                assert (model.embedding(ids) == 2.0).all()
            assert (model.embedding(ids) != 2.0).all()


def test_gradients_of_embeddings_are_those_without_noise() -> None:
    batch, model = sequences((3,)), Model(1.0)
    noise = EmbeddingNoise(model, 5.0, 0)
    with noise.of_update(batch.tokens, 0), noise.over(lay_out(batch, np.arange(1)), None):
        model.embedding(torch.tensor([[1, 2, 1]])).sum().backward()
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad[:, 0].tolist() == [0, 2, 1, *[0] * 7]
