"""The run's state beside weights and optimizers: all that decides what the next step does."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

from numpy.typing import NDArray

from postgrad.checkpoint.schema import StateSchema, require
from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError

FORMAT = 2
READABLE = (1, 2)  # format 1 has no samples under way
DICTS = ("algorithm", "choices", "log_offsets", "source", "sentinels", "loggers")


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far."""

    metric: str  # as checkpoint.best_metric names it: "eval/accuracy"
    value: float
    step: int  # after which the metric had that value
    waited: int = 0  # evaluations since then, none of them better
    mode: str = ""  # as checkpoint.best_mode says what is better; "": an earlier version wrote it

    def to_json(self) -> dict[str, Any]:
        """Its keys as in state.json."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run after some steps. Its fields are the keys of state.json
    (docs/checkpoint-format.md).
    """

    step: int  # steps of the loop so far
    update: int  # optimizer steps so far
    episodes: int  # samples whose tickets are settled
    cursor: Cursor  # which tickets are settled
    algorithm: Mapping[str, Any]  # what credit carries over to the next step: {"kl_coef": 0.1}
    evaluations: Mapping[str, float]  # the newest result by metric
    best: Best | None  # None: no evaluation has measured checkpoint.best_metric yet
    choices: Mapping[str, Any]  # what the run chose at its start: dtype, threads, token budget
    log_offsets: Mapping[str, int]  # bytes of each log file that belong to these steps, by name
    source: Mapping[str, Any] = field(default_factory=dict[str, Any])  # a curriculum's rows
    # By sentinel: the step since which it reports, and what it remembers.
    sentinels: Mapping[str, Any] = field(default_factory=dict[str, Any])
    loggers: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the run's id there
    # Samples under way, {} where there are none; in a file of their own, see rollout/pending.py.
    pending: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])

    def to_json(self) -> dict[str, Any]:
        """The content of state.json: `from_json` reads it, but for `pending`."""
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
        """Reads the content of state.json. Raises RunError for missing or unknown keys: no state is
        made up or lost.
        """
        if not isinstance(data, dict):
            raise RunError("state.json is not a run's state: no JSON object")
        data = cast(dict[str, Any], data)
        if data.get("format") not in READABLE:
            raise RunError(
                f"state.json has format {data.get('format')!r}, this version reads {READABLE}: "
                "resume with the version of postgrad that wrote it (manifest.json names it)"
            )
        names = {entry.name for entry in fields(cls)} - {"pending"}
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
        return cls(  # from what was read, not from the schema's copy of it: the same bits
            cursor=Cursor.from_json(data["cursor"]),
            best=None if best is None else Best(**best),
            evaluations={
                name: math.nan if value is None else value
                for name, value in data["evaluations"].items()
            },
            **{name: data[name] for name in ("step", "update", "episodes", *DICTS)},
        )
