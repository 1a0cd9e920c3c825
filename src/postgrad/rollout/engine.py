"""The protocol of rollout engines: requests go in, completions come out as they finish.

    Request (a token prefix, n samples of it) -> Engine -> Completion (one sample's next turn)

An engine continues token sequences; it knows nothing of environments and rewards. All engines pass
one suite of tests, tests/contracts/test_engines.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.errors import RunError
from postgrad.core.records import FinishReason
from postgrad.rollout.settings import SamplingSettings


@dataclass(frozen=True, slots=True)
class Request:
    """Continue `token_ids` once for each of `sample_ids`.

    The tokens that are drawn depend only on (seed, ticket, sample, turn, position), on the weights
    and on `token_ids`.
    """

    ticket: int  # of the prompt
    sample_ids: tuple[int, ...]  # numbers of the prompt's samples: (0, 1, 2, 3)
    token_ids: NDArray[np.int32]  # [P], P >= 1: the prompt and, in later turns, all turns since
    sampling: SamplingSettings
    turn: int = 0  # the policy's, from 0
    seed: int = 0  # of the run
    messages: Sequence[Mapping[str, str]] = ()  # the prompt in the chat format; () in later turns


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
    finish_reason: FinishReason  # "length": cut by max_new_tokens
    versions: tuple[tuple[int, int], ...]  # ((policy version, tokens), ...) in order
    text: str  # decoded, without special tokens


@dataclass(slots=True)
class EngineStats:
    """Running sums since the engine was made; subtract two copies to measure a phase."""

    prompt_tokens: int = 0
    response_tokens: int = 0
    decode_steps: int = 0
    decode_slots: int = 0  # of all decode steps together: what response_tokens fill
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def response_tokens_per_second(self) -> float:
        """Sampled tokens per second of prefill and decode; 0 before the first."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.response_tokens / seconds if seconds else 0.0

    def by_engine(self) -> dict[str, float]:
        """Metrics of each of several engines since the last call, "engine/0/response_tokens" say;
        {} where there is one.
        """
        return {}


class Engine(Protocol):
    """A sampler with weights of its own."""

    stats: EngineStats

    def submit(self, request: Request) -> None:
        """Queue a request. Raises UsageError where it is longer than the engine can hold."""
        ...

    def completed(self) -> list[Completion]:
        """Sample until at least one completion is there; [] where no request is open."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, by their Hugging Face names; later tokens get `version`.

        Samples in flight continue with the new weights, and their `versions` record where; the
        built-in engine keeps their keys and values of the old weights. Raises RunError where a
        weight is missing, unknown or of another shape.
        """
        ...

    def logprobs(
        self, sequences: Sequence[NDArray[np.int32]], temperature: float
    ) -> list[NDArray[np.float32]]:
        """The logprob of each token of each sequence under the engine's weights, in nats; 0 for the
        first token. A probe after each publish compares them with the learner's.
        """
        ...

    def rest(self) -> None:
        """Free memory that others may need: no request comes for a while."""
        ...


def generate(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    """All completions of `requests`, ordered by (ticket, sample, turn)."""
    for request in requests:
        engine.submit(request)
    done: list[Completion] = []
    while finished := engine.completed():
        done += finished
    return sorted(done, key=lambda c: (c.ticket, c.sample, c.turn))


def checked(
    lm: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """(name, parameter of `lm`, new weight) for each of `weights`.

    A tied weight may come under either of its names. Raises RunError when one is unknown, missing
    or of another shape: a sampler with half of the new weights is worse than none.
    """
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    missing = {id(parameter): name for name, parameter in parameters.items()}
    for name, tensor in weights:
        parameter = parameters.get(name)
        if parameter is None:
            raise RunError(f"weights for the rollout engine: the model has no {name!r}")
        if parameter.shape != tensor.shape:
            raise RunError(
                f"weights for the rollout engine: {name} is {list(tensor.shape)}, "
                f"the model's is {list(parameter.shape)}"
            )
        yield name, parameter, tensor
        missing.pop(id(parameter), None)
    if missing:
        names = ", ".join(sorted(missing.values())[:3])
        raise RunError(
            f"weights for the rollout engine: {len(missing)} are missing, such as {names}"
        )


def portions(
    weights: Iterable[tuple[str, Tensor]], size: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """`weights` in their order, in lists of up to `size` bytes, each of at least one weight."""
    portion: list[tuple[str, Tensor]] = []
    held = 0
    for name, weight in weights:
        if portion and held + weight.nbytes > size:
            yield portion
            portion, held = [], 0
        portion.append((name, weight))
        held += weight.nbytes
    if portion:
        yield portion


@torch.no_grad()
def take_over(
    lm: nn.Module, weights: Iterable[tuple[str, Tensor]], *, borrow: bool = False
) -> None:
    """Load all weights into `lm`, in its dtype and on its device. Raises RunError as `checked`.

    borrow: a weight that has both already is used without a copy, so a change in place changes
    `lm` too. Parameters that share memory, as a decoder packs some, are copied all the same.
    """
    for _, parameter, tensor in checked(lm, weights):
        alike = tensor.dtype == parameter.dtype and tensor.device == parameter.device
        alone = parameter.untyped_storage().nbytes() == parameter.nbytes
        if borrow and alike and alone and tensor.is_contiguous():
            parameter.data = tensor.detach()
        else:
            parameter.copy_(tensor)
