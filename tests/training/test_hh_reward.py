"""Real comparisons: the shipped reward-model recipe, every row accounted for, and the benchmark
that trains a peer beside it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from postgrad.data.pairs import load_pairs
from postgrad.observe.console import Console
from postgrad.recipe.load import load_recipe
from postgrad.training.start import train

DATA = os.environ.get("POSTGRAD_TEST_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="POSTGRAD_TEST_DATA names no folder")
ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "recipes" / "hh_reward.toml"
FILE = f"{DATA}/hh-rlhf-harmless.jsonl.gz"
SMALL = {
    "model.init.hidden_size": "32", "model.init.intermediate_size": "64",
    "model.init.num_hidden_layers": "1", "model.init.tokenizer.vocab_size": "600",
    "data.split": "train[80:120]", "eval.split": "train[-12:]", "batch.train_batch_size": "8",
    "steps": "3", "learner.warmup_updates": "1", "data.cache": "false", "learner.threads": "1",
}  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def scores_by_transformers(model: str, sequences: list[np.ndarray]) -> np.ndarray:
    """Each conversation alone, so without padding."""
    lm: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = [
            lm(torch.from_numpy(token_ids.astype(np.int64))[None]).logits for token_ids in sequences
        ]
    return torch.cat(logits)[:, 0].numpy()


@pytest.mark.slow
def test_the_shipped_recipe_runs_on_a_file_and_its_rows_add_up(
    tmp_path: Path, console: Console
) -> None:
    flags = {**SMALL, "data.path": FILE, "run_dir": str(tmp_path / "run")}
    recipe: Any = load_recipe(RECIPE, [f"--{key}={value}" for key, value in flags.items()])
    model = train(recipe, console)["model"]
    accounts = [e for e in lines(tmp_path / "run" / "events.jsonl") if e["event"] == "data"]
    training, held_out = accounts
    assert (training["rows"], held_out["rows"]) == (40, 12)
    assert training["empty"] == 1  # line 87 of the file; no row is held out by its question
    kept = sum(training.get(fate, 0) for fate in ("kept", "truncated"))
    assert kept + sum(training.get(f, 0) for f in ("empty", "equal", "no_loss")) == 40
    first, last = lines(tmp_path / "run" / "eval.jsonl")
    assert (first["step"], last["step"]) == (0, 3)
    assert last["rows"] == held_out.get("kept", 0) + held_out.get("truncated", 0)
    pairs = load_pairs(recipe.eval.sets[0].data, AutoTokenizer.from_pretrained(model)).all()
    both = [ids for pair in pairs for ids in (pair.chosen, pair.rejected)]
    scores = scores_by_transformers(model, both)
    assert last["accuracy"] == np.mean(scores[0::2] > scores[1::2])
    assert last["reward_mean"] == pytest.approx(scores.mean(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.long
def test_a_peer_takes_the_same_steps_on_the_same_pairs(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    report = tmp_path / "report.json"
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "reward_model.py", FILE, "--steps", "3",
         "--seeds", "1", "--to", report],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    peer_report = json.loads(report.read_text("utf-8"))
    (seed,) = peer_report["seeds"]
    assert seed["first_losses_apart"] < 1e-5
    assert seed["trl"]["tokens"]["different"] == 0
    assert abs(seed["postgrad"]["held_out"] - seed["trl"]["held_out"]) < 0.01
    assert seed["postgrad"]["own_held_out"] == pytest.approx(seed["postgrad"]["held_out"])
    rows = peer_report["rows"]
    assert (rows["training"]["rows"], rows["held_out"]["rows"]) == (1500, 300)
    assert rows["training"]["empty"] == 4
    counts = {k: v for k, v in rows["training"].items() if k not in ("dataset", "rows", "notes")}
    assert sum(counts.values()) == 1500
