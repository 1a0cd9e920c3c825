"""The run's state beside its weights: all that decides what comes next, and nothing else."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

from postgrad.checkpoint.schema import StateSchema, require
from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError

FORMAT = 1
DICTS = ("algorithm", "choices", "log_offsets", "source", "sentinels", "loggers")


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far: which metric, its value, the step that had it, and how many
    evaluations since then were no better.
    """

    metric: str
    value: float
    step: int
    waited: int = 0

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunState:
    """After `step` steps of the loop and `update` optimizer steps.

    episodes: samples whose tickets are settled. algorithm: what credit gets back (an adaptive KL
    coefficient). evaluations: the newest result by metric. choices: what was probed at the start.
    log_offsets: bytes of each log file that belong to these steps. source: what sampling knows of
    the rows (a curriculum). sentinels: since when each speaks, and what it remembers. loggers: the
    run's id at each.
    """

    step: int
    update: int
    episodes: int
    cursor: Cursor
    algorithm: Mapping[str, Any]
    evaluations: Mapping[str, float]
    best: Best | None
    choices: Mapping[str, Any]
    log_offsets: Mapping[str, int]
    source: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sentinels: Mapping[str, Any] = field(default_factory=dict[str, Any])
    loggers: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        """For state.json."""
        return {
            "format": FORMAT,
            "step": self.step,
            "update": self.update,
            "episodes": self.episodes,
            "cursor": self.cursor.to_json(),
            "algorithm": dict(self.algorithm),
            "evaluations": {
                name: value if math.isfinite(value) else None  # JSON has no NaN
                for name, value in self.evaluations.items()
            },
            "best": self.best and self.best.to_json(),
            "choices": dict(self.choices),
            "log_offsets": dict(self.log_offsets),
            "source": dict(self.source),
            "sentinels": dict(self.sentinels),
            "loggers": dict(self.loggers),
        }

    @classmethod
    def from_json(cls, data: Any) -> "RunState":
        """From state.json. Missing or unknown keys are RunErrors: no state is made up or lost."""
        if not isinstance(data, dict):
            raise RunError("state.json is not a run's state: no JSON object")
        data = cast(dict[str, Any], data)
        if data.get("format") != FORMAT:
            raise RunError(
                f"state.json has format {data.get('format')!r}, this version reads {FORMAT}: "
                "resume with the version of postgrad that wrote it (manifest.json names it)"
            )
        names = {one.name for one in fields(cls)}
        missing, unknown = names - set(data), set(data) - names - {"format"}
        if missing or unknown:
            raise RunError(
                f"state.json is not a run's state: missing {sorted(missing)}, "
                f"unknown {sorted(unknown)}"
            )
        try:
            require(StateSchema, data)
        except ValueError as error:
            raise RunError(f"state.json is not a run's state: {error}") from error
        best = data["best"]
        return cls(  # of what was read, not of what the schema made of it: the same bits
            cursor=Cursor.from_json(data["cursor"]),
            best=None if best is None else Best(**best),
            evaluations={
                name: math.nan if value is None else value
                for name, value in data["evaluations"].items()
            },
            **{name: data[name] for name in ("step", "update", "episodes", *DICTS)},
        )
