"""An engine that answers at once, prompts that are numbers, and rewards that a test chooses."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from postgrad.core.records import Prompt, Rollout, ScoredGroup
from postgrad.rollout.engine import Completion, EngineStats, Request


class Answers:
    """An engine: every sample is one token, its own number."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.sampled: list[int] = []  # tickets, in the order in which they came
        self._waiting: list[Completion] = []

    def submit(self, request: Request) -> None:
        self.sampled.append(request.ticket)
        self._waiting += [
            Completion(
                ticket=request.ticket,
                sample=sample,
                turn=request.turn,
                token_ids=np.array([sample], np.int32),
                logprobs=np.zeros(1, np.float32),
                finish_reason="stop",
                versions=((0, 1),),
                text=str(sample),
            )
            for sample in request.sample_ids
        ]

    def completed(self) -> list[Completion]:
        done, self._waiting = self._waiting, []
        return done

    def load_weights(self, weights: Any, version: int) -> None:
        raise AssertionError

    def logprobs(self, sequences: Any, temperature: float) -> Any:
        raise AssertionError


class Numbers:
    """Prompts: ticket t of an epoch is row t."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def draw(self, ticket: int, seed: int) -> Prompt:
        ids = np.array([1, ticket % 7], np.int32)
        return Prompt(ticket, ids, "q", "a", "numbers", ticket % self._rows)


class Chosen:
    """A scorer: reward(ticket, sample) is a number, or None where the verifier fails. It is the
    component "r"; `length`, where there is one, a second that shapes the total.
    """

    def __init__(
        self,
        reward: Callable[[int, int], float | None],
        length: Callable[[int, int], float] | None = None,
    ) -> None:
        self._reward = reward
        self._length = length
        self._done: list[ScoredGroup] = []

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        given = [self._reward(prompt.ticket, rollout.sample) for rollout in rollouts]
        total = np.array([np.nan if one is None else one for one in given])
        kept = np.array([one is not None for one in given])
        rewards = {"r": total}
        if self._length is not None:
            shaped = [self._length(prompt.ticket, rollout.sample) for rollout in rollouts]
            rewards["length"] = np.array(shaped)
            total = total + rewards["length"]
        self._done.append(ScoredGroup(prompt, tuple(rollouts), rewards, total, kept))

    def completed(self, wait: bool) -> list[ScoredGroup]:
        done, self._done = self._done, []
        return done
