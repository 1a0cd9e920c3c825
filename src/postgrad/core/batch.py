"""Batch numbers: what each one counts, how they follow from each other, which values work.

Pure arithmetic. Nobody should have to guess what a batch number counts (verl#1524, OpenRLHF#397,
open-instruct#524), so every number has its unit and formula beside it and is printed at the start
of a run. Gradient accumulation is derived and never set.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import Field

from postgrad.core.errors import UsageError
from postgrad.core.settings import Settings


class BatchSettings(Settings):
    """Batch numbers of a job whose step is one update: SFT.

    State the size of an update one way, `train_batch_size` or `local_mini_batch_size`, and a
    micro-batch one way, in samples or in tokens. A token budget left out is chosen at start.
    """

    train_batch_size: int | None = Field(default=None, ge=1)
    local_mini_batch_size: int | None = Field(default=None, ge=1)
    micro_train_batch_size: int | None = Field(default=None, ge=1)
    micro_train_tokens: int | None = Field(default=None, ge=2)


class RolloutBatchSettings(BatchSettings):
    """Batch numbers of RL. An update left unsaid takes all samples of a step."""

    rollout_batch_size: int = Field(default=64, ge=1)
    n_samples_per_prompt: int = Field(default=8, ge=1)
    epochs_per_rollout: int = Field(default=1, ge=1)
    num_mini_batches: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How many processes train a role, and how many of them share one copy of the batch."""

    ranks: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1


@dataclass(frozen=True, slots=True)
class RunLength:
    """How long a run is, said one way. `rows` of the training data turn epochs into steps."""

    steps: int | None = None
    total_episodes: int | None = None
    epochs: float | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """Every batch number of a run. None: not known before the data is read, or chosen at start.

    rollout_batch_size, n_samples_per_prompt, num_mini_batches are None where a step is one update.
    local_mini_batch_size is None where replicas get unequal shares, gradient_accumulation where
    micro-batches are cut by tokens. left_over: samples of `total_episodes` that fill no step.
    """

    samples_per_step: int
    train_batch_size: int
    epochs_per_rollout: int
    updates_per_step: int
    data_parallel_size: int
    rollout_batch_size: int | None = None
    n_samples_per_prompt: int | None = None
    num_mini_batches: int | None = None
    local_mini_batch_size: int | None = None
    micro_train_batch_size: int | None = None
    micro_train_tokens: int | None = None
    gradient_accumulation: int | None = None
    steps: int | None = None
    total_updates: int | None = None
    total_episodes: int | None = None
    left_over: int = 0

    def to_json(self) -> dict[str, Any]:
        """Name -> number, for plan.json and summary.json."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The table that a run prints at its start: name, number, unit, formula."""
        rows = [(name, _number(name, getattr(self, name)), text) for name, text in self._texts()]
        width = max(len(number) for _, number, _ in rows)
        return [f"{name:<22} {number:>{width}}  {text}" for name, number, text in rows]

    def _texts(self) -> Iterator[tuple[str, str]]:
        sampled = self.rollout_batch_size is not None
        if sampled:
            yield "rollout_batch_size", "prompts per step"
            yield "n_samples_per_prompt", "samples written for each prompt"
            yield "samples_per_step", "samples = rollout_batch_size * n_samples_per_prompt"
            yield "epochs_per_rollout", "passes over a step's samples"
            yield "num_mini_batches", "updates per pass = samples_per_step / train_batch_size"
        yield "train_batch_size", "samples per update, over all ranks"
        yield "data_parallel_size", "replicas = ranks / (tensor_parallel * context_parallel)"
        if self.local_mini_batch_size is not None:
            yield "local_mini_batch_size", "samples per replica and update"
        if self.micro_train_batch_size is not None:
            yield "micro_train_batch_size", "samples per replica in one forward/backward"
            yield (
                "gradient_accumulation",
                "micro-batches per update = "
                "train_batch_size / (micro_train_batch_size * data_parallel_size)",
            )
        else:
            yield "micro_train_tokens", "tokens per replica in one forward/backward, at most"
        if sampled:
            yield "updates_per_step", "optimizer steps = num_mini_batches * epochs_per_rollout"
        yield "steps", "passes of the loop" if sampled else "updates: a step is one update"
        yield "total_updates", "optimizer steps = steps * updates_per_step"
        rest = f"; {self.left_over} of the budget left over" if self.left_over else ""
        each = "samples_per_step" if sampled else "train_batch_size"
        yield "total_episodes", f"samples = steps * {each}{rest}"


def geometry(
    settings: BatchSettings, length: RunLength, parallel: Parallel | None = None
) -> BatchGeometry:
    """All numbers from those that were stated.

    Raises UsageError listing every ratio that is not whole, with the nearest values that work, and
    every quantity that two settings state differently.
    """
    found, problems = derive(settings, length, parallel)
    if found is None or problems:
        raise UsageError("\n".join(f"{key}: {text}" for key, text in problems))
    return found


def derive(
    settings: BatchSettings, length: RunLength, parallel: Parallel | None = None
) -> tuple[BatchGeometry | None, list[tuple[str, str]]]:
    """The geometry, or None, and the problems as (dotted key, what is wrong and what works)."""
    problems: list[tuple[str, str]] = []
    _check_length(length, problems)
    replicas = _replicas(parallel or Parallel(), problems)
    if replicas is None:
        return None, problems
    sampled = settings if isinstance(settings, RolloutBatchSettings) else None
    per_step = sampled.rollout_batch_size * sampled.n_samples_per_prompt if sampled else None
    train = _train_batch_size(settings, per_step, replicas, problems)
    accumulation = _accumulation(settings, train, replicas, problems)
    if problems:
        return None, problems
    passes = sampled.epochs_per_rollout if sampled else 1
    per_step = per_step or train
    updates = per_step // train * passes
    draws = sampled.rollout_batch_size if sampled else train
    steps, left_over = _steps(length, per_step, draws)
    return BatchGeometry(
        samples_per_step=per_step,
        train_batch_size=train,
        epochs_per_rollout=passes,
        updates_per_step=updates,
        data_parallel_size=replicas,
        rollout_batch_size=sampled.rollout_batch_size if sampled else None,
        n_samples_per_prompt=sampled.n_samples_per_prompt if sampled else None,
        num_mini_batches=per_step // train if sampled else None,
        local_mini_batch_size=train // replicas if train % replicas == 0 else None,
        micro_train_batch_size=settings.micro_train_batch_size,
        micro_train_tokens=settings.micro_train_tokens,
        gradient_accumulation=accumulation,
        steps=steps,
        total_updates=None if steps is None else steps * updates,
        total_episodes=None if steps is None else steps * per_step,
        left_over=left_over,
    ), problems


def _replicas(parallel: Parallel, problems: list[tuple[str, str]]) -> int | None:
    share = parallel.tensor_parallel * parallel.context_parallel
    if parallel.ranks % share == 0:
        return parallel.ranks // share
    problems.append(
        (
            "learner.ranks",
            f"{parallel.ranks} ranks do not divide into copies of {share} "
            "(tensor_parallel * context_parallel); nearest ranks that work: "
            f"{_either(_multiples(parallel.ranks, share))}",
        )
    )
    return None


def _train_batch_size(
    settings: BatchSettings, per_step: int | None, replicas: int, problems: list[tuple[str, str]]
) -> int:
    """Samples per update from whichever setting states it; per_step: None where a step is one."""
    stated: dict[str, int] = {}
    if settings.train_batch_size is not None:
        stated["train_batch_size"] = settings.train_batch_size
    if settings.local_mini_batch_size is not None:
        stated["local_mini_batch_size"] = settings.local_mini_batch_size * replicas
    parts = settings.num_mini_batches if isinstance(settings, RolloutBatchSettings) else None
    if parts is not None and per_step is not None:
        if per_step % parts:
            problems.append(
                (
                    "batch.num_mini_batches",
                    f"{per_step} samples of a step do not divide into {parts} mini-batches; "
                    f"nearest that work: {_either(_divisors(parts, per_step))}",
                )
            )
        else:
            stated["num_mini_batches"] = per_step // parts
    if len(set(stated.values())) > 1:
        said = " but ".join(f"{name} makes it {value}" for name, value in stated.items())
        problems.append(
            (f"batch.{list(stated)[-1]}", f"samples per update are stated twice: {said}; keep one")
        )
    name, train = next(iter(stated.items()), ("train_batch_size", per_step or 64))
    if per_step is not None and per_step % train:
        fitting = _divisors(train, per_step)
        if name == "local_mini_batch_size":
            fitting = [size // replicas for size in fitting if size % replicas == 0]
        works = f"nearest {name} that works: {_either(fitting)}" if fitting else "no value works"
        problems.append(
            (
                f"batch.{name}",
                f"{per_step} samples of a step (rollout_batch_size * n_samples_per_prompt) do not "
                f"divide into updates of {train} samples; {works}",
            )
        )
    return train


def _accumulation(
    settings: BatchSettings, train: int, replicas: int, problems: list[tuple[str, str]]
) -> int | None:
    micro = settings.micro_train_batch_size
    if micro is None:
        return None
    if settings.micro_train_tokens is not None:
        problems.append(
            (
                "batch.micro_train_tokens",
                "micro-batches are stated in samples and in tokens; "
                "keep micro_train_batch_size or micro_train_tokens",
            )
        )
        return None
    if train % (micro * replicas) == 0:
        return train // (micro * replicas)
    ways = [f"train_batch_size {_either(_multiples(train, micro * replicas))}"]
    if train % replicas == 0:
        ways.insert(0, f"micro_train_batch_size {_either(_divisors(micro, train // replicas))}")
    problems.append(
        (
            "batch.micro_train_batch_size",
            f"train_batch_size {train} is not a whole number of micro-batches of {micro} samples "
            f"on {replicas} {'replica' if replicas == 1 else 'replicas'}; nearest that work: "
            f"{', or '.join(ways)}",
        )
    )
    return None


def _check_length(length: RunLength, problems: list[tuple[str, str]]) -> None:
    stated = {
        "steps": length.steps,
        "total_episodes": length.total_episodes,
        "epochs": length.epochs,
    }
    said = [name for name, value in stated.items() if value is not None]
    if len(said) != 1:
        how = f"{' and '.join(said)} are both stated" if said else "nothing says how long to run"
        problems.append((said[-1] if said else "steps", f"{how}: state one of {', '.join(stated)}"))


def _steps(length: RunLength, per_step: int, draws: int) -> tuple[int | None, int]:
    """Steps and what is left of a budget of episodes. draws: rows of the data that a step takes.

    Epochs are rounded up to whole steps, so that every row is drawn at least that often.
    """
    if length.total_episodes is not None:
        steps = max(1, length.total_episodes // per_step)
        return steps, max(0, length.total_episodes - steps * per_step)
    if length.epochs is not None and length.rows is not None:
        return max(1, math.ceil(round(length.epochs * length.rows, 6) / draws)), 0
    return length.steps, 0


def _divisors(value: int, of: int) -> list[int]:
    """The divisors of `of` nearest to `value` from below and from above."""
    fitting = [n for n in range(1, of + 1) if of % n == 0]
    below, above = [n for n in fitting if n <= value], [n for n in fitting if n >= value]
    return sorted({*below[-1:], *above[:1]})


def _multiples(value: int, of: int) -> list[int]:
    """The positive multiples of `of` nearest to `value` from below and from above."""
    return [n for n in (value // of * of, -(-value // of) * of) if n > 0]


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)


def _number(name: str, value: int | None) -> str:
    if value is not None:
        return f"{value}"
    return "at start" if name == "micro_train_tokens" else "from data"
