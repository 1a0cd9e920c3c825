"""The training loop of all jobs: its length, its evaluations, logs and checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import replace
from traceback import clear_frames
from typing import Protocol

from torch import Tensor

from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.state import Best, RunState
from postgrad.core.errors import Diverged, PostgradError, RunError, ScoresMissing, UsageError
from postgrad.evaluation.results import Result
from postgrad.observe.loggers.all import of_evaluation
from postgrad.observe.sentinels.base import SentinelStop
from postgrad.recipe.eval_settings import EvalTimes
from postgrad.training.out_of_memory import explain, phase_of, ran_out
from postgrad.training.run import Run, Stop, Stopped
from postgrad.training.saving import Saver


class Job(Protocol):
    """What each kind of job defines itself: one step, its evaluation, its state."""

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

    Raises Stopped where a signal asked for it, SentinelStop where a sentinel did, ScoresMissing
    where verifiers gave too few scores; all save first.
    """
    run.clock.take_step()  # loading is no part of the first step
    saver = Saver(run, job, state)
    with run.stop, run.console.run(run.steps, state.step):
        try:
            if state.step == 0 and run.recipe.eval.sets and run.recipe.eval.at_start:
                state, _, evaluation = _evaluate(run, job, state)
                run.loggers.log(state.step, evaluation)
            while state.step < run.steps and not _early(run, state):
                following, metrics = job.step(state)
                run.stop.hold()  # also where no update did: a step counts whole, or not at all
                state = _finish(run, job, saver, following, metrics)
                run.stop.release()
                run.sentinels.stop()
                if run.stop.asked and state.step < run.steps:
                    raise Stop
            saver.wait()
        except Stop:
            limit = f"checkpoint.grace_seconds = {run.recipe.checkpoint.grace_seconds:g}"
            why = f", which was not expected to end within {limit}"
            raise Stopped(saver.stop(state, why)) from None
        except SentinelStop as stopped:
            back = f"{run.directory.fork_command} goes back to an earlier checkpoint"
            raise SentinelStop(f"{stopped}; {_standing(saver, state)}; {back}") from stopped
        except Diverged as diverged:
            raise Diverged(f"{diverged}; {_way_back(run, saver)}") from diverged
        except _EvaluationFailed as failed:
            raise failed.error from failed.cause
        except ScoresMissing as failed:
            if not state.step:
                raise
            raise ScoresMissing(f"{failed}; {_standing(saver, state)}") from failed
        except Exception as error:
            if not ran_out(error):
                raise
            clear_frames(error.__traceback__)  # they hold what was being computed
            phase, standing = phase_of(run), saver.rescue(state)
            raise explain(run, state.step, phase, error, standing) from error
        finally:
            saver.close()
    return state


class _EvaluationFailed(Exception):
    """An evaluation after a step has failed. error: the message for people, which also says what
    became of the step. cause: the evaluation's own.
    """

    def __init__(self, error: PostgradError, cause: PostgradError) -> None:
        super().__init__(str(error))
        self.error, self.cause = error, cause


def _standing(saver: Saver, state: RunState) -> str:
    """Saves if possible; a sentence that says where the run stands, or why nothing could be saved:
    a full disk must not hide why the run stopped.
    """
    try:
        return saver.stop(state)
    except RunError as error:
        return str(error)


def _way_back(run: Run, saver: Saver) -> str:
    """How a run goes on whose weights are of no use; nothing is saved of them."""
    try:
        newest, is_saved = saver.newest()
    except RunError as error:
        return str(error)
    if not is_saved:
        return newest
    return (
        f"{newest}; {run.directory.fork_command} makes a run of this or an earlier one, and "
        "postgrad resume DIR --learner.lr RATE --allow-change learner.lr goes on with it"
    )


def _finish(
    run: Run, job: Job, saver: Saver, state: RunState, metrics: Mapping[str, float]
) -> RunState:
    """Logs, evaluates and saves after a job's step, where they are due."""
    settings = run.recipe.eval
    state, line = _log(run, state, metrics)
    improved = False
    if settings.sets and _due(settings, state.step, run.steps):
        try:
            state, improved, evaluation = _evaluate(run, job, state)
        except (ScoresMissing, UsageError) as error:
            with_standing = type(error)(f"{error}; {_trained(run, saver, state)}")
            raise _EvaluationFailed(with_standing, error) from None
        line |= evaluation
    run.loggers.log(state.step, line)
    last = state.step == run.steps or _early(run, state)
    if last or improved or saver.due(state):
        saver.save(state, best=improved, must=last)
        run.clock.take_step()  # saves carry their own times, in events
    return state


def _trained(run: Run, saver: Saver, state: RunState) -> str:
    """Saves a step whose evaluation failed; a sentence that says where the run stands."""
    try:
        saver.save(state, must=True)
    except RunError as error:
        return str(error)
    return (
        f"the checkpoint of step {state.step} is kept, without this evaluation; continue with "
        f"{run.directory.resume_command}"
    )


def _early(run: Run, state: RunState) -> bool:
    """True where early stopping ends the run: checkpoint.early_stop evaluations in a row did not
    beat the best one.
    """
    settings = run.recipe.checkpoint
    patience, best = settings.early_stop, _comparable(state.best, settings)
    return bool(patience) and best is not None and best.waited >= patience


def _due(settings: EvalTimes, step: int, steps: int) -> bool:
    if step == steps:
        return settings.at_end or bool(settings.every and step % settings.every == 0)
    return bool(settings.every and step % settings.every == 0)


def _log(
    run: Run, state: RunState, metrics: Mapping[str, float]
) -> tuple[RunState, dict[str, float]]:
    """Logs a step; returns the state with the sentinels' memory, and the line of metrics.jsonl."""
    memory = run.measure_memory()
    counters = {"step": state.step, "update": state.update, "episodes": state.episodes}
    times = run.clock.take_step()
    estimated = run.estimates.columns
    line = {**counters, **metrics, **times, "peak_memory_bytes": memory, **estimated}
    run.console.step(state.step, run.steps, line)
    remembered, values = run.sentinels.look(state.step, metrics, state.sentinels)
    run.logs.metric(line | values)
    return replace(state, sentinels=remembered), line | values


def _evaluate(run: Run, job: Job, state: RunState) -> tuple[RunState, bool, dict[str, float]]:
    """Evaluates; returns the state with the results, whether the best metric improved, and all
    numbers for the loggers.
    """
    results = job.evaluate()
    run.clock.take_step()  # evaluations carry their own times
    metrics, seen, shown = dict[str, float](), dict[str, float](), dict[str, float]()
    for result in results:
        line = {"step": state.step, "update": state.update, **result.to_json()}
        run.logs.evaluation(line)
        run.logs.evaluation_samples({**sample, "step": state.step} for sample in result.samples)
        metrics |= result.by_metric()
        shown |= result.by_metric(shown=True)
        seen |= of_evaluation(line)
    text = ", ".join(part for result in results for part in result.texts())
    run.console.note(f"evaluation after step {state.step}: {text}")
    run.console.evaluated(state.step, shown)
    remembered, _ = run.sentinels.look(state.step, seen, state.sentinels)
    best, improved = _better(run, state, metrics)
    evaluations = {**state.evaluations, **metrics}
    state = replace(state, evaluations=evaluations, best=best, sentinels=remembered)
    return state, improved, seen


def _better(run: Run, state: RunState, metrics: Mapping[str, float]) -> tuple[Best | None, bool]:
    settings = run.recipe.checkpoint
    metric, mode = settings.best_metric, settings.best_mode
    if metric is None:
        return state.best, False
    if metric not in metrics:
        raise UsageError(
            f"checkpoint.best_metric = {metric!r} is not among this run's evaluation metrics: "
            f"{', '.join(metrics)}: name one of them with --checkpoint.best_metric"
        )
    value, before = metrics[metric], _comparable(state.best, settings)
    if before is None:
        first = not math.isnan(value)
        return Best(metric, value, state.step, mode=mode) if first else state.best, first
    if value > before.value if mode == "max" else value < before.value:  # NaN never is
        return Best(metric, value, state.step, mode=mode), True
    return replace(before, waited=before.waited + 1), False


def _comparable(best: Best | None, settings: CheckpointSettings) -> Best | None:
    """The best evaluation so far; None where a resume has changed what is measured or which way is
    better: a value of another metric is no bound for this one.
    """
    if best is None or best.metric != settings.best_metric:
        return None
    return best if best.mode in ("", settings.best_mode) else None
