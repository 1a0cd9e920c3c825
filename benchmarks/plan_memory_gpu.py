"""The plan's GPU memory beside the peaks of torch's own allocator, allocated and reserved.

Runs on the CUDA device that torch sees: a GPU, or the stub of tests/gpu/stub, on which the
allocator is real and nothing is computed:

    eval "export $(python tests/helpers/gpu_stub.py PYTHON FOLDER)"   # a Python with torch for CUDA
    PYTHON -m benchmarks.plan_memory_gpu --to benchmarks/results/plan_memory_gpu.json

Weights are created on the device. Of eight sharded ranks one is run, beside collectives that do
nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.plan_memory_gpu_cases import MODELS, Case, cases

COMMAND = "python -m benchmarks.plan_memory_gpu --to benchmarks/results/plan_memory_gpu.json"
CHILD = "benchmarks.plan_memory_gpu_child"
LIMIT = 0.05  # of the reserved peak


def answers(
    chosen: Sequence[Case], folder: Path, hardware: str, *, plan_only: bool
) -> Iterator[Any]:
    """A row for each case, as one child gives them."""
    asked = {
        "cases": [
            {
                "name": case.name,
                "model": MODELS[case.size],
                "recipe": case.recipe(
                    folder / case.size, folder / f"{case.row}-{case.sampled}.jsonl"
                ),
                "rows": [case.row, case.sampled],
            }
            for case in chosen
        ],
        "folder": str(folder),
        "hardware": hardware,
        "plan_only": plan_only,
    }
    (folder / "asked.json").write_text(json.dumps(asked), "utf-8")
    command = [sys.executable, "-m", CHILD, str(folder / "asked.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            yield json.loads(line)
    if child.returncode:
        raise SystemExit(f"{CHILD} ended with {child.returncode}")


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row with how far the plan is off."""
    real, plan = row["run"], row["plan"]
    miss = plan["bytes"] / real["reserved"] - 1
    return {
        **row,
        "miss": round(miss, 4),
        "miss_allocated": round(plan["bytes"] / real["allocated"] - 1, 4),
        "within": abs(miss) <= LIMIT,
    }


def shown(row: dict[str, Any]) -> str:
    """One line of the table."""
    real, plan = row["run"], row["plan"]
    return (
        f"{row['name']:<38}{plan['bytes'] / 1e9:8.2f}{real['allocated'] / 1e9:8.2f}"
        f"{real['reserved'] / 1e9:8.2f} GB {row['miss_allocated']:+6.1%}{row['miss']:+6.1%} "
        f"{'' if row['within'] else 'MISSED':<7}{plan['phase']:>8} {real['reserved_in']}"
    )


def write(to: Path, rows: Sequence[Any]) -> None:
    """The file, with the command that makes it."""
    names = ("STUB_CAP", "STUB_MEM")
    text = {
        "command": COMMAND,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "environment": {name: os.environ[name] for name in names if name in os.environ},
        "rows": list(rows),
    }
    to.write_text(json.dumps(text, indent=1) + "\n", "utf-8")


def merged(to: Path, rows: Sequence[Any]) -> list[Any]:
    """The rows of the file with new ones in their places."""
    new = {row["name"]: row for row in rows}
    kept = [new.pop(row["name"], row) for row in measured_before(to)]
    return kept + list(new.values())


def measured_before(to: Path | None) -> list[Any]:
    """The rows of the file; none where there is no file yet."""
    return json.loads(to.read_text("utf-8"))["rows"] if to is not None and to.exists() else []


def main() -> None:
    """Measures; the table and JSON are written as the rows come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true", help="plan the file's rows anew, run none")
    parser.add_argument("--names", nargs="*", help="the cases of these names alone")
    parser.add_argument("--hardware", default="1xH100")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    old = {row["name"]: row for row in measured_before(options.to)}
    chosen = list(cases())
    if options.plan:
        chosen = [case for case in chosen if case.name in old]
    if options.names is not None:
        chosen = [case for case in chosen if case.name in options.names]
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in answers(chosen, Path(folder), options.hardware, plan_only=options.plan):
            before = old.get(row["name"], {}) if options.plan else {}
            rows.append(judged({**before, **row}))
            print(shown(rows[-1]), flush=True)
            if options.to:
                write(options.to, merged(options.to, rows))
    missed = [row["name"] for row in rows if not row["within"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} within {LIMIT:.0%}")


if __name__ == "__main__":
    main()
