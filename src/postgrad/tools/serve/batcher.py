"""Batches sequences of several requests into one call of the model, fairly and within limits.

One thread owns the model. While it scores a batch, new requests wait; the next batch takes one
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
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError, UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Sequences, column_of
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.score import ScoreRole, probabilities, score_sequences, step_scores
from postgrad.models.config import load_config
from postgrad.models.image_reader import ImageReader
from postgrad.models.images import ImageTower
from postgrad.models.rope import max_positions
from postgrad.models.save import model_hash
from postgrad.models.score import judges_steps, load_score_model, scale_of, separator_of
from postgrad.models.supported import reads_images
from postgrad.parallel import device as devices
from postgrad.tools.serve.images import HeldImages
from postgrad.tools.serve.metrics import Metrics
from postgrad.tools.serve.wire import Refusal, ServerLimits

# of one sequence: a number, or [steps] of a process reward model
SequenceScore = np.float64 | NDArray[np.float64]
ScoreList = list[NDArray[np.float64]] | NDArray[np.float64]  # of several sequences


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The ScoringModel of a directory: a frozen score role and what its files say."""

    role: ScoreRole
    tokenizer: Any
    hash: str  # SHA-256 (hex) of the files, and of the base's where they are an adapter's
    mean: float | None  # of the scores on data like the training data; None where no file says it
    std: float | None  # of the same scores
    max_tokens: int | None  # the positions that the model knows; None where it knows any
    separator: str | None = None  # of steps, if it is a process reward model
    images: HeldImages | None = None  # of requests; None of a model that reads text alone

    def score(
        self,
        sequences: Sequence[NDArray[np.int32]],
        images: Sequence[tuple[PlacedImage, ...]] = (),
    ) -> ScoreList:
        """The score at each last token; see score_sequences. images: of each sequence, whose pixels
        are held; (): none has any. Of a process reward model the
        probabilities that the steps are right: a sequence is [tokens, 2] then, see wire.Encoder.
        """
        if self.separator is None:
            return score_sequences(self.role, sequences, images)
        marked = Sequences(
            Ragged.of([each[:, 0] for each in sequences], np.int32),
            Ragged.of([each[:, 1] > 0 for each in sequences], np.bool_),
            np.zeros(len(sequences), np.int64),
            images=column_of(images),
        )
        return [probabilities(scores) for scores in step_scores(self.role, marked)]


def load_reward_model(
    path: Path,
    dtype: str,
    batch_tokens: int,
    *,
    limits: ServerLimits | None = None,
    folder: Path | None = None,
) -> ServedModel:
    """The reward model of a directory, on CUDA where there is one, proved by a first score.

    dtype: "auto", "float32", "bfloat16". batch_tokens: of one forward. limits: of images. folder:
    where images are that clients name by their hash. Raises UsageError where the
    directory holds no reward model, RunError where its first score is no number.
    """
    if not path.is_dir():  # a hub id has no files to hash
        raise UsageError(f"no reward model at {path}: there is no such directory")
    config = load_config(str(path))
    scale = scale_of(config)
    device = devices.apply(devices.choose(None, False))
    loaded = load_score_model(
        str(path),
        dtype=devices.compute_dtype(dtype, device),
        device=device,
        fresh_head=False,
        images=True,
    )
    loaded.lm.requires_grad_(False)
    backbone = Backbone(loaded.lm, device, MicroBatch(max_tokens=batch_tokens))
    images = None
    if reads_images(loaded.config):
        reader = ImageReader(str(path), loaded.config, loaded.tokenizer)
        images = HeldImages(reader, limits or ServerLimits(), folder)
        backbone.tower = ImageTower(loaded.lm, images.pixels)
    elif folder is not None:
        raise UsageError(f"--images {folder}: the model at {path} reads text alone: leave it out")
    model = ServedModel(
        role=ScoreRole(backbone, "at"),
        tokenizer=loaded.tokenizer,
        hash=model_hash(path),
        mean=None if scale is None else scale.mean,
        std=None if scale is None else scale.std,
        max_tokens=max_positions(loaded.config),
        separator=separator_of(config) if judges_steps(config) else None,
        images=images,
    )
    first = float(score_sequences(model.role, [np.zeros(1, np.int32)])[0])
    if not np.isfinite(first):
        raise RunError(f"the reward model {path} gives {first} for one token: its weights are bad")
    return model


_LONGEST_RETRY = 60  # seconds


class SequenceScorer(Protocol):
    """A model that gives every sequence a number, or one for each of its steps."""

    def score(
        self, sequences: Sequence[NDArray[np.int32]], images: Sequence[tuple[PlacedImage, ...]]
    ) -> ScoreList:
        """The score of each sequence of [tokens], at least one, read at its last token. images: of
        each sequence.
        """
        ...


class ScoringModel(SequenceScorer, Protocol):
    """A scorer and what is known about it.

    hash: names its files. mean, std: of its scores on what it was trained on; None where they are
    not known. max_tokens: the longest sequence it knows positions for; None where it knows any.
    separator: of the steps that it scores; None of a model of whole answers. images: what holds
    those of requests; None of a model that reads text alone.
    """

    @property
    def images(self) -> HeldImages | None: ...

    @property
    def separator(self) -> str | None: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def hash(self) -> str: ...

    @property
    def mean(self) -> float | None: ...

    @property
    def std(self) -> float | None: ...

    @property
    def max_tokens(self) -> int | None: ...


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A request whose sequences have not all been scored."""

    sequences: Sequence[NDArray[np.int32]]  # [tokens] of token ids each
    images: Sequence[tuple[PlacedImage, ...]]  # of each
    loop: asyncio.AbstractEventLoop  # where `done` is waited for
    done: asyncio.Future[list[SequenceScore]]
    scores: list[SequenceScore]  # of each sequence, NaN where there is none yet
    since: float  # seconds, of time.monotonic
    taken: int = 0  # sequences that are in a batch already
    missing: int = 0  # sequences that have neither a score nor a failure
    # place among the sequences -> code and message
    failures: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])

    @property
    def tokens_left(self) -> int:
        """How many tokens the sequences have that are in no batch yet."""
        return sum(map(len, self.sequences[self.taken :]))


class Batcher:
    """Scores the sequences of concurrent requests in one thread. Call start once, then `await
    score(...)` from any event loop, and stop at the end.
    """

    def __init__(self, scorer: SequenceScorer, limits: ServerLimits, metrics: Metrics) -> None:
        self._scorer, self._limits, self._metrics = scorer, limits, metrics
        self._changed = threading.Condition()
        self._waiting: deque[_WaitingRequest] = deque()
        self._tokens = 0  # that wait
        self._speed = 0.0  # tokens a second, of the last batch
        self._stopping = False
        self._busy_since: float | None = None
        # A daemon, so that a model that never comes back cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name="reward-model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Refuses new requests, scores those that wait, and ends the thread.

        seconds: how long it waits for that at most.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(seconds)

    async def score(
        self,
        sequences: Sequence[NDArray[np.int32]],
        images: Sequence[tuple[PlacedImage, ...]],
    ) -> list[SequenceScore]:
        """The finite scores of each sequence. Cancelling takes what still waits out of the queue.

        Raises Refusal: 503 where the queue is full or the server is stopping, 500 where the model
        fails on a sequence or gives it no finite score, naming which.
        """
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        n = len(sequences)
        request = _WaitingRequest(
            sequences,
            images,
            loop,
            loop.create_future(),
            [np.float64(math.nan)] * n,
            now,
            missing=n,
        )
        self._enter(request)
        try:
            return await request.done
        finally:
            self._leave(request)

    def queue(self) -> tuple[int, int]:
        """How many sequences and tokens wait."""
        with self._changed:
            sequences = sum(len(request.sequences) - request.taken for request in self._waiting)
            return sequences, self._tokens

    def busy_seconds(self) -> float:
        """How long the call of the model under way has lasted; 0 where there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _enter(self, request: _WaitingRequest) -> None:
        with self._changed:
            if self._stopping:
                raise Refusal(503, "stopping", "the server is stopping", retry_after=1)
            if self._tokens and self._tokens + request.tokens_left > self._limits.queue_tokens:
                message = f"{self._tokens} tokens wait for the model already; try again later"
                raise Refusal(503, "busy", message, retry_after=self._retry_after())
            self._waiting.append(request)
            self._tokens += request.tokens_left
            self._changed.notify()

    def _leave(self, request: _WaitingRequest) -> None:
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
                self._tokens -= request.tokens_left

    def _retry_after(self) -> int:
        """Seconds after which, at the last batch's speed, half of the queue will be gone."""
        seconds = self._tokens / self._speed / 2 if self._speed else 1.0
        return max(1, min(_LONGEST_RETRY, math.ceil(seconds)))

    # In the model's thread.

    def _run(self) -> None:
        while batch := self._next_batch():
            sequences = [request.sequences[place] for request, place in batch]
            images = [request.images[place] for request, place in batch]
            began = self._busy_since = time.monotonic()
            results = self._scored(sequences, images)
            seconds = time.monotonic() - began
            self._busy_since = None
            self._speed = sum(map(len, sequences)) / max(seconds, 1e-6)
            self._metrics.batches.inc()
            self._metrics.model_seconds.observe(seconds)
            for (request, place), result in zip(batch, results, strict=True):
                self._settle(request, place, result)

    def _next_batch(self) -> list[tuple[_WaitingRequest, int]]:
        """The sequences of the next batch, each as its request and its place in it; none where the
        batcher is stopping and nothing waits.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            batch: list[tuple[_WaitingRequest, int]] = []
            room = self._limits.batch_tokens
            while self._waiting:
                request = self._waiting[0]
                tokens = len(request.sequences[request.taken])
                if batch and tokens > room:
                    break  # it is the first of the next batch
                self._waiting.popleft()
                batch.append((request, request.taken))
                request.taken += 1
                room -= tokens
                self._tokens -= tokens
                if request.taken < len(request.sequences):
                    self._waiting.append(request)
            return batch

    def _scored(
        self, sequences: Sequence[NDArray[np.int32]], images: Sequence[tuple[PlacedImage, ...]]
    ) -> list[SequenceScore | Exception]:
        """The score of each sequence, or the exception that the model raised for it.

        A batch on which it fails is halved, so that one bad sequence costs its neighbours time and
        nothing else.
        """
        try:
            results = self._scorer.score(sequences, images)
            scores = [np.asarray(each, np.float64) for each in results]
            if len(scores) != len(sequences):
                raise ValueError(f"{len(sequences)} sequences gave {len(scores)} scores")
        except Exception as error:  # noqa: BLE001  # told to whoever sent the sequence
            if len(sequences) == 1:
                return [error]
            half = len(sequences) // 2
            first = self._scored(sequences[:half], images[:half])
            return first + self._scored(sequences[half:], images[half:])
        return list(scores)

    def _settle(
        self, request: _WaitingRequest, place: int, result: SequenceScore | Exception
    ) -> None:
        if isinstance(result, Exception):
            request.failures[place] = ("model_failed", f"the model failed: {type(result).__name__}")
        elif not np.isfinite(result).all():
            request.failures[place] = ("not_finite", f"the model's score is {result}")
        else:
            request.scores[place] = result
            self._metrics.sequences.inc()
            self._metrics.tokens.inc(len(request.sequences[place]))
        request.missing -= 1
        if not request.missing:
            self._metrics.queue_seconds.observe(time.monotonic() - request.since)
            request.loop.call_soon_threadsafe(_tell, request)


def _tell(request: _WaitingRequest) -> None:
    if request.done.done():  # its client has gone
        return
    if not request.failures:
        request.done.set_result(request.scores)
        return
    place, (code, message) = min(request.failures.items())
    more = f", and {len(request.failures) - 1} more" if len(request.failures) > 1 else ""
    request.done.set_exception(Refusal(500, code, f"inputs.{place}{more}: {message}"))
