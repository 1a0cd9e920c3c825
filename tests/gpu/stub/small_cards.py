"""Recipes of RL on the stub, at the shapes of their models: those for small cards, and one rank of
that for several devices. Prints as JSON what the plan estimates, and the peaks of torch's allocator
over two steps: `small_cards.py RECIPE FOLDER HARDWARE [DETERMINISTIC]`.

Rows fill micro-batches, but are few, and answers are short: their decoding would be all that the
test does. Weights are read by transformers from files of zeros that take no room on disk.
"""

import json
import struct
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import plan_memory_gpu_child as child
from helpers.gpu_stub import ROOT
from postgrad.models.load import read_weights
from postgrad.recipe.load import load_recipe, parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.training.out_of_memory import OutOfMemory

SAMPLES, NEW = 8, 16
PROMPTS = {"cluster/grpo": 32}  # of a step, else 8: each rank has some
ROW = 872  # tokens of a prompt: with its answers 1000, of which micro-batches hold 2 and 8
SLOTS = 32  # what "auto" chooses on an RTX 4090


def shortened(path: Path, model: Path, rows: Path, prompts: int, *, deterministic: bool) -> Recipe:
    """The recipe at `path` with two steps of few rows, and without an evaluation."""
    sections = tomllib.loads(path.read_text("utf-8"))
    del sections["eval"], sections["checkpoint"]
    sections["steps"] = 2
    sections["model"]["path"] = str(model)
    sections["data"] = {
        "path": str(rows), "prompt": "question", "cache": False,
        "max_len": sections["data"]["max_len"],
    }  # fmt: skip
    sections["rewards"] = [{"type": "helpers.by_sample:by_sample"}]
    sections["batch"] |= {"rollout_batch_size": prompts, "train_batch_size": prompts * SAMPLES}
    sections["rollout"] |= {"max_new_tokens": NEW, "slots": SLOTS}
    learner = {"threads": 1, "warmup_updates": 0, "deterministic": deterministic}
    sections["learner"] |= learner
    return parse_recipe(sections)


def sparse_weights(model: Path) -> None:
    """A safetensors file of zeros, of which only the header is written."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    header, end = dict[str, Any](), 0
    for name, parameter in lm.named_parameters():
        start, end = end, end + 2 * parameter.numel()
        header[name] = {
            "dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def told_of(name: str, folder: Path, hardware: str, *, deterministic: bool) -> dict[str, Any]:
    """What the plan says of a recipe, and what its run takes, or "error" where memory ran out."""
    path = ROOT / "recipes" / f"{name}.toml"
    hub_id = load_recipe(path).model.path
    assert hub_id is not None
    model, rows = folder / "model", folder / "rows.jsonl"
    prompts = PROMPTS.get(name, 8)
    child.make(hub_id, model)
    sparse_weights(model)
    child.write_rows(model, ROW, prompts, answered=False, to=rows)
    recipe = shortened(path, model, rows, prompts, deterministic=deterministic)
    plan = child.estimated(recipe, hardware)
    try:
        with patch.object(child, "on_device", read_weights):
            run = child.run(recipe, folder / "run")
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        run = {"error": str(error)}
    else:
        run["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return {"plan": plan, "run": run}


if __name__ == "__main__":
    name, to, hardware, *more = sys.argv[1:]
    report = told_of(name, Path(to), hardware, deterministic=more != ["false"])
    print(json.dumps(report))
