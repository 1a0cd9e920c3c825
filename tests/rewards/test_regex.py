import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards.format import Regex
from postgrad.rewards.verifier import PromptView, RolloutView


def score(text, **settings):
    return Regex(**settings).score(PromptView("?", None), RolloutView(text))


def test_a_match_anywhere_scores_one_and_is_noted():
    scored = score("so x = 42.", pattern=r"x = \d+")
    assert (scored.value, scored.detail) == (1.0, {"match": "x = 42"})
    missing = score("so y", pattern=r"x = \d+")
    assert (missing.value, missing.detail) == (0.0, {"match": None})


def test_absent_turns_it_round():
    assert score("as an AI", pattern="as an AI", absent=True).value == 0.0
    assert score("sure", pattern="as an AI", absent=True).value == 1.0


def test_flags_are_settings():
    assert score("A", pattern="a").value == 0.0
    assert score("A", pattern="a", ignore_case=True).value == 1.0
    assert score("x\na", pattern="^a").value == 0.0
    assert score("x\na", pattern="^a", multiline=True).value == 1.0
    assert score("x\na", pattern="x.a").value == 0.0
    assert score("x\na", pattern="x.a", dot_all=True).value == 1.0


def test_what_does_not_compile_is_refused():
    with pytest.raises(UsageError, match="not a regular expression"):
        Regex(pattern="[")
