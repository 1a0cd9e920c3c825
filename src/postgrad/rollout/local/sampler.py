"""Choosing tokens: the inverse CDF at one counter-based random number a token.

With weights e_i = softmax(l / T)_i, filtered ones set to 0, the token is the first i whose
running sum exceeds u * sum(e), and its logprob is log(e_i / sum(e)): what it was drawn from.
Filters act in transformers' order (top-k, then top-p, then min-p), each on what the last one left.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK_VALUES = 2**24  # logits processed together: bounds what filters sort and sum


STRETCH = 64  # tokens of the vocabulary whose weights are summed before any running sum
UNIT = 2.0**-52  # weights are counted in it: float64 holds any sum of units below 2 exactly


@dataclass(frozen=True, slots=True)
class Knobs:
    """Sampling parameters of N rows."""

    temperature: NDArray[np.float32]  # [N], 0: greedy
    top_k: NDArray[np.int64]  # [N], 0: off
    top_p: NDArray[np.float32]  # [N], 1: off
    min_p: NDArray[np.float32]  # [N], 0: off

    def rows(self, which: slice) -> "Knobs":
        """The parameters of a slice of the rows."""
        return Knobs(
            self.temperature[which], self.top_k[which], self.top_p[which], self.min_p[which]
        )

    @property
    def filtered(self) -> bool:
        """Whether any sampled row has a filter on; greedy rows need none."""
        on = (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)
        return bool(np.any(on & (self.temperature > 0.0)))


def sample(
    logits: Tensor, knobs: Knobs, uniform: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """logits: [N, V] float32, overwritten; uniform: [N] in [0, 1). Returns [N] tokens and [N]
    logprobs in nats.

    A row whose logits are not finite gets a NaN logprob; the caller knows whose row it is.
    """
    size = max(1, CHUNK_VALUES // logits.shape[1])
    parts = [
        _sample(logits[i : i + size], knobs.rows(slice(i, i + size)), uniform[i : i + size])
        for i in range(0, len(logits), size)
    ]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _sample(
    logits: Tensor, knobs: Knobs, uniform: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    device = logits.device
    greedy = knobs.temperature == 0.0
    scale = np.where(greedy, np.float32(1.0), knobs.temperature)
    if np.any(scale != 1.0):
        logits /= torch.from_numpy(scale).to(device)[:, None]
    best = logits.argmax(-1, keepdim=True) if greedy.any() else None
    weights = torch.softmax(logits, -1)  # float32; its sum is 1 up to rounding, hence `total`
    if knobs.filtered:
        weights = _filter(weights, knobs)
    token, total = _draw(weights, torch.from_numpy(uniform).to(device)[:, None])
    if best is not None:
        token = torch.where(torch.from_numpy(greedy).to(device)[:, None], best, token)
    logprob = (weights.gather(-1, token).double() / total).log().float()
    return token[:, 0].cpu().numpy(), logprob[:, 0].cpu().numpy()


def _draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The token that each number draws, and the sum of its row's weights in float64: [N, 1] each.

    First the stretch of the vocabulary is drawn, then the token within it: running sums are made
    over stretches and over one stretch, not over the vocabulary.
    """
    count, vocabulary = weights.shape
    if -vocabulary % STRETCH:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % STRETCH))
    stretches = weights.view(count, -1, STRETCH)
    running = running_sums(stretches.sum(-1, dtype=torch.float64))
    total = running[:, -1:]
    stretch, rest = _search(running, uniform * total)
    within = stretches.gather(1, stretch[..., None].expand(-1, -1, STRETCH))[:, 0]
    token, _ = _search(running_sums(within), rest)
    token = (stretch * STRETCH + token).clamp_(
        max=vocabulary - 1
    )  # rows of NaN search past the end
    return token, total


def running_sums(weights: Tensor) -> Tensor:
    """Sums of the weights up to each one, along the last axis, in float64.

    torch's documentation names `cumsum` of floats among what deterministic mode refuses on CUDA.
    Sums of integers are the same in any order, so no version refuses those.
    """
    if weights.device.type == "cpu":
        return weights.cumsum(-1, dtype=torch.float64)
    return counted_sums(weights)


def counted_sums(weights: Tensor) -> Tensor:
    """Exact `running_sums` of weights rounded up to multiples of UNIT: only a weight of 0 stays 0,
    so the same tokens can be drawn. Sums stay below 2.
    """
    units = weights.double().div_(UNIT).ceil_().long()
    return units.cumsum(-1).double().mul_(UNIT)


def _search(running: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose running sum exceeds `target`, and `target` less the sum before it:
    [N, 1] each.

    A target that rounding made as large as the last sum is taken to be just below it, so that no
    weight of 0 is ever chosen.
    """
    last = running[:, -1:]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    place = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[1] - 1)
    before = running.gather(-1, (place - 1).clamp_(min=0)).masked_fill_(place == 0, 0.0)
    return place, target - before


def _filter(weights: Tensor, knobs: Knobs) -> Tensor:
    """Weights with the filtered tokens at 0. Ties are broken by the lower token id."""
    vocabulary = weights.shape[1]
    device = weights.device
    greedy = knobs.temperature == 0.0
    ranked, order = torch.sort(weights, dim=-1, descending=True, stable=True)
    top_k = np.where((knobs.top_k == 0) | greedy, vocabulary, knobs.top_k)
    rank = torch.arange(vocabulary, device=device)
    ranked = ranked.masked_fill(rank >= torch.from_numpy(top_k).to(device)[:, None], 0.0)
    running = running_sums(ranked)
    before = running - ranked
    top_p = torch.from_numpy(np.where(greedy, np.float32(1.0), knobs.top_p)).to(device)
    cut = (before >= top_p.double()[:, None] * running[:, -1:]) & (top_p < 1.0)[:, None]
    ranked = ranked.masked_fill(cut, 0.0)
    min_p = torch.from_numpy(np.where(greedy, np.float32(0.0), knobs.min_p)).to(device)
    ranked = ranked.masked_fill(ranked < min_p[:, None] * ranked[:, :1], 0.0)
    return torch.zeros_like(weights).scatter_(-1, order, ranked)
