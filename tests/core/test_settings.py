"""Settings cannot be changed, misspelled, or hold what JSON cannot."""

import math

import pytest
from pydantic import ValidationError

from postgrad.algorithms.grpo import GRPO
from postgrad.core.errors import UsageError
from postgrad.core.settings import Settings
from postgrad.models.settings import ModelInit


class Example(Settings):
    rate: float = 0.5


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Example().rate = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_key_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Example.model_validate({"rte": 1.0})


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_does_not_have_are_refused(number: float) -> None:
    with pytest.raises(UsageError, match="finite number"):
        Example(rate=number)


def test_no_text_becomes_a_number_in_strict_mode() -> None:
    with pytest.raises(ValidationError, match="valid number"):
        Example.model_validate_json('{"rate": "0.5"}', strict=True)


def test_settings_made_in_python_are_refused_in_the_words_of_recipes() -> None:
    with pytest.raises(UsageError) as refused:
        GRPO(clip_hi=0.3, kl_coef="much")  # pyright: ignore[reportCallIssue, reportArgumentType]
    unknown, wrong = sorted(str(refused.value).splitlines(), reverse=True)
    assert unknown == "GRPO: unknown key 'clip_hi': did you mean 'clip_high'?"
    assert wrong.startswith("GRPO: kl_coef = 'much': input should be a valid number")


def test_heads_divide_the_width() -> None:
    with pytest.raises(UsageError, match="num_attention_heads = 3 does not divide hidden_size"):
        ModelInit(num_attention_heads=3)
    with pytest.raises(UsageError, match="num_key_value_heads = 3 does not divide"):
        ModelInit(num_key_value_heads=3)
