"""How a model's generation_config.json says to sample: nothing here follows it, and an export has
what of it does not change what the model says.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from helpers.runs import timeless
from postgrad.observe.console import Console
from postgrad.training.start import train

HF = {"save_hf": True}
STATED = {"do_sample": True, "temperature": 0.05, "top_k": 2, "repetition_penalty": 3.0}


def test_no_sample_follows_it_and_an_export_has_it_without_penalties(
    models: Callable[[int], str], make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    stated = tmp_path / "stated"
    shutil.copytree(models(0), stated)
    file = stated / "generation_config.json"
    own_config = json.loads(file.read_text()) | STATED
    file.write_text(json.dumps(own_config | {"no_repeat_ngram_size": 1}))
    runs = list[Path]()
    for name, path in (("plain", models(0)), ("other", str(stated))):
        model = {"path": path, "init": None}
        recipe = make_recipe(
            "rl", name, model=model, steps=1, eval={"at_start": False}, checkpoint=HF
        )
        train(recipe, console)
        runs.append(Path(recipe.run_dir))
    for samples in ("samples.jsonl", "eval_samples.jsonl"):  # drawn, and without drawing
        plain, other = (timeless(run / samples) for run in runs)
        assert plain == other
    exported = json.loads((runs[1] / "model" / "generation_config.json").read_text())
    for key in ("do_sample", "temperature", "top_k", "eos_token_id"):
        assert exported[key] == own_config[key]
    read: Any = GenerationConfig.from_pretrained(runs[1] / "model")
    assert read.repetition_penalty in (None, 1.0)
    assert read.no_repeat_ngram_size in (None, 0)
