"""What observing costs of a step: sentinels, their measures, the live block, loggers.

    python benchmarks/observing.py --pairs 8 --steps 30 --to benchmarks/results/observing.json

Runs of one recipe in one process, in pairs, A B, B A, ...: one with every sentinel, the block drawn
to a terminal and TensorBoard, one with metrics.jsonl alone. CPU time of all threads of the process,
which a busy machine changes least; the difference of each pair, with its standard error. A
difference of a percent drowns in noise, so what observing itself takes is counted too: the CPU time
inside its calls, drawing included, and what the log files take, which both runs of a pair write.
`inside_share` is all of it over the CPU time of a step: under 2% is wanted. `shares` says of what.

The block is drawn by the clock, so that a busy machine, where a step takes longer than its CPU
time, draws it more often in a step. What is counted is a drawing's CPU time as often as it is due
in the CPU time of a step; `drawings` says how often it was drawn in one.
"""

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPE = """
job = "rl"
run_dir = "{run_dir}"
steps = {steps}
[model.init]
type = "qwen3"
hidden_size = {hidden}
intermediate_size = {intermediate}
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
[model.init.tokenizer]
kind = "characters"
phrases = ["Spell this word backward (example: sun -> nus): "]
[data]
path = "reasoning-gym:spell_backward"
size = 2000
max_len = 64
[[rewards]]
type = "reasoning_gym"
[algorithm]
type = "grpo"
[batch]
rollout_batch_size = {prompts}
n_samples_per_prompt = 8
[rollout]
max_new_tokens = 12
[learner]
lr = 1e-4
threads = 1
"""
OFF = "off"
DRAWN = "LiveBlock.draw"


class Terminal(io.StringIO):
    """Takes what is drawn."""

    def isatty(self) -> bool:
        return True


class Spent:
    """CPU seconds inside calls by name, of the thread that makes them; of calls within such calls
    nothing.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._within = threading.local()

    def count(self, owner: Any, name: str) -> None:
        """Every call of owner.name from now on."""
        right: Callable[..., Any] = getattr(owner, name)
        function_name = f"{owner.__name__.rpartition('.')[2]}.{name}"
        self.seconds[function_name], self.calls[function_name] = 0.0, 0

        def counted(*args: Any, **more: Any) -> Any:
            if getattr(self._within, "call", False):
                return right(*args, **more)
            self._within.call = True
            began = time.thread_time()
            try:
                return right(*args, **more)
            finally:
                self.seconds[function_name] += time.thread_time() - began
                self.calls[function_name] += 1
                self._within.call = False

        setattr(owner, name, counted)


def watch_calls() -> Spent:
    """Counts everything that observing calls in a step."""
    from postgrad.observe.board import LiveBlock
    from postgrad.observe.console import Console
    from postgrad.observe.loggers.all import Loggers
    from postgrad.observe.sentinels.watch import Sentinels
    from postgrad.observe.sinks import Logs
    from postgrad.training import rl

    spent = Spent()
    for owner, name in (
        (Logs, "samples"),
        (Logs, "metric"),
        (Sentinels, "look"),
        (Loggers, "log"),
        (Console, "step"),
        (LiveBlock, "draw"),
        (rl, "step_samples"),
        (rl, "learner_logprobs"),
        (rl, "compared_logprobs"),
    ):
        spent.count(owner, name)
    return spent


def run(
    arguments: argparse.Namespace, folder: Path, observed: bool, spent: Spent
) -> dict[str, Any]:
    """CPU and wall seconds of a step, and what of them was inside observing, by call."""
    from postgrad.observe.board import PERIOD_SECONDS
    from postgrad.observe.console import Console
    from postgrad.observe.settings import SentinelSettings
    from postgrad.recipe.load import load_recipe
    from postgrad.training.rl import RLJob
    from postgrad.training.start import train

    path = folder / "recipe.toml"
    sizes = {"hidden": arguments.hidden, "intermediate": 2 * arguments.hidden}
    path.write_text(
        RECIPE.format(
            run_dir=folder / "run", steps=arguments.steps, prompts=arguments.prompts, **sizes
        )
    )
    names = SentinelSettings.model_fields
    flags = [f for name in names for f in (f"--sentinels.{name}.action", OFF)]
    flags = ["--observe.loggers", '["tensorboard"]'] if observed else flags
    marks: list[tuple[float, float]] = []
    insides: list[dict[str, float]] = []
    drawings: list[int] = []
    step = RLJob.step

    def marked(self: Any, state: Any) -> Any:
        marks.append((time.process_time(), time.perf_counter()))
        insides.append(dict(spent.seconds))
        drawings.append(spent.calls[DRAWN])
        return step(self, state)

    RLJob.step = marked
    try:
        console = Console("auto" if observed else "quiet", Terminal())
        train(load_recipe(path, flags), console, overwrite=True)
    finally:
        RLJob.step = step
    first, last = marks[2], marks[-1]  # two steps warm up
    n = len(marks) - 3
    cpu, wall = ((b - a) / n for a, b in zip(first, last, strict=True))
    inside = {name: (insides[-1][name] - insides[2][name]) / n for name in spent.seconds}
    drawn = (drawings[-1] - drawings[2]) / n
    if drawn:
        inside[DRAWN] *= cpu / PERIOD_SECONDS / drawn
    return {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "inside_seconds": inside,
        "drawings": drawn,
    }


def compared(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Medians, the mean relative difference of a pair and its standard error, and the share."""
    more = [with_it["cpu_seconds"] / without["cpu_seconds"] - 1 for with_it, without in pairs]
    shares = {
        name: statistics.median(
            observed["inside_seconds"][name] / observed["cpu_seconds"] for observed, _ in pairs
        )
        for name in pairs[0][0]["inside_seconds"]
    }
    inside = [
        sum(observed["inside_seconds"].values()) / observed["cpu_seconds"] for observed, _ in pairs
    ]
    return {
        "observed_cpu_seconds": statistics.median(observed["cpu_seconds"] for observed, _ in pairs),
        "bare_cpu_seconds": statistics.median(unobserved["cpu_seconds"] for _, unobserved in pairs),
        "observed_wall_seconds": statistics.median(
            observed["wall_seconds"] for observed, _ in pairs
        ),
        "bare_wall_seconds": statistics.median(
            unobserved["wall_seconds"] for _, unobserved in pairs
        ),
        "overhead_of_pairs": statistics.mean(more),
        "standard_error": statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else None,
        "drawings": statistics.median(observed["drawings"] for observed, _ in pairs),
        "inside_share": statistics.median(inside),
        "shares": {name: round(share, 6) for name, share in shares.items()},
        "pairs": [[a["cpu_seconds"], b["cpu_seconds"]] for a, b in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("pairs", 8), ("steps", 30), ("hidden", 192), ("prompts", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--to", type=Path)
    arguments = parser.parse_args()
    os.environ |= {"TERM": "xterm", "COLUMNS": "100"}
    spent = watch_calls()
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number in range(arguments.pairs + 1):
        by_observed: dict[bool, dict[str, Any]] = {}
        for observed in (True, False) if number % 2 else (False, True):
            with tempfile.TemporaryDirectory() as folder:
                by_observed[observed] = run(arguments, Path(folder), observed, spent)
        if number:  # the first pair imports
            pairs.append((by_observed[True], by_observed[False]))
            print(f"pair {number}: {by_observed[True]} {by_observed[False]}", file=sys.stderr)
    settings = {k: v for k, v in vars(arguments).items() if k != "to"}
    result = {
        "command": " ".join(["python", *sys.argv]),
        "settings": settings,
        **compared(pairs),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.to:
        arguments.to.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
