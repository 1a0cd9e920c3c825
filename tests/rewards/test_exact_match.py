import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards.exact_match import ExactMatch
from postgrad.rewards.verifier import PromptView, RolloutView


def reward(text, answer, **settings):
    return ExactMatch(**settings).score(PromptView("?", answer), RolloutView(text)).value


def test_white_space_is_ignored_unless_it_matters():
    assert reward("  a  b\n", "a b") == 1.0
    assert reward("  a  b\n", "a b", ignore_whitespace=False) == 0.0
    assert reward("ab", "a b") == 0.0


def test_case_and_punctuation_matter_unless_ignored():
    assert reward("Stra\u00dfe.", "STRASSE") == 0.0
    assert reward("Stra\u00dfe.", "STRASSE", ignore_case=True) == 0.0
    assert reward("Stra\u00dfe.", "STRASSE", ignore_case=True, ignore_punctuation=True) == 1.0


def test_a_pattern_takes_its_last_match():
    settings = {"pattern": r"<a>(.*?)</a>"}
    assert reward("<a>3</a> no, <a>4\n</a>", "4", **settings) == 1.0
    assert reward("4", "4", **settings) == 0.0
    assert reward("no 3 but 44", "44", pattern=r"\d+") == 1.0


def test_a_broken_pattern_is_refused():
    with pytest.raises(UsageError, match="not a regular expression"):
        ExactMatch(pattern="(")


def test_an_optional_group_that_matched_nothing_is_no_answer():
    assert reward("x", "x", pattern="x(y)?") == 0.0


def test_check_refuses_answers_of_which_nothing_is_left():
    assert ExactMatch().check(PromptView("?", "x")) is None
    assert ExactMatch().check(PromptView("?", None)) == "there is no reference answer"
    assert ExactMatch().check(PromptView("?", " \n")) is not None
    assert ExactMatch(ignore_punctuation=True).check(PromptView("?", "...")) is not None
    with pytest.raises(ValueError, match="no reference answer"):
        reward("x", None)


def test_a_list_of_one_text_is_that_text_or_the_json_that_is_asked_for():
    assert reward("Paris", '["Paris"]') == reward('["Paris"]', '["Paris"]') == 1.0
    assert reward("Paris", '["Paris", "Rome"]') == 0.0
    assert ExactMatch().check(PromptView("?", '[" "]')) is not None
