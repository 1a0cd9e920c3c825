"""Every kind, with responses that follow it and responses that do not, worked by hand."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.ifeval import copying, form, keywords, length, positions, whole
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
    ("punctuation:punctuation_dot", {}, "Yes! No…", True),
    ("punctuation:punctuation_dot", {}, "3.5 of it", False),
    ("punctuation:punctuation_exclamation", {}, "Yes.", True),
    ("punctuation:punctuation_exclamation", {}, "Yes!", False),
    ("keywords:word_once", {"keyword": "sun"}, "The SUN.", True),
    ("keywords:word_once", {"keyword": "sun"}, "Sunny sun.", False),
    ("keywords:word_once", {"keyword": "C++"}, "I like c++.", True),
    ("keywords:word_count_different_numbers", ("war", 2, "at least"), "War and toward.", True),
    ("keywords:word_count_different_numbers", ("war", 2, "less than"), "War and toward.", False),
    ("keywords:exclude_word_harder", {"keyword": "to"}, "Tomorrow at noon", True),
    ("keywords:exclude_word_harder", {"keyword": "to"}, "Whom? To whom", False),
    ("keywords:exclude_word_harder", {"keyword": "world?"}, "Worlds. The end of the world?", False),
    ("keywords:palindrome", {}, "It is at night: Ah!", False),
    ("keywords:palindrome", {}, "A level floor", True),
    ("keywords:palindrome", {}, "I ate a pie - 11", False),
    ("keywords:palindrome", {}, "Hi \"Race-car\".", True),
    ("keywords:keyword_specific_position", ("tea", 2, 3), "Hello. I like, tea too.", True),
    ("keywords:keyword_specific_position", ("tea", 2, 3), "Hello. I like Tea too.", False),
    ("keywords:keyword_specific_position", (["don't"], 1, 2), "I don't.", True),
    ("keywords:keyword_specific_position", ("tea", 3, 1), "Tea. tea.", False),
    ("keywords:start_end", {}, "Don't, I beg you, don't", True),
    ("keywords:start_end", {}, "Tea, I like tea.", False),
    ("keywords:start_end", {}, "**Tea** I like tea", False),
    ("keywords:start_end", {}, "Tea", False),
    ("keywords:no_adjacent_consecutive", {}, "apple cat Bear", True),
    ("keywords:no_adjacent_consecutive", {}, "apple Bear", False),
    ("keywords:no_adjacent_consecutive", {}, "İstanbul kalın", True),
    ("keywords:no_adjacent_consecutive", {}, "habitat İstanbul", False),
    ("letters:letter_counting", (4, "at least"), "né 12, ok", True),
    ("letters:letter_counting", (4, "less than"), "né 12, ok", False),
    ("letters:letter_counting2", ("t", 2, "at least"), "The cat", True),
    ("letters:letter_counting2", ("t", 2, "less than"), "The cat", False),
    ("count:count_increment_word", ("sun", "sea"), "Sea, Sun and sea.", True),
    ("count:count_increment_word", ("sun", "sea"), "Sea and sun.", False),
    ("count:count_increment_word", ("sun", "sea"), "Sea, sun, sun and sea.", False),
    ("count:lowercase_counting", {"N": 2}, "THE cat IS 1st, é", True),
    ("count:lowercase_counting", {"N": 2}, "I don't go", False),  # don, t, go
    ("count:lowercase_counting", {"N": 0}, "ALL", True),
    ("count:count_unique", {}, "No. Not now. Never, friend.", True),
    ("count:count_unique", {}, "The sun and the sea", False),
    ("count:count_unique", {}, "हि हा", True),
    ("count:counting_composition", (2, 2), "Go on. Go!\n***\na b. c d.\n* * *\ne f. g h.", False),
    ("count:counting_composition", (2, 2), "Go on. Do go!\n***\na b. c d.\n* * *\ne f. g h.", True),
    ("count:counting_composition", (1, 2), "***\nDon't go.\n***\na b.\n***\nc d.\n***", True),
    ("count:counting_composition", (1, 2), "a b.\n***\nc d.", False),
    ("count:counting_composition", (1, 2), "a b.\n***\n***\nc d.", False),
    ("paragraphs:paragraphs", {}, "***\na\n\nb\n***\nc", True),
    ("paragraphs:paragraphs", {}, "a\n***\nb\n***\nc", False),
    ("paragraphs:paragraphs2", {}, "a\nb\n\n\nc", True),
    ("paragraphs:paragraphs2", {}, "a\n\nb\n\nc", False),
    ("paragraphs:paragraphs2", {}, "a\n\n\n\nc", False),
    ("first_word:first_word_sent", {"first_word": "well"}, "Well, yes. Well now.", True),
    ("first_word:first_word_sent", {"first_word": "well"}, "Well, yes. No.", False),
    ("first_word:first_word_sent", {"first_word": ["Well"]}, "well", True),
    ("first_word:first_word_sent", {"first_word": "well"}, "...", False),
    ("last_word:last_word_sent", {"last_word": "well"}, "...", False),
    ("first_word:first_word_answer", {"first_word": "well"}, "**Well**. No.", True),
    ("first_word:first_word_answer", {"first_word": "well"}, "Wells. Well.", False),
    ("first_word:first_word_answer", {"first_word": "don't"}, "Don't.", True),
    ("last_word:last_word_sent", {"last_word": "tea"}, "I like tea! More \"tea\".", True),
    ("last_word:last_word_sent", {"last_word": "tea"}, "I like tea. More.", False),
    ("last_word:last_word_answer", {"last_word": "tea"}, "More. I like TEA...", True),
    ("last_word:last_word_answer", {"last_word": "tea"}, "I like tea. More.", False),
    ("copy:copy", {"prompt_to_repeat": "Say it. "}, "\nSAY IT.", True),
    ("copy:copy", {"prompt_to_repeat": "Say it."}, "Say it. It.", False),
    ("copy:copying_simple", {"prompt_to_repeat": "Say it."}, "say it.", True),
    ("copy:copying_simple", {"prompt_to_repeat": "Say it."}, "Say it", False),
    ("copy:copying_multiple", ("Say it.", 2), "Say it.\n******\nsay it.", True),
    ("copy:copying_multiple", ("Say it.", 2), "Say it.\n******\nsay it.\n******", False),
    ("copy:copying_multiple", ("Say it.", 2), "Say it.\n******\nSaid it.", False),
    ("copy:repeat_phrase", ("To be or not", 2), "To be and not. So: To see or not!", True),
    ("copy:repeat_phrase", ("To be or not", 2), "To be and not. To be or not.", False),
    ("copy:repeat_phrase", ("To be or not", 2), "To be and not.", False),
    ("copy:repeat_phrase", ("To be or not", 1), "To see and not.", False),
    ("copy:repeat_phrase", ("To be or not", 1), "To be and so not.", False),
    ("copy:repeat_phrase", ("Is it (a) it?", 1), "Is it (the) it?", True),
    ("new:copy_span_idx", ("Say it now.", 4, 6), " IT\n", True),
    ("new:copy_span_idx", ("Say it now.", 0, 2), "Say", True),
    ("new:copy_span_idx", ("Say it now.", 0, 2), "Sa", True),
    ("new:copy_span_idx", ("Say it now.", 4, 6), "Say it", False),
    ("detectable_format:sentence_hyphens", {}, "One here.-Two here.-Three", True),
    ("detectable_format:sentence_hyphens", {}, "One here. Two here.", False),
    ("detectable_format:sentence_hyphens", {}, "One here.- Two here.", False),
    ("detectable_format:sentence_hyphens", {}, "A well-known one.-Two here.", False),
    ("detectable_format:sentence_hyphens", {}, "\nOne here.-Two here.\n", True),
    ("detectable_format:square_brackets", {}, "[All]\n[of,] [it.]", True),
    ("detectable_format:square_brackets", {}, "[All of] [it]", False),
    ("detectable_format:square_brackets", {}, "[All] [of it].", False),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>> now", True),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> at home", False),
]  # fmt: skip


def follows(name, values, text):
    """A tuple gives the values in the order of the kind's fields."""
    if isinstance(values, tuple):
        values = dict(zip(KINDS[name].model_fields, values, strict=True))
    return instruction(name, values).follows(text)


@pytest.mark.parametrize(("name", "values", "text", "expected"), CASES)
def test_a_response_follows_an_instruction_or_does_not(name, values, text, expected):
    assert follows(name, values, text) is expected


def test_every_kind_of_ifeval_and_of_open_instruct_is_there_and_has_a_case_of_both_sorts():
    kinds = keywords.KINDS | length.KINDS | form.KINDS | whole.KINDS | positions.KINDS
    kinds |= {name: kind for name, kind in copying.KINDS.items() if name[:7] != "repeat:"}
    assert len(kinds) == 25 + 29
    assert {(name, expected) for name, _, _, expected in CASES} == {
        (name, expected) for name in kinds for expected in (True, False)
    }


COUNTED = {  # kind -> its count, worked out in another way
    "length_constraints:number_words": lambda text: len(re.sub(r"\W+", " ", text).split()),
    "keywords:letter_frequency": lambda text: sum(character in "aA" for character in text),
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


ONES = ["[", "<<", "*", "** ", "\n", ".", ". ", "a", "A.", '"', "\n* ", "-", "a.-", "To ", "To x "]


@pytest.mark.slow
@pytest.mark.parametrize("repeated", ONES)
def test_long_runs_of_one_thing_take_no_quadratic_time(repeated):
    text = repeated * 50_000 + ("" if repeated.strip() else "a")
    for name, values in {name: values for name, values, _, _ in CASES}.items():
        assert follows(name, values, text) in (True, False)


def test_json_that_is_nested_too_deep_is_not_json():
    assert not follows("detectable_format:json_format", {}, "[" * 200_000 + "]" * 200_000)
