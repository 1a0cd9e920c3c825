"""Choosing tokens: the inverse CDF at one counter-based random number a token.

The numbers are those of core.seeds, computed where the logits are. Nothing here waits for a device.

With weights e_i = softmax(l / T)_i, filtered ones set to 0, the token is the first i whose
running sum exceeds u * sum(e), and its logprob is log(e_i / sum(e)): what it was drawn from.
Filters act in transformers' order (top-k, then top-p, then min-p), each on what the last one left;
a grammar acts before them, on the logits.

What they left of a row, its sampling mask, is all tokens with a weight above 0: those that the
number could have drawn. On the device it is a bit for each token of the vocabulary: so many bits
for any filters, as a CUDA graph needs it. The host makes ids of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core import seeds
from postgrad.core.ragged import Ragged
from postgrad.rollout.grammar import ALL

CHUNK_VALUES = 2**24  # logits processed together: bounds what filters sort and sum


STRETCH = 64  # tokens of the vocabulary whose weights are summed before any running sum
# The constants of core.seeds in the bits of int64: torch multiplies no uint64.
GOLDEN, MIX_1, MIX_2 = (
    int(constant.astype(np.int64)) for constant in (seeds.GOLDEN, seeds.MIX_1, seeds.MIX_2)
)
UNIT = 2.0**-52  # weights are counted in it: float64 holds any sum of units below 2 exactly


class Kind(NamedTuple):
    """What some of the rows of a step need; rows that do not need it get the same bits."""

    heated: bool  # a temperature other than 1
    greedy: bool  # temperature 0
    filtered: bool  # top-k, top-p or min-p, of a row that is not greedy
    masked: bool = False  # a grammar
    keeps: bool = False  # its sampling mask, of a row that is filtered or masked

    @staticmethod
    def of(
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
    ) -> "Kind":
        """Of N rows; arguments as in Knobs."""
        greedy = temperature == 0.0
        filters = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
        heated = bool(np.any(~greedy & (temperature != 1.0)))
        return Kind(heated, bool(greedy.any()), bool(np.any(filters & ~greedy)))


@dataclass(frozen=True, slots=True)
class Knobs:
    """Sampling parameters of N rows, on their device. Numbers that a request has in float32 are
    float64 here.
    """

    temperature: Tensor  # [N], 0: greedy
    top_k: Tensor  # [N], 0: off
    top_p: Tensor  # [N], 1: off
    min_p: Tensor  # [N], 0: off
    # [N, W] int32, a bit for each token, the lowest first; None where no row was masked yet
    allowed: Tensor | None = None

    def rows(self, which: slice) -> "Knobs":
        """The parameters of a slice of the rows."""
        return Knobs(
            self.temperature[which],
            self.top_k[which],
            self.top_p[which],
            self.min_p[which],
            None if self.allowed is None else self.allowed[which],
        )


def uniform(key: Tensor, counter: Tensor) -> Tensor:
    """[N] float64 in [0, 1): the bits of seeds.uniform where `key` [N] int64 are seeds.bits of all
    counters but the last, and `counter` [N] int64 is the last.

    Products and sums of int64 wrap as those of uint64 do; only shifts have to be told of the sign.
    """
    x = (key ^ counter) + GOLDEN
    x = (x ^ _shifted(x, 30)) * MIX_1
    x = (x ^ _shifted(x, 27)) * MIX_2
    x = x ^ _shifted(x, 31)
    return _shifted(x, 11).double() * 2.0**-53


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(
    logits: Tensor, knobs: Knobs, uniform: Tensor, kind: Kind, left: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits: [N, V] float32, overwritten; uniform: [N] float64 in [0, 1). Returns [N] tokens and
    [N] float32 logprobs in nats. left: uint8 [N, mask_bytes(V)], written where kind.keeps: the bits
    of the tokens that could be drawn, the lowest first; all 0 where nothing was taken away.

    A row whose logits are not finite gets a NaN logprob; the caller knows whose row it is.
    """
    size = max(1, CHUNK_VALUES // logits.shape[1])
    if len(logits) <= size:
        return _sample(logits, knobs, uniform, kind, left)
    parts: list[tuple[Tensor, Tensor]] = []
    for i in range(0, len(logits), size):
        rows = slice(i, i + size)
        of_rows = None if left is None else left[rows]
        parts.append(_sample(logits[rows], knobs.rows(rows), uniform[rows], kind, of_rows))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _sample(
    logits: Tensor, knobs: Knobs, uniform: Tensor, kind: Kind, left: Tensor | None
) -> tuple[Tensor, Tensor]:
    greedy = (knobs.temperature == 0.0)[:, None]
    if kind.masked:
        assert knobs.allowed is not None
        logits.masked_fill_(_bits(knobs.allowed, logits.shape[1]) == 0, -torch.inf)
    if kind.heated:
        scale = knobs.temperature.float()[:, None]
        logits /= scale.masked_fill(greedy, 1.0) if kind.greedy else scale
    best = logits.argmax(-1, keepdim=True) if kind.greedy else None
    weights = torch.softmax(logits, -1)  # float32; its sum is 1 up to rounding, hence `total`
    drawn_from = _filter(weights, knobs, greedy) if kind.filtered else weights
    if kind.keeps:
        assert left is not None
        left.copy_(_left(weights, drawn_from, knobs, kind))
    weights = drawn_from
    token, total = _draw(weights, uniform[:, None])
    if best is not None:
        token = torch.where(greedy, best, token)
    logprob = (weights.gather(-1, token).double() / total).log().float()
    return token[:, 0], logprob[:, 0]


def mask_bytes(vocabulary: int) -> int:
    """Bytes of a row's bits: whole numbers of 64 bits, which the host looks through."""
    return -(-vocabulary // 64) * 8


def _left(weights: Tensor, drawn_from: Tensor, knobs: Knobs, kind: Kind) -> Tensor:
    """What `sample` writes into `left`. weights, drawn_from: before and after the filters."""
    could = drawn_from > 0
    touched = could.sum(-1) < (weights > 0).sum(-1)
    if kind.masked:
        assert knobs.allowed is not None
        touched = touched | (knobs.allowed != ALL).any(-1)
    could = could & touched[:, None]
    missing = 8 * mask_bytes(could.shape[1]) - could.shape[1]
    octets = torch.nn.functional.pad(could.to(torch.uint8), (0, missing)).unflatten(1, (-1, 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return (octets << shifts).sum(-1, dtype=torch.uint8)


def masks_of(left: NDArray[np.uint8]) -> Ragged:
    """[N, bytes] as `sample` writes it -> SamplingMask of N rows."""
    words = left.view(np.uint64)
    row, word = np.nonzero(words)  # few: the bits of these alone are looked at
    octets = words[row, word][:, None].view(np.uint8)
    of_word, bit = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
    ids = (64 * word[of_word] + bit).astype(np.int32)
    return Ragged.of_sizes(ids, np.bincount(row[of_word], minlength=len(left)))


def _bits(words: Tensor, count: int) -> Tensor:
    """[N, W] int32 -> [N, count] uint8: their first bits, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    octets = words.view(torch.uint8)[:, :, None]  # the lowest first, as all that torch runs on
    return ((octets >> shifts) & 1).flatten(1)[:, :count]


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


def _filter(weights: Tensor, knobs: Knobs, greedy: Tensor) -> Tensor:
    """Weights with the filtered tokens at 0. Ties are broken by the lower token id. greedy: [N, 1]
    rows that have no filters.
    """
    vocabulary = weights.shape[1]
    ranked, order = torch.sort(weights, dim=-1, descending=True, stable=True)
    top_k = knobs.top_k[:, None]
    top_k = top_k.masked_fill((top_k == 0) | greedy, vocabulary)
    rank = torch.arange(vocabulary, device=weights.device)
    ranked = ranked.masked_fill(rank >= top_k, 0.0)
    running = running_sums(ranked)
    before = running - ranked
    top_p = knobs.top_p[:, None].masked_fill(greedy, 1.0)
    cut = (before >= top_p * running[:, -1:]) & (top_p < 1.0)
    ranked = ranked.masked_fill(cut, 0.0)
    min_p = knobs.min_p.float()[:, None].masked_fill(greedy, 0.0)
    ranked = ranked.masked_fill(ranked < min_p * ranked[:, :1], 0.0)
    return torch.zeros_like(weights).scatter_(-1, order, ranked)
