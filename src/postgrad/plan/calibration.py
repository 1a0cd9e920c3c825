"""What runs have shown of machines: how long a phase takes, beside what the figures foresee."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import Field, ValidationError

from postgrad.core.errors import UsageError
from postgrad.core.files import write_text
from postgrad.core.settings import Settings
from postgrad.core.user_files import user_file
from postgrad.plan.hardware import Device, full_name
from postgrad.plan.timing import Timing
from postgrad.recipe.recipe import Recipe

KEY = ("device", "dtype", "threads", "job", "phase")  # what stands once in the file
ROLES = ("reference", "critic", "reward_model")  # tables of a recipe that have a model of their own


class Measured(Settings):
    """One phase of one run.

    times: seconds of a token over those that are foreseen from the hardware table. tokens: tokens
    of a step over those that are foreseen, which are the job's own: answers shorter than they may
    be, groups without gradient. device: its full name. threads: of a CPU; 0 elsewhere.
    """

    device: str
    dtype: str
    threads: int = Field(ge=0)
    job: str
    phase: str
    times: float = Field(gt=0.0)
    tokens: float = Field(gt=0.0)
    run: str
    date: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides how fast a phase is."""

    device: str
    dtype: str
    threads: int

    def to_json(self) -> dict[str, Any]:
        """For plan.json."""
        return asdict(self)

    def __str__(self) -> str:
        threads = f", threads = {self.threads}" if self.threads else ""
        return f"{self.device}, {self.dtype}{threads}"


@dataclass(frozen=True, slots=True)
class Factors:
    """What a plan's seconds are multiplied by. source: the runs that it comes from, for people."""

    phases: Mapping[str, float]
    source: str

    def applied(self, timing: Timing) -> Timing:
        """With the seconds that these make of it. What comes once is read as samples are."""
        once = self.phases.get("score", 1.0)
        return Timing(
            {name: seconds * self.phases.get(name, 1.0) for name, seconds in timing.step.items()},
            timing.steps,
            {name: seconds * once for name, seconds in timing.once.items()},
            timing.devices,
        )


def machine_of(recipe: Recipe, device: Device) -> Machine:
    """What a recipe computes with, as far as it says; else a CPU's float32 and all of its cores."""
    dtype = recipe.model.dtype
    if dtype == "auto":
        dtype = "float32" if device.is_cpu else "bfloat16"
    threads = recipe.learner.threads or os.cpu_count() or 1
    return Machine(full_name(device), dtype, threads if device.is_cpu else 0)


def settled(recipe: Recipe, device: Device, rows: Sequence[Measured]) -> Recipe:
    """With dtype and threads that the recipe leaves open as the newest run on this device chose
    them: on a CPU both are measured when a run starts.
    """
    own = full_name(device)
    dtype, threads = recipe.model.dtype, recipe.learner.threads
    for row in reversed(rows):
        stated = (dtype in ("auto", row.dtype), threads in (None, row.threads))
        if device.is_cpu and row.device == own and all(stated):
            return chosen(recipe, row.dtype, row.threads)
    return recipe


def chosen(recipe: Recipe, dtype: str, threads: int | None) -> Recipe:
    """A recipe in which nothing about them is open; all roles compute in one dtype."""
    roles = {
        name: role.model_copy(update={"model": role.model.model_copy(update={"dtype": dtype})})
        for name in ROLES
        if (role := getattr(recipe, name, None)) is not None
    }
    model = recipe.model.model_copy(update={"dtype": dtype})
    learner = recipe.learner.model_copy(update={"threads": threads})
    return recipe.model_copy(update={"model": model, "learner": learner, **roles})


def factors(rows: Sequence[Measured], machine: Machine, job: str) -> Factors | None:
    """What runs on this machine have shown: of the job's own phases, else what other jobs say of
    them by token. None where there was no run.
    """
    own = [row for row in rows if (row.device, row.dtype, row.threads) == _key(machine)]
    found = {row.phase: row for row in own if row.job != job}
    found |= {row.phase: row for row in own if row.job == job}
    if not found:
        return None
    told = dict.fromkeys(f"{row.run} on {row.date}" for row in found.values())
    return Factors(
        {
            phase: row.times * (row.tokens if row.job == job else 1.0)
            for phase, row in found.items()
        },
        f"calibrated from {', '.join(told)}",
    )


def _key(machine: Machine) -> tuple[str, str, int]:
    return machine.device, machine.dtype, machine.threads


def calibration_file(environment: Mapping[str, str] | None = None) -> Path | None:
    """$POSTGRAD_CALIBRATION, else calibration.toml of the person's own settings; None where
    nobody's home is known.
    """
    environment = os.environ if environment is None else environment
    return user_file("calibration.toml", "POSTGRAD_CALIBRATION", environment)


def read(path: Path | None) -> tuple[Measured, ...]:
    """The rows of a calibration file, the oldest first; none where there is no file. Raises
    UsageError where it is not one.
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
            f"{path} is no calibration that `postgrad plan --calibrate` wrote: {error}; mend it, "
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
