"""A plan by the names of a run's metrics: seconds and bytes of each phase that a run measures."""

from collections.abc import Mapping

from postgrad.plan.phases import Phase
from postgrad.plan.plan import Outlook

# By job: a run's phases and parts of phases, and which phases of the plan each consists of.
_SUPERVISED = {"train": ("update",)}
PHASE_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "rl": {
        "sample": ("sample",),
        "train": ("score", "update"),
        "train/columns": ("score",),
        "train/update": ("update",),
    },
    "sft": _SUPERVISED,
    "reward": _SUPERVISED,
    "preference": _SUPERVISED,
}
MEMORY_OF: Mapping[str, tuple[Phase, ...]] = {
    "load": ("load",),
    "sample": ("rollout",),
    "train/columns": ("score",),
    "train/update": ("update",),
    "train": ("score", "update"),
    "save": ("save",),
}


def phase_seconds(planned: Outlook) -> dict[str, float]:
    """Seconds of a step by phase of the run; "step": of all phases."""
    seconds = {
        name: sum(planned.timing.step.get(phase, 0.0) for phase in phases)
        for name, phases in PHASE_OF[planned.recipe.job].items()
    }
    seconds["step"] = planned.timing.step_seconds
    return {name: value for name, value in seconds.items() if value}


def phase_bytes(planned: Outlook) -> dict[str, int]:
    """Bytes by phase of the run, as a run measures them: of its own process, above what that took
    before the run.
    """
    timed = PHASE_OF[planned.recipe.job]
    return {
        name: max(planned.memory.above_baseline(phase) for phase in phases)
        for name, phases in MEMORY_OF.items()
        if name in timed or name in ("load", "save")
    }


def foreseen_columns(seconds: Mapping[str, float], peaks: Mapping[str, int]) -> dict[str, float]:
    """The columns foreseen/NAME_seconds and foreseen/NAME_memory_bytes of metrics.jsonl, for the
    phases of a step. seconds, peaks: as phase_seconds and phase_bytes give them.
    """
    columns: dict[str, float] = {
        f"foreseen/{name}_seconds": round(value, 6) for name, value in seconds.items()
    }
    for name, count in peaks.items():
        if name not in ("load", "save"):
            columns[f"foreseen/{name}_memory_bytes"] = count
    return columns
