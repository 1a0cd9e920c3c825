"""The task behind recipes/process_reward: what its labels say of the lines of a sum."""

import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards.sums import Sums, examples, judged, questions, steps, terms_of
from postgrad.rewards.verifier import PromptView, RolloutView


@pytest.mark.parametrize(
    ("lines", "right"),
    [
        (["3+8=11", "11+5=16"], [True, True]),
        (["3+8=12", "12+5=17"], [False, True]),  # goes on from what was said
        (["3+8=12", "11+5=16"], [False, False]),
        (["3+8=11", "11+5=17"], [True, False]),
        (["3+8=11", "5+11=16"], [True, False]),
        (["3+8=11"], [False]),  # a number is left
        (["3+5=8", "8+8=16"], [False, False]),
        (["3+8=11", "11+5=16", "16+0=16"], [True, True, False]),
        (["3+8=011", "011+5=16"], [False, True]),
        ([""], [False]),
        (["3+8=x", "x+5=16"], [False, False]),
    ],
)
def test_a_line_is_right_if_it_adds_the_next_number_rightly(
    lines: list[str], right: list[bool]
) -> None:
    assert judged([3, 8, 5], lines) == right


def test_the_verifier_wants_every_line() -> None:
    prompt = PromptView("Add 3+8+5.", "16")
    score = Sums().score(prompt, RolloutView("3+8=11\n11+5=16"))
    assert (score.value, score.detail) == (1.0, [True, True])
    assert Sums().score(prompt, RolloutView("3+8=12\n12+5=17")).value == 0.0
    assert Sums().check(prompt) is None
    assert "not one like" in str(Sums().check(PromptView("Spell sun.", None)))


def test_mistakes_are_as_frequent_as_stated_and_labelled() -> None:
    rows = list(steps(2000, 7, slip=0.2, stop=0.1))
    assert rows == list(steps(2000, 7, slip=0.2, stop=0.1))
    assert all(judged(terms_of({"question": r["prompt"]}), r["completions"]) == r["labels"]
               for r in rows)  # fmt: skip
    complete_rows = [r for r in rows if len(r["completions"]) == r["prompt"].count("+")]
    lines = [label for r in complete_rows for label in r["labels"]]
    assert len(complete_rows) / len(rows) == pytest.approx(0.9, abs=0.03)
    assert sum(lines) / len(lines) == pytest.approx(0.8, abs=0.02)
    assert all(all(r["labels"]) for r in steps(50, 7, slip=0.0, stop=0.0))


def test_examples_are_the_same_answers_and_questions_have_the_true_one() -> None:
    for row, other in zip(steps(20, 3), examples(20, 3), strict=True):
        assert other == {"question": row["prompt"], "answer": "\n".join(row["completions"])}
    for row in questions(20, 3, least=2, most=4):
        terms = terms_of(row)
        assert 2 <= len(terms) <= 4
        assert row["answer"] == str(sum(terms))
    with pytest.raises(UsageError, match="2 <= least <= most"):
        list(questions(1, 0, least=1))
