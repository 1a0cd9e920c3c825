"""Memory that `postgrad plan` estimates against what runs take, each in a process of its own.

    python -m benchmarks.plan_memory --data DIR --to benchmarks/results/plan_memory.json

DIR holds gsm8k.jsonl and hh-rlhf-harmless.jsonl.gz. A run trains for two steps on fresh weights,
which another process has made. Measured is the peak resident size less that of the process before
the run, after the same run of a tiny model has imported everything. --only WORDS measures the
configurations whose name has all of them; the file's other rows stay as they are.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan_memory_cases import Case, cases
from benchmarks.plan_memory_child import SMALL, make, run

COMMAND = "python -m benchmarks.plan_memory --data DIR --to benchmarks/results/plan_memory.json"


def in_child(mode: str, value: Any) -> Any:
    """Does `what` in a process of its own; its last line, which is JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan_memory", f"--{mode}"],
        input=json.dumps(value), capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measured(case: Case, models: Path) -> dict[str, Any]:
    """What one run took: bytes by phase, and seconds of CPU."""
    paths = [models / case.size, models / f"{case.size}-{SMALL}"]
    if not all(path.exists() for path in paths):
        data = str(case.data / "gsm8k.jsonl")
        in_child("make", {"size": case.size, "data": data, "to": str(models)})
    with tempfile.TemporaryDirectory() as folder:
        recipe = {**case.recipe(paths[0]), "run_dir": str(Path(folder) / "run")}
        warm = {**case.recipe(paths[1]), "run_dir": str(Path(folder) / "warm")}
        return in_child("child", {"recipe": recipe, "warm": warm})


def estimated(case: Case, models: Path) -> dict[str, Any]:
    """What the plan says of the run's own process: bytes by phase above the framework's, and the
    lines of the peak.
    """
    from postgrad.models.known_shapes import shape_of_model
    from postgrad.plan.hardware import parse_hardware
    from postgrad.plan.held import PHASES
    from postgrad.plan.lengths import row_lengths
    from postgrad.plan.plan import Facts, make_plan
    from postgrad.recipe.load import parse_recipe

    recipe = parse_recipe({**case.recipe(models / case.size), "run_dir": "run"})
    facts = Facts(shape_of_model, parse_hardware("CPU"), lengths=row_lengths(recipe))
    memory = make_plan(recipe, facts).memory
    phases = {phase: memory.above_baseline(phase) for phase in PHASES}
    peak = memory.peak
    lines = {f"{line.role} {line.purpose}": line.bytes.get(peak, 0) for line in memory.own_lines}
    lines = {name: count for name, count in lines.items() if count}
    return {"bytes": phases[peak], "phase": peak, "phases": phases, "lines": lines}


def row(case: Case, models: Path, real: Any) -> dict[str, Any]:
    """Foreseen beside measured."""
    plan = estimated(case, models)
    miss = plan["bytes"] - real["bytes"]
    within = abs(miss) <= max(0.1 * real["bytes"], 100e6)
    return {
        "name": case.name, "estimated": plan["bytes"], "measured": real["bytes"],
        "miss": round(miss / real["bytes"], 4), "within": within, "plan": plan, "run": real,
    }  # fmt: skip


def shown(figures: Any) -> str:
    """One line of the table."""
    real, plan = figures["run"], figures["plan"]
    return (
        f"{figures['name']:<40}{figures['estimated'] / 1e6:8.0f}"
        f"{figures['measured'] / 1e6:8.0f} MB "
        f"{figures['miss']:+5.0%} {'' if figures['within'] else 'MISSED':<7}{plan['phase']:>8}"
        f"{real['phase']:>12}{real['cpu_seconds']:7.1f} s {real['page_faults'] / 1e3:6.0f}k"
    )


def merged(to: Path | None, rows: Sequence[Any]) -> list[Any]:
    """The rows of the file with new ones in their places."""
    old = json.loads(to.read_text("utf-8"))["rows"] if to and to.exists() else []
    new = {row_of_case["name"]: row_of_case for row_of_case in rows}
    kept = [new.pop(row_of_case["name"], row_of_case) for row_of_case in old]
    return kept + list(new.values())


def main() -> None:
    """Measures; the table and JSON are written as the rows come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--plan", action="store_true", help="plan the file's rows anew, run none")
    parser.add_argument("--data", type=Path, default=os.environ.get("POSTGRAD_TEST_DATA"))
    parser.add_argument("--models", type=Path, help="where fresh models are kept between calls")
    parser.add_argument("--name", help="the one configuration of that name")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    if options.child:
        run(json.load(sys.stdin))
        return
    if options.make:
        make(**json.load(sys.stdin))
        return
    if options.plan:
        old = {
            row_of_case["name"]: row_of_case["run"]
            for row_of_case in json.loads(options.to.read_text("utf-8"))["rows"]
        }
        recorded_cases = [case for case in cases(options.data) if case.name in old]
        write(options.to, [row(case, options.models, old[case.name]) for case in recorded_cases])
        return
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or Path(folder)
        for case in cases(options.data):
            chosen = options.name in (None, case.name)
            if chosen and all(word in case.name.split() for word in options.only):
                rows.append(row(case, models, measured(case, models)))
                print(shown(rows[-1]), flush=True)
                if options.to:
                    write(options.to, merged(options.to, rows))


def write(to: Path, rows: Sequence[Any]) -> None:
    """The file, with the command that makes it."""
    settings = {k: v for k, v in os.environ.items() if k.startswith("MALLOC_")}
    text = {
        "command": COMMAND,
        "environment": settings,
        "rows": list(rows),
    }
    to.write_text(json.dumps(text, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
