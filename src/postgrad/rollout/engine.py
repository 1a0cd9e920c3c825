"""What a rollout engine is: requests go in, completions come out as they finish.

    Request (a token prefix, n samples of it) -> Engine -> Completion (one sample's next turn)

Prompts, environments and rewards are not the engine's business: it continues token sequences. All
engines are held to one suite, tests/contracts/test_engines.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core.records import FinishReason
from postgrad.rollout.settings import SamplingSettings


@dataclass(frozen=True, slots=True)
class Request:
    """Continue `token_ids` once for each of `sample_ids`.

    token_ids: [P] int32, P >= 1: the prompt, and in later turns all that followed it. What is drawn
    depends only on (seed, ticket, sample, turn, position), on the weights and on the tokens.
    messages: what the prompt says, for engines that take no tokens; () in later turns.
    """

    ticket: int
    sample_ids: tuple[int, ...]
    token_ids: NDArray[np.int32]
    sampling: SamplingSettings
    turn: int = 0
    seed: int = 0
    messages: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample's tokens, the end-of-sequence token included where it was written.

    token_ids: [R] int32. logprobs: [R] float32 under the distribution that each token was drawn
    from: at the sampling temperature, renormalised over what the filters left; at temperature 1 for
    greedy sampling. versions: ((policy version, tokens), ...) in order. text: decoded, without
    special tokens.
    """

    ticket: int
    sample: int
    turn: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]
    text: str


@dataclass(slots=True)
class EngineStats:
    """Running sums since the engine was made; subtract two copies to measure a phase.

    `decode_slots` adds up, over decode steps, the slots that were there: tokens over it is how full
    the batch was.
    """

    prompt_tokens: int = 0
    response_tokens: int = 0
    decode_steps: int = 0
    decode_slots: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def response_tokens_per_second(self) -> float:
        """Sampled tokens over the seconds spent in prefill and decode; 0 before any."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.response_tokens / seconds if seconds else 0.0


class Engine(Protocol):
    """A sampler with weights of its own."""

    stats: EngineStats

    def submit(self, request: Request) -> None:
        """Queue a request. Raises UsageError when it can never fit."""
        ...

    def completed(self) -> list[Completion]:
        """Sample on until at least one completion is there; [] when nothing was asked for."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, by their Hugging Face names; later tokens carry `version`.

        Samples in flight go on with the new weights over keys and values of the old ones, and their
        `versions` say where. Raises RunError when a weight is missing, unknown or of another shape.
        """
        ...

    def logprobs(
        self, sequences: Sequence[NDArray[np.int32]], temperature: float
    ) -> list[NDArray[np.float32]]:
        """The engine's own logprob of each token of each sequence; 0 for the first one.

        What a probe after a publish compares with the learner's.
        """
        ...

    def rest(self) -> None:
        """Nothing will be asked for a while: give back memory that others may need."""
        ...


def generate(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    """All completions of `requests`, ordered by (ticket, sample, turn)."""
    for request in requests:
        engine.submit(request)
    done: list[Completion] = []
    while finished := engine.completed():
        done += finished
    return sorted(done, key=lambda c: (c.ticket, c.sample, c.turn))
