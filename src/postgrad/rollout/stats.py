"""What rollout engines count: requests, tokens, seconds; of a whole engine and of each of several
processes that share its work; and whether those with the same weights agree.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from postgrad.core.errors import RunError
from postgrad.core.records import Logprobs

StatsRow = tuple[float, ...]  # the values of SUMMED
# The row of a whole engine; behind it those of several processes that share its work.
EngineSums = tuple[StatsRow, ...]

# The most that engines with the same weights may differ: mean over a probe's tokens, in nats.
AGREEMENT = {"float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3}


@dataclass(slots=True)
class EngineStats:
    """Running sums since the engine was made; subtract two copies to measure a phase."""

    requests: int = 0  # turns of samples that have ended
    prompt_tokens: int = 0
    response_tokens: int = 0
    decode_steps: int = 0
    decode_slots: int = 0  # of all decode steps together: what response_tokens fill
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    busy_seconds: float = 0.0  # in which samples were open

    def count_step(self, started: float, admitted: float, ended: float, *, turns: int) -> None:
        """A prefill until `admitted`, then a decoding step, in which so many turns have ended."""
        self.prefill_seconds += admitted - started
        self.decode_seconds += ended - admitted
        self.busy_seconds += ended - started
        self.requests += turns

    @property
    def row(self) -> StatsRow:
        """The values of SUMMED."""
        return tuple(float(getattr(self, name)) for name in SUMMED)

    def rows(self) -> EngineSums:
        """The sums of the whole engine and of each of several processes."""
        return (self.row,)

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


SUMMED = tuple(field.name for field in fields(EngineStats))
# What is known of one of several processes that share an engine's work.
SHARED = ("requests", "prompt_tokens", "response_tokens", "busy_seconds")


class DividedStats(EngineStats):
    """The sums of an engine whose work several processes share, and those of each process."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self._processes = [EngineStats() for _ in range(processes)]
        self._open = [0] * processes  # samples
        self._since = 0.0  # when the seconds were counted last
        self._counted: Sequence[StatsRow] = [EngineStats().row] * processes  # at the last report

    def begin(self, process: int, samples: int, prompt_tokens: int) -> None:
        """A process is asked for samples of a prompt."""
        self._count_seconds()
        self._open[process] += samples
        for stats in (self, self._processes[process]):
            stats.prompt_tokens += prompt_tokens

    def cut(self, process: int) -> None:
        """A sample of a process was cut: it is open no more."""
        self._count_seconds()
        self._open[process] -= 1

    def end(self, process: int, response_tokens: int) -> None:
        """A sample of a process has ended its turn."""
        self.cut(process)
        for stats in (self, self._processes[process]):
            stats.requests += 1
            stats.response_tokens += response_tokens

    def rows(self) -> EngineSums:
        several = self._processes if len(self._processes) > 1 else ()
        return (self.row, *(stats.row for stats in several))

    def by_engine(self) -> dict[str, float]:
        """EngineStats.by_engine, of each process."""
        _, *now = self.rows()
        done = np.subtract(now, self._counted[: len(now)])
        self._counted = now or self._counted
        return engine_metrics({str(n): named(row, SHARED) for n, row in enumerate(done.tolist())})

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        self.busy_seconds += passed * any(self._open)
        for stats, samples in zip(self._processes, self._open, strict=True):
            stats.busy_seconds += passed * bool(samples)


def named(row: Sequence[float], names: Sequence[str] = SUMMED) -> dict[str, float]:
    """The values of a row that `names` name."""
    by_name = dict(zip(SUMMED, row, strict=True))
    return {name: by_name[name] for name in names}


def engine_metrics(done: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics "engine/NAME/..." of what each engine did. `busy_time_fraction`: its busy_seconds
    over those of the engine that was busy longest; left out where none was.
    """
    most = max((values["busy_seconds"] for values in done.values()), default=0.0)
    metrics: dict[str, float] = {}
    for engine, values in done.items():
        share = {"busy_time_fraction": values["busy_seconds"] / most} if most > 0.0 else {}
        metrics |= {f"engine/{engine}/{name}": value for name, value in {**values, **share}.items()}
    return metrics


def distance(first: Sequence[Logprobs], second: Sequence[Logprobs]) -> float:
    """Mean absolute difference of two lists of logprobs of the same tokens, in nats."""
    return float(np.abs(np.concatenate(first) - np.concatenate(second)).mean())


def agreed(logprobs: Sequence[list[Logprobs]], dtype: str, title: str) -> list[Logprobs]:
    """The logprobs of the first engine, once all others are found to agree with them.

    logprobs: for each engine those of the same sequences. dtype: what they compute in. title: what
    messages call an engine. Raises RunError where one differs by more than AGREEMENT[dtype].
    """
    first, *others = logprobs
    for number, other in enumerate(others, 1):
        apart = distance(first, other)
        if not apart <= AGREEMENT[dtype]:  # NaN is no agreement
            raise RunError(
                f"{title} {number} does not have the weights of {title} 0: mean logprob "
                f"difference {apart:.4g} on the same tokens (limit {AGREEMENT[dtype]:g})"
            )
    return first
