"""How many runs of a sweep go at once on this machine, and which devices each of them gets."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from postgrad.core.errors import PostgradError, UsageError
from postgrad.core.process import usable_cores
from postgrad.models.known_shapes import shape_of_model
from postgrad.models.settings import ModelSettings
from postgrad.models.shapes import ModelShape
from postgrad.observe.run_dir import RunDirectory
from postgrad.plan import hardware as machines
from postgrad.plan.calibration import calibration_file, read
from postgrad.plan.hardware import Hardware, this_machine
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.plan.planner import start_of
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.pipeline import Pipeline
from postgrad.recipe.recipe import Recipe
from postgrad.recipe.sweep import Sweep, SweptRun

SPARE = 0.9  # the share of the free memory that runs may take together: plans err by some percent


@dataclass(frozen=True, slots=True)
class Places:
    """Places for runs at the same time."""

    count: int
    threads: int | None  # of each run, where the machine's cores are divided; None: as it states
    devices: tuple[str, ...]  # $CUDA_VISIBLE_DEVICES of each place; empty: as it is
    reason: str  # what set the count, for the person who waits

    def environment(self, place: int) -> dict[str, str]:
        """Variables for a run in one of the places."""
        if not self.devices:
            return {}
        return {"CUDA_VISIBLE_DEVICES": self.devices[place % len(self.devices)]}


def places_for(trials: Sequence[SweptRun], at_once: int | None) -> Places:
    """Places for the trials, `at_once` of them where that is given.

    On GPUs a place has as many as the plan of a run uses. On a CPU a run needs a core and, by its
    plan, memory. Where no plan can be made, runs go one after another.
    """
    if at_once is not None and at_once < 1:
        raise UsageError(f"--at-once {at_once}: 1 or more is expected")
    recipes = [recipe for trial in trials for recipe in trial.recipes]
    stated = max((recipe.learner.threads or 0 for recipe in recipes), default=0)
    if any(recipe.cluster.type != "local" for recipe in recipes) and at_once is None:
        return Places(1, None, (), "runs of a cluster go one after another")
    try:
        hardware = this_machine()
        if not hardware.device.is_cpu:
            return _on_gpus(trials, hardware, at_once)
        peak = 0 if at_once is not None else max(_peak(trial, hardware) for trial in trials)
    except PostgradError as error:
        if at_once is None:
            return Places(1, None, (), f"the plan failed, so runs go one after another: {error}")
        return Places(min(at_once, len(trials)), None, (), "--at-once")
    free = min(hardware.device.memory_bytes, psutil.virtual_memory().available)
    return _on_cores(len(trials), usable_cores(), stated, peak, free, at_once)


def _on_cores(
    runs: int, cores: int, stated: int, peak: int, free: int, at_once: int | None
) -> Places:
    """Places on a CPU. stated: threads of a run by its recipe, 0 where that leaves them open. peak,
    free: bytes that a run takes at most, and bytes that are free.
    """
    by_cores = max(1, cores // max(1, stated))
    by_memory = max(1, int(free * SPARE) // peak) if peak else runs
    count = min(runs, at_once or min(by_cores, by_memory))
    reason = f"{cores} cores" if by_cores <= by_memory else f"{peak / 2**30:.1f} GiB each"
    threads = None if stated or count == 1 else max(1, cores // count)
    return Places(count, threads, (), "--at-once" if at_once else reason)


def _on_gpus(trials: Sequence[SweptRun], hardware: Hardware, at_once: int | None) -> Places:
    used = max(_devices(trial, hardware) for trial in trials)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(hardware.count)]
    names = [name.strip() for name in names[: hardware.count]]
    groups = tuple(
        ",".join(names[start : start + used]) for start in range(0, len(names) - used + 1, used)
    )
    count = min(len(trials), at_once or max(1, len(groups)))
    reason = "--at-once" if at_once else f"{hardware.count} GPUs, {used} for each"
    return Places(count, None, groups if count > 1 else (), reason)


def _peak(trial: SweptRun, hardware: Hardware) -> int:
    """Bytes that a run takes at most, by its plan."""
    return max(planned.memory.peak_bytes for planned in _planned(trial, hardware))


def _devices(trial: SweptRun, hardware: Hardware) -> int:
    return max(planned.used_devices for planned in _planned(trial, hardware))


def _planned(trial: SweptRun, hardware: Hardware) -> Iterator[RunPlan]:
    """The plans of its recipes. Rows count as long as they may be: no data is read for this."""
    models: dict[str, ModelSettings] = {}
    stages = trial.source.stages if isinstance(trial.source, Pipeline) else ()
    for name, recipe in [(stage.name, stage.recipe) for stage in stages] or [("", trial.source)]:
        assert not isinstance(recipe, Pipeline)
        cores = machines.with_threads(hardware, recipe.learner.threads)

        def shape(model: ModelSettings) -> ModelShape:
            return shape_of_model(start_of(model, models))

        yield make_plan(recipe, Facts(shape, cores, calibration=read(calibration_file())))
        models[name] = start_of(recipe.model, models)


def with_threads(sweep: Sweep, threads: int | None) -> Sweep:
    """The sweep with `learner.threads` in the recipes that leave it open: of runs that have begun
    as they began, since another number of threads rounds differently; else `threads`.
    """
    return replace(sweep, trials=tuple(_with_threads(trial, threads) for trial in sweep.trials))


def _with_threads(trial: SweptRun, threads: int | None) -> SweptRun:
    if not isinstance(trial.source, Pipeline):
        return replace(trial, source=_settled(trial.source, threads))
    stages = tuple(
        replace(stage, recipe=_settled(stage.recipe, threads)) for stage in trial.source.stages
    )
    return replace(trial, source=replace(trial.source, stages=stages))


def _settled(recipe: Recipe, threads: int | None) -> Recipe:
    path = Path(recipe.run_dir)
    if RunDirectory.holds_run(path):
        threads = RunDirectory(path).recipe().get("learner", {}).get("threads")
    if recipe.learner.threads is not None or threads is None:
        return recipe
    data = recipe.dump()
    for table in (data, data.get("critic") or {}):  # a resolved critic states the learner's keys
        if "learner" in table:
            table["learner"]["threads"] = threads
    return recipe_from_json(data)
