import json
import os
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.gsm8k import GSM8K, last_number, marked_number
from postgrad.rewards.verifier import PromptView, RolloutView


def reward(text, answer="48 + 24 = <<48+24=72>>72 clips.\n#### 72", **settings):
    return GSM8K(**settings).score(PromptView("?", answer), RolloutView(text)).value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 72", "72"),
        ("####72", "72"),
        ("#### -3", "-3"),
        ("#### \u22123", "-3"),
        ("#### +3", "3"),
        ("#### $1,234,567.50", "1234567.50"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### .5", "0.5"),
        ("#### 72.", "72"),
        ("#### 72 clips", "72"),
        ("#### 50%", "50"),
        ("#### 12\n#### 13\n", "13"),
        ("so 5 + 6 = 11\n#### 0011", "11"),
    ],
)
def test_the_number_after_the_last_mark_is_read(text, value):
    assert marked_number(text) == Decimal(value)


@pytest.mark.parametrize(
    "text",
    ["", "72", "####", "#### clips", "#### 5\n#### none", "### 5", "#### \n72", "#### 5,3",
     "#### 1,2345", "#### 1234,567", "#### 7/2", "#### 1e5", "#### --", "#### $"],
)  # fmt: skip
def test_what_is_no_number_is_not_read(text):
    assert marked_number(text) is None


def test_the_last_number_of_a_text_is_not_the_end_of_another_one():
    assert last_number("first 3, then 10-5") == 5
    assert last_number("it costs $1,250.") == 1250
    assert last_number("x7 and 3,4") is None


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2), st.booleans(), st.booleans())
def test_a_number_is_read_however_it_is_written(number, comma, dollar):
    written = f"{number.copy_abs():{',' if comma else ''}.2f}"
    text = f"#### {'-' if number < 0 else ''}{'$' if dollar else ''}{written} in all"
    assert marked_number(text) == number
    assert last_number(text) == number


@given(st.text(alphabet="#0123456789,.$- \n\u0663x", max_size=40))
def test_any_text_is_read_without_an_error(text):
    assert reward(text) in (0.0, 1.0)


def test_equal_numbers_written_differently_are_right():
    assert reward("#### 72.00") == 1.0
    assert reward("#### $72") == 1.0
    assert reward("#### 1,072", "#### 1072") == 1.0
    assert reward("#### 72.01") == 0.0
    assert reward("#### 71") == 0.0


def test_a_bare_number_is_a_reference_answer_too():
    assert reward("#### 72", "72") == 1.0
    assert GSM8K().check(PromptView("?", "about 72")) is not None


def test_flexible_takes_the_last_number_only_where_no_mark_gives_one():
    assert reward("the answer is 72.") == 0.0
    assert reward("the answer is 72.", flexible=True) == 1.0
    assert reward("#### 71, not 72", flexible=True) == 0.0


def test_an_unreadable_reference_is_named_by_check_and_an_error_in_score():
    assert GSM8K().check(PromptView("?", None)) == "there is no reference answer"
    reason = GSM8K().check(PromptView("?", "it is #### many"))
    assert reason == "no '#### number' in the reference answer 'it is #### many'"
    with pytest.raises(ValueError, match="no '#### number'"):
        reward("#### 1", "it is #### many")


def test_a_long_run_of_digits_takes_no_quadratic_time():
    text = "#### " + "1" * 200_000 + ",5"
    assert marked_number(text) is None
    assert last_number(text) is None


def test_every_real_reference_answer_is_read_and_right_in_its_own_eyes():
    folder = os.environ.get("POSTGRAD_TEST_DATA")
    if not folder:
        pytest.skip("POSTGRAD_TEST_DATA is not set")
    lines = (Path(folder) / "gsm8k.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    verifier = GSM8K()
    assert len(answers) == 7473
    assert [a for a in answers if verifier.check(PromptView("?", a)) is not None] == []
    assert sum(reward(answer, answer) for answer in answers) == 7473


def test_a_list_of_one_text_is_that_text_and_several_are_refused():
    assert reward("#### 1000", '["1,000"]') == 1.0
    assert reward("#### 72", '["so it is\\n#### 72"]') == 1.0
    assert GSM8K().right_answer(PromptView("?", '["72"]')) == "#### 72"
    reason = GSM8K().check(PromptView("?", '["7", "8"]'))
    assert reason == "no '#### number' in the reference answer '[\"7\", \"8\"]'"
