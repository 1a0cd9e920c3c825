"""An engine that answers at once, an environment that replies twice, prompts that are numbers, and
rewards that a test chooses.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from postgrad.core.records import Prompt, Rollout, ScoredGroup
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.environment import Observation, Step, at_once
from postgrad.rollout.stats import EngineStats


class Answers:
    """An engine: every sample is one token, its own number."""

    streams = 1

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

    def completed(self, awaited: Collection[int] | None = None) -> list[Completion]:
        done, self._waiting = self._waiting, []
        return done

    def load_weights(self, weights: Any, version: int) -> None:
        raise AssertionError

    def logprobs(self, sequences: Any, temperature: float) -> Any:
        raise AssertionError


class TwoReplies:
    """An environment that answers three tokens twice."""

    deterministic = True
    concurrent = 0
    turn_tokens = ()
    begins = False

    def reset(self, prompt: Prompt, sample: int) -> "TwoReplies":
        return self

    def resume(self, prompt: Prompt, sample: int, *recorded: Any) -> None:
        raise AssertionError

    def step(self, response: Completion) -> Step:
        return at_once(Observation(np.array([5, 6, 7], np.int32), done=response.turn == 2))

    def close(self) -> None:
        """Keeps nothing of an episode."""


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
        sample_rewards = [self._reward(prompt.ticket, rollout.sample) for rollout in rollouts]
        total = np.array([np.nan if reward is None else reward for reward in sample_rewards])
        kept = np.array([reward is not None for reward in sample_rewards])
        rewards = {"r": total}
        if self._length is not None:
            shaped = [self._length(prompt.ticket, rollout.sample) for rollout in rollouts]
            rewards["length"] = np.array(shaped)
            total = total + rewards["length"]
        self._done.append(ScoredGroup(prompt, tuple(rollouts), rewards, total, kept))

    def completed(self, wait: bool) -> list[ScoredGroup]:
        done, self._done = self._done, []
        return done

    def too_many_failed(self, groups: Iterable[ScoredGroup], samples: int) -> bool:
        return False

    def require_scored(self, groups: Iterable[ScoredGroup]) -> None:
        pass


class Words:
    """A tokenizer whose tokens are their own numbers; 95 ends an answer."""

    eos_token_id = 95

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, rows: Sequence[Sequence[int]], **how: bool) -> list[str]:
        return [self.decode(row, **how) for row in rows]


class Ticking:
    """An engine of `slots` rows whose samples are as long as length(ticket, sample, turn) says.

    The token of position p is 100 * version + p, its logprob -p - version / 8.
    """

    streams = 1

    def __init__(
        self,
        length: Callable[[int, int, int], int],
        slots: int = 4,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        """rest: called before each decode step."""
        self._rest = rest
        self.stats = EngineStats()
        self.version = 0
        self.steps = 0  # of decoding
        self._length = length
        self._slots = slots
        self._open: list[Request] = []

    def submit(self, request: Request) -> None:
        request.require_valid()
        self._open += [replace(request, sample_ids=(sample,)) for sample in request.sample_ids]
        self._open.sort(key=lambda open_request: (open_request.ticket, open_request.sample_ids[0]))

    def completed(
        self, awaited: Collection[int] | None = None, *, halt: Callable[[], bool] = lambda: False
    ) -> list[Completion]:
        done: list[Completion] = []
        while self._open and not done and not halt():
            self._rest()
            self.steps += 1
            rows, self._open = self._open[: self._slots], self._open[self._slots :]
            self.stats.decode_steps += 1
            self.stats.response_tokens += len(rows)
            for request in map(self._step, rows):
                sample = request.sample_ids[0]
                if request.position < self._length(request.ticket, sample, request.turn):
                    self._open.append(request)
                    continue
                turn = request.written
                assert turn is not None
                fields = (turn.token_ids, turn.logprobs, "stop", turn.versions)
                text = Words().decode(turn.token_ids.tolist())
                done.append(Completion(request.ticket, sample, request.turn, *fields, text))
            self._open.sort(key=lambda request: (request.ticket, request.sample_ids[0]))
        return done

    def notify(self) -> None:
        pass

    def cut(self) -> list[Request]:
        cut, self._open = self._open, []
        return cut

    def _step(self, request: Request) -> Request:
        place = request.position
        turn = request.turn_with(
            np.array([100 * self.version + place], np.int32),
            np.array([-place - self.version / 8], np.float32),
            ((self.version, 1),),
        )
        return replace(request, written=turn)
