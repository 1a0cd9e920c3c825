"""What benchmarks.plan_memory_gpu does in a process of its own on a CUDA device: recipes are
prepared and run for their steps, with weights that are created on the device and never read.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoTokenizer

from postgrad.fleet.local import LocalFleet
from postgrad.learner.tensor import grid_of
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.fresh import make_fresh
from postgrad.models.known_shapes import shape_of_model
from postgrad.models.load import Loading
from postgrad.models.score import HEAD
from postgrad.models.settings import ModelInit, ModelSettings
from postgrad.models.stored import Box, StoredTensor, of_tensors, realise
from postgrad.observe.console import Console
from postgrad.observe.run_dir import RunDirectory
from postgrad.parallel.device import Placement, apply
from postgrad.parallel.ranks import Ranks
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.held import PHASES
from postgrad.plan.lengths import row_lengths
from postgrad.plan.plan import Facts, make_plan
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.engine import Completion
from postgrad.rollout.local.engine import LocalEngine
from postgrad.training import prepare

ROWS = 256  # of the data
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class OneOfRanks(Ranks):
    """Rank 0 of several, without the others: what they would send is not computed with."""

    def most(self, count: int) -> int:
        return count

    def sum(self, value: float) -> float:
        return value

    def gathered(self, value: Any) -> list[Any]:
        return [value] * self.size

    def merged(self, values: Any, computed: Any) -> tuple[Any, Any]:
        return values, np.ones_like(computed)


def make(model: str | dict[str, Any], to: Path) -> None:
    """A directory with the config of a known shape, or with this config, and a tokenizer of
    characters.
    """
    init = {
        "type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tokenizer": {"kind": "characters"},
        "max_position_embeddings": 40960,
    }  # fmt: skip
    make_fresh(ModelInit.model_validate(init), [], 0, to)
    config: Any = AutoConfig.from_pretrained(to)
    if not isinstance(model, str):
        ends = {name: getattr(config, name) for name in ("eos_token_id", "pad_token_id")}
        AutoConfig.for_model(**model, **ends).save_pretrained(to)
        return
    shape = shape_of_model(ModelSettings(path=model))
    config.update(
        {
            "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tied,
            "layer_types": ["full_attention"] * shape.layers,
        }
    )  # fmt: skip
    config.save_pretrained(to)


def write_rows(model: Path, tokens: int, count: int, *, answered: bool, to: Path) -> None:
    """Rows of `tokens` tokens each, half of them the answer's where it is in the data."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = np.random.default_rng(0)

    def messages(question: str, answer: str) -> list[dict[str, str]]:
        asked = [{"role": "user", "content": question}]
        return [*asked, {"role": "assistant", "content": answer}] if answered else asked

    more = not answered
    around = tokenizer.apply_chat_template(
        messages("", ""), add_generation_prompt=more, tokenize=False
    )
    around = len(tokenizer(around, add_special_tokens=False)["input_ids"])
    new = (tokens - around) // 2 if answered else 0
    old = tokens - around - new

    def text(length: int) -> str:
        return "".join(rng.choice(list(LETTERS), length))

    rows = [{"question": text(old), "answer": text(new), "other": text(new)} for _ in range(count)]
    to.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def on_device(path: str, config: Any, kind: Any, how: Loading) -> tuple[Any, list[str]]:
    """models.load.read_weights, of weights as the device has them; of zeros where ranks divide them
    as they are read, or where they get one piece of memory.
    """
    if how.together:
        how = replace(how, device=torch.device("cpu"), in_files=True)
    with torch.device("meta" if how.stored else "cuda"):
        lm = kind.from_config(config, attn_implementation=ATTENTION_NAME, dtype=how.dtype)
    missing = [HEAD] if hasattr(lm, "score") else []
    if how.stored:
        device = torch.empty(0, device=how.device).device
        weights = {
            name: StoredTensor(weight.shape, weight.dtype, device, partial(_zeros, weight.dtype))
            for name, weight in lm.named_parameters()
            if name not in missing
        }
        lm, _ = of_tensors(type(lm), config, how.dtype, weights, ATTENTION_NAME)
    if how.together:
        realise(lm)
    return lm, missing


def _zeros(dtype: torch.dtype, box: Box) -> torch.Tensor:
    return torch.zeros([count for _, count in box], dtype=dtype)


def fleet(run: Any, stack: ExitStack, session: Any) -> LocalFleet:
    """prepare._fleet: every model in this process, also where it is one of several ranks."""
    count = run.recipe.learner.ranks
    if count == 1:
        return LocalFleet(run, logs=run.directory.path)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    stack.callback(dist.destroy_process_group)
    ranks = OneOfRanks(0, count, "cuda", dist.HashStore(), grid_of(run.recipe.learner))
    return LocalFleet(run, ranks, run.directory.path)


def unlike(completed: Callable[..., list[Completion]]) -> Any:
    """LocalEngine.completed, with other tokens for each sample: on the stub all are the same, and
    equal answers would be computed once.
    """

    @wraps(completed)
    def changed(self: LocalEngine, *arguments: Any, **named: Any) -> list[Completion]:
        return [
            replace(completion, token_ids=_letters(completion))
            for completion in completed(self, *arguments, **named)
        ]

    return changed


def _letters(completion: Completion) -> Any:
    rng = np.random.default_rng((completion.ticket, completion.sample))
    return rng.integers(10, 90, len(completion.token_ids), np.int32)


@contextmanager
def without_weights() -> Iterator[None]:
    """Models are created on the device."""
    with (
        patch.object(LocalEngine, "completed", unlike(LocalEngine.completed)),
        patch("postgrad.models.load.read_weights", on_device),
        patch("postgrad.models.score.read_weights", on_device),
        patch("postgrad.training.prepare._fleet", fleet),
    ):
        yield


def run(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Peaks by phase of the recipe's steps, allocated and reserved; of the whole run too."""
    for _ in range(2):  # of what FSDP2 left the first collection frees a part alone
        gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved()
    peaks: dict[str, list[int]] = {}
    with ExitStack() as stack, watching(peaks), without_weights():
        directory = RunDirectory.create(folder, recipe.dump(), overwrite=True)
        run, job, _, state = prepare.prepare(recipe, directory, Console("quiet"), stack)
        for _ in range(run.steps):
            state, _ = job.step(state)
            run.clock.take_step()
        computed = run.choices.micro_train_tokens
    del run, job, state
    peaks["between"] = peaks.pop("between")  # last: of equal peaks that of a span is named
    allocated = max(peaks, key=lambda name: peaks[name][0])
    reserved = max(peaks, key=lambda name: peaks[name][1])
    return {
        "left": left, "tokens": computed,
        "allocated": peaks[allocated][0], "allocated_in": allocated,
        "reserved": peaks[reserved][1], "reserved_in": reserved,
        "phases": peaks,
    }  # fmt: skip


@contextmanager
def watching(peaks: dict[str, list[int]]) -> Iterator[None]:
    """[allocated, reserved] bytes at the peak of each span of a run, and outside of them."""
    from postgrad.training.run import Clock

    timed = Clock.timed
    opened = ["between"]

    def end() -> None:
        most = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        for name in opened[-1:]:
            before = peaks.get(name, [0, 0])
            peaks[name] = [max(pair) for pair in zip(before, most, strict=True)]
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def within(self: Clock, name: str) -> Iterator[None]:
        end()
        opened.append(name)
        try:
            with timed(self, name):
                yield
        finally:
            end()
            opened.pop()

    torch.cuda.reset_peak_memory_stats()
    with patch.object(Clock, "timed", within), patch("postgrad.training.prepare.gauges_for", none):
        yield
        end()


def none(_: str) -> tuple[()]:
    """No gauges: they would begin the device's peaks anew."""
    return ()


def estimated(recipe: Recipe, hardware: str) -> dict[str, Any]:
    """What the plan says: bytes by phase, and the lines of the peak."""
    facts = Facts(shape_of_model, parse_hardware(hardware), lengths=row_lengths(recipe))
    planned = make_plan(recipe, facts)
    memory = planned.memory
    lines = {
        f"{line.role}: {line.purpose}": {p: c for p, c in line.bytes.items() if c}
        for line in memory.lines
    }
    phases = {phase: memory.above_baseline(phase) for phase in PHASES}
    return {"bytes": max(phases.values()), "phase": memory.peak, "phases": phases, "lines": lines}


def main() -> None:
    """Reads cases from the JSON file that is named, and prints a line of JSON for each."""
    asked = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    apply(Placement("cuda", 1, deterministic=True))  # sets the allocator up, as a run does
    printed = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no line of JSON
    for number, case in enumerate(asked["cases"]):
        model, data = Path(case["recipe"]["model"]["path"]), Path(case["recipe"]["data"]["path"])
        if not model.exists():
            make(case["model"], model)
        if not data.exists():
            tokens, sampled = case["rows"]
            write_rows(model, tokens, ROWS, answered=not sampled, to=data)
        recipe = parse_recipe({**case["recipe"], "run_dir": str(Path(asked["folder"]) / "run")})
        row: dict[str, Any] = {"name": case["name"], "plan": estimated(recipe, asked["hardware"])}
        if not asked["plan_only"]:
            row["run"] = run(recipe, Path(asked["folder"]) / f"run-{number}")
        print(json.dumps(row), file=printed, flush=True)


if __name__ == "__main__":
    main()
