"""Derives all batch numbers from those that a recipe states, and names values that would work."""

import math
from collections.abc import Callable

from postgrad.core.batch import (
    BatchGeometry,
    BatchSettings,
    Parallel,
    RolloutBatchSettings,
    RunLength,
)
from postgrad.core.errors import UsageError


def geometry(
    settings: BatchSettings, length: RunLength, parallel: Parallel | None = None
) -> BatchGeometry:
    """All batch numbers, from those that `settings` and `length` state.

    Raises UsageError that lists every ratio that is not an integer, with the nearest values that
    work, and every quantity that two settings state differently.
    """
    derived, problems = derive(settings, length, parallel)
    if derived is None or problems:
        raise UsageError("\n".join(f"{key}: {text}" for key, text in problems))
    return derived


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
    accumulation = None
    if per_step is None or per_step % train == 0:  # else that size is not the one to divide
        accumulation = _accumulation(settings, train, per_step, replicas, problems)
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
        micro_train_tokens=settings.stated_tokens,
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
    """Samples per update, from the setting that states them. per_step: samples of a step; None
    where a step is one update.
    """
    stated: dict[str, int] = {}
    if settings.train_batch_size is not None:
        stated["train_batch_size"] = settings.train_batch_size
    if settings.local_mini_batch_size is not None:
        stated["local_mini_batch_size"] = settings.local_mini_batch_size * replicas
    unit = replicas * (settings.micro_train_batch_size or 1)  # samples of whole micro-batches
    parts = settings.num_mini_batches if isinstance(settings, RolloutBatchSettings) else None
    if parts is not None and per_step is not None:
        if per_step % parts:
            fitting = _divisors(parts, per_step, lambda n: per_step // n % unit == 0)
            problems.append(
                (
                    "batch.num_mini_batches",
                    f"{per_step} samples of a step do not divide into {parts} mini-batches; "
                    f"nearest that work: {_either(fitting or _divisors(parts, per_step))}",
                )
            )
        else:
            stated["num_mini_batches"] = per_step // parts
    if len(set(stated.values())) > 1:
        both = " but ".join(f"{name} makes it {value}" for name, value in stated.items())
        problems.append(
            (f"batch.{list(stated)[-1]}", f"samples per update are stated twice: {both}; keep one")
        )
    name, train = next(iter(stated.items()), ("train_batch_size", per_step or 64))
    if per_step is not None and per_step % train:
        share = replicas if name == "local_mini_batch_size" else 1
        per_share = per_step // share if per_step % share == 0 else 0
        fitting = _divisors(train // share, per_share, lambda n: n * share % unit == 0)
        fitting = fitting or _divisors(train // share, per_share)
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
    settings: BatchSettings,
    train: int,
    per_step: int | None,
    replicas: int,
    problems: list[tuple[str, str]],
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
    unit = micro * replicas
    if train % unit == 0:
        return train // unit
    ways: list[str] = []
    if train % replicas == 0:
        ways.append(f"micro_train_batch_size {_either(_divisors(micro, train // replicas))}")
    if per_step is None:
        larger = _multiples(train, unit)
    else:
        larger = _divisors(train, per_step, lambda n: n % unit == 0)
    if larger and not _stated_otherwise(settings):
        ways.append(f"train_batch_size {_either(larger)}")
    works = f"nearest that work: {', or '.join(ways)}" if ways else "no micro-batch works with it"
    problems.append(
        (
            "batch.micro_train_batch_size",
            f"train_batch_size {train} is not a whole number of micro-batches of {micro} samples "
            f"on {replicas} {'replica' if replicas == 1 else 'replicas'}; {works}",
        )
    )
    return None


def _stated_otherwise(settings: BatchSettings) -> bool:
    """Whether another setting than train_batch_size states the size of an update."""
    parts = settings.num_mini_batches if isinstance(settings, RolloutBatchSettings) else None
    return settings.local_mini_batch_size is not None or parts is not None


def _check_length(length: RunLength, problems: list[tuple[str, str]]) -> None:
    stated = {
        "steps": length.steps,
        "total_episodes": length.total_episodes,
        "epochs": length.epochs,
    }
    names = [name for name, value in stated.items() if value is not None]
    if len(names) != 1:
        how = f"{' and '.join(names)} are both stated" if names else "nothing says how long to run"
        problems.append(
            (names[-1] if names else "steps", f"{how}: state one of {', '.join(stated)}")
        )


def _steps(length: RunLength, per_step: int, draws: int) -> tuple[int | None, int]:
    """Steps of the run (None: unknown), and samples of `total_episodes` that fill no step. draws:
    rows of the data per step. Epochs are rounded up to whole steps, so that every row is drawn at
    least that often.
    """
    if length.total_episodes is not None:
        steps = max(1, length.total_episodes // per_step)
        return steps, max(0, length.total_episodes - steps * per_step)
    if length.epochs is not None and length.rows is not None:
        return max(1, math.ceil(round(length.epochs * length.rows, 6) / draws)), 0
    return length.steps, 0


def _divisors(
    value: int, of: int, works: Callable[[int], bool] = lambda divisor: True
) -> list[int]:
    """The nearest divisors of `of` below and above `value` for which `works` is true; none of 0."""
    small = [n for n in range(1, math.isqrt(of) + 1) if of % n == 0]
    fitting = [n for n in sorted({*small, *(of // n for n in small)}) if works(n)]
    below, above = [n for n in fitting if n <= value], [n for n in fitting if n >= value]
    return sorted({*below[-1:], *above[:1]})


def _multiples(value: int, of: int) -> list[int]:
    """The positive multiples of `of` nearest to `value` from below and from above."""
    return [n for n in (value // of * of, -(-value // of) * of) if n > 0]


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
