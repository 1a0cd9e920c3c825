"""Open-Instruct's verifiers of ground truths."""

import ast
import json
import logging
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peer_objectives.answers import FORMULAS, NUMBERS, Answer, Scored, because
from benchmarks.peer_objectives.loading import Checkout, statements
from benchmarks.peer_objectives.open_instruct import BASE, OpenInstruct, flag

OF_NUMBERS = because({
    "a number is compared as text there": "decimals; plus; last number, decimals",
})  # fmt: skip
OF_FORMULAS = because({
    "a box, a formula in dollars or a final answer is read there, any last expression here":
        "no LaTeX; unit of a number; plain number; Answer line; Answer line, number; "
        "Answer line, thousands",
    "formulas that its parser does not read are compared as text there":
        "unit without space; text around; bold; thousands in LaTeX; bare word; root as a decimal",
    "boxes of one paragraph are a set here": "last box right",
    "a box that is not closed is read here": "box not closed",
    "12% is 12 there; here too, but not with antlr 4.11": "percent sign",
    "a thin space is left out there": "thousands, thin space",
})  # fmt: skip
VERIFIERS = {  # class -> a data set's name, answers, what differs, what is told of it
    "GSM8KVerifier": ("ai2-adapt-dev/rlvr_gsm8k_zs", NUMBERS, OF_NUMBERS, "as text there"),
    "MathVerifier": ("ai2-adapt-dev/rlvr_math", FORMULAS, OF_FORMULAS, "there the last box"),
}


TASKS = {
    "punctuation:no_comma": {}, "detectable_format:title": {},
    "length_constraints:number_words": {"relation": "less than", "num_words": 8},
    "keywords:existence": {"keywords": ["sun", "sea"]},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "startend:end_checker": {"end_phrase": "The end."},
}  # fmt: skip
COLUMNS = {"instruction_id_list": list(TASKS), "kwargs": list(TASKS.values())}
TEXTS = {
    "all but bullets": "<<A day>>\nThe sun and the sea. The end.",
    "all": "<<Day>>\n* Sun\n* sea\nThe end.", "no title": "* Sun\n* sea\nThe end.",
    "comma": "<<Day>>\n* Sun, \n* sea\nThe end.", "too long": "<<Day>>\n* Sun\n* sea\n" + "a " * 9,
    "other end": "<<Day>>\n* Sun\n* sea\nThe end!", "other case": "<<DAY>>\n* SUN\n* SEA\nTHE END.",
    "quoted end": '<<Day>>\n* Sun\n* sea\n"The end."', "dashes": "<<Day>>\n- Sun\n- sea\nThe end.",
    "nothing": "", "spaces": "  ",
    "thoughts": "<think>a, b, c</think><<Day>>\n* Sun\n* sea\nThe end.",
    "answer tags": "<answer><<Day>>\n* Sun\n* sea\nThe end.</answer>",
}  # fmt: skip
OF_TAGS = because({"what is behind </think> and within <answer> is judged there":
                   "thoughts; answer tags"})  # fmt: skip


def cases(checkout: Path) -> Iterator[Scored]:
    """Those that a data set's name chooses."""
    yield from _ground_truths(checkout)
    yield _instructions(checkout)


def _instructions(checkout: Path) -> Scored:
    """IFEvalVerifier."""
    files = Checkout(checkout / "open_instruct", ["langdetect", "absl", "immutabledict"])
    space: dict[str, Any] = {
        "ast": ast, "json": json, "VerifierFunction": object, "VerifierConfig": Any,
        "VerificationResult": lambda score: score, "logger": logging.getLogger("peer"),
        "instructions_registry": files.module("open_instruct.IFEvalG.instructions_registry"),
    }  # fmt: skip
    path = checkout / "open_instruct" / "ground_truth_utils.py"
    for name in ("def remove_thinking_section", "class IFEvalVerifier("):
        statements(path, name)(space)
    verifier = space["IFEvalVerifier"].__new__(space["IFEvalVerifier"])

    def peer(answer: Answer) -> float:
        asked = {"instruction_id": list(TASKS), "kwargs": list(TASKS.values())}
        return 10.0 * verifier([], answer.text, repr([json.dumps(asked)]))

    answers = [Answer(name, text, "", columns=COLUMNS) for name, text in TEXTS.items()]
    return Scored("IFEvalVerifier", words_of("ai2-adapt-dev/rlvr_ifeval"), peer, answers, OF_TAGS,
                  "behind </think>")  # fmt: skip


def words_of(data: str) -> list[str]:
    """A command with a data set."""
    stated = BASE | {"dataset_mixer_list": [data, "1.0"]}
    return ["grpo", *(word for key, value in stated.items() for word in flag(key, value))]


def _ground_truths(checkout: Path) -> Iterator[Scored]:
    """The verifiers of numbers and of formulas."""
    OpenInstruct(checkout)  # makes its files importable
    space: dict[str, Any] = {
        "re": re, "VerifierFunction": object, "VerifierConfig": Any,
        "VerificationResult": lambda score: score,
    } | vars(import_module("open_instruct.math_utils"))  # fmt: skip
    path = checkout / "open_instruct" / "ground_truth_utils.py"
    for name, (data, answers, differing, told) in VERIFIERS.items():
        statements(path, f"class {name}(")(space)
        verifier = space[name].__new__(space[name])

        def peer(answer: Answer, verifier: Any = verifier) -> float:
            return 10.0 * verifier([], answer.text, answer.reference)  # verification_reward

        yield Scored(name, words_of(data), peer, answers, differing, told)
