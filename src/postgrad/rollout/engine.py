"""The protocol of rollout engines: requests go in, completions come out as they finish.

    Request (a token prefix, n samples of it) -> Engine -> Completion (one sample's next turn)

An engine continues token sequences; it knows nothing of environments and rewards. All engines pass
one suite of tests, tests/contracts/test_engines.py.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.errors import RunError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experts, FinishReason, PlacedImage, SamplingMask
from postgrad.rollout.grammar import KINDS, Grammar
from postgrad.rollout.settings import SamplingSettings
from postgrad.rollout.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Written:
    """The first W tokens of a sample's turn, which an engine wrote before it was cut."""

    token_ids: NDArray[np.int32]  # [W]
    logprobs: NDArray[np.float32]  # [W] nats, as in a Completion
    versions: tuple[tuple[int, int], ...]  # ((policy version, tokens), ...) in order
    experts: Experts | None = None  # as in a Completion
    sampling_mask: SamplingMask | None = None  # [W] where the request keeps it

    def first(self, count: int) -> "Written":
        """The first `count` tokens."""
        dropped = len(self.token_ids) - count
        experts = None if self.experts is None else self.experts[: len(self.experts) - dropped]
        versions: list[tuple[int, int]] = []
        left = count
        for version, tokens in self.versions:
            versions.append((version, min(tokens, left)))
            left -= versions[-1][1]
        kept = tuple((version, tokens) for version, tokens in versions if tokens)
        mask = self.sampling_mask
        mask = None if mask is None else mask.take_many(np.arange(count))
        return Written(self.token_ids[:count], self.logprobs[:count], kept, experts, mask)


@dataclass(frozen=True, slots=True)
class Request:
    """Continue `token_ids` once for each of `sample_ids`.

    The tokens that are drawn depend only on (seed, ticket, sample, turn, position), on the weights
    and on `token_ids`. A turn that was cut goes on behind `written`, which is part of its
    completion and of its limit: positions, stop strings and max_new_tokens count from its start.
    """

    ticket: int  # of the prompt
    sample_ids: tuple[int, ...]  # numbers of the prompt's samples: (0, 1, 2, 3)
    token_ids: NDArray[np.int32]  # [P], P >= 1: the prompt and, in later turns, all turns since
    sampling: SamplingSettings
    turn: int = 0  # the policy's, from 0
    seed: int = 0  # of the run
    messages: Sequence[Mapping[str, str]] = ()  # the prompt in the chat format; () in later turns
    written: Written | None = None  # of a turn that goes on; then `sample_ids` is a single sample
    images: tuple[PlacedImage, ...] = ()  # among `token_ids`, in order
    keeps_mask: bool = False  # completions have sampling masks: of the built-in engine alone
    may_go_on: bool = False  # another turn of these samples may follow, with this one in its prefix

    @property
    def prefix(self) -> NDArray[np.int32]:
        """[P + W] the tokens behind which the next one is drawn."""
        if self.written is None:
            return self.token_ids
        return np.concatenate([self.token_ids, self.written.token_ids])

    @property
    def position(self) -> int:
        """W: the place of the next token in its turn."""
        return 0 if self.written is None else len(self.written.token_ids)

    @property
    def grammar(self) -> Grammar | None:
        """What the turn follows from its first token on."""
        texts = ((kind, getattr(self.sampling, kind)) for kind in KINDS)
        return next(((kind, text) for kind, text in texts if text is not None), None)

    @property
    def new_tokens(self) -> int:
        """How many tokens may still be drawn."""
        return self.sampling.max_new_tokens - self.position

    def require_valid(self) -> None:
        """Raises ValueError for a request that no engine can do."""
        if not len(self.token_ids) or not self.sample_ids:
            raise ValueError(f"ticket {self.ticket}: a request needs a token and a sample")
        if self.written is not None and (len(self.sample_ids) > 1 or self.new_tokens < 1):
            raise ValueError(
                f"ticket {self.ticket}: a continued turn has one sample, and is below its limit"
            )

    def turn_with(
        self,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        versions: Sequence[tuple[int, int]],
        experts: Experts | None = None,
        sampling_mask: SamplingMask | None = None,
    ) -> Written:
        """The turn from its start to the end of newly drawn tokens. experts: as in a Completion.
        sampling_mask: of the new tokens.
        """
        before = self.written
        if before is None:
            return Written(token_ids, logprobs, tuple(versions), experts, sampling_mask)
        if sampling_mask is not None:
            assert before.sampling_mask is not None  # the request that was cut kept it too
            sampling_mask = Ragged.joined([before.sampling_mask, sampling_mask], np.int32)
        return Written(
            np.concatenate([before.token_ids, token_ids]),
            np.concatenate([before.logprobs, logprobs]),
            joined(before.versions, versions),
            None if experts is None else recorded_first(before.experts, len(token_ids), experts),
            sampling_mask,
        )

    def cut_after(self, sample: int, turn: Written) -> "Request":
        """The request that continues `sample` where it was cut; turn: as of `turn_with`."""
        return replace(self, sample_ids=(sample,), written=turn if len(turn.token_ids) else None)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample's next turn: R tokens, the end-of-sequence token included if it was sampled.

    Logprobs are under the distribution that each token was drawn from: at the sampling temperature,
    renormalised over the tokens that the filters left; at temperature 1 for greedy sampling.
    """

    ticket: int
    sample: int
    turn: int  # as in the request
    token_ids: NDArray[np.int32]  # [R]
    logprobs: NDArray[np.float32]  # [R], in nats; NaN from a server that gives none
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]  # ((policy version, tokens), ...) in order
    text: str  # decoded, without special tokens
    # [X, layers, k] of the last X tokens of request and turn, where the engine records them. The
    # newest token has none: no engine computes it before the next turn.
    experts: Experts | None = None
    sampling_mask: SamplingMask | None = None  # [R] where the request keeps it


@dataclass(frozen=True, slots=True)
class Sent:
    """The account of a publish."""

    way: str  # of the payloads; "local": in the learner's process; "gloo+memory": of two engines
    size: int  # bytes of payloads, for each engine
    seconds: float
    fallback: str = ""  # why they did not go the way that these cards could
    ways: Mapping[str, str] = field(default_factory=dict[str, str])  # by rollout worker

    @property
    def metrics(self) -> dict[str, float]:
        """The names and numbers of docs/metrics.md."""
        measured = {
            "publish/send_seconds": self.seconds,
            "publish/sent_bytes": float(self.size),
            **{f"publish/by_{way}": 1.0 for way in self.way.split("+")},
        }
        return measured | ({"publish/fallback_seconds": self.seconds} if self.fallback else {})


class WeightHandover(Iterable[tuple[str, Tensor]]):
    """The weights of a publish, and what is done once the last was handed over."""

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], after: Callable[[], None] = lambda: None
    ) -> None:
        self.weights = weights
        self.after = after

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights
        self.after()


class Engine(Protocol):
    """A sampler with weights of its own."""

    stats: EngineStats

    @property
    def streams(self) -> int:
        """What shares a batch follows from requests and token counts alone, for each of so many
        parts of the tickets (ticket % streams) by itself. 0: it depends on the clock.
        """
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. Raises UsageError where it is longer than the engine can hold."""
        ...

    def completed(self, awaited: Collection[int] | None = None) -> list[Completion]:
        """Sample until at least one completion is there; [] where no request is open.

        awaited: the tickets that somebody waits for. An engine of several processes lets each go on
        only while it has a sample of these, so that where `cut` finds it does not depend on the
        clock; other engines need not look. None: all.
        """
        ...

    def load_weights(self, weights: WeightHandover, version: int) -> Sent | None:
        """Replace all weights, by their Hugging Face names; later tokens get `version`. Returns the
        account of what was sent. An engine to which ranks send them by themselves iterates over
        none.

        Samples in flight continue with the new weights, and their `versions` record where; the
        built-in engine keeps their keys and values of the old weights. Raises RunError where a
        weight is missing, unknown or of another shape. After any error the engine refuses to work
        until weights have been loaded whole.
        """
        ...

    def logprobs(
        self,
        sequences: Sequence[NDArray[np.int32]],
        temperature: float,
        images: Sequence[tuple[PlacedImage, ...]] = (),
    ) -> list[NDArray[np.float32]]:
        """The logprob of each token of each sequence under the engine's weights, in nats; 0 for the
        first token. A probe after each publish compares them with the learner's. images: of each
        sequence, where any has some.
        """
        ...

    def cut(self) -> list[Request]:
        """Stop all samples that have not ended. Returns the requests that continue them, ordered by
        (ticket, sample). `completed` still returns those that ended before.
        """
        ...

    def sleep(self) -> None:
        """Free memory that others may need: no request comes for a while."""
        ...


class HaltingEngine(Engine, Protocol):
    """An engine that stops between two tokens: in a rollout worker."""

    def completed(
        self, awaited: Collection[int] | None = None, *, halt: Callable[[], bool] = lambda: False
    ) -> list[Completion]:
        """As Engine.completed. Once `halt` is true it returns what there is, often []."""
        ...

    def notify(self) -> None:
        """From any thread: a `completed` that waits asks `halt` again."""
        ...


def recorded_first(first: Experts | None, more: int, again: Experts) -> Experts:
    """The experts of tokens that an engine computed several times, for instance in each turn: those
    of the first time.

    first: [F, layers, k] of all tokens but the newest `more`. again: of the newest tokens, computed
    now. Returns those of all tokens that either knows.
    """
    if first is None:
        return again
    size = max(len(first) + more, len(again))
    merged = np.full((size, *again.shape[1:]), -1, np.int16)
    merged[size - len(again) :] = again
    earlier = merged[size - more - len(first) : size - more]
    np.copyto(earlier, first, where=first >= 0)
    return merged


def joined(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """The (version, tokens) of `first`, then of `second`; neighbours of one version are added."""
    spans: list[tuple[int, int]] = []
    for version, tokens in (*first, *second):
        if spans and spans[-1][0] == version:
            tokens += spans.pop()[1]
        spans.append((version, tokens))
    return tuple(spans)


def in_order(requests: Iterable[Request]) -> list[Request]:
    """`requests` ordered by (ticket, first sample)."""
    return sorted(requests, key=lambda request: (request.ticket, request.sample_ids[0]))


def generate(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    """All completions of `requests`, ordered by (ticket, sample, turn)."""
    for request in requests:
        engine.submit(request)
    done: list[Completion] = []
    while finished := engine.completed():
        done += finished
    return sorted(done, key=lambda c: (c.ticket, c.sample, c.turn))


class ExpectedWeights:
    """The parameters of a model that weights are to come for. A tied weight may come under either
    of its names.
    """

    def __init__(self, lm: nn.Module) -> None:
        self._parameters = dict(lm.named_parameters(remove_duplicate=False))
        self._missing = {id(parameter): name for name, parameter in self._parameters.items()}

    def parameter(self, name: str, shape: Sequence[int]) -> nn.Parameter:
        """That of a weight which has come. Raises RunError where it is unknown or of another
        shape.
        """
        parameter = self._parameters.get(name)
        if parameter is None:
            raise RunError(f"weights for the rollout engine: the model has no {name!r}")
        if list(parameter.shape) != list(shape):
            raise RunError(
                f"weights for the rollout engine: {name} is {list(shape)}, "
                f"the model's is {list(parameter.shape)}"
            )
        self._missing.pop(id(parameter), None)
        return parameter

    def require_all(self) -> None:
        """Raises RunError where one has not come: a sampler with half of the new weights is worse
        than none.
        """
        if self._missing:
            names = ", ".join(sorted(self._missing.values())[:3])
            raise RunError(
                f"weights for the rollout engine: {len(self._missing)} are missing, such as {names}"
            )


class WeightIntake:
    """Takes new weights into `lm`, in its dtype and on its device, in any order.

    borrow: a weight that has both already is used without a copy, so a change in place changes
    `lm` too. Parameters that share memory, as a decoder packs some, are copied all the same.
    """

    def __init__(self, lm: nn.Module, *, borrow: bool = False) -> None:
        self._expected = ExpectedWeights(lm)
        self._borrow = borrow
        self.size = 0  # bytes that came

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads some. Raises RunError for one that is unknown or of another shape."""
        for name, tensor in weights:
            parameter = self._expected.parameter(name, tensor.shape)
            alike = tensor.dtype == parameter.dtype and tensor.device == parameter.device
            alone = parameter.untyped_storage().nbytes() == parameter.nbytes
            if self._borrow and alike and alone and tensor.is_contiguous():
                parameter.data = tensor.detach()
            else:
                parameter.copy_(tensor)
            self.size += tensor.nbytes

    def require_all(self) -> None:
        """Raises RunError where one has not come."""
        self._expected.require_all()
