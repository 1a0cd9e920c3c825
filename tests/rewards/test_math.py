import pytest

from postgrad.rewards.math import Math
from postgrad.rewards.verifier import PromptView, RolloutView


@pytest.fixture(scope="module", autouse=True)
def prepared():
    Math().prepare()


def reward(text, answer, **settings):
    return Math(**settings).score(PromptView("?", answer), RolloutView(text)).value


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        (r"so it is $\boxed{\frac{1}{2}}$", "1/2", 1.0),
        (r"so it is $\boxed{0.5}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.51}", r"\frac{1}{2}", 0.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}", 1.0),
        (r"either \boxed{1} or \boxed{2}", r"\{1,2\}", 1.0),
        (r"either \boxed{1} or \boxed{2}", "$2$", 0.0),
        ("first $\\boxed{1}$, no.\n\nIt is $\\boxed{2}$", "$2$", 1.0),
        (r"it costs \boxed{\$18.90}", r"\$18.90", 1.0),
        (r"it costs \boxed{32348} dollars", r"\$32,\!348", 1.0),
        (r"it costs $\boxed{18.80}$", r"\$18.90", 0.0),
        ("the answer is 72", "72", 1.0),
        ("I do not know", "72", 0.0),
        (r"\boxed{\frac{1}{", "1", 0.0),
        ("", "1", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(text, answer, value):
    assert reward(text, answer) == value


def test_boxed_only_wants_a_box():
    assert reward("the answer is 72", "72", boxed_only=True) == 0.0
    assert reward(r"the answer is \boxed{72}", "72", boxed_only=True) == 1.0


def test_an_unreadable_reference_is_named_by_check_and_an_error_in_score():
    assert Math().check(PromptView("?", r"\frac{1}{2}")) is None
    assert Math().check(PromptView("?", None)) == "there is no reference answer"
    assert "reads no answer" in (Math().check(PromptView("?", "")) or "")
    with pytest.raises(ValueError, match="reads no answer"):
        reward("1", "")
