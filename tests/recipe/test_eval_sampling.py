"""Each evaluation set may say how its own answers are sampled; [eval] says the rest."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.recipe.compare import compare
from postgrad.recipe.eval_settings import EvalSet, EvalSettings
from postgrad.recipe.load import parse_recipe, recipe_from_json, with_overrides

AIME = {"name": "aime", "path": "aime.jsonl", "n_samples": 32, "temperature": 0.6, "top_p": 0.95}
MATH = {"name": "math", "path": "math.jsonl"}
KEYS = ("n_samples", "temperature", "top_p", "top_k", "min_p", "max_new_tokens")


def recipe_of(evaluation: dict[str, Any], **more: Any) -> Any:
    return parse_recipe(
        {
            "job": "rl",
            "run_dir": "run",
            "steps": 1,
            "model": {"path": "model"},
            "data": {"path": "train.jsonl", "max_len": 1024},
            "algorithm": {"type": "grpo"},
            "batch": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
            "rollout": {"max_new_tokens": 512},
            "rewards": [{"type": "math"}],
            "eval": evaluation,
            **more,
        }
    )


def test_a_set_has_its_own_samples_and_the_rest_of_eval() -> None:
    shared = {"pass_at": [1, 8, 32], "maj_at": [4], "top_k": 50, "max_new_tokens": 256}
    recipe = recipe_of({**shared, "sets": [AIME, {**MATH, "max_new_tokens": 128}]})
    aime, math = recipe.eval.samplings
    assert [getattr(aime, key) for key in KEYS] == [32, 0.6, 0.95, 50, 0.0, 256]
    assert [getattr(math, key) for key in KEYS] == [1, 1.0, 1.0, 50, 0.0, 128]
    assert (aime.pass_at, aime.maj_at) == ((1, 8, 32), (4,))
    assert (math.pass_at, math.maj_at) == ((1,), ())  # as many as it samples
    assert (aime.sorts, math.sorts) == (True, True)


def test_keys_beside_the_path_of_one_set_are_those_of_eval() -> None:
    recipe = recipe_of({"path": "aime.jsonl", "n_samples": 8, "temperature": 0.6})
    assert recipe.eval.n_samples == 8
    assert recipe.eval.sets[0].n_samples is None
    assert recipe.eval.samplings[0].temperature == 0.6


def test_a_resolved_recipe_reads_again_and_an_override_leaves_a_set_its_own() -> None:
    recipe = recipe_of({"sets": [AIME, MATH], "pass_at": [1, 32]})
    again = recipe_from_json(json.loads(json.dumps(recipe.dump())))
    assert again == recipe
    changed = with_overrides(recipe, ["--eval.n_samples", "4", "--eval.temperature", "0.5"])
    sampled = [(s.n_samples, s.temperature) for s in changed.eval.samplings]
    assert sampled == [(32, 0.6), (4, 0.5)]
    of_set = with_overrides(recipe, ["--eval.sets.0.n_samples", "64"])
    assert of_set.eval.samplings[0].n_samples == 64
    with pytest.raises(UsageError, match=r"eval\.sets\.0\.n_samples: 32 there, 64 here"):
        compare(recipe, of_set, [], Path("run"))


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"sets": [AIME, MATH], "pass_at": [64]}, "numbers from 1 to n_samples = 32"),
        ({"sets": [AIME, MATH], "maj_at": [33]}, "numbers from 2 to n_samples = 32"),
        ({"sets": [MATH], "pass_at": [2]}, "numbers from 1 to n_samples = 1"),
        (
            {"sets": [AIME, {**MATH, "max_new_tokens": 9999}]},
            "no room for a prompt in .*: lower eval.sets.1.max_new_tokens, or raise data.max_len",
        ),
        (
            {"sets": [AIME, {**MATH, "max_len": 32}], "max_new_tokens": 64},
            r"eval.sets.1.max_len: .* in 32 tokens: lower eval.max_new_tokens, or raise this",
        ),
        ({"sets": [{**AIME, "n_samples": 0}]}, "n_samples"),
        ({"sets": [{**AIME, "temperature": 0.0}]}, "temperature"),
        ({"sets": [{**AIME, "top_p": 1.5}]}, "top_p"),
        ({"sets": [{**MATH, "max_new_tokens": 1024}]}, "leaves no room for a prompt"),
    ],
)
def test_what_a_set_cannot_sample_is_refused(evaluation: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipe_of(evaluation)


def test_the_best_metric_is_one_that_its_set_has_the_samples_for() -> None:
    evaluation = {"sets": [AIME, MATH], "pass_at": [1, 8]}
    recipe_of(evaluation, checkpoint={"best_metric": "eval/aime/pass@8"})
    with pytest.raises(UsageError, match=r"'eval/math/pass@8' is not what .* measure"):
        recipe_of(evaluation, checkpoint={"best_metric": "eval/math/pass@8"})


def test_a_reward_that_compares_samples_judges_no_set_of_one() -> None:
    rewards = {"rewards": [{"type": "relative_length", "name": "short"}]}
    recipe_of({"n_samples": 4, "sets": [MATH]}, **rewards)
    with pytest.raises(UsageError, match=r"eval\.sets\.0\.n_samples.* compares the samples"):
        recipe_of({"n_samples": 4, "sets": [{**MATH, "n_samples": 1}]}, **rewards)


def test_pairs_and_losses_sample_nothing() -> None:
    pairs = {"job": "reward", "algorithm": {}, "rollout": {}, "rewards": []}
    for more in (pairs, {"job": "sft", "algorithm": {}, "rollout": {}, "rewards": []}):
        raw = {key: value for key, value in more.items() if value}
        with pytest.raises(UsageError, match="n_samples"):
            parse_recipe(
                {
                    "run_dir": "run",
                    "steps": 1,
                    "model": {"path": "model"},
                    "data": {"path": "train.jsonl"},
                    "batch": {"train_batch_size": 2},
                    "eval": {"sets": [AIME]},
                    **raw,
                }
            )


@given(
    st.integers(1, 6),
    st.none() | st.integers(1, 6),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_a_set_has_the_ks_that_it_reaches(n: int, set_samples: int | None, ks: list[int]) -> None:
    eval_set = EvalSet(path="a.jsonl", n_samples=set_samples)
    ks = [k for k in ks if k <= (set_samples or n)] or [1]
    settings = EvalSettings(sets=(eval_set,), n_samples=n, pass_at=tuple(ks))
    assert settings.sampling_of(eval_set).pass_at == tuple(ks)
    other = EvalSet(path="b.jsonl", name="b", n_samples=1)
    both = settings.model_copy(update={"sets": (eval_set, other)})
    assert set(both.samplings[1].pass_at) <= {1}
