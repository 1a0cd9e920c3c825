"""The estimates of a run beside its measurements, in plan.json, metrics.jsonl and summary.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from postgrad.core.errors import PostgradError, UsageError
from postgrad.core.files import finite
from postgrad.fleet.choices import Choices
from postgrad.models.known_shapes import shape_of_model
from postgrad.observe.run_dir import RunDirectory
from postgrad.observe.sinks import Logs
from postgrad.plan.calibrate import median, warm
from postgrad.plan.calibration import calibration_file, chosen, machine_of, read
from postgrad.plan.hardware import Hardware, this_cpu, this_machine, with_threads
from postgrad.plan.lengths import RowLengths, row_lengths
from postgrad.plan.page import Page, TableRows
from postgrad.plan.plan import (
    Facts,
    RunPlan,
    estimated_columns,
    make_plan,
    phase_bytes,
    phase_seconds,
    phases_of,
)
from postgrad.plan.smaller import less_memory
from postgrad.recipe.recipe import Recipe

COLUMNS = ("", "estimated s", "measured s", "estimated GB", "measured GB")  # of `rows`


@dataclass(frozen=True, slots=True)
class Estimates:
    """What a plan estimates by phase, such as "train". Empty where no plan could be made."""

    seconds: Mapping[str, float] = field(default_factory=dict[str, float])  # of a step
    bytes: Mapping[str, int] = field(default_factory=dict[str, int])  # peak memory
    kind: str = "memory"  # of these bytes: "reserved" on a GPU

    @classmethod
    def of(cls, plan: RunPlan) -> "Estimates":
        """The estimates of a plan, by the phase names of metrics.jsonl."""
        kind = "memory" if plan.hardware.device.is_cpu else "reserved"
        return cls(phase_seconds(plan), phase_bytes(plan), kind)

    @property
    def columns(self) -> Mapping[str, float]:
        """The columns that each line of metrics.jsonl has of the estimates."""
        return estimated_columns(self.seconds, self.bytes, self.kind)

    def beside(
        self, recipe: Recipe, lines: Sequence[Mapping[str, Any]], peaks: Mapping[str, int]
    ) -> dict[str, dict[str, float]]:
        """Estimate and measurement by phase, as far as they are known: the median of the steps'
        seconds, the most bytes of any step.

        lines: of metrics.jsonl. peaks: columns of the process, for phases that are in no step.
        """
        steps = warm(lines, recipe) or lines
        by_phase: dict[str, dict[str, float]] = {}
        for name in ("load", *phases_of(recipe), "save"):
            measured = [line.get(f"{name}_{self.kind}_bytes") or 0 for line in (*lines, peaks)]
            figures = {
                "estimated_seconds": self.seconds.get(name),
                "seconds": median(steps, f"{name}_seconds"),
                "estimated_memory_bytes": self.bytes.get(name),
                "memory_bytes": max(measured) or None,
            }
            if figures["seconds"] is not None or figures["memory_bytes"] is not None:
                by_phase[name] = {key: value for key, value in figures.items() if value is not None}
        return by_phase


def estimate(
    directory: RunDirectory,
    recipe: Recipe,
    choices: Choices,
    logs: Logs,
    *,
    after: int,
    steps: int,
    held: int | None,
) -> Estimates:
    """Plans the run as it continues after step `after`, and appends the estimates to plan.json
    where they differ from those before.

    held: resident bytes before the run; None where they are not known. A plan that cannot be made
    stops no run: plan.json and an event say why.
    """
    filled = as_chosen(recipe, choices).model_copy(
        update={"steps": steps, "epochs": None, "total_episodes": None}
    )
    entry: dict[str, Any] = {}
    estimates = Estimates()
    try:
        facts = facts_here(choices, row_lengths(filled))
        entry["machine"] = machine_of(filled, facts.hardware.device).to_json()
        planned = make_plan(filled, facts)
        entry |= Page(planned, less_memory(planned, facts)).to_json()
        estimates = Estimates.of(planned)
        if held is not None and choices.device == "cpu":  # peak_memory_bytes counts them too
            estimates = replace(
                estimates, bytes={**estimates.bytes, "peak": planned.memory.with_held(held)}
            )
    except Exception as error:  # noqa: BLE001  # recorded: to run matters more than its plan
        reason = str(error) if isinstance(error, PostgradError) else repr(error)
        entry["problem"] = f"the plan failed: {reason}"
        logs.event("no_plan", entry["problem"])
    _add(directory, entry, after)
    return estimates


def as_chosen(recipe: Recipe, choices: Choices) -> Recipe:
    """The recipe with all choices of the run in place of "auto" and missing values."""
    filled = settled(recipe, choices)
    batch = filled.batch.model_copy(update={"micro_train_tokens": choices.micro_train_tokens})
    filled = filled.model_copy(update={"batch": batch})
    rollout = filled.rollout_settings
    if rollout is not None and choices.sizes is not None:
        rollout = rollout.model_copy(update=choices.sizes.to_json())
        filled = filled.model_copy(update={"rollout": rollout})
    return filled


def settled(recipe: Recipe, choices: Choices) -> Recipe:
    """The recipe with the run's dtype and threads: what is chosen before the sizes."""
    return chosen(recipe, choices.dtype, choices.threads)


def require_device(choices: Choices) -> None:
    """Raises UsageError where the run computes on GPUs of other machines alone."""
    if choices.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "the run's GPUs are on other machines, so this one cannot plan for them: state the "
            'numbers that are "auto"; postgrad plan --hardware says which ones fit'
        )


def hardware_here(choices: Choices) -> Hardware:
    """The hardware that the run computes on, with its number of threads. A GPU has the memory that
    torch reports: a slice of MIG, or of a virtual machine, has less than the card.
    """
    require_device(choices)
    if choices.device != "cuda":
        return with_threads(this_cpu(), choices.threads)
    hardware = this_machine()
    _, total = torch.cuda.mem_get_info()
    seen = {"memory_bytes": min(total, hardware.device.memory_bytes)}
    return hardware.model_copy(update={"device": hardware.device.model_copy(update=seen)})


def facts_here(choices: Choices, lengths: RowLengths | None) -> Facts:
    """The facts that a plan for this machine needs. lengths: of the recipe's rows."""
    return Facts(
        shape_of_model,
        hardware_here(choices),
        lengths=lengths,
        calibration=read(calibration_file()),
    )


def _add(directory: RunDirectory, entry: Mapping[str, Any], after: int) -> None:
    """Appends an entry to plan.json where it differs from the last one. Drops entries after step
    `after`: a resume has taken those steps back.
    """
    before = [plan for plan in directory.plans() if plan["after_step"] <= after]
    new = json.loads(json.dumps(finite(entry)))
    if not before or {**before[-1], "after_step": None} != {"after_step": None, **new}:
        before = [plan for plan in before if plan["after_step"] < after]
        before.append({"after_step": after, **new})
    directory.write_plans(before)


def rows(beside: Mapping[str, Mapping[str, float]]) -> TableRows:
    """The table of `Estimates.beside` with the head `COLUMNS`: seconds of a step, and gigabytes."""

    def cell(of: Mapping[str, float], key: str) -> str:
        if key not in of:
            return ""
        return f"{of[key] / 1e9 if key.endswith('_bytes') else of[key]:.3g}"

    keys = ("estimated_seconds", "seconds", "estimated_memory_bytes", "memory_bytes")
    return [[name, *(cell(of, key) for key in keys)] for name, of in beside.items()]
