import json
import subprocess
import sys

import pytest

from postgrad.rewards.ifeval.verifier import IFEval, variants
from postgrad.rewards.registry import build
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView

NO_COMMA, WORDS, TITLE = (
    "punctuation:no_comma",
    "length_constraints:number_words",
    "detectable_format:title",
)
THREE = {
    "instruction_id_list": [NO_COMMA, WORDS, TITLE],
    "kwargs": [{}, {"num_words": 3, "relation": "at least"}, {}],
}


def prompt(**metadata):
    return PromptView("?", None, metadata)


def score(text, row=THREE, **settings):
    return IFEval(**settings).score(prompt(**row), RolloutView(text))


def reason(name, values, **settings):
    row = prompt(instruction_id_list=[name], kwargs=[values])
    return IFEval(**settings).check(row)


def test_all_or_nothing_or_the_share_that_is_followed():
    assert score("<<Three words here>>").value == 1.0
    assert score("Three words here").value == 0.0
    assert score("Three words here", credit="fraction").value == pytest.approx(2 / 3)
    assert score("No, no", credit="fraction").value == 0.0


def test_the_detail_lists_every_instruction_and_whether_it_was_followed():
    assert score("Three, words here").detail == [
        {"instruction": NO_COMMA, "followed": False},
        {"instruction": WORDS, "followed": True},
        {"instruction": TITLE, "followed": False},
    ]


def test_a_blank_sample_follows_nothing():
    assert score(" \n", credit="fraction").value == 0.0
    assert score("***", {"instruction_id_list": [NO_COMMA], "kwargs": [{}]}, loose=True).value == 1
    assert score("", {"instruction_id_list": [NO_COMMA], "kwargs": [{}]}, loose=True).value == 0


def test_loose_forgives_a_first_line_a_last_line_and_asterisks():
    row = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    for text in ('Sure:\n"It is."', '"It is."\nBye', 'Sure:\n"It is."\nBye', '**"It is."**'):
        assert score(text, row).value == 0.0
        assert score(text, row, loose=True).value == 1.0
    assert score('Sure:\n\nHere:\n"It is."', row, loose=True).value == 0.0


def test_the_eight_variants_of_a_text_are_those_of_the_paper():
    assert list(variants("*a*\nb\n*c* ")) == [
        "*a*\nb\n*c* ", "a\nb\nc ", "b\n*c*", "b\nc", "*a*\nb", "a\nb", "b", "b",
    ]  # fmt: skip


def test_nulls_are_no_values_as_in_tables_where_all_rows_have_all_columns():
    row = {
        "instruction_id_list": [NO_COMMA, WORDS],
        "kwargs": [
            {"num_words": None, "relation": None, "keywords": None},
            {"num_words": 2, "relation": "less than", "keywords": None},
        ],
    }
    assert score("Word", row).value == 1.0
    assert reason(NO_COMMA, None) is None


def test_columns_may_hold_json_text_and_have_other_names():
    row = {"ids": json.dumps(THREE["instruction_id_list"]), "values": json.dumps(THREE["kwargs"])}
    settings = {"instructions": "ids", "kwargs": "values"}
    assert score("<<Three words here>>", row, **settings).value == 1.0
    assert (
        IFEval(**settings)
        .check(prompt(ids="[", values="[]"))
        .startswith("column 'ids' is text that is neither JSON nor a Python literal: ")
    )


ASKED = {
    "instruction_id": [NO_COMMA, WORDS],
    "kwargs": [None, {"num_words": 2, "relation": "at least"}],
}
WRITTEN = {
    "Python in a list": repr([ASKED]), "JSON in a list": json.dumps([ASKED]),
    "JSON in a Python list": repr([json.dumps(ASKED)]),
    "Python in a JSON list": json.dumps([repr([ASKED])]),
    "a mapping": repr(ASKED), "a mapping as JSON": json.dumps(ASKED),
}  # fmt: skip


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_rows_of_open_instruct_have_both_in_their_reference_answer(text):
    verifier = IFEval(instructions="answer", credit="fraction")
    row = PromptView("?", text, {})
    assert verifier.check(row) is None
    assert verifier.score(row, RolloutView("No, no")).value == 0.5
    assert verifier.score(row, RolloutView("One")).value == 0.5
    assert verifier.score(row, RolloutView("One two")).value == 1.0
    in_a_column = PromptView("?", None, {"ground_truth": text})
    verifier = IFEval(instructions="ground_truth")
    assert verifier.score(in_a_column, RolloutView("One two")).value == 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[{'instruction_id': ['a']", "the reference answer is text that is neither JSON nor"),
        ("__import__('os')", "the reference answer is text that is neither JSON nor"),
        ("(" * 100_000, "the reference answer is text that is neither JSON nor"),
        (repr([ASKED, ASKED]), "the reference answer has 2 sets of instructions; one is expected"),
        (repr([{"instruction_id": [NO_COMMA]}]), "there is no 'kwargs' in"),
        (repr({"kwargs": []}), "there is no 'instruction_id' in"),
        (repr(ASKED | {"kwargs": [None]}), "2 instructions in 'answer', 1 sets of values in 'answ"),
        (repr(ASKED | {"instruction_id": NO_COMMA}), "a list is expected, not 'punctuation:no_com"),
        (None, "the reference answer: a list is expected, not None"),
        ("12", "the reference answer: a list is expected, not 12"),
    ],
)  # fmt: skip
def test_check_says_what_is_wrong_with_a_row_of_open_instruct(value, message):
    assert message in IFEval(instructions="answer").check(PromptView("?", value, {}))


def test_check_names_the_column_that_is_missing_or_wrong():
    assert IFEval().check(prompt(**THREE)) is None
    message = IFEval().check(prompt(instruction_ids=[NO_COMMA], kwargs=[{}]))
    assert message == (
        "no column 'instruction_id_list' (the nearest is 'instruction_ids'); "
        "name it with the setting `instructions`"
    )
    assert "a list is expected, not {}" in IFEval().check(prompt(instruction_id_list=[], kwargs={}))
    assert "names no instruction" in IFEval().check(prompt(instruction_id_list=[], kwargs=[]))
    message = IFEval().check(prompt(instruction_id_list=[NO_COMMA], kwargs=[]))
    assert message.startswith("1 instructions in 'instruction_id_list', 0 sets of values in 'kwa")


def test_check_names_an_unknown_instruction_with_the_nearest_one():
    message = reason("punctuation:no_commas", {})
    assert message == (
        "no instruction is called 'punctuation:no_commas'; did you mean 'punctuation:no_comma'?"
    )
    assert reason(7, {}).startswith("no instruction is called 7; known: keywords:existence, ")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (WORDS, {"num_words": 3}, "there is no 'relation'"),
        (WORDS, {"num_words": 3, "relation": "at most"}, "relation = 'at most': Input should be"),
        (WORDS, {"num_words": -1, "relation": "at least"}, "num_words = -1: Input should be"),
        (NO_COMMA, {"num_words": 3}, "it takes no 'num_words'"),
        (NO_COMMA, [3], "a mapping is expected, not [3]"),
        ("keywords:existence", {"keywords": []}, "keywords = []: List should have at least 1"),
        ("keywords:existence", {"keywords": [" "]}, "keywords.0 = ' ': a text that is not blank"),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            "letter = 'ab': one character is expected",
        ),
        (
            "language:response_language",
            {"language": "xx"},
            "this language cannot be detected; known:",
        ),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "elm"},
            "there is no paragraph 3 of 2",
        ),
        ("copy:copying_multiple", {"prompt_to_repeat": "Say", "N": 0}, "N = 0: Input should be"),
        ("copy:repeat_phrase", {"phrase": "Say it", "small_n": 2}, "phrase = 'Say it': three wor"),
        (
            "new:copy_span_idx",
            {"prompt_to_repeat": "Say", "n_start": 2, "n_end": 2},
            "a prompt of 3 characters has no span from 2 to 2",
        ),
        ("new:copy_span_idx", {"prompt_to_repeat": "Say", "n_start": 3, "n_end": 5}, "has no span"),
        ("first_word:first_word_sent", {"first_word": ["a", "b"]}, "first_word = ['a', 'b']: Inp"),
        ("first_word:first_word_answer", {"first_word": "a b"}, "first_word = 'a b': one word is"),
        ("last_word:last_word_answer", {"last_word": "..."}, "last_word = '...': one word is expe"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "don't"},
            'first_word = "don\'t": one word without punctuation is expected',
        ),
    ],
)
def test_check_names_the_value_that_is_wrong(name, values, message):
    reason_text = reason(name, values)
    assert message in reason_text
    assert name in reason_text
    with pytest.raises(ValueError, match=name):
        score("Words", {"instruction_id_list": [name], "kwargs": [values]})


def test_whole_numbers_may_come_as_floats_as_tables_with_gaps_write_them():
    assert reason(WORDS, {"num_words": 3.0, "relation": "at least"}) is None
    assert reason(WORDS, {"num_words": 3.5, "relation": "at least"}) is not None


def test_a_recipe_names_it_ifeval_and_says_its_settings():
    verifier = build(RewardSettings(type="ifeval", credit="fraction", loose=True))
    assert isinstance(verifier, IFEval)
    assert verifier.credit == "fraction"


def test_a_worker_scores_rows_with_it(make_scorer, make_rollouts, make_prompt):
    scorer = make_scorer(RewardSettings(type="ifeval"))
    asked, wrong = make_prompt(answer=None, **THREE), make_prompt(1, answer=None)
    assert scorer.check([asked]) == []
    assert [prompt.row for prompt, _ in scorer.check([asked, wrong])] == [11]
    group = scorer.score([(asked, make_rollouts(["<<Three words here>>", "No, no"]))])[0]
    assert group.rewards["ifeval"].tolist() == [1.0, 0.0]


def test_neither_numpy_nor_torch_is_imported_for_it():
    code = (
        "import sys, postgrad.rewards.ifeval.verifier; print({'numpy', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
