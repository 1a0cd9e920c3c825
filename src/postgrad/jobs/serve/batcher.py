"""Sequences of several requests in one call of the model: fair, bounded, nothing lost.

One thread owns the model. While it scores a batch, what arrives waits; the next batch takes one
sequence of each waiting request in turn, until the token budget is full. So a request with one
sequence overtakes one with hundreds, and nobody waits for a batch to fill up.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from postgrad.jobs.serve.limits import Limits, Refusal
from postgrad.jobs.serve.metrics import Metrics
from postgrad.jobs.serve.protocol import Scorer

_LONGEST_RETRY = 60  # seconds


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request: its sequences, how many are in a batch already, its scores and its failures.

    failures: by place among the sequences: code and message.
    """

    sequences: Sequence[NDArray[np.int32]]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[NDArray[np.float64]]
    scores: NDArray[np.float64]
    since: float
    given: int = 0
    missing: int = 0
    failures: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])

    @property
    def tokens_left(self) -> int:
        """Of the sequences that still wait."""
        return sum(len(one) for one in self.sequences[self.given :])


class Batcher:
    """Start it, `await score(...)` from a loop as often as wanted, stop it."""

    def __init__(self, scorer: Scorer, limits: Limits, metrics: Metrics) -> None:
        self._scorer, self._limits, self._metrics = scorer, limits, metrics
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._tokens = 0  # that wait
        self._speed = 0.0  # tokens a second, of the last batch
        self._stopping = False
        self._busy_since: float | None = None
        # A daemon, so that a model that never comes back cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name="reward-model", daemon=True)

    def start(self) -> None:
        """Begin to score."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Score what waits and end, within so many seconds; refuse what comes."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(seconds)

    async def score(self, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        """[len(sequences)] finite scores. Cancelling it takes what still waits out of the queue.

        Raises Refusal: 503 where the queue is full or the server is stopping, 500 where the model
        fails on a sequence or gives it no finite score, naming which.
        """
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        n = len(sequences)
        one = _Waiting(sequences, loop, loop.create_future(), np.full(n, math.nan), now, missing=n)
        self._enter(one)
        try:
            return await one.done
        finally:
            self._leave(one)

    def queue(self) -> tuple[int, int]:
        """How many sequences and tokens wait."""
        with self._changed:
            return sum(len(one.sequences) - one.given for one in self._waiting), self._tokens

    def busy_seconds(self) -> float:
        """For how long the model has been in the call that it is in; 0 where it is in none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _enter(self, one: _Waiting) -> None:
        with self._changed:
            if self._stopping:
                raise Refusal(503, "stopping", "the server is stopping", retry_after=1)
            if self._tokens and self._tokens + one.tokens_left > self._limits.queue_tokens:
                message = f"{self._tokens} tokens wait for the model already; try again later"
                raise Refusal(503, "busy", message, retry_after=self._retry_after())
            self._waiting.append(one)
            self._tokens += one.tokens_left
            self._changed.notify()

    def _leave(self, one: _Waiting) -> None:
        with self._changed:
            if one in self._waiting:
                self._waiting.remove(one)
                self._tokens -= one.tokens_left

    def _retry_after(self) -> int:
        """Seconds after which, at the last batch's speed, half of the queue will be gone."""
        seconds = self._tokens / self._speed / 2 if self._speed else 1.0
        return max(1, min(_LONGEST_RETRY, math.ceil(seconds)))

    # In the model's thread.

    def _run(self) -> None:
        while batch := self._next_batch():
            sequences = [one.sequences[place] for one, place in batch]
            began = self._busy_since = time.monotonic()
            found = self._scored(sequences)
            seconds = time.monotonic() - began
            self._busy_since = None
            self._speed = sum(map(len, sequences)) / max(seconds, 1e-6)
            self._metrics.batches.inc()
            self._metrics.model_seconds.observe(seconds)
            for (one, place), result in zip(batch, found, strict=True):
                self._settle(one, place, result)

    def _next_batch(self) -> list[tuple[_Waiting, int]]:
        """The next sequences, each as its request and its place there; none where all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            batch: list[tuple[_Waiting, int]] = []
            room = self._limits.batch_tokens
            while self._waiting:
                one = self._waiting[0]
                tokens = len(one.sequences[one.given])
                if batch and tokens > room:
                    break  # it is the first of the next batch
                self._waiting.popleft()
                batch.append((one, one.given))
                one.given += 1
                room -= tokens
                self._tokens -= tokens
                if one.given < len(one.sequences):
                    self._waiting.append(one)
            return batch

    def _scored(self, sequences: Sequence[NDArray[np.int32]]) -> list[float | Exception]:
        """Of each sequence its score, or what the model raised on it alone.

        A batch on which it fails is halved, so that one bad sequence costs its neighbours time and
        nothing else.
        """
        try:
            scores = np.asarray(self._scorer.score(sequences), np.float64)
            if scores.shape != (len(sequences),):
                raise ValueError(f"{len(sequences)} sequences gave scores of shape {scores.shape}")
        except Exception as error:  # noqa: BLE001  # told to whoever sent the sequence
            if len(sequences) == 1:
                return [error]
            half = len(sequences) // 2
            return self._scored(sequences[:half]) + self._scored(sequences[half:])
        return [float(score) for score in scores]

    def _settle(self, one: _Waiting, place: int, result: float | Exception) -> None:
        if isinstance(result, Exception):
            one.failures[place] = ("model_failed", f"the model failed: {type(result).__name__}")
        elif not math.isfinite(result):
            one.failures[place] = ("not_finite", f"the model's score is {result}")
        else:
            one.scores[place] = result
            self._metrics.sequences.inc()
            self._metrics.tokens.inc(len(one.sequences[place]))
        one.missing -= 1
        if not one.missing:
            self._metrics.queue_seconds.observe(time.monotonic() - one.since)
            one.loop.call_soon_threadsafe(_tell, one)


def _tell(one: _Waiting) -> None:
    if one.done.done():  # its client has gone
        return
    if not one.failures:
        one.done.set_result(one.scores)
        return
    place, (code, message) = min(one.failures.items())
    more = f", and {len(one.failures) - 1} more" if len(one.failures) > 1 else ""
    one.done.set_exception(Refusal(500, code, f"inputs.{place}{more}: {message}"))
