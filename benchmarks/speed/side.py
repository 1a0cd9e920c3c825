"""What a side is: a module that prepares one work once and then does it round by round.

A side imports only what its own environment has: postgrad's interpreter may lack the peer, the
peer's may lack postgrad. So nothing here imports more than the standard library.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Precision = Literal["float32", "bfloat16"]
Round = Callable[[], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Options:
    """How a side computes.

    precision: that of products; master weights are each side's own affair. threads: of the
    process, set before the side is imported. extra: what only this work knows.
    """

    precision: Precision
    threads: int
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> str:
        """One argument of the worker's command line."""
        return json.dumps(asdict(self))


class Side(Protocol):
    """A module `benchmarks/speed/WORK/SIDE.py`."""

    def prepare(self, folder: Path, options: Options) -> Round:
        """Load whatever is loaded once; nothing is warmed up.

        folder: made by workload.py, the same for all sides. The function that is returned does one
        round and says how much: "sampled_tokens", "trained_tokens", "prompt_tokens", "samples",
        "pairs", ... Those that the work names must be the same on all sides. Where it has a
        method `clear`, that is called after each round, unmeasured.
        """
        ...


def read_work(folder: Path) -> dict[str, Any]:
    """What workload.py wrote down."""
    return json.loads((folder / "work.json").read_text("utf-8"))
