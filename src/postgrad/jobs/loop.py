"""What all jobs share of the loop: how long, when to evaluate, what to log, when to save."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from postgrad.checkpoint.state import Best, RunState
from postgrad.core.errors import UsageError
from postgrad.jobs.evaluation import Result
from postgrad.jobs.run import Run
from postgrad.recipe.settings import EvalSettings


class Job(Protocol):
    """The part of a job that is its own: one step, and how its policy is evaluated."""

    def step(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """Sample, score, train: the state after the step, and what to log of it."""
        ...

    def evaluate(self) -> list[Result]:
        """The results of every evaluation set with the weights of now."""
        ...

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """The state of every role that changes, by file stem: "policy.weights"."""
        ...


def loop(run: Run, job: Job, state: RunState) -> RunState:
    """Runs the job from `state` to its last step."""
    settings = run.recipe.eval
    run.clock.take_step()  # loading is no part of the first step
    if state.step == 0 and settings.sets and settings.at_start:
        state, _ = _evaluate(run, job, state)
    while state.step < run.steps:
        state, metrics = job.step(state)
        _log(run, state, metrics)
        improved = False
        if settings.sets and _due(settings, state.step, run.steps):
            state, improved = _evaluate(run, job, state)
        every = run.recipe.checkpoint.save_steps
        if improved or state.step == run.steps or (every and state.step % every == 0):
            _save(run, job, state, improved)
    return state


def _due(settings: EvalSettings, step: int, steps: int) -> bool:
    if step == steps:
        return settings.at_end or bool(settings.every and step % settings.every == 0)
    return bool(settings.every and step % settings.every == 0)


def _log(run: Run, state: RunState, metrics: Mapping[str, float]) -> None:
    memory = run.measure_memory()
    counters = {"step": state.step, "update": state.update, "episodes": state.episodes}
    times = run.clock.take_step()
    line = {**counters, **metrics, **times, "peak_memory_bytes": memory}
    run.logs.metric(line)
    run.console.step(state.step, run.steps, line)


def _evaluate(run: Run, job: Job, state: RunState) -> tuple[RunState, bool]:
    """The state with the results, and whether the best metric improved."""
    results = job.evaluate()
    run.clock.take_step()  # evaluations carry their own times
    found: dict[str, float] = {}
    for result in results:
        run.logs.evaluation({"step": state.step, "update": state.update, **result.to_json()})
        found |= result.by_metric()
    run.console.note(_told(state.step, found))
    best, improved = _better(run, state, found)
    return replace(state, evaluations={**state.evaluations, **found}, best=best), improved


def _told(step: int, found: Mapping[str, float]) -> str:
    """One line for people: rates as percentages with one digit."""
    values = (f"{name.removeprefix('eval/')} {value:.3f}" for name, value in found.items())
    return f"evaluation after step {step}: {', '.join(values)}"


def _better(run: Run, state: RunState, found: Mapping[str, float]) -> tuple[Best | None, bool]:
    metric, mode = run.recipe.checkpoint.best_metric, run.recipe.checkpoint.best_mode
    if metric is None:
        return state.best, False
    if metric not in found:
        raise UsageError(
            f"checkpoint.best_metric = {metric!r} is not among this run's evaluation metrics: "
            f"{', '.join(found)}"
        )
    value = found[metric]
    if math.isnan(value):
        return state.best, False
    before = state.best
    improved = before is None or (value > before.value if mode == "max" else value < before.value)
    return (Best(metric, value, state.step), True) if improved else (before, False)


def _save(run: Run, job: Job, state: RunState, best: bool) -> None:
    with run.phase("save"):
        offsets = run.logs.sync()
        kept = replace(state, log_offsets=offsets, choices=run.choices.to_json())
        run.store.save(kept, job.tensors(), best=best)
