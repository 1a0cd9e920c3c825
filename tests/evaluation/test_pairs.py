"""Pairs as learners read them, and what an evaluation says of whatever scores them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.comparing import recipe_of
from helpers.jobs import write_pairs
from helpers.runs import lines
from postgrad.core.errors import UsageError
from postgrad.core.records import Sequences
from postgrad.data.pairs import load_pairs
from postgrad.data.settings import PairSettings
from postgrad.evaluation.pairs import PairEvaluator, sequences_of
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.training.start import train


@pytest.fixture
def tokenizer(models: Any) -> Any:
    return load_tokenizer(models(0))


def evaluated(rows: list[dict[str, Any]], scores: list[float], to: Path, tokenizer: Any) -> Any:
    """The result of a model that gives the sequences these scores, in order."""
    path = to / "eval.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    by = "subset" if "subset" in rows[0] else None
    (evaluation,) = PairEvaluator(recipe_of(str(path), by=by), tokenizer)(
        lambda sequences: np.array(scores[: len(sequences)])
    )
    return evaluation


def rows_of(n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}?", "chosen": f"{i}!", "rejected": "no", **more} for i in range(n)]


def test_a_pair_is_two_sequences_in_one_group_the_chosen_first(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = str(write_pairs(tmp_path / "pairs.jsonl", rows=3))
    pairs = load_pairs(PairSettings(path=path), tokenizer).all()
    sequences = sequences_of(pairs)
    assert sequences.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert "after 0?" in tokenizer.decode(sequences.tokens.row(0))
    marked = [
        tokenizer.decode(tokens[mask])
        for tokens, mask in zip(sequences.tokens, sequences.loss_mask, strict=True)
    ]
    end = tokenizer.eos_token
    assert marked == [f"1.{end}", f"-1{end}", f"2.{end}", f"0{end}", f"3.{end}", f"1{end}"]
    last = sequences.at_last()
    assert last.loss_mask.sums().tolist() == [1] * 6
    assert all(mask[-1] for mask in last.loss_mask)


def test_what_is_reported_of_four_pairs_by_hand(tokenizer: Any, tmp_path: Path) -> None:
    """Margins 2, -1, 0 and 4: two of four are right, since a draw is not."""
    scores = [2.0, 0.0, 0.0, 1.0, 1.0, 1.0, 3.0, -1.0]
    evaluation = evaluated(rows_of(4), scores, tmp_path, tokenizer)
    assert (evaluation.rows, evaluation.failed) == (4, 0)
    assert evaluation.metrics["accuracy"] == 0.5
    assert evaluation.metrics["margin"] == pytest.approx((2 - 1 + 0 + 4) / 4)
    assert evaluation.metrics["reward_chosen"] == pytest.approx((2 + 0 + 1 + 3) / 4)
    assert evaluation.metrics["reward_rejected"] == pytest.approx((0 + 1 + 1 - 1) / 4)
    assert evaluation.metrics["reward_mean"] == pytest.approx(7 / 8)
    assert evaluation.metrics["reward_std"] == pytest.approx(float(np.std(scores)))
    histogram = evaluation.more["margin_histogram"]
    assert sum(histogram["counts"]) == 4
    assert (histogram["edges"][0], histogram["edges"][-1]) == (-1.0, 4.0)
    low, high = evaluation.intervals["accuracy"]
    assert 0.0 < low < 0.5 < high < 1.0


def test_accuracy_by_subset_as_rewardbench_has_it(tokenizer: Any, tmp_path: Path) -> None:
    rows = [*rows_of(2, subset="chat"), *rows_of(1, subset="safety")]
    evaluation = evaluated(rows, [1.0, 0.0, 0.0, 1.0, 5.0, 0.0], tmp_path, tokenizer)
    assert evaluation.metrics["accuracy"] == pytest.approx(2 / 3)
    assert evaluation.metrics["accuracy/chat"] == 0.5
    assert evaluation.metrics["accuracy/safety"] == 1.0


def test_a_column_of_subsets_that_is_not_there_is_named(tokenizer: Any, tmp_path: Path) -> None:
    path = str(write_pairs(tmp_path / "pairs.jsonl", rows=2))
    with pytest.raises(UsageError, match=r"eval\.by = 'subset': row 0"):
        PairEvaluator(recipe_of(path, by="subset"), tokenizer)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_failures_and_no_part_of_means(
    bad: float, tokenizer: Any, tmp_path: Path
) -> None:
    scores = [2.0, 0.0, bad, 0.0, 3.0, 1.0]
    evaluation = evaluated(rows_of(3), scores, tmp_path, tokenizer)
    assert (evaluation.rows, evaluation.failed) == (3, 1)
    assert evaluation.metrics["margin"] == pytest.approx(2.0)
    assert evaluation.metrics["accuracy"] == 1.0  # of those that have a score
    assert sum(evaluation.more["margin_histogram"]["counts"]) == 2


def test_an_evaluation_of_nothing_but_failures_does_not_end_the_run(
    tokenizer: Any, tmp_path: Path
) -> None:
    evaluation = evaluated(rows_of(2), [np.nan] * 4, tmp_path, tokenizer)
    assert (evaluation.rows, evaluation.failed) == (2, 2)
    assert np.isnan(
        [evaluation.metrics[name] for name in ("accuracy", "margin", "reward_mean")]
    ).all()


FATES = [
    {"prompt": "a?", "chosen": "yes", "rejected": "no"},
    {"prompt": "b?", "chosen": "same", "rejected": "same"},
    {"prompt": "c?", "chosen": "", "rejected": "no"},
    {"prompt": "d?", "chosen": "yes", "rejected": "   "},
    {"prompt": "e?", "chosen": "y" * 200, "rejected": "no"},
    {"prompt": "f?", "chosen": "yes", "rejected": "never"},
]


@pytest.mark.parametrize("job", ["reward", "preference"])
def test_rows_that_say_nothing_are_dropped_counted_and_told(
    job: str, make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe(job, batch={"train_batch_size": 2})
    data = recipe.data.model_copy(update={"max_lost_fraction": 1.0})
    recipe = recipe.model_copy(update={"data": data})
    text = "\n".join(json.dumps(row) for row in FATES)
    Path(recipe.data.path).write_text(text, "utf-8")
    train(recipe, console)
    (event,) = [
        line for line in lines(Path(recipe.run_dir) / "events.jsonl") if line["event"] == "data"
    ]
    assert (event["rows"], event["kept"]) == (6, 2)
    dropped = {key: value for key, value in event.items() if isinstance(value, int)}
    assert sum(dropped.values()) - 6 - 2 == 4, event


@pytest.mark.parametrize("job", ["reward", "preference"])
def test_a_dataset_of_which_nothing_is_left_is_an_error(
    job: str, make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe(job)
    text = "\n".join(json.dumps(row) for row in FATES[1:4])
    Path(recipe.data.path).write_text(text, "utf-8")
    with pytest.raises(UsageError, match=r"equal|empty"):
        train(recipe, console)


def test_an_empty_selection_is_no_sequence() -> None:
    nothing = sequences_of([])
    assert isinstance(nothing, Sequences)
    assert len(nothing) == 0
