"""Functions of Open-Instruct's older verifier of instructions, each on many responses."""

import json
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peer_objectives.answers import Answer, Scored, because
from benchmarks.peer_objectives.loading import Checkout, statements
from benchmarks.peer_objectives.open_instruct import words_of
from benchmarks.peer_objectives.open_instruct_instructions import named

AROUND = {"N": 6, "quantifier": "around"}
ASKED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "verify_keywords": ({"keyword_list": ["sun", "sea"]}, ["Sun and seas", "Sunny"]),
    "verify_keyword_frequency": ({"word": "sun", "N": 1}, ["Sun, sunny", "Sun, sun"]),
    "validate_forbidden_words": ({"forbidden_words": ["sun"]}, ["Sunny", "Sea"]),
    "verify_letter_frequency": ({"letter": "s", "N": 2}, ["Seas as S", "seas as", "sS"]),
    "validate_response_language": ({"language": "de"}, ["Das ist mein altes Haus am Meer."]),
    "verify_paragraph_count": ({"N": 2}, ["a\n* * *\nb", "a\n***\nb", "* * *\na\n* * *\nb"]),
    "validate_word_constraint": (AROUND, ["a b c d e", "a b c d", "It's not so well-known to us"]),
    "verify_sentence_constraint": (
        {"N": 3, "quantifier": "at least"}, ["One. Two. Three.", "One! Two."]),
    "validate_paragraphs": (
        {"N": 2, "i": 2, "first_word": "The"}, ["A b.\n\nThe c.", "A.\n\nThen.", "A.\n\nthe b."]),
    "verify_postscript": (
        {"postscript_marker": "P.S."}, ["Bye.\nP.S. Oh", "Bye. P.S.", "Bye. p.s. Oh"]),
    "validate_placeholders": ({"N": 2}, ["[a] [b]", "[a\nb] [c]", "[[a] [b]]"]),
    "verify_bullet_points": ({"N": 2}, ["* a\n- b", "**a**\n* b\n*c"]),
    "validate_title": ({}, ["<<A>>", "<<>>", "<<A\nb>>"]),
    "validate_choice": ({"options": ["yes", "no"]}, ["It is no use", "Yes", "nothing"]),
    "validate_highlighted_sections": ({"N": 2}, ["*a* *b*", "**a**", "*a* b"]),
    "validate_sections": (
        {"N": 2, "section_splitter": "Part"},
        ["Part 1\na\nPart 2\nb", "Two:\nPart 1\na\nPart 2\nb", "Two:\nPart 1"]),
    "validate_json_format": ({}, ["[1]", "```json\n[1]\n```", "Here: [1]"]),
    "validate_repeat_prompt": ({"original_prompt": "Say it."}, ["Say it. It", "SAY IT. It"]),
    "validate_two_responses": (
        {}, ["a\n******\nb", "a\n******\na", "******\na\n******\nb", "a\n******"]),
    "validate_uppercase": ({}, ["THIS IS THE WAY.", "This", "26", "DAS IST MEIN HAUS."]),
    "validate_lowercase": ({}, ["this is the way.", "das ist mein haus."]),
    "validate_frequency_capital_words": (
        {"N": 1, "quantifier": "at least"}, ["I AM", "ÉLAN", "Don't"]),
    "validate_end": ({"end_phrase": "The end."}, ["So. The end.", "the end.", '"The end."']),
    "validate_quotation": ({}, ['"So."', '"']),
    "validate_no_commas": ({}, ["So", "So, so"]),
}  # fmt: skip
OF_LANGUAGE = "any language is right there"
OF_CASE = "letter by letter there"
OF_DIVIDERS = "a divider may not begin or end it there, and an empty part is one"
DIFFERING: dict[str, dict[str, str]] = {  # function -> why, and names of responses
    "validate_forbidden_words": {"a word is found within others there": "Sunny"},
    "verify_paragraph_count": {OF_DIVIDERS: "* * * / a / * * * / b"},
    "verify_sentence_constraint": {
        "an emoji alone and the number of a line are sentences there": "emoji; numbered"},
    "validate_paragraphs": {
        "a blank paragraph counts there": "four breaks",
        "the paragraph begins so there, letter by letter": "A. /  / Then.; A. /  / the b."},
    "verify_postscript": {
        "something has to follow there": "Bye. P.S.", OF_CASE: "Bye. p.s. Oh"},
    "verify_bullet_points": {
        "every line that begins with * or - there": "three by dividers; **a** / * b / *c"},
    "validate_title": {"an empty title is one there": "<<>>"},
    "validate_highlighted_sections": {
        "every two * of a line are a highlight there": "three by dividers; **a**"},
    "validate_sections": {
        "what stands before the first section is one there":
            "Two: / Part 1 / a / Part 2 / b; Two: / Part 1"},
    "validate_json_format": {"without a fence there": "```json / [1] / ```"},
    "validate_repeat_prompt": {OF_CASE: "SAY IT. It"},
    "validate_two_responses": {OF_DIVIDERS: "****** / a / ****** / b; a / ******"},
    "validate_uppercase": {OF_LANGUAGE: "Chinese; Hindi; dots; 26; DAS IST MEIN HAUS."},
    "validate_lowercase": {OF_LANGUAGE: "Chinese; Hindi; dots; das ist mein haus."},
    "validate_frequency_capital_words": {"only letters from A to Z count there": "ÉLAN"},
    "validate_end": {OF_CASE: "the end.", "a quotation mark may not follow there": '"The end."'},
    "validate_quotation": {"one mark is enough there": '"'},
}  # fmt: skip
RAISES = {"validate_response_language": "dots"}  # there: langdetect finds no letter


def function_cases(checkout: Path) -> Iterator[Scored]:
    """IFEvalVerifierOld, by function."""
    files = Checkout(checkout / "open_instruct", ["langdetect"])
    functions = files.module("open_instruct.if_functions").IF_FUNCTIONS_MAP
    space: dict[str, Any] = {
        "json": json, "VerifierFunction": object, "VerifierConfig": Any,
        "VerificationResult": lambda score: score, "IF_FUNCTIONS_MAP": functions,
    }  # fmt: skip
    path = checkout / "open_instruct" / "ground_truth_utils.py"
    for name in ("def remove_thinking_section", "class IFEvalVerifierOld("):
        statements(path, name)(space)
    verifier = space["IFEvalVerifierOld"].__new__(space["IFEvalVerifierOld"])
    words = words_of("allenai/RLVR-IFeval")
    for name, (values, texts) in ASKED.items():
        if name == "validate_response_language" and find_spec("langdetect") is None:
            continue
        row = json.dumps({"func_name": name} | values)
        answers = [Answer(label, text, row) for label, text in named(texts).items()
                   if text.strip() and label != RAISES.get(name)]  # fmt: skip
        differing = because(DIFFERING.get(name, {}))
        yield Scored(f"IFEvalVerifierOld, {name}", words, partial(_score, verifier), answers,
                     differing, "rewards.md")  # fmt: skip


def _score(verifier: Any, answer: Answer) -> float:
    return 10.0 * verifier([], answer.text, answer.reference)  # verification_reward
