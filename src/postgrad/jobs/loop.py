"""What all jobs share of the loop: how long, when to evaluate, what to log, when to save."""

import math
from collections.abc import Mapping
from dataclasses import replace
from traceback import clear_frames
from typing import Protocol

from torch import Tensor

from postgrad.checkpoint.state import Best, RunState
from postgrad.core.errors import UsageError
from postgrad.jobs import out_of_memory
from postgrad.jobs.results import Result
from postgrad.jobs.run import Run
from postgrad.jobs.saving import Saver
from postgrad.jobs.stopping import Stop, Stopped
from postgrad.recipe.settings import EvalTimes


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
    """Runs the job from `state` to its last step, or until early stopping.

    Raises Stopped where a signal asked for it.
    """
    run.clock.take_step()  # loading is no part of the first step
    saver = Saver(run, job, state)
    with run.stop:
        try:
            if state.step == 0 and run.recipe.eval.sets and run.recipe.eval.at_start:
                state, _ = _evaluate(run, job, state)
            while state.step < run.steps and not _early(run, state):
                following, metrics = job.step(state)
                run.stop.hold()  # a step without any update too is whole or not at all
                state = _finish(run, job, saver, following, metrics)
                run.stop.release()
                if run.stop.asked and state.step < run.steps:
                    raise Stop
            saver.wait()
        except Stop:
            raise Stopped(saver.stop(state)) from None
        except Exception as error:
            if not out_of_memory.ran_out(error):
                raise
            clear_frames(error.__traceback__)  # they hold what was being computed
            phase, standing = out_of_memory.phase_of(run), saver.rescue(state)
            raise out_of_memory.explain(run, state.step, phase, error, standing) from error
        finally:
            saver.close()
    return state


def _finish(
    run: Run, job: Job, saver: Saver, state: RunState, metrics: Mapping[str, float]
) -> RunState:
    """What belongs to a step beside the job's own part: its log, evaluation and checkpoint."""
    settings = run.recipe.eval
    _log(run, state, metrics)
    improved = False
    if settings.sets and _due(settings, state.step, run.steps):
        state, improved = _evaluate(run, job, state)
    last = state.step == run.steps or _early(run, state)
    if last or improved or saver.due(state):
        saver.save(state, best=improved, must=last)
        run.clock.take_step()  # saves carry their own times, in events
    return state


def _early(run: Run, state: RunState) -> bool:
    """True where the best evaluation has not been beaten for long enough."""
    patience = run.recipe.checkpoint.early_stop
    return bool(patience) and state.best is not None and state.best.waited >= patience


def _due(settings: EvalTimes, step: int, steps: int) -> bool:
    if step == steps:
        return settings.at_end or bool(settings.every and step % settings.every == 0)
    return bool(settings.every and step % settings.every == 0)


def _log(run: Run, state: RunState, metrics: Mapping[str, float]) -> None:
    memory = run.measure_memory()
    counters = {"step": state.step, "update": state.update, "episodes": state.episodes}
    times = run.clock.take_step()
    foreseen = run.foreseen.columns
    line = {**counters, **metrics, **times, "peak_memory_bytes": memory, **foreseen}
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
    told = ", ".join(part for result in results for part in result.told())
    run.console.note(f"evaluation after step {state.step}: {told}")
    best, improved = _better(run, state, found)
    return replace(state, evaluations={**state.evaluations, **found}, best=best), improved


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
    if improved:
        return Best(metric, value, state.step), True
    assert before is not None
    return replace(before, waited=before.waited + 1), False
