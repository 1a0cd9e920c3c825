"""Rows of Open-Instruct's older verifier, which name a function."""

import json

import pytest

from postgrad.rewards.ifeval.functions import KINDS
from postgrad.rewards.ifeval.verifier import IFEval
from postgrad.rewards.verifier import PromptView, RolloutView

AROUND = {"N": 20, "quantifier": "around"}
CASES = [
    ("verify_keywords", {"keyword_list": ["sun", "sea"]}, "Sun and seas", True),
    ("verify_keywords", {"keyword_list": ["sun", "sea"]}, "Sun", False),
    ("verify_keyword_frequency", {"word": "sun", "N": 2}, "Sun, sun, sunny", True),
    ("verify_keyword_frequency", {"word": "sun", "N": 2}, "Sun, sun, sun", False),
    ("validate_forbidden_words", {"forbidden_words": ["sun"]}, "Sunny", True),
    ("validate_forbidden_words", {"forbidden_words": ["sun"]}, "Sun", False),
    ("verify_letter_frequency", {"letter": "s", "N": 2}, "Seas as S", True),
    ("verify_letter_frequency", {"letter": "s", "N": 2}, "seas as", False),
    ("validate_response_language", {"language": "de"}, "Das ist mein Haus.", True),
    ("validate_response_language", {"language": "de"}, "This is my house.", False),
    ("verify_paragraph_count", {"N": 2}, "a\n* * *\nb", True),
    ("verify_paragraph_count", {"N": 2}, "a\n***\nb", False),
    ("validate_word_constraint", AROUND, "a " * 22, True),
    ("validate_word_constraint", AROUND, "a " * 23, False),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, "It's not so", True),
    ("validate_word_constraint", {"N": 3, "quantifier": "around"}, "It's not", True),
    ("validate_word_constraint", {"N": 3, "quantifier": "at least"}, "It's not", False),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, "One. Two.", True),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, "One.", False),
    ("validate_paragraphs", {"N": 2, "i": 2, "first_word": "the"}, "A b.\n\nThe c.", True),
    ("validate_paragraphs", {"N": 2, "i": 2, "first_word": "the"}, "The b.\n\nA c.", False),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Oh", True),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Bye.", False),
    ("validate_placeholders", {"N": 2}, "[a] [b]", True),
    ("validate_placeholders", {"N": 2}, "[a]", False),
    ("verify_bullet_points", {"N": 2}, "* a\n- b", True),
    ("verify_bullet_points", {"N": 2}, "* a\n- b\n- c", False),
    ("validate_title", {}, "<<A>>", True),
    ("validate_title", {}, "A", False),
    ("validate_choice", {"options": ["yes", "no"]}, "It is no use", True),
    ("validate_choice", {"options": "yes / no"}, "It is so", False),
    ("validate_highlighted_sections", {"N": 2}, "*a* *b*", True),
    ("validate_highlighted_sections", {"N": 2}, "*a* b", False),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1\na\nPart 2", True),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1\na\npart 2", False),
    ("validate_json_format", {}, '{"a": 1}', True),
    ("validate_json_format", {}, "a", False),
    ("validate_repeat_prompt", {"original_prompt": "Say it."}, "Say it. It", True),
    ("validate_repeat_prompt", {"original_prompt": "Say it."}, "It", False),
    ("validate_two_responses", {}, "a\n******\nb", True),
    ("validate_two_responses", {}, "a\n******\na", False),
    ("validate_uppercase", {}, "THIS IS THE WAY.", True),
    ("validate_uppercase", {}, "This", False),
    ("validate_lowercase", {}, "this is the way.", True),
    ("validate_lowercase", {}, "This", False),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at most"}, "I AM", True),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "at most"}, "I AM", False),
    ("validate_end", {"end_phrase": "The end."}, "So. The end.", True),
    ("validate_end", {"end_phrase": "The end."}, "So. The end. Yes.", False),
    ("validate_quotation", {}, '"So."', True),
    ("validate_quotation", {}, "So.", False),
    ("validate_no_commas", {}, "So", True),
    ("validate_no_commas", {}, "So, so", False),
]  # fmt: skip
NULLS = dict.fromkeys(
    ["N", "quantifier", "end_phrase", "keyword_list", "word", "forbidden_words", "letter", "i",
     "first_word", "postscript_marker", "options", "section_splitter", "original_prompt"]
)  # fmt: skip


def row(name, values):
    """As the data have it: every value that any function takes, most of them null."""
    return PromptView("?", json.dumps({"func_name": name} | NULLS | values), {})


@pytest.mark.parametrize(("name", "values", "text", "expected"), CASES)
def test_a_response_follows_what_a_function_checks_or_does_not(name, values, text, expected):
    verifier = IFEval(instructions="answer")
    assert verifier.check(row(name, values)) is None
    score = verifier.score(row(name, values), RolloutView(text))
    assert score.value == float(expected)
    assert score.detail == [{"instruction": name, "followed": expected}]


def test_every_function_has_a_case_of_both_sorts():
    assert len(KINDS) == 25
    assert {(name, expected) for name, _, _, expected in CASES} == {
        (name, expected) for name in KINDS for expected in (True, False)
    }


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("validate_titles", {}, "did you mean 'validate_title'?"),
        ("validate_title", {"N": 2}, "values of validate_title: it takes no 'N'"),
        ("validate_placeholders", {}, "there is no 'num_placeholders'"),
        ("validate_word_constraint", {"N": 2, "quantifier": "over"}, "quantifier = 'over': Input"),
        ("verify_letter_frequency", {"letter": "ab", "N": 2}, "letter = 'ab': one character is"),
    ],
)
def test_check_names_what_is_wrong_with_a_function(name, values, message):
    assert message in IFEval(instructions="answer").check(row(name, values))
