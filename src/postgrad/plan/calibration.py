"""Measured speeds of machines: how long phases of runs took, over what the table estimates."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import Field, ValidationError

from postgrad.core.errors import UsageError
from postgrad.core.files import user_file, write_text
from postgrad.core.settings import Settings
from postgrad.plan.hardware import Device, full_name
from postgrad.plan.timing import START, Timing
from postgrad.recipe.recipe import Recipe

KEY = ("device", "dtype", "threads", "job", "phase")  # the file has one row for each
# tables of a recipe that have a model of their own
ROLES = ("reference", "critic", "reward_model", "teacher")


class Measured(Settings):
    """A row of the calibration file: one phase of one run."""

    device: str  # its full name
    dtype: str  # that the models computed in
    threads: int = Field(ge=0)  # of a CPU; 0 elsewhere
    job: str  # "rl", "sft", ...
    phase: str  # of a plan: "sample", "score" or "update"
    times: float = Field(gt=0.0)  # measured seconds a token over those estimated from the table
    # Measured tokens of a step over the estimated ones. They depend on the job: answers may be
    # shorter than the longest, groups may have no gradient.
    tokens: float = Field(gt=0.0)
    run: str  # its directory
    date: str  # of the calibration: "2026-01-31"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a calibration holds for: the same device, dtype and threads."""

    device: str  # its full name
    dtype: str  # that the models compute in
    threads: int  # of a CPU; 0 elsewhere

    def to_json(self) -> dict[str, Any]:
        """The value of "machine" in plan.json."""
        return asdict(self)

    def __str__(self) -> str:
        threads = f", threads = {self.threads}" if self.threads else ""
        return f"{self.device}, {self.dtype}{threads}"


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors for the seconds of a plan."""

    phases: Mapping[str, float]  # by phase of the plan
    source: str  # the runs that they come from, for people

    def applied(self, timing: Timing) -> Timing:
        """The timing with its seconds multiplied. What is computed once takes the factor of
        "score": it reads samples too; the start of an adapter does not.
        """
        once = self.phases.get("score", 1.0)
        return replace(
            timing,
            step={name: value * self.phases.get(name, 1.0) for name, value in timing.step.items()},
            once={
                name: seconds * (1.0 if name == START else once)
                for name, seconds in timing.once.items()
            },
            longest=timing.longest * self.phases.get("sample", 1.0),
        )


def machine_of(recipe: Recipe, device: Device) -> Machine:
    """The machine that a recipe computes on. Where the recipe leaves them open: the dtype is
    float32 on a CPU and else bfloat16, the threads are all cores of this machine.
    """
    dtype = recipe.model.dtype
    if dtype == "auto":
        dtype = "float32" if device.is_cpu else "bfloat16"
    threads = recipe.learner.threads or os.cpu_count() or 1
    return Machine(full_name(device), dtype, threads if device.is_cpu else 0)


def settled(recipe: Recipe, device: Device, rows: Sequence[Measured]) -> Recipe:
    """The recipe with the dtype and threads, where it leaves them open, that the newest measured
    run on this device chose: on a CPU, runs choose both by measuring.
    """
    name = full_name(device)
    dtype, threads = recipe.model.dtype, recipe.learner.threads
    for row in reversed(rows):
        stated = (dtype in ("auto", row.dtype), threads in (None, row.threads))
        if device.is_cpu and row.device == name and all(stated):
            return chosen(recipe, row.dtype, row.threads)
    return recipe


def chosen(recipe: Recipe, dtype: str, threads: int | None) -> Recipe:
    """The recipe with that dtype for all roles, and that number of threads."""
    roles = {
        name: role.model_copy(update={"model": role.model.model_copy(update={"dtype": dtype})})
        for name in ROLES
        if (role := getattr(recipe, name, None)) is not None
    }
    model = recipe.model.model_copy(update={"dtype": dtype})
    learner = recipe.learner.model_copy(update={"threads": threads})
    return recipe.model_copy(update={"model": model, "learner": learner, **roles})


def factors(rows: Sequence[Measured], machine: Machine, job: str) -> Factors | None:
    """The factors that runs on this machine have measured: rows of the same job, and for other
    phases the seconds a token of other jobs. None where no run was measured.
    """
    matching = [row for row in rows if (row.device, row.dtype, row.threads) == _key(machine)]
    by_phase = {row.phase: row for row in matching if row.job != job}
    by_phase |= {row.phase: row for row in matching if row.job == job}
    if not by_phase:
        return None
    runs = dict.fromkeys(f"{row.run} on {row.date}" for row in by_phase.values())
    return Factors(
        {
            phase: row.times * (row.tokens if row.job == job else 1.0)
            for phase, row in by_phase.items()
        },
        f"calibrated from {', '.join(runs)}",
    )


def _key(machine: Machine) -> tuple[str, str, int]:
    return machine.device, machine.dtype, machine.threads


def calibration_file() -> Path | None:
    """$POSTGRAD_CALIBRATION, else calibration.toml in the user's configuration folder; None where
    there is no home folder.
    """
    return user_file("calibration.toml", "POSTGRAD_CALIBRATION", os.environ)


def read(path: Path | None) -> tuple[Measured, ...]:
    """The rows of a calibration file, the oldest first; none where there is no file. Raises
    UsageError where the file is not a calibration.
    """
    if path is None:
        return ()
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the calibration {path} cannot be read: {error}") from error
    try:
        rows = tomllib.loads(text).get("measured", [])
        return tuple(Measured.model_validate(row, strict=True) for row in rows)
    except (tomllib.TOMLDecodeError, ValidationError, TypeError) as error:
        raise UsageError(
            f"{path} is no calibration that `postgrad plan --calibrate` wrote: {error}; fix it, "
            "or remove it and calibrate again"
        ) from error


def write(path: Path, new: Sequence[Measured]) -> None:
    """Puts rows into the file, each in place of an older one of the same phase."""
    keys = {_identity(row) for row in new}
    rows = [*(row for row in read(path) if _identity(row) not in keys), *new]
    table = tomlkit.document()
    table.add(tomlkit.comment("written by `postgrad plan --calibrate`"))
    table["measured"] = [row.model_dump() for row in rows]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, tomlkit.dumps(table))
    except OSError as error:
        raise UsageError(
            f"the calibration {path} cannot be written: {error}; name another file in "
            "POSTGRAD_CALIBRATION"
        ) from error


def _identity(row: Measured) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in KEY)
