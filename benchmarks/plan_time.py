"""Time that a calibrated plan estimates against what other runs then take.

    python -m benchmarks.plan_time --data DIR --to benchmarks/results/plan_time.json

DIR holds gsm8k.jsonl and hh-rlhf-harmless.jsonl.gz. Of each job one run is trained and `postgrad
plan --calibrate` learns from it; then runs with other batches, lengths and models are trained, and
what each of them estimated (estimated/NAME_seconds of its metrics) is held to its own medians.
--cases limits these runs, and --size takes one model for all. Each run has a process of its
own, one thread, and fresh weights. Seconds are CPU seconds of the process (the clock of phases
reads them here), so that a busy machine tells the same as an idle one, as far as its caches and
clock allow; with --wall they are seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from benchmarks.plan_memory_cases import GSM8K, HH, SIZES
from benchmarks.speed.report import machine

STEPS = 6
PHASES = ("sample", "train/columns", "train/update", "train")


@dataclass(frozen=True, slots=True)
class Case:
    """A run. batch: samples of an update, or prompts of a step. answers: of a prompt. length: of
    rows, and of sampled answers half of it.
    """

    job: str
    size: str
    batch: int
    length: int
    answers: int = 4
    model: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """In words."""
        words = [self.job, self.size, f"batch {self.batch}", f"length {self.length}"]
        words += [f"{self.answers} answers"] if self.job == "grpo" else []
        return ", ".join([*words, *(key.replace("_", " ") for key in self.model)])

    def recipe(self, data: Path) -> dict[str, Any]:
        """The recipe without its run directory."""
        hidden, inner, layers, heads, kv_heads, vocabulary, kind = SIZES[self.size]
        init = {
            "type": kind, "hidden_size": hidden, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "tokenizer": {"vocab_size": vocabulary},
        }  # fmt: skip
        table: dict[str, Any] = {
            "job": "rl" if self.job == "grpo" else self.job,
            "steps": STEPS,
            "model": {"init": init, "dtype": "float32", **self.model},
            "learner": {"threads": 1},
            "batch": {"train_batch_size": self.batch},
            "checkpoint": {"save_steps": 0},
        }
        path = str(data / "gsm8k.jsonl")
        table["data"] = {"path": path, "max_len": self.length, **GSM8K}
        if self.job == "reward":
            path = str(data / "hh-rlhf-harmless.jsonl.gz")
            table["data"] = {"path": path, "max_len": self.length, "max_lost_fraction": 1.0, **HH}
            table["data"]["limit"] = 400
        if self.job == "grpo":
            table["batch"] = {
                "rollout_batch_size": self.batch, "n_samples_per_prompt": self.answers,
            }  # fmt: skip
            table["rewards"] = [{"type": "regex", "pattern": "[a-m]$"}]  # half of random answers
            table["algorithm"] = {"type": "grpo", "kl_coef": 0.05}
            table["rollout"] = {"max_new_tokens": self.length // 2}
        return table


# Of each job: the run that is learned from, and those that are estimated then.
CASES: dict[str, tuple[Case, ...]] = {
    "sft": (
        Case("sft", "6M", 32, 512),
        Case("sft", "6M", 8, 512),
        Case("sft", "6M", 128, 256),
        Case("sft", "6M", 32, 512, model={"gradient_checkpointing": True}),
        Case("sft", "22M", 32, 512),
    ),
    "reward": (
        Case("reward", "6M", 16, 256),
        Case("reward", "6M", 48, 256),
        Case("reward", "6M", 16, 1024),
        Case("reward", "22M", 16, 512),
    ),
    "grpo": (
        Case("grpo", "6M", 16, 256),
        Case("grpo", "6M", 32, 256, 8),
        Case("grpo", "6M", 8, 512),
        Case("grpo", "6M", 32, 384, 2),
        Case("grpo", "22M", 16, 256),
    ),
}


def in_child(value: Any, environment: dict[str, str]) -> Any:
    """A run, or a calibration, in a process of its own; its last line, which is JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan_time", "--child"],
        input=json.dumps(value), capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def child(value: Any) -> None:
    """Trains, and with "learn" calibrates; prints what was estimated and measured, by phase."""
    from postgrad.observe.console import Console
    from postgrad.plan.calibrate import calibrate
    from postgrad.recipe.load import parse_recipe
    from postgrad.training import run as runs
    from postgrad.training.start import train

    recipe = parse_recipe(value["recipe"])
    clock = time.perf_counter if value["wall"] else time.process_time
    clocks = SimpleNamespace(**(vars(time) | {"perf_counter": clock}))  # of the run's phases
    with patch.object(runs, "time", clocks):
        train(recipe, Console("quiet"))
    folder = Path(recipe.run_dir)
    if value["learn"]:
        calibrate(folder, Console("quiet"))
    phases = json.loads((folder / "summary.json").read_text("utf-8"))["phases"]
    print(json.dumps({name: phases[name] for name in PHASES if name in phases}))


def chosen(job: str, size: str | None, most: int | None) -> list[Case]:
    """The run of a job that is learned from, and at most so many that are estimated."""
    first, *others = CASES[job]
    return [replace(case, size=size or case.size) for case in (first, *others[:most])]


def measured(cases: list[Case], data: Path, *, wall: bool) -> Iterator[tuple[Case, Any]]:
    """The runs after the first, which is learned from, with what each of them says."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"POSTGRAD_CALIBRATION": str(Path(folder) / "calibration.toml")}
        for number, case in enumerate(cases):
            recipe = {**case.recipe(data), "run_dir": str(Path(folder) / f"run-{number}")}
            result = in_child({"recipe": recipe, "learn": not number, "wall": wall}, environment)
            if number:
                yield case, result


def row(case: Case, phase: str, rounds: list[Any]) -> dict[str, Any]:
    """Medians of all rounds. A phase that has no time of its own in a plan is left out before."""
    estimated = statistics.median(measurement[phase]["estimated_seconds"] for measurement in rounds)
    seconds = statistics.median(measurement[phase]["seconds"] for measurement in rounds)
    return {
        "name": case.name, "phase": phase, "estimated": round(estimated, 5),
        "measured": round(seconds, 5), "miss": round(estimated / seconds - 1, 4),
        "within": abs(estimated / seconds - 1) <= 0.25,
        "rounds": [[round(measurement[phase][key], 5) for key in ("estimated_seconds", "seconds")]
                   for measurement in rounds],
    }  # fmt: skip


def main() -> None:
    """Measures; the table and JSON are written as the rows come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--data", type=Path, default=os.environ.get("POSTGRAD_TEST_DATA"))
    parser.add_argument("--jobs", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", type=int, help="runs of each job that are estimated, at most")
    parser.add_argument("--size", choices=SIZES, help="of all models, instead of their own")
    parser.add_argument("--wall", action="store_true", help="seconds, on a machine that is idle")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    if options.child:
        child(json.load(sys.stdin))
        return
    rows: list[dict[str, Any]] = []
    for job in options.jobs:
        measurements: dict[str, tuple[Case, list[Any]]] = {}
        for _ in range(options.rounds):
            cases = chosen(job, options.size, options.cases)
            for case, measurement in measured(cases, options.data, wall=options.wall):
                measurements.setdefault(case.name, (case, []))[1].append(measurement)
        for case, rounds in measurements.values():
            for phase in PHASES:
                if all("estimated_seconds" in measurement.get(phase, {}) for measurement in rounds):
                    rows.append(row(case, phase, rounds))
                    newest_row = rows[-1]
                    print(
                        f"{newest_row['name']:<48} {phase:<14} {newest_row['estimated']:9.3f}"
                        f"{newest_row['measured']:9.3f} s {newest_row['miss']:+5.0%}", flush=True,
                    )  # fmt: skip
        if options.to:
            write(options.to, rows, options)


def write(to: Path, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The file, with the command and machine that made it."""
    text = {
        "command": " ".join(["python", "-m", "benchmarks.plan_time", *sys.argv[1:]]),
        "seconds": "wall" if options.wall else "of CPU, one thread",
        "rounds": options.rounds, "machine": machine(), "rows": rows,
    }  # fmt: skip
    to.write_text(json.dumps(text, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
