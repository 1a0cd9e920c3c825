"""F1 against numbers of SQuAD's own rule, worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.f1 import F1, f1, words
from postgrad.rewards.verifier import PromptView, RolloutView


def score(text, answer, metadata=None, **settings):
    return F1(**settings).score(PromptView("?", answer, metadata or {}), RolloutView(text))


def test_words_are_lower_case_without_punctuation_and_articles():
    assert words("The cat's hat,  a U.S. (Then an\nanthem)") == [
        "cats", "hat", "us", "then", "anthem",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "reference", "wanted"),
    [
        ("Denver Broncos", "the Denver Broncos!", 1.0),
        ("the broncos of Denver", "Denver Broncos", 2 * (2 / 3) * 1.0 / (2 / 3 + 1.0)),
        ("a b c d", "c d e", 2 * (2 / 3) * (2 / 3) / (4 / 3)),  # "a" is an article
        ("no no no", "no", 2 * (1 / 3) * 1.0 / (4 / 3)),  # counts, not sets
        ("Paris", "Rome", 0.0),
        ("", "Rome", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1_is_that_of_squad(answer, reference, wanted):
    assert f1(answer, reference) == pytest.approx(wanted, abs=1e-15)


@given(st.text("ab the,", max_size=12), st.text("ab the,", max_size=12))
def test_f1_is_symmetric_within_bounds_and_one_for_equal_bags(first, second):
    assert 0.0 <= f1(first, second) == f1(second, first) <= 1.0
    assert (f1(first, second) == 1.0) == (sorted(words(first)) == sorted(words(second)))


def test_the_best_of_several_references_counts():
    best = score("Denver", '["Broncos of Denver", "Denver city"]')
    assert best.value == pytest.approx(2 / 3)
    assert best.detail == {"answer": "Denver", "reference": "Denver city"}


@pytest.mark.parametrize("column", ["Denver", ["x", "Denver"], {"text": ["x", "Denver"]}])
def test_references_may_stand_in_a_column(column):
    assert score("Denver", None, {"golds": column}, references="golds").value == 1.0


def test_a_pattern_finds_the_answer_in_the_sample():
    settings = {"pattern": "<answer>(.*?)</answer>"}
    text = "<answer>Rome</answer> no, <answer>\nthe Paris</answer> of course"
    assert score(text, "Paris", **settings).value == 1.0
    missing = score("Paris", "Paris", **settings)
    assert (missing.value, missing.detail) == (0.0, {"answer": None})


def test_a_text_that_begins_with_a_bracket_is_one_answer():
    assert score("sic", "[sic]").value == 1.0


@pytest.mark.parametrize(
    ("answer", "metadata", "references", "reason"),
    [
        (None, {}, None, "there is no reference answer"),
        ("[]", {}, None, "there is no reference answer"),
        ("the", {}, None, "nothing to compare with in the reference answer 'the'"),
        ('["x", 3]', {}, None, "nothing to compare with in the reference answer 3"),
        ("x", {}, "golds", "the row has no column 'golds'"),
        ("x", {"golds": 7}, "golds", "there is no reference answer"),
        ("x", {"golds": {"text": []}}, "golds", "there is no reference answer"),
    ],
)
def test_check_refuses_references_that_cannot_be_compared(answer, metadata, references, reason):
    verifier = F1(references=references)
    prompt = PromptView("?", answer, metadata)
    assert verifier.check(prompt) == reason
    with pytest.raises(ValueError, match=r"reference|column"):
        verifier.score(prompt, RolloutView("x"))
    assert F1().check(PromptView("?", "x")) is None
