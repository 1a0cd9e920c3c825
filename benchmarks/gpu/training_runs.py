"""Runs of `postgrad train` that are measured step by step and left after the last measured one.

They end without the checkpoint of a run's end: those of large models take longer than the steps.
"""

import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.session import Result, Session
from postgrad.observe.console import Console, Phase
from postgrad.plan.plan import phases_of
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.training.start import train

WARM_UP = 1  # steps whose times do not count
Line = Mapping[str, float]
Hook = Callable[[int], None]  # gets the number of steps that have ended


class Enough(BaseException):
    """All steps that were wanted have ended. No Exception, so that the loop does not treat it as a
    failure.
    """


class Watching(Console):
    """Keeps the metrics and the seconds of every step; at the first phase after the last step that
    is wanted it ends the run.
    """

    def __init__(self, session: Session, steps: int | None, hook: Hook = lambda ended: None):
        """steps: None takes all of the run. hook: called between steps."""
        super().__init__("quiet")
        self.lines: list[Line] = []
        self.seconds: list[float] = []
        self.reserved: list[int] = []  # bytes that the allocator held at the end of each step
        self._session = session
        self._steps = steps
        self._hook = hook
        self._since = time.perf_counter()

    @contextmanager
    def run(self, total: int, done: int) -> Generator[None]:
        self._since = time.perf_counter()
        with super().run(total, done):
            yield

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[Phase]:
        if self._steps is not None and len(self.lines) >= self._steps:
            raise Enough
        return super().phase(name, total)

    def step(self, number: int, total: int, metrics: Line) -> None:
        self._session.synchronize()
        self.seconds.append(time.perf_counter() - self._since)
        self.lines.append(dict(metrics))
        if self._session.device == "cuda":
            self.reserved.append(torch.cuda.memory_reserved())
        self._hook(len(self.lines))
        self._since = time.perf_counter()


def run_recipe(
    session: Session,
    name: str,
    recipe: Mapping[str, Any],
    *,
    steps: int,
    hook: Hook = lambda ended: None,
    lines: list[Line] | None = None,
) -> Result:
    """Trains for `steps` steps in the run directory `name`; see `measured`. lines: gets the metrics
    of the steps.
    """
    console = Watching(session, steps, hook)
    named = {"run_dir": str(session.runs / name), "steps": steps + 1}
    parsed = parse_recipe({**recipe, **named})
    with suppress(Enough):
        train(parsed, console, overwrite=True)
    if lines is not None:
        lines += console.lines
    return measured(console, parsed)


def measured(console: Watching, recipe: Recipe) -> Result:
    """Medians of the steps after those that warm up, and by phase what was estimated and measured.
    Bytes are the most of any step.
    """
    lines = console.lines[WARM_UP:] or console.lines
    run_result: Result = {
        "steps": len(console.lines),
        "step_seconds": statistics.median(console.seconds[WARM_UP:] or console.seconds),
        "first_step_seconds": console.seconds[0],
        "computed_tokens": middle(lines, "policy/computed_tokens"),
        "phases": {name: figures for name in names(recipe) if (figures := of_phase(console, name))},
    }
    if console.reserved:
        run_result["reserved_bytes"] = max(console.reserved)
    return run_result


def names(recipe: Recipe) -> Sequence[str]:
    """The phases of a recipe's step, those without a forecast too."""
    return (*phases_of(recipe), "publish", "log", "sample/prefill", "sample/decode", "sample/score")


def of_phase(console: Watching, name: str) -> Result:
    """Seconds and bytes of a phase, estimated and measured, as far as the metrics have them. Bytes
    on a GPU are those that torch's allocator reserves: plans estimate these.
    """
    lines = console.lines[WARM_UP:] or console.lines
    planned = f"estimated/{name}_reserved_bytes"
    kind = "reserved" if most(console.lines, planned) is not None else "memory"
    figures = {
        "estimated_seconds": middle(lines, f"estimated/{name}_seconds"),
        "seconds": middle(lines, f"{name}_seconds"),
        "estimated_bytes": most(console.lines, f"estimated/{name}_{kind}_bytes"),
        "bytes": most(console.lines, f"{name}_{kind}_bytes"),
    }
    return {key: value for key, value in figures.items() if value is not None}


def middle(lines: Sequence[Line], key: str) -> float | None:
    """The median over the lines that have the number; None where none has it."""
    values = [line[key] for line in lines if line.get(key) is not None]
    return statistics.median(values) if values else None


def most(lines: Sequence[Line], key: str) -> float | None:
    """The largest; None where no line has it."""
    return max((line[key] for line in lines if line.get(key) is not None), default=None)


def sft(
    session: Session,
    path: Path,
    rows: Path,
    *,
    pack: int,
    update: int,
    model: Mapping[str, Any],
    learner: Mapping[str, Any],
) -> dict[str, Any]:
    """The recipe of an SFT job. path: of the model. update: rows of an optimizer step. model,
    learner: more keys of these sections.
    """
    return {
        "job": "sft",
        "model": {"path": str(path), "dtype": session.dtype, **model},
        "data": {"path": str(rows), "max_len": pack, "shuffle": False, "cache": False},
        "batch": {"train_batch_size": update, "micro_train_tokens": pack},
        "learner": {"lr": 1e-6, **threads(session), **learner},
    }


def quicker(session: Session) -> list[str]:
    """Overrides of the quickstart's recipes in a dry run: fewer rows, and one core of a CPU."""
    words = ["--data.size", "400", "--eval.size", "16"] if session.small else []
    return words + (["--learner.threads", "1"] if session.device == "cpu" else [])


def threads(session: Session) -> dict[str, int]:
    """Of [learner]: a dry run takes one core."""
    return {"threads": 1} if session.device == "cpu" else {}


def grpo(
    session: Session, path: Path, rows: Path, *, prompts: int, samples: int, longest: int, new: int
) -> dict[str, Any]:
    """The recipe of GRPO without a reference, one update a step. longest: tokens of a prompt. new:
    most tokens of an answer.
    """
    return {
        "job": "rl",
        "model": {"path": str(path), "dtype": session.dtype, "compile": "auto"},
        "data": {
            "path": str(rows), "max_len": longest + new, "shuffle": False, "cache": False,
        },
        "rewards": [{"type": "benchmarks.gpu.reward:score"}],
        "scoring": {"workers": 1},
        "algorithm": {"type": "grpo", "kl_coef": 0.0},
        "batch": {"rollout_batch_size": prompts, "n_samples_per_prompt": samples},
        "rollout": {"max_new_tokens": new},
        "learner": {"lr": 1e-6, **threads(session)},
        "sentinels": {"truncation": "off", "repetition": "off"},  # fresh models do both
    }  # fmt: skip
