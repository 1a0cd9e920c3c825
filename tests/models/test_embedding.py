"""The embedding of many words, against torch's own."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from postgrad.models import linear
from postgrad.models.linear import WordEmbedding, speed_up

WORDS, WIDTH = 40, 6


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LARGE_WEIGHT", 16)


def pair(padding: int | None = None) -> tuple[nn.Embedding, nn.Embedding]:
    """torch's and ours with the same weights."""
    torch.manual_seed(0)
    reference_embedding = nn.Embedding(WORDS, WIDTH, padding)
    ours = nn.Embedding(WORDS, WIDTH, padding)
    ours.load_state_dict(reference_embedding.state_dict())
    speed_up(ours, torch.device("cpu"))
    assert type(ours) is WordEmbedding
    return reference_embedding, ours


def gradient(embedding: nn.Embedding) -> torch.Tensor:
    assert embedding.weight.grad is not None
    return embedding.weight.grad


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("again", [False, True])
def test_rows_and_gradients_of_micro_batches_are_the_same_bits(
    padding: int | None, again: bool
) -> None:
    reference_embedding, ours = pair(padding)
    places: set[int] = set()
    for seed in range(3):
        drawn = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 9, (2, 50), generator=drawn)  # every word often
        coming = torch.randn(2, 50, WIDTH, generator=drawn)
        for embedding in (reference_embedding, ours):
            rows = checkpoint(embedding, ids, use_reentrant=False) if again else embedding(ids)
            rows.backward(coming)
        assert torch.equal(reference_embedding(ids), ours(ids))
        assert torch.equal(gradient(reference_embedding), gradient(ours))
        places.add(gradient(ours).data_ptr())
    assert len(places) == 1


def test_a_head_that_is_tied_to_it_adds_to_the_same_gradient() -> None:
    gradients: list[torch.Tensor] = []
    for embedding in pair():
        head = nn.Linear(WIDTH, WORDS, bias=False)
        head.weight = embedding.weight
        speed_up(head, torch.device("cpu"))
        ids = torch.arange(12) % 5
        for _ in range(2):
            head(embedding(ids).tanh()).square().sum().backward()
        gradients.append(gradient(embedding))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


def test_what_is_frozen_or_wants_more_than_rows_goes_torchs_way() -> None:
    reference_embedding, ours = pair()
    ours.requires_grad_(False)
    assert not ours(torch.arange(4)).requires_grad
    ours.requires_grad_(True)
    for embedding in (reference_embedding, ours):
        embedding.scale_grad_by_freq = True
        embedding(torch.tensor([1, 1, 2])).sum().backward()
    assert torch.equal(gradient(reference_embedding), gradient(ours))
