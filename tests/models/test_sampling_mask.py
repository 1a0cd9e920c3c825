"""An output head over the tokens that a sampler's filters left, against float64 by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedConfig

from postgrad.core.ragged import Ragged
from postgrad.models import head
from postgrad.models.compiled import head_kernels
from postgrad.models.sampling_mask import LogitMask

VOCABULARY, HIDDEN, TEMPERATURE = 23, 7, 0.7
TARGETS = torch.tensor([1, 2, 3, 4, 5, 6])
LEFT = [[1, 7, 9], [], [3], [0, 4, 22], [], [5, 6, 11, 12, 13]]  # of each entry; []: all
COMING = torch.tensor([[1.0, -2.0, 3.0, -4.0, 5.0, 6.0], [2.0, 3.0, -1.0, 4.0, 0.5, -3.0]])


class Head(nn.Module):
    """A model that is nothing but its output head. adapted: the head is more than a matrix."""

    def __init__(self, dtype: torch.dtype, adapted: bool, **shaped: float) -> None:
        super().__init__()
        self.config = PreTrainedConfig(vocab_size=VOCABULARY, **shaped)
        self.matrix = nn.Linear(HIDDEN, VOCABULARY, dtype=dtype)
        self.out = nn.Sequential(self.matrix) if adapted else self.matrix

    def get_output_embeddings(self) -> nn.Module:
        return self.out


def mask_of(left: list[list[int]]) -> LogitMask:
    return LogitMask(Ragged.of(left, np.int32), torch.device("cpu"))


def read(
    model: Head, hidden: Tensor, mask: LogitMask | None, compiler: str | None = None
) -> list[Tensor]:
    """Logprobs, entropies, and gradients of hidden states and matrix."""
    hidden = hidden.clone().requires_grad_()
    logprobs, entropy = head.target_logprobs(
        model, hidden, TARGETS, temperature=TEMPERATURE, with_entropy=True, compiler=compiler,
        mask=mask,
    )  # fmt: skip
    assert entropy is not None
    loss = (COMING[0] * logprobs + COMING[1] * entropy).sum()
    gradients = torch.autograd.grad(loss, [hidden, model.matrix.weight])
    return [logprobs.detach(), entropy.detach(), *gradients]


def by_hand(model: Head, hidden: Tensor) -> list[Tensor]:
    """The same in float64: each entry alone, by its own few logits."""
    hidden = hidden.double().requires_grad_()
    weight = model.matrix.weight.detach().double().requires_grad_()
    assert model.matrix.bias is not None
    logits = hidden @ weight.T + model.matrix.bias.detach().double()
    if (cap := getattr(model.config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    logprobs, entropies = [], []
    for row, target, left in zip(logits / TEMPERATURE, TARGETS.tolist(), LEFT, strict=True):
        ids = left or list(range(VOCABULARY))
        p = row[ids].exp() / row[ids].exp().sum()
        logprobs.append(p[ids.index(target)].log())
        entropies.append(-(p * p.log()).sum())
    logprobs, entropies = torch.stack(logprobs), torch.stack(entropies)
    loss = (COMING[0] * logprobs + COMING[1] * entropies).sum()
    gradients = torch.autograd.grad(loss, [hidden, weight])
    return [logprobs.detach(), entropies.detach(), *gradients]


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("shaped", [{}, {"final_logit_softcapping": 1.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_entropies_and_gradients_are_those_over_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shaped: dict[str, float],
    adapted: bool,
    chunk: int,
) -> None:
    monkeypatch.setattr(head, "chunk_rows", lambda _, **__: chunk)
    torch.manual_seed(0)
    model, hidden = Head(dtype, adapted, **shaped), torch.randn(6, HIDDEN, dtype=dtype)
    got = read(model, hidden, mask_of(LEFT))
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    for actual, true in zip(got, by_hand(model, hidden), strict=True):
        assert (actual - true).norm() <= tolerance * true.norm()
    assert got[0][2] == 0.0  # one token left: it is certain
    assert got[1][2] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("shaped", [{}, {"final_logit_softcapping": 1.5}])
def test_compiled_heads_give_the_same(shaped: dict[str, float]) -> None:
    torch._dynamo.reset()
    head_kernels.cache_clear()
    torch.manual_seed(0)
    model, hidden = Head(torch.float32, adapted=False, **shaped), torch.randn(6, HIDDEN)
    got = read(model, hidden, mask_of(LEFT), "aot_eager")
    for actual, true in zip(got, by_hand(model, hidden), strict=True):
        assert (actual - true).norm() <= 1e-6 * true.norm()


def test_the_gradient_of_logits_is_the_finite_difference_and_none_at_what_was_taken_away() -> None:
    torch.manual_seed(0)
    mask, everything = mask_of(LEFT), slice(0, len(LEFT))
    start, step = 2 * torch.randn(6, VOCABULARY, dtype=torch.float64), 1e-6
    coming = COMING.double()

    def loss(logits: Tensor) -> Tensor:
        inputs = head.masked(logits.clone(), mask, everything), TARGETS, TEMPERATURE, True
        logprobs, entropy = head._TokenLogprobs.apply(*inputs)  # pyright: ignore[reportGeneralTypeIssues, reportPrivateUsage]
        return (coming[0] * logprobs + coming[1] * entropy).sum()

    gradient = torch.autograd.grad(loss(logits := start.clone().requires_grad_()), logits)[0]
    gone = mask.taken_away(everything, VOCABULARY)
    assert not gradient[gone].any()
    slopes = torch.zeros_like(gradient)
    with torch.no_grad():
        for place in np.ndindex(*start.shape):
            moved = torch.zeros_like(start)
            moved[place] = step
            slopes[place] = (loss(start + moved) - loss(start - moved)) / (2 * step)
    torch.testing.assert_close(gradient, slopes, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_that_no_filter_touched_keep_their_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, hidden = Head(dtype, adapted=False), torch.randn(6, HIDDEN, dtype=dtype)
    masked, plain = read(model, hidden, mask_of(LEFT)), read(model, hidden, None)
    unmasked = read(model, hidden, mask_of([[]] * 6))
    for masked_tensor, other in zip(masked[:3], plain[:3], strict=True):
        assert torch.equal(masked_tensor[[1, 4]], other[[1, 4]])
        assert not torch.equal(masked_tensor, other)
    assert all(
        torch.equal(unmasked_tensor, other)
        for unmasked_tensor, other in zip(unmasked, plain, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, VOCABULARY - 1)), min_size=1, max_size=8), st.data())
def test_what_is_taken_away_is_the_rest_of_the_vocabulary(
    left: list[set[int]], data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(left) - 1))
    rows = slice(begin, data.draw(st.integers(begin + 1, len(left))))
    gone = mask_of([sorted(row) for row in left]).taken_away(rows, VOCABULARY)
    everything = set(range(VOCABULARY))
    expected = [everything - row if row else set[int]() for row in left[rows]]
    assert [set(row.nonzero()[:, 0].tolist()) for row in gone] == expected
