"""Rows: the state of the sequences in the cache, as arrays with one entry a row.

Rows 0..count-1 are in use. When some end, the last rows move into the holes, so that every decode
step works on one dense batch; which row a sample has depends on nothing but token counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core import seeds
from postgrad.core.errors import Diverged, UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experts, SamplingMask
from postgrad.layout.layout import rotary_positions
from postgrad.rollout.engine import Completion, Request, Written
from postgrad.rollout.grammar import ALL, Grammars
from postgrad.rollout.local.budget import close_gaps
from postgrad.rollout.local.sampler import Kind, masks_of


class DrawnTokens(NamedTuple):
    """The next token of each of N rows."""

    rows: NDArray[np.int64]  # their numbers
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # nats
    # [N, layers, k] of the token before it, which the same step computed if it is of the response
    experts: Experts | None = None
    masks: SamplingMask | None = None  # None where nothing was taken away from any row


class Rows:
    """State of up to `capacity` rows that write at most `max_new_tokens` each. All arrays have
    `capacity` entries, of which the first `count` are in use.
    """

    def __init__(self, capacity: int, max_new_tokens: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.requests: Any = np.empty(capacity, object)
        # Versions that ended: [(version, tokens written by then), ...].
        self.spans: Any = np.empty(capacity, object)
        self.sample = np.zeros(capacity, np.int64)
        self.ticket = np.zeros(capacity, np.int64)
        self.turn = np.zeros(capacity, np.int64)
        # The random bits of (seed, ticket, sample, turn): with the token's index they give the
        # number that draws it.
        self.key = np.zeros(capacity, np.uint64)
        self.prompt = np.zeros(capacity, np.int64)  # tokens before the response
        # The position of its first token in rotary embeddings: behind images it is not `prompt`.
        self.rotary = np.zeros(capacity, np.int64)
        self.stretch = np.zeros(capacity, np.int64)  # number of the prompt's stretch: SharedPrompts
        self.position = np.zeros(capacity, np.int64)  # tokens of the turn before these, see cut
        self.written = np.zeros(capacity, np.int64)  # tokens of the response so far
        self.launched = np.zeros(capacity, np.int64)  # and those that are being computed
        self.limit = np.zeros(capacity, np.int64)  # most tokens of the response
        self.has_stop = np.zeros(capacity, np.bool_)
        self.temperature = np.zeros(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.top_p = np.zeros(capacity, np.float32)
        self.min_p = np.zeros(capacity, np.float32)
        self.matcher: Any = np.empty(capacity, object)  # of a row with a grammar, else None
        # [capacity, W] bits of the tokens that may come next, from the first row with a grammar on
        self.allowed = np.zeros((capacity, 0), np.int32)
        self.tokens = np.zeros((capacity, max_new_tokens), np.int32)
        self.logprobs = np.zeros((capacity, max_new_tokens), np.float32)
        self.before: Any = np.empty(capacity, object)  # Experts of what a response stands behind
        # [capacity, tokens, layers, k] of the response, from the first row that has some on
        self.experts = np.zeros((capacity, 0, 0, 0), np.int16)
        self.keeps = np.zeros(capacity, np.bool_)  # rows whose sampling masks are kept
        # Of these the tokens' masks: ids end to end, as bytes that grow, and [capacity, tokens] how
        # many of them are of each token, from the first such row on.
        self.mask_ids: Any = np.empty(capacity, object)
        self.mask_sizes = np.zeros((capacity, 0), np.int32)

    def add(
        self,
        request: Request,
        samples: Sequence[int],
        stretches: NDArray[np.int64],
        experts: Experts | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Use the next rows for samples of a request. stretches: [samples] where its prompt is.
        experts: [prefix, layers, k] of its prefix, where they are recorded. grammars: for a request
        with a grammar.
        """
        rows = slice(self.count, self.count + len(samples))
        sampling = request.sampling
        self.requests[rows] = request
        self.spans[rows] = [[] for _ in samples]
        self.sample[rows] = samples
        self.ticket[rows] = request.ticket
        self.turn[rows] = request.turn
        counters = request.ticket, np.array(samples, np.int64), request.turn
        self.key[rows] = seeds.bits(request.seed, "sample", *counters)
        self.position[rows] = request.position
        self.prompt[rows] = length = len(request.prefix)
        self.rotary[rows] = rotary_positions(length + 1, request.images)[0, -1]
        self.stretch[rows] = stretches
        self.written[rows] = 0
        self.launched[rows] = 0
        self.limit[rows] = request.new_tokens
        self.has_stop[rows] = bool(sampling.stop)
        self.temperature[rows] = sampling.temperature
        self.top_k[rows] = sampling.top_k
        self.top_p[rows] = sampling.top_p
        self.min_p[rows] = sampling.min_p
        if experts is not None:
            if not self.experts.size:
                size = (*self.tokens.shape, *experts.shape[1:])
                self.experts = np.full(size, -1, np.int16)
            self.experts[rows] = -1
            for row in range(rows.start, rows.stop):
                self.before[row] = experts
        self.keeps[rows] = request.keeps_mask
        if request.keeps_mask:
            self.mask_ids[rows] = [bytearray() for _ in samples]
            if not self.mask_sizes.size:
                self.mask_sizes = np.zeros(self.tokens.shape, np.int32)
        if grammars is not None:
            self._constrain(range(rows.start, rows.stop), grammars)
        self.count += len(samples)

    def _constrain(self, rows: range, grammars: Grammars) -> None:
        """What may come first in new rows of one request."""
        request = self.requests[rows.start]
        if self.allowed.size:
            self.allowed[rows.start : rows.stop] = ALL
        if (grammar := request.grammar) is None:
            self.matcher[rows.start : rows.stop] = None
            return
        if not self.allowed.size:
            self.allowed = np.full((self.capacity, grammars.words), ALL, np.int32)
        written = None if request.written is None else request.written.token_ids
        for row in rows:
            self.matcher[row] = grammars.begin(grammar, written)
        grammars.allow(self.matcher[rows.start : rows.stop], rows, self.allowed)

    @property
    def masked(self) -> bool:
        """Whether any row has a grammar."""
        return self.allowed.size > 0 and any(m is not None for m in self.matcher[: self.count])

    def follow_grammars(
        self, rows: NDArray[np.int64], ended: NDArray[np.bool_], grammars: Grammars
    ) -> NDArray[np.bool_]:
        """What may come behind the newest tokens of the rows numbered `rows`, apart from those that
        have `ended` [count]. Returns [count] True where no token may.
        """
        dead = np.zeros(self.count, np.bool_)
        if self.allowed.size:
            open_rows = [row for row in rows if self.matcher[row] is not None and not ended[row]]
            newest = self.newest(self.count)[open_rows].tolist()
            goes_on = grammars.follow(self.matcher[open_rows], newest, open_rows, self.allowed)
            dead[open_rows] = np.logical_not(goes_on)
        return dead

    def newest(self, count: int) -> NDArray[np.int64]:
        """[count] the newest token of each of the first rows, which must have one."""
        return self.tokens[np.arange(count), self.written[:count] - 1].astype(np.int64)

    def kind(self) -> Kind:
        """What choosing the next tokens takes."""
        n = self.count
        kind = Kind.of(self.temperature[:n], self.top_k[:n], self.top_p[:n], self.min_p[:n])
        kind = kind._replace(masked=self.masked)
        return kind._replace(keeps=(kind.filtered or kind.masked) and bool(self.keeps[:n].any()))

    def append(self, drawn: DrawnTokens) -> None:
        """Add the next token of rows."""
        rows, tokens, logprobs, experts, masks = drawn
        place = self.written[rows]
        if experts is not None:
            later = place > 0
            self.experts[rows[later], place[later] - 1] = experts[later]
        if masks is not None:
            for row, mask in zip(rows, masks, strict=True):
                if self.keeps[row]:
                    self.mask_ids[row] += mask.tobytes()
            self.mask_sizes[rows, place] = masks.lengths
        elif self.mask_sizes.size:
            self.mask_sizes[rows, place] = 0
        self.tokens[rows, place] = tokens
        self.logprobs[rows, place] = logprobs
        self.written[rows] = place + 1

    def end_version(self, version: int) -> None:
        """Record that `version` wrote every row's tokens since the version before it."""
        for row in range(self.count):
            self.spans[row].append((version, int(self.written[row])))

    def versions(self, row: int, version: int) -> tuple[tuple[int, int], ...]:
        """((version, tokens), ...) of a row whose newest tokens are `version`'s."""
        ends = [*self.spans[row], (version, int(self.written[row]))]
        starts = [0, *(end for _, end in ends)]
        spans = zip(ends, starts, strict=False)
        return tuple((v, end - start) for (v, end), start in spans if end > start)

    def whole_turn(self, row: int, version: int) -> Written:
        """A row's turn from its start, before any cut. version: as of `versions`."""
        written = slice(0, int(self.written[row]))
        experts = None
        if self.before[row] is not None:
            experts = np.concatenate([self.before[row], self.experts[row, written]])
        return self.requests[row].turn_with(
            self.tokens[row, written].copy(),
            self.logprobs[row, written].copy(),
            self.versions(row, version),
            experts,
            self._masks(row),
        )

    def _masks(self, row: int) -> SamplingMask | None:
        """Those of a row's response; None where they are not kept."""
        if not self.keeps[row]:
            return None
        sizes = self.mask_sizes[row, : self.written[row]]
        return Ragged.of_sizes(np.frombuffer(bytes(self.mask_ids[row]), np.int32), sizes)

    def tail(self, row: int, count: int) -> list[int]:
        """The newest `count` tokens of a row's turn, fewer where there are fewer."""
        written: NDArray[np.int32] = self.tokens[row, : self.written[row]]
        if len(written) < count and self.position[row]:
            written = np.concatenate([self.requests[row].written.token_ids, written])
        return written[max(0, len(written) - count) :].tolist()

    def remove(self, gone: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Free rows and close the gaps. Returns (to, source): row source[i] became row to[i]."""
        left, to, source = close_gaps(self.count, gone)
        for column in (
            self.requests, self.spans, self.sample, self.ticket, self.turn, self.key, self.prompt,
            self.rotary, self.stretch, self.position, self.written, self.launched, self.limit,
            self.has_stop, self.temperature, self.top_k, self.top_p, self.min_p, self.matcher,
            self.allowed, self.tokens, self.logprobs, self.before, self.experts, self.keeps,
            self.mask_ids, self.mask_sizes,
        ):  # fmt: skip
            column[to] = column[source]
        self.count = left
        return to, source


@dataclass(slots=True)
class Flight:
    """The results of a step, on their way to the host.

    rows: [N] the number that each row of the step has now, -1 where it has ended since.
    """

    rows: NDArray[np.int64]
    _results: Tensor
    _arrived: torch.cuda.Event | None
    _experts: Tensor | None = None  # [decoded, layers, k] of the tokens that the step began with
    _left: Tensor | None = None  # [rows, bytes] as sampler.sample writes it, where a row keeps it

    def move(
        self, gone: NDArray[np.int64], to: NDArray[np.int64], source: NDArray[np.int64]
    ) -> None:
        """Rows `gone` have ended, row source[i] is number to[i] now."""
        size = int(max(self.rows.max(initial=0), source.max(initial=0), gone.max(initial=0))) + 1
        number = np.arange(size)
        number[gone] = -1
        number[source] = to
        left = self.rows >= 0
        self.rows[left] = number[self.rows[left]]

    def read(self) -> "DrawnTokens":
        """Waits for the step. Returns what it drew for the rows that are still there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        left = np.flatnonzero(self.rows >= 0)
        results = self._results.numpy()[:, left]
        masks = None if self._left is None else masks_of(self._left.numpy()[left])
        logprobs = results[1].view(np.float32)
        return DrawnTokens(self.rows[left], results[0], logprobs, self._experts_of(left), masks)

    def _experts_of(self, left: NDArray[np.int64]) -> Experts | None:
        """-1 of rows that were new in the step: nothing was decoded for them."""
        if self._experts is None:
            return None
        decoded = self._experts.numpy()[: len(self.rows)]
        experts = np.full((len(self.rows), *decoded.shape[1:]), -1, np.int16)
        experts[: len(decoded)] = decoded
        return experts[left]


def completions(
    rows: Rows,
    gone: NDArray[np.int64],
    stopped: NDArray[np.bool_],
    dead: NDArray[np.bool_],
    version: int,
    tokenizer: Any,
) -> list[Completion]:
    """The turns of the rows `gone`. stopped, dead: [count] which rows ended by a token or a string,
    and which follow a grammar that allows no further token. version: as of Rows.versions.
    """
    turns = [rows.whole_turn(row, version) for row in gone]
    ids = [turn.token_ids for turn in turns]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [
        Completion(
            ticket=int(rows.ticket[row]),
            sample=int(rows.sample[row]),
            turn=int(rows.turn[row]),
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            finish_reason="stop" if stopped[row] else "dead_end" if dead[row] else "length",
            versions=turn.versions,
            text=text,
            experts=turn.experts,
            sampling_mask=turn.sampling_mask,
        )
        for row, turn, text in zip(gone, turns, texts, strict=True)
    ]


def require_finite(rows: Rows, drawn: DrawnTokens, version: int) -> None:
    """Raises RunError where a new token has no logprob."""
    broken = np.flatnonzero(~np.isfinite(drawn.logprobs))
    if len(broken):
        row = drawn.rows[broken[0]]
        raise Diverged(
            f"the policy's logits are not finite (version {version}, ticket "
            f"{rows.ticket[row]}, sample {rows.sample[row]}, token "
            f"{rows.position[row] + rows.written[row]}): "
            "the weights have diverged; go back to a checkpoint with a lower learner.lr"
        )


MARGIN = 4  # tokens decoded before a stop string: the first of a text may decode differently


def eos_token_ids(lm: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response: the generation config's and the tokenizer's.

    Raises UsageError where there is none: every answer would run into the token limit.
    """
    config = getattr(lm, "generation_config", None)
    stated = getattr(config, "eos_token_id", None)
    ids = set(stated if isinstance(stated, Iterable) else [] if stated is None else [stated])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise UsageError(
            "neither the tokenizer nor generation_config.json names an end-of-sequence token: "
            "no answer could end; set eos_token in tokenizer_config.json"
        )
    return tuple(sorted(int(i) for i in ids))


class Stopper:
    """Finds rows that end by an end-of-sequence token or a stop string."""

    def __init__(self, eos: tuple[int, ...], tokenizer: Any) -> None:
        self._eos = np.array(eos, np.int64)
        self._tokenizer = tokenizer

    def stopped(self, rows: Rows) -> NDArray[np.bool_]:
        """[count] True where a row's newest token ends it; the token limit does not count."""
        ended = np.isin(rows.newest(rows.count), self._eos)
        watched = np.flatnonzero(rows.has_stop[: rows.count] & ~ended)
        if len(watched):
            ended[watched] = self._completes_stop_string(rows, watched)
        return ended

    def _completes_stop_string(self, rows: Rows, watched: NDArray[np.int64]) -> list[bool]:
        """[watched] whether the newest token completes a stop string. Only tails are decoded, with
        special tokens: one of them may be the stop string.
        """
        stops = [rows.requests[row].sampling.stop for row in watched]
        # A token that shows has at least one byte, so a string of B bytes ends within B tokens.
        reach = max(len(text.encode()) for texts in stops for text in texts) + MARGIN
        tails = [rows.tail(row, reach) for row in watched]
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=False)
        return [
            any(text in tail for text in row_stops)
            for row_stops, tail in zip(stops, texts, strict=True)
        ]
