"""The prefix cache: keys and values of samples between two turns.

The next turn of a sample stands behind all of its turns so far, of which the cache has keys and
values already. While the environment works they stay in one of the prompts' stretches that no row
reads; the engine then computes the new tokens alone. Rows come first: where they need all
stretches, what was kept longest is dropped, and computed again if its sample goes on.

The states of layers that carry one (models/states.py) stay with them, in numbers of rows that none
has. A state is that behind all tokens: it serves no shorter beginning, as keys and values do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.records import PlacedImage
from postgrad.layout.layout import ImageRows, Layout
from postgrad.layout.tree import NO_SHARING, common_prefix
from postgrad.models.attention import carries_states, min_shared_of, to_device
from postgrad.models.latent import Latent
from postgrad.models.tree import attention_over
from postgrad.rollout.engine import Request
from postgrad.rollout.local.budget import ALIGN, SharedPrompts
from postgrad.rollout.local.cache import KeyValueCache, Stretches
from postgrad.rollout.local.rows import Rows

if TYPE_CHECKING:
    from postgrad.models.mixing import Continued

SampleKey = tuple[int, int, int]  # seed, ticket and sample


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """The tokens [K] whose keys and values are in a stretch."""

    tokens: NDArray[np.int32]
    stretch: int  # its number among those of the prompts
    images: tuple[PlacedImage, ...] = ()  # among the tokens
    state: int | None = None  # the number of a row whose states are those behind the tokens

    def shared_with(self, request: Request) -> int:
        """How many of its first tokens, with their images, a request begins with: never all that
        the request has, and an image as a whole.
        """
        shared = common_prefix(self.tokens, request.prefix[:-1])
        for image, other in zip_longest(self.images, request.images):
            if image is None or other is None or not _same(image, other):
                starts = [int(each.at[0]) for each in (image, other) if each is not None]
                return min(shared, *starts)
            if image.at[-1] >= shared:
                return min(shared, int(image.at[0]))
        return shared


class KeptPrefixes:
    """What is kept in the stretches of one division of the cache: in numbers that `shared`, the
    prompts that rows read, does not use.

    Which prefixes are there depends on requests and token counts alone, as rows do.
    """

    def __init__(self, cache: KeyValueCache, shared: SharedPrompts, lm: nn.Module) -> None:
        """lm: whose keys and values they are. Where its layers do not go on from a state over
        several tokens, nothing is kept.
        """
        self._cache, self._shared = cache, shared
        self._keeps, self._with_states = min_shared_of(lm) != NO_SHARING, carries_states(lm)
        self._by_sample: dict[SampleKey, KeptPrefix] = {}  # what was kept longest first
        self._claimed: list[KeptPrefix] = []  # by requests whose rows begin next

    @property
    def stretches(self) -> Stretches:
        """Where it is kept."""
        return self._cache.prompts

    def clear(self) -> None:
        """Drops all prefixes: the weights have changed, or the cache is laid out anew."""
        self._by_sample.clear()

    def reach(self, request: Request) -> int:
        """How many of the first tokens of a request need not be computed: never all of them."""
        kept = self._by_sample.get(_key(request))
        if kept is None or not request.turn:
            return 0
        shared = kept.shared_with(request)
        if self._with_states:
            from postgrad.models.mixing import MIN_CONTINUING

            new = len(request.prefix) - shared
            if shared < len(kept.tokens) or new < MIN_CONTINUING:
                return 0
        return shared if shared >= ALIGN else 0

    def claim(self, request: Request) -> KeptPrefix | None:
        """What is kept for a request, whose row takes it over with `open`; None: nothing is."""
        if not (length := self.reach(request)):
            return None
        kept = self._by_sample.pop(_key(request))
        kept.tokens = kept.tokens[:length]
        kept.images = tuple(image for image in kept.images if image.at[0] < length)
        self._claimed.append(kept)
        return kept

    def release(self, kept: KeptPrefix) -> None:
        """Drops what was claimed."""
        self._claimed.remove(kept)

    def keep(self, rows: Rows, gone: NDArray[np.int64]) -> None:
        """Keeps what the rows `gone`, which have ended a turn and are still there, have read and
        written, as far as another turn may follow. The newest token was never computed, unless a
        step ahead has begun with it.
        """
        prompts, responses = self._cache.prompts, self._cache.responses
        readers = np.bincount(rows.stretch[: rows.count], minlength=self._shared.count)
        for row in gone.tolist():
            request: Request = rows.requests[row]
            stretch, prompt = int(rows.stretch[row]), int(rows.prompt[row])
            readers[stretch] -= 1
            written = computed = int(rows.launched[row]) - 1
            if rows.experts.size:  # a step ahead does not say which the newest token had
                written = int(rows.written[row]) - 1
            behind_all = written == computed or not self._with_states
            goes_on = self._keeps and request.may_go_on and behind_all
            if not goes_on or prompt + written > prompts.places:
                continue
            key = request.seed, request.ticket, int(rows.sample[row])
            self._by_sample.pop(key, None)
            number = stretch
            if readers[stretch]:  # others go on reading it
                if (number := self._free()) is None:
                    continue
                _copy(prompts, stretch, prompts, number, prompt)
            _copy(responses, row, prompts, number, written, first=prompt)
            tokens = np.concatenate([request.prefix, rows.tokens[row, :written]])
            state = row if self._with_states else None
            self._by_sample[key] = KeptPrefix(tokens, number, request.images, state)

    def close_gaps(self, to: NDArray[np.int64], source: NDArray[np.int64]) -> None:
        """Row source[i] is number to[i] now. States that are kept there take its place."""
        held, states = self._by_state(), self._cache.states
        both = np.isin(to, list(held))
        states.move(to[~both], source[~both])
        states.exchange(to[both], source[both])
        for number, other in zip(to[both].tolist(), source[both].tolist(), strict=True):
            held[number].state = other

    def begin_rows(self, rows: range) -> None:
        """Rows begin with these numbers. States that are kept there, or that rows and kept ones
        together have no numbers for, move or are dropped with what they belong to.
        """
        if not self._with_states:
            return
        slots = len(self._shared.length)
        while len(self._by_state()) > slots - rows.stop:
            self._by_sample.pop(next(iter(self._by_sample)))
        held = self._by_state()
        free = [number for number in range(rows.stop, slots) if number not in held]
        moved = [number for number in rows if number in held]
        to = np.array(free[len(free) - len(moved) :], np.int64)
        self._cache.states.move(to, np.array(moved, np.int64))
        for number, other in zip(moved, to.tolist(), strict=True):
            held[number].state = other

    def states_of(self, kept: Sequence[KeptPrefix | None]) -> list[dict[str, Tensor]]:
        """Copies of the states behind what was claimed, for each mixer [P, ...] by name. Their
        numbers are free then.
        """
        claims = [each for each in kept if each is not None and each.state is not None]
        states = self._cache.states.copies(np.array([each.state for each in claims], np.int64))
        for each in claims:
            each.state = None
        return states

    def rearrange(self, to: NDArray[np.int64], source: NDArray[np.int64]) -> None:
        """Stretch source[i], which rows read, becomes to[i]. What is kept there takes its place."""
        held = self._by_number()
        both = np.isin(to, list(held))
        self._cache.prompts.move(to[~both], source[~both], self._shared.length)
        if both.any():
            lengths = [len(held[number].tokens) for number in to[both].tolist()]
            longest = max(*lengths, int(self._shared.length[to[both]].max()))
            self._cache.prompts.exchange(to[both], source[both], longest)
            for number, other in zip(to[both].tolist(), source[both].tolist(), strict=True):
                held[number].stretch = other

    def open(self, numbers: Sequence[int], kept: KeptPrefix | None = None) -> None:
        """Rows begin to read the stretches `numbers`, which get what was claimed for them."""
        for number in numbers:
            if kept is not None and kept in self._claimed:
                self._enter(kept, number)
                continue
            self._make_way(number)
            if kept is not None:
                prompts = self._cache.prompts
                _copy(prompts, kept.stretch, prompts, number, len(kept.tokens))

    def _enter(self, kept: KeptPrefix, number: int) -> None:
        self._claimed.remove(kept)
        if kept.stretch == number:
            return
        prompts, here, there = self._cache.prompts, np.array([number]), np.array([kept.stretch])
        other = self._by_number().get(number)
        if other is None:
            prompts.move(here, there, self._shared.length)
        else:
            prompts.exchange(here, there, max(len(kept.tokens), len(other.tokens)))
            other.stretch = kept.stretch
        kept.stretch = number

    def _make_way(self, number: int) -> None:
        """What is kept in a stretch moves to another one, or is dropped where all are in use."""
        if (kept := self._by_number().get(number)) is None:
            return
        free = self._free()
        assert free is not None  # rows, and samples with a claim, are no more than stretches
        if free == number:  # it was dropped itself
            return
        self._cache.prompts.exchange(np.array([free]), np.array([number]), len(kept.tokens))
        kept.stretch = free

    def _free(self) -> int | None:
        """The last stretch that nothing is in; else that of what was kept longest, which is
        dropped. None: rows and claims have all.
        """
        used = self._by_number()
        for number in range(len(self._shared.length) - 1, self._shared.count - 1, -1):
            if number not in used:
                return number
        if not self._by_sample:
            return None
        oldest = next(iter(self._by_sample))
        return self._by_sample.pop(oldest).stretch

    def _by_state(self) -> dict[int, KeptPrefix]:
        kept = self._by_sample.values()
        return {each.state: each for each in kept if each.state is not None}

    def _by_number(self) -> dict[int, KeptPrefix]:
        return {kept.stretch: kept for kept in (*self._by_sample.values(), *self._claimed)}


class BehindKept:
    """The attention of a layout's tokens that are not kept: each sees those before it, and what is
    kept of its sequence.

    rows: [N] those of the layout, in order. starts: [sequences + 1] where each sequence begins
    among them.
    """

    def __init__(
        self,
        layout: Layout,
        kept: Sequence[KeptPrefix | None],
        prefixes: KeptPrefixes,
        device: torch.device,
    ) -> None:
        """layout: of sequences that share nothing, with their kept tokens. kept: of each of them,
        claimed from `prefixes`.
        """
        self._kept, self._prefixes, self._prompts = kept, prefixes, prefixes.stretches
        ends, first = layout.segment_start[1:], layout.segment_start[:-1] + lengths_of(kept)
        self.starts = np.concatenate([[0], np.cumsum(ends - first)])
        self.rows = np.concatenate([np.arange(*span) for span in zip(first, ends, strict=True)])
        place = np.zeros(layout.n_tokens, np.int64)
        place[self.rows] = np.arange(len(self.rows))
        self._rows, self._place = to_device(self.rows, device), to_device(place, device)
        self._attention = attention_over(layout, device, first=first)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        latent: Latent | None = None,
    ) -> Tensor:
        """query [H, N, D], key [KV, N, D], value [KV, N, Dv]; returns [N, H, Dv]. latent: of a
        layer of which latents are kept.
        """
        everywhere = query.index_select(1, self._place)  # nothing reads the results of kept rows
        keys, values = self._spliced(layer, key, value, latent)
        out = self._attention.attend(
            layer, everywhere, keys, values,
            scale=scale, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return out.index_select(0, self._rows)

    def continued(self) -> "Continued":
        """How mixers go on from the states of what is kept, whose numbers are free then."""
        from postgrad.models.mixing import Continued

        behind = np.array([kept is not None for kept in self._kept])
        above = np.where(behind, np.cumsum(behind) - 1, -1)
        return Continued(self.starts, above, self._prefixes.states_of(self._kept))

    def images(self, images: Sequence[ImageRows]) -> tuple[ImageRows, ...]:
        """Those of a layout's images that are computed, at their rows among the computed ones."""
        return tuple(
            replace(image, rows=np.searchsorted(self.rows, image.rows))
            for image in images
            if image.rows[0] in self.rows
        )

    def _spliced(
        self, layer: int, key: Tensor, value: Tensor, latent: Latent | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [KV, N, D], with what is kept of each sequence before its new tokens."""
        keys, values = self._prompts.keys[layer], self._prompts.values[layer]
        parts: list[tuple[Tensor, Tensor]] = []
        for kept, (start, end) in zip(self._kept, pairwise(self.starts.tolist()), strict=True):
            if kept is not None:
                place, tokens = self._prompts.place[kept.stretch], slice(len(kept.tokens))
                stored = keys[place, :, tokens], values[place, :, tokens]
                parts.append(stored if latent is None else latent.spread(stored[0]))
            parts.append((key[:, start:end], value[:, start:end]))
        every_key, every_value = zip(*parts, strict=True)
        return torch.cat(every_key, 1), torch.cat(every_value, 1)


def lengths_of(kept: Sequence[KeptPrefix | None]) -> NDArray[np.int64]:
    """How many tokens each of them has, 0 where there is none."""
    return np.array([0 if each is None else len(each.tokens) for each in kept], np.int64)


def _same(image: PlacedImage, other: PlacedImage) -> bool:
    return image.digest == other.digest and np.array_equal(image.at, other.at)


def _key(request: Request) -> SampleKey:
    return request.seed, request.ticket, request.sample_ids[0]


def _copy(
    source: Stretches, number: int, target: Stretches, onto: int, tokens: int, first: int = 0
) -> None:
    """The first tokens of a stretch, to place `first` of another one and behind it."""
    of, to = int(source.place[number]), int(target.place[onto])
    for store, other in zip(source.stores, target.stores, strict=True):
        other[to, :, first : first + tokens] = store[of, :, :tokens]
