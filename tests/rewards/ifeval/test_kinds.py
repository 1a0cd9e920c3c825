"""Every kind, with responses that follow it and responses that do not, worked by hand."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.ifeval.verifier import KINDS, instruction

TEXTS = st.text(alphabet="abAB.,!?*#<>[]{}\"'-1 \n_é", max_size=60)
CASES = [
    ("keywords:existence", {"keywords": ["rock", "Sun"]}, "A ROCKET in the sun.", True),
    ("keywords:existence", {"keywords": ["rock", "sun"]}, "A rock in the rain.", False),
    ("keywords:existence", {"keywords": ["C++"]}, "I like c++.", True),
    ("keywords:existence", {"keywords": ["a.c"]}, "abc", False),
    ("keywords:frequency", ("war", 2, "at least"), "War and toward.", True),
    ("keywords:frequency", ("war", 3, "at least"), "War and toward.", False),
    ("keywords:frequency", ("war", 3, "less than"), "War and toward.", True),
    ("keywords:frequency", ("war", 2, "less than"), "War and toward.", False),
    ("keywords:frequency", ("aa", 2, "less than"), "aaa", True),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "A rocket.", True),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "A Rock!", False),
    ("keywords:forbidden_words", {"forbidden_words": ["C++"]}, "I like C++, yes.", False),
    ("keywords:forbidden_words", {"forbidden_words": ["a", "b"]}, "only b", False),
    ("keywords:letter_frequency", ("#", 2, "at least"), "#one #two", True),
    ("keywords:letter_frequency", ("t", 2, "less than"), "The cat", False),
    ("keywords:letter_frequency", ("T", 3, "less than"), "The cat", True),
    ("language:response_language", {"language": "de"}, "Das ist nicht mein Haus.", True),
    ("language:response_language", {"language": "de"}, "This is not my house.", False),
    ("language:response_language", {"language": "zh-cn"}, "这不是我的房子。", True),
    ("length_constraints:number_sentences", (2, "at least"), "One here. Two here.", True),
    ("length_constraints:number_sentences", (3, "at least"), "One here. Two here.", False),
    ("length_constraints:number_sentences", (3, "less than"), "One here. Two here.", True),
    ("length_constraints:number_sentences", (2, "less than"), "One here. Two here.", False),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n\nb\n***\nc", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb\n***", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n\nb", False),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\n***\nb", False),
    ("length_constraints:number_words", (3, "at least"), "Don't go.", True),  # don, t, go
    ("length_constraints:number_words", (4, "at least"), "Don't go.", False),
    ("length_constraints:number_words", (3, "less than"), "Two words!", True),
    ("length_constraints:number_words", (2, "less than"), "Two words!", False),
    ("length_constraints:number_words", (3, "less than"), "हिन्दी भाषा", True),
    ("length_constraints:nth_paragraph_first_word", (2, 2, "Elm"), "Oak.\n\n'ELM, ash.", True),
    ("length_constraints:nth_paragraph_first_word", (2, 2, "elm"), "Elm.\n\nOak.", False),
    ("length_constraints:nth_paragraph_first_word", (2, 1, "elm"), "Elm.\nOak.", False),
    ("length_constraints:nth_paragraph_first_word", (2, 2, "oak"), "\n\nElm\n\n\n\nOak", True),
    ("length_constraints:nth_paragraph_first_word", (1, 1, "elm"), "Elms", False),
    ("length_constraints:nth_paragraph_first_word", (1, 1, "elm"), '"', False),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b c]", True),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b\nc]", False),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[[a] b]", False),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\n\np. s. Oh", True),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\n\nPS Oh", False),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S. Oh", True),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.S. Oh", False),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, "n.b. this", True),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, "nabs this", False),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "Two:\n* a\n  - b", True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b\n* c", False),
    ("detectable_format:number_bullet_lists", {"num_bullets": 0}, "**bold**\n*\nc", True),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.", True),
    ("detectable_format:constrained_response", {}, "My answer is perhaps.", False),
    ("detectable_format:constrained_response", {}, "my answer is yes.", False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", True),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "**a** ** **", False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*a\nb*", False),
    ("detectable_format:multiple_sections", ("SECTION", 2), "SECTION 1\na\nSECTION2\nb", True),
    ("detectable_format:multiple_sections", ("SECTION", 2), "Section 1\na\nSection 2\nb", False),
    ("detectable_format:multiple_sections", ("SECTION", 2), "SECTION 1\na", False),
    ("detectable_format:json_format", {}, '{"a": [1, "b"]}', True),
    ("detectable_format:json_format", {}, '\n```JSON\n{"a": 1}\n```\n', True),
    ("detectable_format:json_format", {}, 'Here: {"a": 1}', False),
    ("detectable_format:json_format", {}, "{'a': 1}", False),
    ("detectable_format:title", {}, "Now:\n<<Poem of joy>>\nJoy", True),
    ("detectable_format:title", {}, "<< >>", False),
    ("detectable_format:title", {}, "<<Poem of\njoy>>", False),
    ("detectable_format:title", {}, "<Poem of joy>", False),
    ("detectable_format:title", {}, ">> and <<", False),
    ("combination:two_responses", {}, "Yes.\n******\nNo.", True),
    ("combination:two_responses", {}, "******\nYes.\n******\nNo.\n******", True),
    ("combination:two_responses", {}, "Yes.\n******\n Yes.", False),
    ("combination:two_responses", {}, "Yes.\n******\n******\nNo.", False),
    ("combination:two_responses", {}, "a\n******\nb\n******\nc", False),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, "\nSAY IT. It.", True),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Sure: Say it. It.", False),
    ("startend:end_checker", {"end_phrase": "The end."}, '"So. THE END."\n', True),
    ("startend:end_checker", {"end_phrase": "The end."}, "The end. Bye.", False),
    ("startend:quotation", {}, ' "All of it."\n', True),
    ("startend:quotation", {}, '"Not" all of it.', False),
    ("startend:quotation", {}, '"', False),
    ("change_case:capital_word_frequency", (3, "at least"), "I saw a UFO-SHOW, DON'T you?", True),
    ("change_case:capital_word_frequency", (4, "at least"), "I saw a UFO-SHOW, DON'T you?", False),
    ("change_case:capital_word_frequency", (1, "less than"), "We saw Tom-TOM 12", True),
    ("change_case:capital_word_frequency", (1, "less than"), "THE U.S.", False),
    ("change_case:english_capital", {}, "THIS IS THE WAY, 24 HOURS A DAY.", True),
    ("change_case:english_capital", {}, "This IS THE WAY.", False),
    ("change_case:english_capital", {}, "DAS IST NICHT MEIN HAUS.", False),
    ("change_case:english_capital", {}, "26", False),
    ("change_case:english_lowercase", {}, "this is the way.", True),
    ("change_case:english_lowercase", {}, "this is The way.", False),
    ("change_case:english_lowercase", {}, "das ist nicht mein haus.", False),
    ("punctuation:no_comma", {}, "No; none.", True),
    ("punctuation:no_comma", {}, "Yes, one.", False),
]  # fmt: skip


def follows(name, values, text):
    """A tuple gives the values in the order of the kind's fields."""
    if isinstance(values, tuple):
        values = dict(zip(KINDS[name].model_fields, values, strict=True))
    return instruction(name, values).follows(text)


@pytest.mark.parametrize(("name", "values", "text", "expected"), CASES)
def test_a_response_follows_an_instruction_or_does_not(name, values, text, expected):
    assert follows(name, values, text) is expected


def test_every_kind_of_the_paper_is_there_and_has_a_case_of_both_sorts():
    assert len(KINDS) == 25
    assert {(name, expected) for name, _, _, expected in CASES} == {
        (name, expected) for name in KINDS for expected in (True, False)
    }


COUNTED = {  # kind -> its count, worked out in another way
    "length_constraints:number_words": lambda text: len(re.sub(r"\W+", " ", text).split()),
    "keywords:letter_frequency": lambda text: sum(one in "aA" for one in text),
    "keywords:frequency": lambda text: len(text.lower().split("ab")) - 1,
}


@pytest.mark.parametrize("name", COUNTED)
@given(text=TEXTS, number=st.integers(0, 20))
def test_at_least_n_holds_where_the_count_is_n_or_more_and_less_than_n_elsewhere(
    name, text, number
):
    first = {"keywords:letter_frequency": ("a",), "keywords:frequency": ("ab",)}.get(name, ())
    enough = COUNTED[name](text) >= number
    assert follows(name, (*first, number, "at least"), text) is enough
    assert follows(name, (*first, number, "less than"), text) is not enough


@given(TEXTS)
def test_exactly_one_number_of_bullets_holds(text):
    held = [
        follows("detectable_format:number_bullet_lists", {"num_bullets": n}, text)
        for n in range(62)
    ]
    assert held.count(True) == 1


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("detectable_content:number_placeholders", "num_placeholders"),
        ("detectable_format:number_highlighted_sections", "num_highlights"),
    ],
)
@given(text=TEXTS, number=st.integers(1, 10))
def test_who_follows_at_least_n_follows_at_least_fewer(name, key, text, number):
    if follows(name, {key: number}, text):
        assert follows(name, {key: number - 1}, text)
    assert follows(name, {key: 0}, text)


@given(TEXTS)
def test_what_is_wrapped_or_ended_or_written_as_json_follows_whatever_it_is(text):
    assert follows("startend:quotation", {}, f'"{text}"')
    assert follows("detectable_format:json_format", {}, json.dumps({"text": text}))
    assert follows("startend:end_checker", {"end_phrase": "The end."}, f"{text} The end.")
    assert follows("punctuation:no_comma", {}, text.replace(",", ""))


@pytest.mark.parametrize("one", ["[", "<<", "*", "** ", "\n", ".", ". ", "a", "A.", '"', "\n* "])
def test_long_runs_of_one_thing_take_no_quadratic_time(one):
    for name, values, _, _ in CASES[::2]:
        assert follows(name, values, one * 50_000) in (True, False)


def test_json_that_is_nested_too_deep_is_not_json():
    assert not follows("detectable_format:json_format", {}, "[" * 200_000 + "]" * 200_000)
