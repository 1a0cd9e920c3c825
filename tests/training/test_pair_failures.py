"""Pairs whose score is no finite number: counted as failed, in no mean."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.comparing import recipe_of
from postgrad.core.errors import UsageError
from postgrad.core.records import Sequences
from postgrad.evaluation.pairs import PairEvaluator
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit, TokenizerInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.recipe.load import parse_recipe
from postgrad.training.rows import evaluated


def test_pairs_without_a_finite_score_are_counted_and_in_no_mean(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(4)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    init = ModelInit(hidden_size=8, tokenizer=TokenizerInit(kind="characters"))
    make_fresh(init, [], 0, tmp_path / "model")
    evaluator = PairEvaluator(recipe_of(str(file)), load_tokenizer(str(tmp_path / "model")))

    def score(sequences: Sequences) -> NDArray[np.float64]:
        assert len(sequences) == 8
        return np.array([3.0, 1.0, np.nan, 1.0, 1.0, 2.0, 5.0, -np.inf])

    (result,) = evaluator(score)
    assert (result.rows, result.failed) == (4, 2)
    assert result.metrics["accuracy"] == 0.5
    assert result.metrics["margin"] == pytest.approx((2.0 - 1.0) / 2)
    assert result.metrics["reward_mean"] == pytest.approx((3.0 + 1.0 + 1.0 + 2.0) / 4)
    assert sum(result.more["margin_histogram"]["counts"]) == 2


def test_a_fraction_of_labelled_answers_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "labelled.jsonl"
    file.write_text(json.dumps({"prompt": "1?", "completion": "yes", "label": True}))
    recipe = parse_recipe(
        {
            "job": "preference",
            "run_dir": "run",
            "steps": 1,
            "model": {"path": "model"},
            "algorithm": {"type": "kto"},
            "data": {"path": str(file), "eval_fraction": 0.5},
        }
    )
    why = r"the part that data\.eval_fraction holds out: delete that key, and give \[eval\] a file"
    with pytest.raises(UsageError, match=why):
        evaluated(recipe, 0, None)
