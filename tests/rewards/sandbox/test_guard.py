"""Under the guard, text may be a formula and nothing else. One hook of this process serves all."""

import subprocess
import sys

import pytest

FORMULAS = ["1 + 2*3", "[[1, 2], ['a', None]]", "sqrt(2)/2 + x", "-x**2", "{1: 2}", "max(1, 2)"]
CODE = [
    "__import__('os')",
    "entry",
    "(1).__class__",
    "x.real",
    "lambda: 1",
    "[i for i in (1, 2)]",
    "(y := 3)",
    "eval('1')",
    "open('/etc/passwd')",
    "getattr(x, 'real')",
    "f'{x!r:>{10}}'.format",
    "print(1)",
]
RUN = """
import sys, types
from postgrad.rewards.sandbox.guard import Guard, NotAFormula
guard = Guard()
scope = {"sqrt": abs, "x": 1.5, "entry": 7}
def run(text, names=("sqrt", "max")):
    try:
        return guard.formulas(names, lambda: eval(text, dict(scope)))[1] is None
    except NotAFormula:
        return False
"""


def in_a_process_of_its_own(check: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUN + check], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_formulas_run_and_code_does_not():
    printed = in_a_process_of_its_own(
        f"print([run(text) for text in {FORMULAS!r}], [run(text) for text in {CODE!r}])"
    )
    assert printed == f"{[True] * len(FORMULAS)} {[False] * len(CODE)}"


def test_a_refusal_is_told_though_the_scorer_takes_it_for_a_wrong_answer():
    printed = in_a_process_of_its_own(
        "def score():\n"
        "    try:\n"
        "        return eval('entry', {'entry': 1})\n"
        "    except Exception:\n"
        "        return 0.0\n"
        "print(guard.formulas((), score))"
    )
    assert printed == "(0.0, \"it names 'entry'\")"


@pytest.mark.parametrize(
    "way",
    [
        "exec('y = 1')",
        "types.FunctionType(compile('entry', 'a', 'eval'), {})()",
        "(lambda: 0).__code__.replace(co_name='x')",
    ],
)
def test_no_other_way_from_text_to_code_is_open(way):
    printed = in_a_process_of_its_own(
        "def score():\n"
        f"    return {way}\n"
        "try:\n"
        "    print(guard.formulas((), score))\n"
        "except NotAFormula as error:\n"
        "    print('refused')"
    )
    assert printed == "refused"


def test_modules_are_imported_and_text_is_parsed_as_ever():
    printed = in_a_process_of_its_own(
        "import ast\n"
        "def score():\n"
        "    import colorsys\n"
        "    return ast.literal_eval('[1, 2]'), colorsys.__name__\n"
        "print(guard.formulas((), score))\n"
        "print(eval('entry', scope))"
    )
    assert printed == "(([1, 2], 'colorsys'), None)\n7"
