"""A step that samples while the policy learns, against one that does not, or that waits more, on
the same two cores.

    python benchmarks/overlap.py --pairs 10 --to benchmarks/results/overlap.json
    python benchmarks/overlap.py --of free --pairs 10 --to benchmarks/results/overlap_free.json

One run with a rollout worker and a rank, each pinned to a core of its own. Its processes do both
kinds of steps in turn, A B, B A, ...: with max_staleness = 1, where samples of the next step are
drawn beside learning, and with 0, where engine and learner take turns. Both draw the same tickets,
whose answers have log-normal lengths (or end where the model says so). `ratio` is the median over
pairs of the wall time of a synchronous step over that of an overlapped one. 2 is the bound, reached
where both sides take equally long and a publish takes nothing: choose --epochs, --prompts
and --most so that a synchronous step has as many engine_seconds as train_seconds. With `--of free`
both kinds of steps overlap: one whose engine is cut as soon as the policy has learned, and one of
the fixed schedule, which waits for the next step's groups. Both may be --staleness steps behind.
Idle shares are of each side's core: the engine's seconds of prefill and decode, the learner's of
training, over the wall time.

`simulated` is what plan/simulate.py says of the overlapped steps. It gets the lengths of their
answers and three rates, means over the steps: seconds of the sampling side for a sampled token, of
the learner for a trained one, and those in which both stand still (cut, publish, records). The
sampling side is at work beyond the engine's prefill and decode: requests and scores, which are
`seconds_beside_the_engine` of a step. Who waits for whom, and how long, is the simulation's.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from benchmarks.speed.report import machine, write_result
from postgrad.checkpoint.state import RunState
from postgrad.observe.console import Console
from postgrad.observe.follow import read_lines
from postgrad.observe.run_dir import RunDirectory
from postgrad.plan.simulate import (
    AnswerLengths,
    BatchLoad,
    Pace,
    Simulation,
    drawn_lengths,
)
from postgrad.recipe.load import parse_recipe
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.local.budget import MAX_SLOTS
from postgrad.rollout.stats import SUMMED
from postgrad.training.prepare import prepare
from postgrad.training.rl import RLJob
from postgrad.training.rl_parts import SampleInputs, rollout_source
from postgrad.training.run import Run

RECIPE = """
job = "rl"
run_dir = "{run_dir}"
steps = 1000
[model.init]
type = "qwen3"
hidden_size = {hidden}
intermediate_size = {intermediate}
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 1024
[model.init.tokenizer]
kind = "characters"
phrases = ["Spell this word backward (example: sun -> nus): "]
[data]
path = "reasoning-gym:spell_backward"
size = 2000
max_len = {max_len}
[[rewards]]
type = "regex"
pattern = "[a-m]"
[scoring]
workers = 1
[algorithm]
type = "grpo"
correction = "tis"
[batch]
rollout_batch_size = {prompts}
n_samples_per_prompt = 8
epochs_per_rollout = {epochs}
[rollout]
max_new_tokens = {most}
max_staleness = {staleness}
[learner]
lr = 1e-5
threads = 1
[cluster]
type = "ray"
start_seconds = 900.0
[cluster.rollout]
workers = 1
"""
PROMPT_TOKENS = 64
OF_THE_ENGINE = ("prefill_seconds", "decode_seconds", "decode_steps")
KINDS: dict[str, dict[str, dict[str, Any]]] = {  # --of -> kind of step -> keys of [rollout]
    "overlapped": {"overlapped": {}, "synchronous": {"max_staleness": 0}},
    "free": {"free": {"schedule": "free"}, "fixed": {}},
}
WAITS = ("overlap/learner_wait_seconds", "overlap/engine_wait_seconds")


class Drawn:
    """An engine whose answers are at most as long as they were drawn."""

    def __init__(self, engine: Any, lengths: AnswerLengths) -> None:
        self._engine = engine
        self._lengths = lengths
        self.prompt_tokens = 0
        self.tokens: dict[tuple[int, int], int] = {}  # of the answer to (ticket, sample)

    def completed(self, awaited: Any = None) -> list[Completion]:
        """Engine.completed, which notes how long the answers are."""
        done = self._engine.completed(awaited)
        self.tokens |= {(turn.ticket, turn.sample): len(turn.token_ids) for turn in done}
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        """Asks for each sample alone, with a token limit of its own."""
        self.prompt_tokens = len(request.token_ids)
        for sample in request.sample_ids:
            limit = {"max_new_tokens": self._lengths(request.ticket, sample)}
            sampling = request.sampling.model_copy(update=limit)
            self._engine.submit(replace(request, sample_ids=(sample,), sampling=sampling))


class Side:
    """Steps of one kind, and what they took."""

    def __init__(self, job: RLJob, run: Run, state: RunState, engine: Drawn) -> None:
        self._job = job
        self.engine = engine
        self._run = run
        self._state = state
        self.steps: list[dict[str, float]] = []

    def step(self) -> None:
        """Does the next step."""
        before = named(self.engine.stats.row)
        began = time.perf_counter()
        self._state, metrics = self._job.step(self._state)
        wall = time.perf_counter() - began
        times = self._run.clock.take_step()
        after = named(self.engine.stats.row)
        engine = {name: after[name] - before[name] for name in after}
        self.steps.append(
            {
                "wall_seconds": wall,
                "engine_seconds": engine["prefill_seconds"] + engine["decode_seconds"],
                **{name: engine[name] for name in OF_THE_ENGINE},
                "sampled_tokens": engine["response_tokens"],
                **{name: metrics[name] for name in WAITS if name in metrics},
                "train_seconds": times["train_seconds"],
                "publish_seconds": times["publish_seconds"],
                "staleness_mean": metrics.get("staleness/mean", 0.0),
                "response_tokens": metrics["response_tokens"],
            }
        )

    def medians(self, first: int) -> dict[str, float]:
        """Of the steps from number `first` on, and the idle shares of both cores."""
        steps = self.steps[first:]
        middle = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        wall = sum(step["wall_seconds"] for step in steps)
        for side in ("engine", "train"):
            busy = sum(step[f"{side}_seconds"] for step in steps)
            middle[f"{side}_idle_share"] = 1 - busy / wall
        return {name: round(value, 4) for name, value in middle.items()}


def named(row: Sequence[float]) -> dict[str, float]:
    """An engine's sums by their names."""
    return dict(zip(SUMMED, row, strict=True))


def simulated(side: Side, first: int, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of an overlapped step and the idle shares, by the simulation of the steps from number
    `first` on.
    """
    steps, tokens = side.steps[first:], side.engine.tokens
    total = {name: sum(step[name] for step in steps) for name in steps[0]}
    waits = total["overlap/learner_wait_seconds"] - total["overlap/engine_wait_seconds"]
    sampling = total["train_seconds"] + waits  # from when the learner begins to the last answer
    standing = total["wall_seconds"] - total["train_seconds"] - total[WAITS[0]]
    a_token = sampling / total["sampled_tokens"]
    prompts = side.engine.prompt_tokens * options.prompts * len(steps)
    a_trained_token = total["train_seconds"] / (total["response_tokens"] + prompts)

    def length(ticket: int, sample: int) -> int:
        return tokens.get((ticket, sample), round(options.mean))  # of the last, not ended yet

    pace = Pace(
        slots=min(MAX_SLOTS, options.prompts * 8),
        cache_tokens=math.inf,
        decode=lambda rows, cached: rows * a_token,
        prefill=lambda count: 0.0,  # among the seconds of a sampled token
        learn=lambda count: count * a_trained_token,
        publish=standing / len(steps),
    )
    load = BatchLoad(options.prompts, 8, side.engine.prompt_tokens, length)
    result = Simulation(load, pace, 1, 1, apart=True).run(len(side.steps), first)
    in_the_engine = total["engine_seconds"] / sampling
    return {
        "wall_seconds": round(result.seconds, 4),
        "engine_idle_share": round(1 - in_the_engine * (1 - result.engine_waits), 4),
        "train_idle_share": round(result.learner_idle, 4),
        "seconds_both_stand": round(standing / len(steps), 4),
        "seconds_beside_the_engine": round((sampling - total["engine_seconds"]) / len(steps), 4),
    }


def pin(run: Run) -> dict[str, int]:
    """Binds engine and learner, with all their threads, to a core each. The loop's own process,
    which waits for both, shares the learner's.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two cores are needed")
    placed = {
        event["role"]: event["places"][0][1]
        for event in read_lines(run.directory.path / "events.jsonl")
        if event["event"] == "placed"
    }
    where = {"rollout": cores[0], "policy": cores[1]}
    for role, core in where.items():
        for thread in Path(f"/proc/{placed[role]}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
    os.sched_setaffinity(0, {where["policy"]})
    return where


def sides(
    run: Run, job: Any, state: RunState, options: argparse.Namespace, stack: ExitStack
) -> dict[str, Side]:
    """The two kinds of steps, by their names, of one run with the same processes and tickets."""
    parts, recipe = job._parts, cast(Any, run.recipe)
    live, thread = parts.source._live, parts.source._thread
    lengths = drawn_lengths(options.mean, options.most, 8)
    sides_by_name: dict[str, Side] = {}
    for name, keys in KINDS[options.of].items():
        engine: Any = Drawn(parts.engine, lengths)
        rollout = recipe.rollout.model_copy(update=keys)
        other = recipe.model_copy(update={"rollout": rollout})
        # Only an environment, which the recipe lacks, reads the policy's path.
        inputs = SampleInputs("", parts.tokenizer, None, live._prompts, parts.scorer)
        source = rollout_source(
            run, other, inputs, engine, thread if rollout.max_staleness else None, stack
        )
        side_parts = replace(parts, source=source, recipe=other)
        sides_by_name[name] = Side(RLJob(run, side_parts), run, state, engine)
    return sides_by_name


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs the pairs, after some that warm up."""
    text = RECIPE.format(
        run_dir=folder / "run", hidden=options.hidden, intermediate=2 * options.hidden,
        prompts=options.prompts, most=options.most, max_len=options.most + PROMPT_TOKENS,
        epochs=options.epochs, staleness=options.staleness,
    )  # fmt: skip
    recipe = parse_recipe(tomllib.loads(text))
    directory = RunDirectory.create(Path(recipe.run_dir), recipe.dump(), overwrite=False)
    with ExitStack() as stack:
        run, job, _, state = prepare(recipe, directory, Console("quiet"), stack)
        cores = pin(run)
        kinds = sides(run, job, state, options, stack)
        faster, slower = kinds.values()
        for pair in range(options.warm + options.pairs):
            for side in (faster, slower) if pair % 2 else (slower, faster):
                side.step()
    ratios = [
        other["wall_seconds"] / step["wall_seconds"]
        for other, step in zip(slower.steps, faster.steps, strict=True)
    ][options.warm :]
    of_simulation = (
        {"simulated": simulated(faster, options.warm, options)} if options.of != "free" else {}
    )
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "cores": cores,
        "pairs": options.pairs,
        "steps": faster.steps,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **{name: side.medians(options.warm) for name, side in kinds.items()},
        **of_simulation,
    }


def main() -> None:
    """Measures, prints, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=10, help="of steps that count")
    parser.add_argument("--of", choices=tuple(KINDS), default="overlapped", help="what is compared")
    parser.add_argument("--staleness", type=int, default=1, help="most steps behind the policy")
    parser.add_argument("--warm", type=int, default=2, help="pairs before them")
    parser.add_argument("--prompts", type=int, default=32, help="of a step, with 8 samples each")
    parser.add_argument("--mean", type=float, default=64.0, help="tokens of an answer")
    parser.add_argument("--most", type=int, default=192, help="tokens of the longest")
    parser.add_argument("--hidden", type=int, default=128, help="size of the model")
    parser.add_argument("--epochs", type=int, default=3, help="passes of the learner over a step")
    parser.add_argument("--to", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    write_result(result, options.to)


if __name__ == "__main__":
    main()
