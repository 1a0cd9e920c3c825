"""`postgrad plan --calibrate RUN_DIR`: measures how fast this machine is by a run's metrics."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from postgrad.algorithms.critic import Critic
from postgrad.checkpoint.schema import problem_of
from postgrad.core.errors import RunError, UsageError
from postgrad.models.known_shapes import shape_of_model
from postgrad.observe.console import Console
from postgrad.observe.follow import read_steps
from postgrad.observe.run_dir import RunDirectory
from postgrad.plan import calibration
from postgrad.plan.calibration import Machine, Measured
from postgrad.plan.hardware import Hardware, full_name, this_cpu, this_machine, with_threads
from postgrad.plan.lengths import row_lengths
from postgrad.plan.pass_time import Samples
from postgrad.plan.plan import Facts, RunPlan, make_plan, phases_of
from postgrad.plan.timing import REWARD, answered_tokens
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Recipe

LEAST = 3  # steps after those that warm up: of fewer, a median says little
WARM_UP = 1  # steps of a run in which kernels are chosen and memory is first taken

MetricsLine = Mapping[str, Any]  # a line of metrics.jsonl


def calibrate(run_dir: Path, console: Console) -> dict[str, Any]:
    """Measures this machine by the run in `run_dir`, stores that for later plans, and returns it.

    Raises UsageError where there is no run, no plan.json, or too few steps, and where the run was
    on other hardware.
    """
    directory = RunDirectory.open(run_dir)
    machine, after = _newest_plan(directory)
    recipe = calibration.chosen(
        recipe_from_json(directory.recipe()), machine.dtype, machine.threads or None
    )
    hardware = _hardware(machine, run_dir)
    lines = warm(_lines(run_dir / "metrics.jsonl", after), recipe)
    if len(lines) < LEAST:
        raise UsageError(
            f"{run_dir} has {len(lines)} steps beyond those that warm up; a calibration needs "
            f"{LEAST}"
        )
    path = calibration.calibration_file()
    if path is None:
        raise UsageError("no home directory: name the calibration file in POSTGRAD_CALIBRATION")
    facts = Facts(shape_of_model, hardware, lengths=row_lengths(recipe))  # without calibration
    rows = list(learned(make_plan(recipe, facts), lines, machine, str(run_dir.resolve())))
    if not rows:
        raise UsageError(f"{run_dir}: its metrics have the time of no phase that a plan has")
    calibration.write(path, rows)
    _show(rows, path, console)
    return {"file": str(path), "measured": [row.model_dump() for row in rows]}


def _hardware(machine: Machine, run_dir: Path) -> Hardware:
    """The hardware of this machine that the run used. Raises UsageError where the run was on
    another machine.
    """
    hardware = this_cpu()
    if machine.device != full_name(hardware.device):
        hardware = this_machine()
    if machine.device != full_name(hardware.device):
        raise UsageError(
            f"{run_dir} ran on {machine.device}, this machine is {full_name(hardware.device)}: "
            "calibrate where the run was"
        )
    return with_threads(hardware, machine.threads or None)


def warm(lines: Sequence[MetricsLine], recipe: Recipe) -> Sequence[MetricsLine]:
    """The lines without the steps that warm up, and without those in which only a critic learns."""
    algorithm = recipe.algorithm
    alone = algorithm.critic_warmup_steps if isinstance(algorithm, Critic) else 0
    return lines[max(WARM_UP, alone) :]


def median(lines: Sequence[MetricsLine], key: str) -> float | None:
    """The median over the lines that have the number; None where no line has it."""
    values = [line[key] for line in lines if line.get(key) is not None]
    return statistics.median(values) if values else None


def learned(
    planned: RunPlan, lines: Sequence[MetricsLine], machine: Machine, run: str
) -> Iterator[Measured]:
    """A row for each phase that was measured. planned: without calibration."""
    shares = _shares(planned, lines)
    for name, phases in phases_of(planned.recipe).items():
        timed = [phase for phase in phases if phase != REWARD or planned.timing.step.get(phase)]
        if len(timed) != 1:  # its parts are measured too
            continue
        (phase,) = timed
        seconds, estimated = median(lines, f"{name}_seconds"), planned.timing.step.get(phase)
        if not seconds or not estimated:
            continue
        tokens = shares.get(phase, 1.0)
        yield Measured(
            **machine.to_json(),
            job=planned.recipe.job,
            phase=phase,
            times=_rounded(seconds / estimated / tokens),
            tokens=_rounded(tokens),
            run=run,
            date=datetime.now(UTC).date().isoformat(),
        )


def _answered(line: MetricsLine) -> float:
    """Tokens of the answers that the policy sampled in place of rows'."""
    return (line["on_policy/samples"] or 0.0) * (line["on_policy/mean_tokens"] or 0.0)


def _shares(planned: RunPlan, lines: Sequence[MetricsLine]) -> dict[str, float]:
    """By phase, measured tokens of a step over the estimated ones, where runs count the tokens."""
    samples = Samples.of(planned.recipe, planned.geometry, planned.lengths)
    learners = sum(role.learner is not None for role in planned.roles)
    estimated = learners * planned.geometry.epochs_per_rollout * samples.tokens
    computed = [_sum(line, "/computed_tokens") for line in lines]
    shares = {"update": statistics.median(computed) / estimated}
    if answered := answered_tokens(planned.recipe, planned.geometry):
        drawn = [_answered(line) for line in lines if "on_policy/samples" in line]
        shares["sample"] = statistics.median(drawn or [0.0]) / answered
    sampled = median(lines, "response_tokens")
    if sampled is not None:
        shares["sample"] = sampled / samples.written
        # replies are fewer as turns are
        behind = samples.written * planned.lengths.answer / planned.lengths.written
        shorter = behind * (1 - shares["sample"])
        shares["score"] = (samples.tokens - shorter) / samples.tokens
    return {phase: share for phase, share in shares.items() if share > 0.0}


def _sum(line: MetricsLine, ending: str) -> float:
    return sum(value for key, value in line.items() if key.endswith(ending) and value is not None)


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")


def _newest_plan(directory: RunDirectory) -> tuple[Machine, int]:
    """The machine of the newest plan in plan.json, and the step after which that plan holds."""
    plans = directory.plans()
    if not plans:
        raise UsageError(
            f"{directory.plan} is not there: an older version of postgrad made the run"
        )
    try:
        recorded = json.dumps(plans[-1].get("machine"))
        machine = TypeAdapter(Machine).validate_json(recorded, strict=True)
    except ValidationError as error:
        raise UsageError(
            f"{directory.plan} names no machine: {problem_of(error)}; calibrate from another run"
        ) from error
    return machine, plans[-1]["after_step"]


def _lines(path: Path, after: int) -> list[MetricsLine]:
    """The metrics of the steps after step `after`, for which the plan holds."""
    try:
        return [line for line in read_steps(path) if line["step"] > after]
    except (OSError, RunError) as error:
        raise UsageError(str(error)) from error


def _show(rows: Sequence[Measured], path: Path, console: Console) -> None:
    machine = Machine(rows[0].device, rows[0].dtype, rows[0].threads)
    console.table(
        f"learned of {machine}",
        ("phase", "times the table's estimate, by token", "tokens, of those estimated"),
        [(row.phase, f"{row.times:.3g}", f"{row.tokens:.1%}") for row in rows],
    )
    console.note(f"wrote {path}: plans for {machine} use it from now on")
