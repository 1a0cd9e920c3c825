import pytest

from postgrad.evaluation.results import wrong_answers
from postgrad.rewards.math import Math, _form, _multiplied_out, _parse
from postgrad.rewards.math_text import readable
from postgrad.rewards.verifier import PromptView, RolloutView

ROWS = r"\begin{pmatrix}1 \\| 2\end{pmatrix}"


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
        (r"so it costs \$5.", "5", 1.0),
        (r"\$3 and then \$5", r"\$5", 1.0),
        (rf"\boxed{{{ROWS.replace('|', '[2pt]')}}}", ROWS.replace("|", ""), 1.0),
        (rf"\boxed{{{ROWS.replace('|', '')}}}", ROWS.replace("|", " [-0.5em]"), 1.0),
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


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{9^{9^{9}}}",
        r"\boxed{1 + 9^{9^{9^{9}}}}",
        r"\boxed{2^{-9^{9}}}",
        r"\boxed{\left(\frac{7}{8}\right)^{9^{9}}}",
        r"\boxed{\sqrt{9^{9^{8}}}}",
        r"\boxed{(2 \cdot 5)^{10^{8}}}",
        r"\boxed{x = 9^{9^{9}}}",
        "9**9**9",
    ],
)
def test_a_power_that_takes_too_long_to_compute_is_an_error_at_once(text):
    """Not a zero: whether it is equal is not known. No limit from outside is needed."""
    with pytest.raises(ValueError, match="a power of more than 2525222 digits"):
        reward(text, "1")


def test_a_huge_power_is_equal_to_one_that_is_written_alike():
    assert reward(r"\boxed{9^{9^{9}}}", "9^{9^{9}}") == 1.0
    assert reward(r"\boxed{1 + 9^{9^{9}}}", "9^{9^{9}} + 1") == 1.0
    assert reward("I do not know", "9^{9^{9}}") == 0.0
    with pytest.raises(ValueError, match="digits"):
        reward(r"\boxed{9^{9}}", "9^{9^{9}}")


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        (r"\boxed{2^{2005}}", r"2 \cdot 2^{2004}", 1.0),
        (r"\boxed{10^{\frac{1234}{5678}}}", r"10^{\frac{617}{2839}}", 1.0),
        (r"\boxed{1^{9^{9}}}", "1", 1.0),
        (r"\boxed{x^{9^{9^{2}}}}", "x", 0.0),
        (r"\boxed{1.5^{9^{9}}}", "1", 0.0),
        (r"\boxed{(-2)^{\frac{1}{2}}}", "1", 0.0),
        (r"\boxed{0^{-1}}", "1", 0.0),
    ],
)
def test_other_powers_are_compared(text, answer, value):
    assert reward(text, answer) == value


@pytest.mark.parametrize(
    ("texts", "ballots"),
    [
        ([r"\boxed{x + 1}", "$1+x$", r"\boxed{x+2}"], 2),
        ([r"\boxed{3x}", r"\boxed{x \cdot 3}", r"\boxed{\{2,1\}}", r"\boxed{1} and \boxed{2}"], 2),
        ([r"\boxed{2(x+1)}", r"\boxed{2x+2}", r"\boxed{(x+1)^2-x^2+1}", r"\boxed{2x+1}"], 2),
        ([r"\boxed{\frac{x}{2}}", r"\boxed{0.5x}", r"\boxed{\frac{2x}{4}}", r"\boxed{x^2}"], 2),
        ([r"\boxed{\sqrt{8}}", r"\boxed{2\sqrt{2}}", r"\boxed{\frac{4}{\sqrt{2}}}"], 1),
        ([r"\boxed{\sin(2x)}", r"\boxed{\sin(x+x)}", r"\boxed{2\sin(x)}"], 2),
        ([r"\boxed{\{2,3\}}", r"\boxed{\{6/2,1+1\}}", r"\boxed{(2,3)}"], 2),
        (
            [
                r"\boxed{\begin{pmatrix}1+1\\3\end{pmatrix}}",
                r"\boxed{\begin{pmatrix}2\\3\end{pmatrix}}",
            ],
            1,
        ),
        ([r"\boxed{\frac{1}{1-1}}", r"\boxed{\frac{2}{1-1}}"], 2),  # no value, so no equal ones
    ],
)
def test_wrong_formulas_vote_alike_however_their_terms_are_written(texts, ballots):
    details = [Math().score(PromptView("?", "7"), RolloutView(text)).detail for text in texts]
    assert len({detail["votes_as"] for detail in details}) == ballots
    assert len(wrong_answers([0.0] * len(texts), details, 1.0)) == ballots


def test_a_formula_that_is_a_number_votes_as_that_number():
    texts = (r"\boxed{2+3}", r"\boxed{5}", r"\boxed{\frac{10}{2}}", r"\boxed{500\%}")
    details = [Math().score(PromptView("?", "7"), RolloutView(text)).detail for text in texts]
    assert wrong_answers([0.0] * len(texts), details, 1.0) == (4,)


@pytest.mark.parametrize(
    "text",
    [
        "(a+b+c)^{50}",
        "(((x+1)^4)^4)^4",
        "2^{100000000}",
        r"(0.5)^{1000000000}",
        r"(1\%)^{1000000000}",
        "2^{x+1000000000}",
        "2^{" * 40 + "3" + "}" * 40,
        "(" * 40 + "x+1" + ")^2" * 40,
    ],
)
def test_what_would_be_large_is_not_multiplied_out_for_a_vote(text):
    (formula, *_) = _parse(rf"\boxed{{{text}}}", True)
    assert _form(_multiplied_out(formula)) == _form(formula)


def test_a_wrong_matrix_has_the_score_0():
    assert reward(rf"\boxed{{{ROWS.replace('|', '')}}}", r"\begin{pmatrix}1 \\ 3\end{pmatrix}") == 0


def test_only_a_wrong_formula_that_is_not_too_long_has_a_ballot():
    long = "+".join(f"x^{{{n}}}" for n in range(2, 60))
    for text in ("\\boxed{7}", "\\boxed{8}", "none", f"\\boxed{{{long}}}"):
        detail = Math().score(PromptView("?", "7"), RolloutView(text)).detail
        assert detail.keys() == {"answer"}


@pytest.mark.parametrize("text", ["1000", r"\boxed{1{,}000}"])
def test_a_list_of_one_text_is_that_text(text):
    assert reward(text, '["1,000"]') == reward(text, "1,000") == 1.0
    assert reward(r"\boxed{\frac{2}{4}}", r'["$\\frac{1}{2}$"]') == 1.0


def test_a_list_of_several_texts_is_refused_and_no_interval():
    reason = Math().check(PromptView("?", '["7", "8"]'))
    assert reason == 'math-verify reads no answer in \'["7", "8"]\''
    assert reward(r"\boxed{[7, 8]}", "[7, 8]") == 1.0


def test_the_right_answer_to_a_list_of_one_text_is_right():
    prompt = PromptView("?", '["1/2"]')
    assert Math().right_answer(prompt) == r"\boxed{1/2}"
    assert reward(Math().right_answer(prompt), prompt.answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("The answer is **1/2**.", "1/2", 1.0),
        ("The answer is **1/2**.", "1", 0.0),
        ("**Answer:** **2 + 3**", "5", 1.0),
        ("It is 2**10 and 2 ** 10", "1024", 1.0),
        (r"\boxed{1.5e3}", "1500", 1.0),
        (r"\boxed{1500}", "1.5e3", 1.0),
        ("The answer is 1.5e3", "1.5", 0.0),
        ("The answer is 1.5E+3.", "1500", 1.0),
        (r"\boxed{0.00001}", "1e-05", 1.0),
        (r"\boxed{e-5}", "1e-05", 0.0),
        (r"\boxed{e-5}", "e - 5", 1.0),
        (r"\boxed{2e-5}", r"2e - 5", 1.0),  # Euler's number
        (r"\boxed{6.02e23}", r"6.02 \times 10^{23}", 1.0),
        (r"\boxed{1.05\times10^{-34}}", r"6.63 \times 10^{-34}", 0.0),
        (r"\boxed{6.63\times10^{-34}}", "6.63e-34", 1.0),
        (r"\boxed{0.0000002}", "0.0000001", 0.0),
        (r"\boxed{1.0512\times10^{-7}}", "0.000000105", 1.0),
        (r"\boxed{0.001\%}", "0.00001", 1.0),
        (r"\boxed{0.33333333}", r"\frac{1}{3}", 1.0),
        (r"\boxed{10\,000}", "10000", 1.0),
        (r"\boxed{1~234~567.5}", "1234567.5", 1.0),
        (r"\boxed{10 000}", "10000", 1.0),
        (r"\boxed{10000}", r"10\ 000", 1.0),
        (r"\boxed{(1,\ 234)}", "(1, 234)", 1.0),
        (r"\boxed{0.1\overline{6}}", r"\frac{1}{6}", 1.0),
        (r"\boxed{-\frac{1}{3}}", r"-0.\overline{3}", 1.0),
        (r"\boxed{2 1/2}", "5/2", 1.0),
        ("The answer is 2 1/2", "5/2", 1.0),
        ("The answer is 2 1/2", "1", 0.0),
        (r"\boxed{12.}", "12", 1.0),
        ("The answer is \N{MINUS SIGN}3", "-3", 1.0),
        (r"\boxed{5 eggs}", "5", 1.0),
        (r"\boxed{18,000 dollars}", "18000", 1.0),
        (r"\boxed{18000}", "18,000 dollars", 1.0),
        (r"\boxed{18}", "18,000 dollars", 0.0),
        (r"\boxed{5 million}", "5", 0.0),
        (r"\boxed{3 theta}", "3", 0.0),
    ],
)
def test_usual_notations_of_numbers_are_read_by_their_values(text, answer, value):
    assert reward(text, answer) == value


def test_decimal_places_that_a_recipe_asks_for_are_enough_for_numbers_that_have_them():
    prompt, right = PromptView("?", r"\frac{1}{3}"), Math(float_rounding=2)
    assert right.score(prompt, RolloutView(r"\boxed{0.33}", "stop", 1, 0)).value == 1.0


def test_no_text_takes_long_to_be_made_readable():
    for part in ("**1 ", "1 ", "1.", r"1\,", "1e", r"\boxed{1 000 ", "1 1/", "a", "*", "1.5e3"):
        assert isinstance(readable(part * 100_000), str)
