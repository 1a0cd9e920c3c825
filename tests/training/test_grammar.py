"""Whole runs whose answers follow a grammar: in steps, evaluations, `generate`, after a kill."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import MODEL, MakeRecipe
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.observe.console import Console
from postgrad.tools.generate import Extent, generate
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

REGEX = "[aeiou]{2,4}(n|s)?|ma+"
AHEAD = {"regex": REGEX, "max_staleness": 1, "slots": 5}  # samples are cut, and go on
CORRECTED = {"type": "grpo", "correction": "tis", "correction_with_filters": True}
TOKENIZER = {**MODEL["init"]["tokenizer"], "kind": "bpe", "vocab_size": 300}
BYTES = {**MODEL["init"], "tokenizer": TOKENIZER}


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The recipe's [model]: one whose tokens are bytes of text, made once."""
    path = tmp_path_factory.mktemp("bytes") / "model"
    make_fresh(ModelInit.model_validate(BYTES), [], 0, path)
    return {"path": str(path), "init": None}


def samples_of(run_dir: str, name: str) -> list[dict[str, Any]]:
    return [
        sample for line in lines(Path(run_dir) / name) for sample in line.get("samples", [line])
    ]


@pytest.mark.slow
def test_a_run_with_a_grammar_has_no_other_answer_and_survives_a_kill(
    make_recipe: MakeRecipe,
    by_bytes: dict[str, Any],
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"model": by_bytes, "rollout": AHEAD, "algorithm": CORRECTED, "eval": {"every": 2}}
    never = make_recipe("rl", "never", **changes)
    killed = make_recipe("rl", "killed", **changes)
    train(never, console)
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, 3)
    for name in ("samples.jsonl", "eval_samples.jsonl"):
        stopped = [s for s in samples_of(never.run_dir, name) if s["finish_reason"] == "stop"]
        assert len({sample["text"] for sample in stopped}) > 2
        assert all(re.fullmatch(REGEX, sample["text"]) for sample in stopped)
    for step in lines(Path(never.run_dir) / "metrics.jsonl"):
        assert not any(key.startswith("mismatch/") for key in step)  # of another distribution
        assert np.isfinite(step["loss"])


def test_generate_follows_the_grammar_of_the_recipe(
    make_recipe: MakeRecipe, by_bytes: dict[str, Any], tmp_path: Path
) -> None:
    recipe = make_recipe("rl", model=by_bytes, rollout={"regex": "[aeiou]{2,4}"})
    generate(recipe, tmp_path / "to", Console("quiet"), Extent(samples=2, rows=6, shard=4))
    texts = [
        json.loads(line)
        for path in sorted((tmp_path / "to" / "shards").iterdir())
        for line in path.read_text("utf-8").splitlines()
    ]
    assert len(texts) == 12
    assert all(re.fullmatch("[aeiou]{2,4}", sample["text"]) for sample in texts)
