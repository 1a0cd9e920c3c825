"""A plan in the words of a run's metrics: what it foresees for each phase that a run measures."""

from collections.abc import Iterator, Mapping

from postgrad.plan.memory import Memory
from postgrad.plan.phases import Phase
from postgrad.plan.plan import Outlook

# A run's phases and parts of phases, and the plan's phases whose time they take.
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


def phase_seconds(of: Outlook) -> dict[str, float]:
    """Seconds of a step by phase, in the run's words; "step": of all of it."""
    found = {
        name: sum(of.timing.step.get(one, 0.0) for one in phases)
        for name, phases in PHASE_OF[of.recipe.job].items()
    }
    found["step"] = of.timing.step_seconds
    return {name: seconds for name, seconds in found.items() if seconds}


def phase_bytes(of: Outlook) -> dict[str, int]:
    """Bytes by phase, in the run's words, of the run's own process above its baseline: so it is
    measured.
    """
    return dict(_bytes(of.memory, PHASE_OF[of.recipe.job]))


def _bytes(memory: Memory, timed: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    for name, phases in MEMORY_OF.items():
        if name in timed or name in ("load", "save"):
            yield name, max(memory.above_baseline(one) for one in phases)


def columns(seconds: Mapping[str, float], peaks: Mapping[str, int]) -> dict[str, float]:
    """What a line of metrics.jsonl says beside what was measured: foreseen/NAME_seconds and
    foreseen/NAME_memory_bytes of what is in a step.
    """
    found: dict[str, float] = {
        f"foreseen/{name}_seconds": round(value, 6) for name, value in seconds.items()
    }
    held = {name: count for name, count in peaks.items() if name not in ("load", "save")}
    return found | {f"foreseen/{name}_memory_bytes": count for name, count in held.items()}
