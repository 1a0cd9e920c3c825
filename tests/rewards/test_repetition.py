"""The penalty for repetition, by hand."""

import pytest

from postgrad.rewards.repetition import RepeatedNgrams
from postgrad.rewards.verifier import PromptView, RolloutView

PROMPT = PromptView(question="", answer=None)


@pytest.mark.parametrize(
    ("text", "ngram", "repeated"),
    [
        ("one two three four", 2, 0.0),
        ("Go on go ON go on", 2, 3 / 5),  # go on, on go, go on, on go, go on
        ("a a a a a", 3, 2 / 3),
        ("a\n\na  a", 1, 2 / 3),
        ("too short", 3, 0.0),
        ("", 1, 0.0),
    ],
)
def test_repeated_n_grams_are_charged(text: str, ngram: int, repeated: float) -> None:
    score = RepeatedNgrams(ngram=ngram, penalty=0.5).score(PROMPT, RolloutView(text))
    assert score.value == pytest.approx(-0.5 * repeated, abs=1e-15)
    assert score.detail == {"repeated": pytest.approx(repeated, abs=1e-15)}


def test_a_text_that_repeats_nothing_scores_a_plain_zero() -> None:
    assert str(RepeatedNgrams().score(PROMPT, RolloutView("all of it is new")).value) == "0.0"
