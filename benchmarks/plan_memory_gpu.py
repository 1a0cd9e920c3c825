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
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "STUB_CAP", "STUB_MEM")
    text = {
        "command": COMMAND,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "environment": {name: os.environ[name] for name in names if name in os.environ},
        "rows": list(rows),
    }
    to.write_text(json.dumps(text, indent=1) + "\n", "utf-8")


def main() -> None:
    """Measures; the table and JSON are written as the rows come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true", help="plan the file's rows anew, run none")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names have these words")
    parser.add_argument("--hardware", default="1xH100")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    chosen = [case for case in cases() if all(w in case.name.split() for w in options.only)]
    old = json.loads(options.to.read_text("utf-8"))["rows"] if options.plan else []
    by_name = {row["name"]: row for row in old}
    if options.plan:
        chosen = [case for case in cases() if case.name in by_name]
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in answers(chosen, Path(folder), options.hardware, plan_only=options.plan):
            rows.append(judged({**by_name.get(row["name"], {}), **row}))
            print(shown(rows[-1]), flush=True)
            if options.to and not options.only:
                write(options.to, rows)
    missed = [row["name"] for row in rows if not row["within"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} within {LIMIT:.0%}")


if __name__ == "__main__":
    main()
