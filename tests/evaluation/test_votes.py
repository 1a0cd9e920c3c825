"""Votes on what a user's own verifier reads: a run without any is refused before its first step."""

from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.evaluation import votes
from postgrad.evaluation.answers import Evaluator
from postgrad.fleet.learned import scorer_of
from postgrad.models.fresh import make_fresh
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.training.start import train

VOTES = {"n_samples": 2, "pass_at": [1], "maj_at": [2], "greedy": False}


def require_votes(make_recipe: Any, folder: Path, reward: str, **more: Any) -> None:
    recipe = make_recipe("rl", eval=VOTES, rewards=[{"type": f"tiny_rewards:{reward}", **more}])
    make_fresh(recipe.model.init, [], 0, folder / "model")
    tokenizer = load_tokenizer(str(folder / "model"))
    with scorer_of(recipe, tokenizer, None) as scorer:
        prompts = Evaluator(recipe, tokenizer, scorer).sets[0][1].all()
    votes.require_votes(recipe, prompts, tokenizer)


@pytest.mark.parametrize("job", ["rl", "sft"])
def test_a_verifier_that_reads_no_answer_is_refused_before_a_step(
    make_recipe: Any, job: str
) -> None:
    recipe = make_recipe(job, eval={**VOTES, "every": 2})
    with pytest.raises(UsageError, match=r"maj_at: 'vowels' did not say of any answer to row \d"):
        train(recipe, Console("quiet"))
    assert not (Path(recipe.run_dir) / "metrics.jsonl").exists()


@pytest.mark.parametrize("after", [None, "</think>"])
def test_a_verifier_that_reads_answers_of_one_form_passes(
    make_recipe: Any, tmp_path: Path, after: str | None
) -> None:
    require_votes(make_recipe, tmp_path, "reads_marked", after=after)


def test_of_a_verifier_that_fails_on_all_of_them_nothing_is_known(
    make_recipe: Any, tmp_path: Path
) -> None:
    require_votes(make_recipe, tmp_path, "broken", on_failure="stop_run")


def test_nor_of_one_that_finds_an_answer_in_none_of_them(make_recipe: Any, tmp_path: Path) -> None:
    require_votes(make_recipe, tmp_path, "reads_unusual")
