"""What the parts share: where a session writes, its cases, and the file that stands after each.

A part is a list of cases. Each case's result is in results.json as soon as the case has ended, so
that a session that is cut still counts. A case that fails or is skipped says why, and the others go
on; one that breaks the device ends its process, and the runner starts the part again behind it.
"""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

RESULTS = "results.json"
PARTS = ("checks", "training", "decode", "step", "planner", "learning")  # in order of worth
LAST_LINES = 12  # of a traceback that is kept
BROKEN = "CUDA error"  # in messages after which a process can compute no more
DIED = 3  # exit status of a part whose device is broken

Result = dict[str, Any]


class Skipped(Exception):
    """A case cannot run here; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Session:
    """What every process of a session is told.

    to: the folder of results. scratch: of models, rows and runs, removed at the end. small: shapes
    of a dry run. deadline: when the part has to have ended, in seconds of `time.time`.
    """

    to: Path
    scratch: Path
    device: Literal["cuda", "cpu"]
    small: bool
    deadline: float

    def to_json(self) -> str:
        """One argument of a child's command line."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What to_json wrote."""
        fields = json.loads(text)
        return cls(**fields | {name: Path(fields[name]) for name in ("to", "scratch")})

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.time()

    @property
    def dtype(self) -> str:
        """What models compute in: a CPU takes float32, whose products are exact to compare."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def runs(self) -> Path:
        """The run directories of cases that train."""
        return self.scratch / "runs"

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. seconds: what it takes on the card that this is made for, at most; with less
    left it is skipped.
    """

    name: str
    seconds: float
    run: Callable[[], Result]


class Store:
    """The file of results. One process writes at a time."""

    def __init__(self, to: Path) -> None:
        self._path = to / RESULTS

    def read(self) -> Result:
        """{"about": ..., "parts": {PART: {"cases": {CASE: ...}}}}; {} before the first write."""
        if not self._path.exists():
            return {}
        return json.loads(self._path.read_text("utf-8"))

    def about(self, facts: Mapping[str, Any]) -> None:
        """Adds what the results depend on."""
        everything = self.read()
        everything["about"] = {**everything.get("about", {}), **facts}
        self._write(everything)

    def part(self, part: str) -> Result:
        """What the file has of a part; {"cases": {}} where it has nothing."""
        return self.read().get("parts", {}).get(part, {"cases": {}})

    def note(self, part: str, **facts: Any) -> None:
        """Adds facts about a part."""
        self._change(part, lambda kept: kept.update(facts))

    def begin(self, part: str, case: str) -> None:
        """A case is under way."""
        self.note(part, under_way=case)

    def end(self, part: str, case: str, result: Result) -> None:
        """A case has ended."""

        def change(kept: Result) -> None:
            kept["cases"][case] = result
            kept.pop("under_way", None)

        self._change(part, change)

    def lost(self, part: str, why: str) -> bool:
        """The part's process has ended: the case that was under way has failed. Returns whether
        there was such a case.
        """
        case = self.part(part).get("under_way")
        if case is not None:
            self.end(part, case, {"failed": why})
        return case is not None

    def _change(self, part: str, change: Callable[[Result], None]) -> None:
        everything = self.read()
        change(everything.setdefault("parts", {}).setdefault(part, {"cases": {}}))
        self._write(everything)

    def _write(self, everything: Result) -> None:
        text = json.dumps(everything, indent=1, default=str) + "\n"
        written = self._path.with_suffix(".part")
        written.write_text(text, "utf-8")
        written.replace(self._path)


def serve(part: str, cases: Iterable[Case], session: Session) -> None:
    """Runs the cases of a part that the file does not have yet."""
    store = Store(session.to)
    for case in cases:
        if case.name in store.part(part)["cases"]:
            continue
        if session.left < (1.0 if session.small else case.seconds):
            left = f"it takes up to {case.seconds:.0f} s and {max(0.0, session.left):.0f} were left"
            store.end(part, case.name, {"skipped": left})
            continue
        store.begin(part, case.name)
        began = time.time()
        result = outcome(case)
        result["took_seconds"] = round(time.time() - began, 1)
        store.end(part, case.name, result)
        print(f"{part}: {case.name}: {brief(result)}", file=sys.stderr, flush=True)
        if BROKEN in result.get("failed", ""):
            sys.exit(DIED)
        release()


def outcome(case: Case) -> Result:
    """The case's result, or why there is none."""
    try:
        return case.run()
    except Skipped as reason:
        return {"skipped": str(reason)}
    except Exception as error:  # noqa: BLE001  # recorded: one case must not cost the others
        lines = traceback.format_exc().splitlines()[-LAST_LINES:]
        return {"failed": f"{type(error).__name__}: {error}"[:2000], "traceback": lines}


def brief(result: Result) -> str:
    """A line of the log."""
    for word in ("skipped", "failed"):
        if word in result:
            return f"{word}: {result[word][:200]}"
    return f"{result['took_seconds']} s"


def release() -> None:
    """Gives back the memory of the case before, and cuBLAS's workspaces: what the next one takes is
    compared with its plan, which counts them.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
