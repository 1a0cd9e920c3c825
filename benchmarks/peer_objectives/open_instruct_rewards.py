"""Open-Instruct's verifiers of ground truths."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peer_objectives.answers import FORMULAS, NUMBERS, Answer, Scored, because
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.open_instruct import OpenInstruct, words_of
from benchmarks.peer_objectives.open_instruct_functions import function_cases
from benchmarks.peer_objectives.open_instruct_instructions import instruction_cases

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


def cases(checkout: Path) -> Iterator[Scored]:
    """Those that a data set's name chooses."""
    yield from _ground_truths(checkout)
    yield from instruction_cases(checkout)
    yield from function_cases(checkout)


def _ground_truths(checkout: Path) -> Iterator[Scored]:
    """The verifiers of numbers and of formulas."""
    OpenInstruct(checkout)  # makes its files importable
    space: dict[str, Any] = {
        "re": re, "VerifierFunction": object, "VerifierConfig": Any,
        "VerificationResult": lambda score: score,
    } | vars(import_module("open_instruct.math_utils"))  # fmt: skip
    path = checkout / "open_instruct" / "ground_truth_utils.py"
    for name, (data, answers, differing, note) in VERIFIERS.items():
        statements(path, f"class {name}(")(space)
        verifier = space[name].__new__(space[name])

        def peer(answer: Answer, verifier: Any = verifier) -> float:
            return 10.0 * verifier([], answer.text, answer.reference)  # verification_reward

        yield Scored(name, words_of(data), peer, answers, differing, note)
