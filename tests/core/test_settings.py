"""Settings cannot be changed, misspelled, or hold what JSON cannot."""

import math

import pytest
from pydantic import ValidationError

from postgrad.core.settings import Settings


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
    with pytest.raises(ValidationError, match="finite number"):
        Example(rate=number)


def test_no_text_becomes_a_number_in_strict_mode() -> None:
    with pytest.raises(ValidationError, match="valid number"):
        Example.model_validate_json('{"rate": "0.5"}', strict=True)
