"""Sixteen samples that each call a slow function once: one after the other, and side by side.

    python -m benchmarks.side_by_side --to benchmarks/results/side_by_side.json

Each sample takes a turn of a few tokens, calls a function that sleeps for 0.2 s in a process of its
own (rollout/environments/workers.py), and takes a second turn; then it is scored. What is timed is
all sampling and scoring of such a step by the source of a run, with a model of three small layers
on one thread. The first step starts the processes and does not count.
"""

import argparse
import json
import statistics
import string
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PrivateAttr

from benchmarks.speed.report import machine, write_result
from postgrad.core.records import Prompt
from postgrad.observe.console import Console
from postgrad.observe.run_dir import RunDirectory
from postgrad.recipe.load import parse_recipe
from postgrad.rollout.environments.base import ChatEnvironment, Course, Reply
from postgrad.rollout.environments.workers import FunctionWorkers

SECONDS = 0.2  # of a call
SAMPLES = 16
RECIPE = """
job = "rl"
run_dir = "{run_dir}"
steps = 1000
[model.init]
type = "qwen3"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 3
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 256
[model.init.tokenizer]
kind = "characters"
phrases = ["Spell this word backward (example: sun -> nus): "]
[data]
path = "reasoning-gym:spell_backward"
size = 1000
max_len = 192
chat_template = "chatml"
[environment]
type = "benchmarks.side_by_side:Slow"
concurrent = {concurrent}
max_turns = 2
[[rewards]]
type = "regex"
pattern = "[a-m]"
[scoring]
workers = 1
[algorithm]
type = "grpo"
[batch]
rollout_batch_size = 2
n_samples_per_prompt = 8
[rollout]
max_new_tokens = 48
stop = {letters}
[learner]
lr = 1e-5
threads = 1
"""


def slow(text: str) -> str:
    """What a tool answers after 0.2 s."""
    time.sleep(SECONDS)
    return text[:1]


class Slow(ChatEnvironment):
    """Calls the function for the first turn of each sample, and ends with the second."""

    waits: ClassVar[bool] = True
    _workers: FunctionWorkers | None = PrivateAttr(default=None)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """With processes for the calls."""
        self._workers = FunctionWorkers()
        try:
            yield
        finally:
            self._workers.close()

    def start(self, prompt: Prompt, sample: int) -> Course:
        del prompt, sample
        return Play(self)

    async def ask(self, text: str) -> str:
        """The function's answer."""
        assert self._workers is not None
        return await self._workers.call("benchmarks.side_by_side:slow", {"text": text})


class Play:
    """One sample: a call, then the end."""

    def __init__(self, world: Slow) -> None:
        self._world = world
        self.calls = 0

    async def step(self, text: str) -> Reply:
        """Replies to a turn."""
        if self.calls:
            return Reply(done=True)
        self.calls += 1
        answer = await self._world.ask(text)
        return Reply(({"role": "user", "content": answer},), counts={"slow_calls": 1.0})


def steps(concurrent: int, count: int, folder: Path) -> list[float]:
    """Seconds of each step's sampling and scoring, after one that does not count."""
    # Each of the processes that call `slow` imports this file: torch would take it five seconds.
    from postgrad.training.prepare import prepare

    text = RECIPE.format(
        run_dir=folder / f"run-{concurrent}",
        concurrent=concurrent,
        letters=json.dumps(list(string.ascii_letters)),  # a turn ends at its first letter
    )
    recipe = parse_recipe(tomllib.loads(text))
    directory = RunDirectory.create(Path(recipe.run_dir), recipe.dump(), overwrite=False)
    seconds: list[float] = []
    with ExitStack() as stack:
        _, job, _, state = prepare(recipe, directory, Console("quiet"), stack)
        source: Any = job._parts.source  # pyright: ignore[reportAttributeAccessIssue]
        cursor = state.cursor
        for step in range(1, count + 2):
            began = time.perf_counter()
            sampled = source.next(step, cursor, state.source, state.pending)
            seconds.append(time.perf_counter() - began)
            cursor = sampled.cursor
            calls = sum(r.counts.get("slow_calls", 0.0) for g in sampled.all for r in g.rollouts)
            if calls < SAMPLES:
                sys.exit(f"{calls:.0f} of {SAMPLES} samples called the function")
    return seconds[1:]


def main() -> None:
    """Measures, prints, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=5, help="that count, of each kind")
    parser.add_argument("--to", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = {
            "command": " ".join(["python", "-m", "benchmarks.side_by_side", *sys.argv[1:]]),
            "machine": machine(),
            "samples": SAMPLES,
            "call_seconds": SECONDS,
        }
        for name, concurrent in (("one_after_the_other", 1), ("side_by_side", SAMPLES)):
            seconds = steps(concurrent, options.steps, Path(folder))
            result[name] = {
                "median_seconds": round(statistics.median(seconds), 3),
                "seconds": [round(value, 3) for value in seconds],
            }
    write_result(result, options.to)


if __name__ == "__main__":
    main()
