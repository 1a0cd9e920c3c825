import sys
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards.registry import VERIFIERS, build, component_names
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView


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
def test_every_named_verifier_is_built_from_its_name_alone(name):
    assert build(RewardSettings(type=name)).model_dump() is not None


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
    assert message == "rewards.flexible = 'yes' of 'gsm8k': Input should be a valid boolean"


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
