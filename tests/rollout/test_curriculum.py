"""A curriculum keeps a score for each row: rows that it could not tell apart are refused."""

from dataclasses import replace

import numpy as np
import pytest

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.rollout.curriculum import require_told_apart, row_key
from postgrad.rollout.settings import CurriculumSettings

ON = CurriculumSettings(retire_at=0.9)
PROMPT = Prompt(0, np.array([4], np.int32), "1 + 1?", "2", "openai/gsm8k", 17)


def test_two_rows_of_one_name_and_number_are_refused() -> None:
    other = replace(PROMPT, ticket=1, question="2 + 2?")  # of another subset of the dataset
    assert row_key(PROMPT) == row_key(other) == "openai/gsm8k:17"
    with pytest.raises(UsageError, match="two different rows 17 of openai/gsm8k"):
        require_told_apart(ON, [PROMPT, other])


def test_a_row_that_is_drawn_twice_and_rows_of_other_names_are_none_of_these() -> None:
    again = replace(PROMPT, ticket=1)
    elsewhere = replace(PROMPT, question="2 + 2?", dataset="math/train.parquet")
    require_told_apart(ON, [PROMPT, again, elsewhere])


def test_without_a_curriculum_names_may_be_shared() -> None:
    require_told_apart(CurriculumSettings(), [PROMPT, replace(PROMPT, question="2 + 2?")])
