import sys
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards.registry import VERIFIERS, build, component_names, for_rollout
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView

NEEDED = {
    "judge": {"base_url": "http://localhost:8000/v1", "model": "m"},
    "overlong": {"buffer": 16},
    "regex": {"pattern": "x"},
    "remote": {"url": "http://localhost:8000"},
    "target_length": {"target": 100},
}  # what cannot be left out


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    sys.modules.pop("misbehaving", None)


def refusal(**reward):
    with pytest.raises(UsageError) as error:
        build(RewardSettings(**reward))
    return str(error.value)


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_every_named_verifier_is_built_from_its_name_and_what_it_must_know(name):
    assert build(RewardSettings(type=name, **NEEDED.get(name, {}))).model_dump() is not None


def test_what_a_verifier_must_know_and_is_not_told_is_refused():
    assert refusal(type="regex") == "rewards.pattern: 'regex' needs it, and it is missing"


def test_lists_and_tables_of_a_recipe_become_settings():
    judge = build(
        RewardSettings(type="judge", **NEEDED["judge"], rubric=[{"name": "a", "text": "b"}])
    )
    assert judge.criteria[0].weight == 1.0
    assert build(RewardSettings(type="format", tags=["a", "b"])).tags == ("a", "b")


def test_what_is_left_to_the_rollout_is_filled_in():
    rewards = [
        RewardSettings(type="overlong", buffer=10),
        RewardSettings(type="overlong", buffer=10, max_new_tokens=50, name="own"),
        RewardSettings(type="gsm8k"),
        RewardSettings(type="my_pkg:score"),
    ]
    filled = for_rollout(rewards, 200)
    assert [reward.verifier_settings.get("max_new_tokens") for reward in filled] == [
        200,
        50,
        None,
        None,
    ]
    assert rewards[0].verifier_settings == {"buffer": 10}
    assert build(filled[0]).score(PromptView("?", None), RolloutView("", "length", 200)) == -1.0


def test_keys_of_a_reward_are_the_verifiers_settings():
    verifier = build(RewardSettings(type="gsm8k", flexible=True, weight=2.0))
    assert verifier.model_dump() == {"flexible": True}


def test_a_misspelt_key_is_refused_with_the_nearest_one():
    message = "rewards.flexble: 'gsm8k' has no such setting; did you mean 'flexible'?"
    assert refusal(type="gsm8k", flexble=True) == message
    assert "did you mean 'weight'?" in refusal(type="gsm8k", wieght=2.0)
    assert "known: flexible, type" in refusal(type="gsm8k", zzzz=1)


def test_a_value_of_the_wrong_type_is_refused_with_its_key():
    message = refusal(type="gsm8k", flexible="yes")
    wrong = "'yes' does not fit 'gsm8k': input should be a valid boolean"
    assert message == f"rewards.flexible: {wrong}"


def test_an_unknown_verifier_is_refused_with_the_nearest_name():
    assert "did you mean 'gsm8k'?" in refusal(type="gsm8")
    assert "cannot be imported" in refusal(type="no_such_package:score")


def test_a_function_takes_further_keys_as_arguments(importable):
    verifier = build(RewardSettings(type="misbehaving:obey", factor=3.0))
    assert verifier.score(PromptView("?", None), RolloutView("2")) == 6.0
    message = refusal(type="misbehaving:obey", factr=3.0)
    assert "cannot be called with (prompt, rollout, factr=)" in message
    assert "neither a function" in refusal(type="misbehaving:not_callable")


def test_components_are_named_by_name_or_by_type_without_its_package():
    rewards = [
        RewardSettings(type="gsm8k"),
        RewardSettings(type="a.b:score"),
        RewardSettings(type="gsm8k", name="again"),
    ]
    assert component_names(rewards) == ["gsm8k", "score", "again"]


def test_two_components_of_one_name_are_refused():
    rewards = [RewardSettings(type="a:score"), RewardSettings(type="b:score")]
    with pytest.raises(UsageError, match=r"2 of .* are called 'score'"):
        component_names(rewards)
    with pytest.raises(UsageError, match="at least one"):
        component_names([])
