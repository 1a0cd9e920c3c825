"""What scores a sample: verifiers, an environment, and recipes in which nothing does."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.load import load_recipe, recipe_from_json

Write = Callable[..., Path]
REWARDS = '[[rewards]]\ntype = "gsm8k"\n'
GAME = '[environment]\ntype = "guess_number"\n'
TOOLS = '[environment]\ntype = "tools"\ntools = ["calculator"]\n'


def test_an_environment_is_a_component_of_the_reward_beside_the_verifiers(write: Write) -> None:
    recipe = load_recipe(write((REWARDS, REWARDS + GAME + "weight = 0.5\nmax_turns = 3\n")))
    assert recipe.reward_components == ["gsm8k", "environment"]
    assert recipe.environment_weight == 0.5
    assert recipe.environment is not None
    assert recipe.environment.max_turns == 3
    assert recipe_from_json(recipe.dump()) == recipe


def test_an_environment_with_rewards_needs_no_verifier(write: Write) -> None:
    recipe = load_recipe(write((REWARDS, GAME)), ["--eval.component", "environment"])
    assert recipe.reward_components == ["environment"]


def test_an_environment_without_rewards_does(write: Write) -> None:
    assert load_recipe(write((REWARDS, REWARDS + TOOLS))).reward_components == ["gsm8k"]
    with pytest.raises(UsageError, match="nothing scores the samples"):
        load_recipe(write((REWARDS, TOOLS)))


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ('[environment]\ntype = "gess_number"', "12: environment: no environment is called "
         "'gess_number': did you mean 'guess_number'"),
        ("[environment]\nmax_turns = 3", "12: environment.type is missing"),
        (GAME + "miss_rewards = 0.0", "did you mean 'miss_reward'"),
        (GAME + "miss_reward = 0.5", "environment.miss_reward = 0.5 of 'guess_number'"),
        (GAME + 'miss_reward = "0"', "environment.miss_reward = '0' of 'guess_number'"),
        (GAME + "max_turns = 0", "environment.max_turns = 0"),
        ('[environment]\ntype = "postgrad.core.errors:UsageError"', "is not a subclass of"),
        (GAME + '[[rewards]]\ntype = "gsm8k"\nname = "environment"', "`name` it otherwise"),
    ],
)  # fmt: skip
def test_a_section_that_is_wrong_is_told_before_anything_runs(
    section: str, why: str, write: Write
) -> None:
    text = section if "[[rewards]]" in section else section + "\n" + REWARDS
    with pytest.raises(UsageError) as told:
        load_recipe(write((REWARDS, text + "\n")))
    assert why.split(": ", 1)[-1] in str(told.value)


@pytest.mark.parametrize(
    "other", ["chat_template_kwargs = { thinking = true }", 'chat_template = "chatml"']
)
def test_an_environment_speaks_through_one_template_with_one_set_of_variables(
    other: str, write: Write
) -> None:
    path = write((REWARDS, REWARDS + GAME), ('split = "test"', f'split = "test"\n{other}'))
    with pytest.raises(UsageError, match=rf"{other.split()[0]}:.*have those of .data."):
        load_recipe(path)
