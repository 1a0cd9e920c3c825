"""Any local Hugging Face directory of a supported type works where a recipe names a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit, ModelType, TokenizerInit
from postgrad.observe.console import Console
from postgrad.training.start import train


@pytest.mark.slow
@pytest.mark.parametrize("kind", ModelType.__args__)
def test_sft_and_rl_train_a_model_of_every_type(
    kind: Any, make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    init = ModelInit(
        type=kind,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tokenizer=TokenizerInit(kind="bpe" if kind == "qwen2" else "characters"),
    )
    make_fresh(init, [], 0, tmp_path / "model")
    long = {"max_len": 96}  # every character of the question is a token here
    for job in ("sft", "rl"):
        recipe = make_recipe(
            job,
            run_dir=job,
            model={"path": str(tmp_path / "model")},
            data=long,
            eval={**long, "size": 2},
            steps=2,
        )
        summary = train(recipe, console)
        assert summary["updates"] == 2
    lines = (tmp_path / "rl" / "metrics.jsonl").read_text("utf-8").splitlines()
    for line in map(json.loads, lines):
        assert line["sentinel/prob_difference"] < 1e-6
        assert line["sentinel/publish_difference"] < 1e-5
        assert line["sentinel/policy_moved"] > 1e-4
