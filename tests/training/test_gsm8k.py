"""Real questions: the shipped GSM8K recipes, SFT then RL, every row accounted for.

SFT reads them as the recipe names them, from a stand-in of the hub's layout; RL from a local file.
"""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from postgrad.observe.console import Console
from postgrad.recipe.load import load_recipe
from postgrad.training.start import train

DATA = os.environ.get("POSTGRAD_TEST_DATA")
RECIPES = Path(__file__).parent.parent.parent / "recipes"
ROWS = 7473
SMALL = [
    "--model.init.hidden_size",
    "64",
    "--model.init.num_hidden_layers",
    "2",
    "--eval.limit",
    "8",
]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="POSTGRAD_TEST_DATA names no folder")
def test_sft_then_rl_over_all_real_questions(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "openai" / "gsm8k" / "main"
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(lines(Path(DATA or "") / "gsm8k.jsonl"))
    pq.write_table(table, folder / "train-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    sft = load_recipe(
        RECIPES / "gsm8k_sft.toml",
        [*SMALL, "--run_dir", str(tmp_path / "sft"), "--steps", "10",
         "--learner.warmup_updates", "2"],
    )  # fmt: skip
    model = train(sft, console)["model"]
    data = ["--data.path", f"{DATA}/gsm8k.jsonl"]
    losses = [line["loss"] for line in lines(tmp_path / "sft" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.5
    rl = load_recipe(
        RECIPES / "gsm8k_grpo.toml",
        [*data, *SMALL, "--run_dir", str(tmp_path / "rl"), "--model.path", model, "--steps", "3",
         "--batch.rollout_batch_size", "4", "--learner.warmup_updates", "0"],
    )  # fmt: skip
    train(rl, console)
    assert [line["step"] for line in lines(tmp_path / "rl" / "metrics.jsonl")] == [1, 2, 3]
    for run in ("sft", "rl"):
        account = next(
            line for line in lines(tmp_path / run / "events.jsonl") if line["event"] == "data"
        )
        fates = ("kept", "truncated", "excluded", "too_long", "no_loss")
        assert account["rows"] == ROWS - 128
        assert sum(account.get(fate, 0) for fate in fates) == ROWS - 128
    held_out = {line["question"] for line in read_questions(range(ROWS - 128, ROWS))}
    trained = {line["question"] for line in lines(tmp_path / "rl" / "samples.jsonl")}
    assert len(trained) == 3 * 4
    assert not held_out & trained


def read_questions(rows: range) -> list[dict[str, Any]]:
    questions = lines(Path(DATA or "") / "gsm8k.jsonl")
    return [questions[row] for row in rows]
