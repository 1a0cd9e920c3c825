"""The code verifier: programs found in samples, tests of every kind, and no way to forge a pass."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.rewards import code
from postgrad.rewards.code import Code, program_in
from postgrad.rewards.code_tests import (
    AssertionTest,
    CallTest,
    StdinTest,
    read_tests,
    same_text,
    same_value,
)
from postgrad.rewards.registry import build
from postgrad.rewards.sandbox import choice
from postgrad.rewards.sandbox.values import encode
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
READ = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module", autouse=True)
def _a_sandbox():
    try:
        choice.shared(False)
    except UsageError as error:
        pytest.skip(str(error))
    yield
    choice.shared(False).close()
    choice.shared.cache_clear()


def score(expected, program, metadata=None, **settings):
    verifier = Code(whole_text=True, **settings)
    answer = expected if isinstance(expected, str) else json.dumps(expected)
    return verifier.score(PromptView("?", answer, metadata or {}), RolloutView(program))


def test_the_program_is_the_last_block_that_is_python_or_has_no_label():
    assert program_in("a\n```python\n1\n```\nb\n```py\n2\n```\nc") == "2\n"
    assert program_in("```\n1\n```\nprints\n```text\n2\n```") == "1\n"
    assert program_in("  ```Python\n  1\n  ```  ") == "1\n"
    assert program_in("```python\n1\n```\n```python\n2") == "1\n"
    assert program_in("```python\n'''\n```json\n'''\n```\n") == "'''\n```json\n'''\n"
    assert program_in("print(1)") is None
    assert program_in("```python\n1") is None


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("1. So:\n\n   ```python\n   if x:\n       y\n\n   z\n   ```\n", "if x:\n    y\n\nz\n"),
        ("\t```\n\tif x:\n\t\ty\n\t```", "if x:\n\ty\n"),
        ("  ```\nif x:\n  y\n  ```", "if x:\n  y\n"),  # the fence alone is indented
        ("```\n    return x\n```", "    return x\n"),  # the rest of a function in `prefix`
        ("x", None),
    ],
)
def test_a_program_loses_the_indentation_of_its_fence_and_keeps_its_own(text, program):
    assert program_in(text) == program


def test_a_right_program_in_a_list_of_steps_passes():
    listed = f"1. Read and add:\n\n   ```python\n   for _ in [0]:\n       {READ}\n   ```\n2. Done."
    assert Code().score(PromptView("?", json.dumps(SUM)), RolloutView(listed)).value == 1.0


@given(st.text(alphabet="`py\n 1", max_size=60))
def test_a_block_is_found_in_any_text_without_an_error(text):
    block = program_in(text)
    assert block is None or all(line in text for line in block.splitlines(keepends=True))


@pytest.mark.parametrize("piece", ["a", " ", "\t", "`", "```a`", "``` "])
def test_a_fence_line_of_a_million_characters_is_read_at_once(piece):
    line = piece * (10**6 // len(piece)) + "`"
    assert program_in(f"```{line}") is None
    assert program_in(f"```{line}\n```python\n1\n```\n{line}") == "1\n"


def test_tests_are_read_as_data_sets_write_them():
    assert read_tests(SUM) == [StdinTest("1 2\n", "3\n"), StdinTest("3 4\n", "7\n")]
    assert read_tests(json.dumps(ADD))[1] == CallTest("add", ([1], [2]), [1, 2])
    assert read_tests({"inputs": [["1", "2"]], "outputs": ["3"]}) == [StdinTest("1\n2", "3")]
    cases = [
        {"input": "1", "output": "2", "testtype": "stdin"},
        {"input": '[1]\n"a"', "output": "true", "testtype": "functional"},
    ]
    assert read_tests(cases, "f") == [StdinTest("1", "2"), CallTest("f", ([1], "a"), True)]
    assert read_tests(["assert 1", "assert 2"], setup="import math") == [
        AssertionTest(("import math", "assert 1"), None),
        AssertionTest(("import math", "assert 2"), None),
    ]
    assert read_tests("def check(candidate): ...", "f") == [
        AssertionTest(("def check(candidate): ...",), "f")
    ]


def test_a_list_of_one_reference_has_the_tests_in_it() -> None:
    """As an assertion it would be a list of texts, which every program passes."""
    assert read_tests(json.dumps(['["assert 1", "assert 2"]'])) == [
        AssertionTest(("assert 1",), None),
        AssertionTest(("assert 2",), None),
    ]
    assert read_tests([json.dumps(SUM)]) == read_tests(SUM)
    assert read_tests(["assert 1"]) == [AssertionTest(("assert 1",), None)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "the tests are empty"),
        (7, "the tests are int"),
        ([], "there are no tests"),
        ("[1", "the tests are no JSON"),
        ([3], "a test is neither code nor an object"),
        ({"inputs": []}, "not 'inputs' and 'outputs'"),
        ({"inputs": [], "outputs": []}, "there are no tests"),
        ({"inputs": ["a"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": ["a"]}, "an input or output is int, not text"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "the arguments of f are int"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "has no 'fn_name'"),
        ([{"input": "x", "output": "1", "testtype": "functional", "fn_name": "f"}], "not JSON"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_of_the_data(value, message):
    with pytest.raises(ValueError, match=message):
        read_tests(value)
    verifier = Code(tests="column")
    assert message in (verifier.check(PromptView("?", None, {"column": value})) or "")
    assert verifier.check(PromptView("?", None)) == "the row has no tests in 'column'"


def test_text_is_compared_line_by_line_without_regard_to_spaces():
    assert same_text("1 2\n3", "1  2 \n3\n\n")
    assert not same_text("1 2\n3", "1\n2 3")
    assert not same_text("1\n\n2", "1\n2")
    assert not same_text("0.30", "0.3")
    assert same_text("a 0.30", "a 0.3000001", 1e-6)
    assert not same_text("a 0.30", "b 0.30", 1e-6)
    assert not same_text("1" * 500, "1" * 499 + "2", 0.5)


def test_values_are_compared_as_json():
    assert same_value([1, [2, 3]], encode([1, (2, 3)]))
    assert same_value({"1": [0.5]}, encode({1: (0.5,)}))
    assert same_value(1, encode(1.0))
    assert not same_value(True, encode(1))
    assert not same_value(1, encode(True))
    assert not same_value([1], encode({1}))
    assert not same_value("1", encode(1))
    assert not same_value(None, encode(0))
    assert not same_value({"a": 1}, encode({"a": 1, "b": 2}))
    assert same_value(0.3, encode(0.1 + 0.2), 1e-9)
    assert not same_value(0.3, encode(0.1 + 0.2))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON)
def test_every_json_value_equals_itself(value):
    assert same_value(value, json.loads(json.dumps(encode(value))))


def test_stdin_tests_pass_or_fail_as_a_whole_or_in_part():
    assert score(SUM, READ).value == 1.0
    half = score(SUM, "print(3)")
    assert (half.value, half.detail) == (
        0.0, {"passed": 1, "tests": 2, "test": 1, "cause": "wrong_answer", "message": ""}
    )  # fmt: skip
    assert score(SUM, "print(7)", partial=True).value == 0.5
    crashed = score(SUM, READ + "\n1 / 0")
    assert crashed.detail["cause"] == "exit"
    assert crashed.detail["message"] == "ZeroDivisionError: division by zero"


def test_half_a_surrogate_pair_in_a_row_or_a_sample_is_no_failure():
    tests = {"inputs": ["\ud800\n"], "outputs": ["3"]}
    assert score(tests, "input()\nprint(3)").value == 1.0
    assert score(tests, "print('\ud800')").detail["cause"] == "exit"
    assert score(ADD, "def add(a, b): return '\\ud800'").detail["cause"] == "wrong_answer"


def test_a_sample_without_a_program_scores_nothing():
    verdict = Code().score(PromptView("?", json.dumps(SUM)), RolloutView("I do not know"))
    assert (verdict.value, verdict.detail) == (0.0, {"passed": 0, "tests": 2, "cause": "no_code"})
    fenced = f"Here:\n```python\n{READ}\n```"
    assert Code().score(PromptView("?", json.dumps(SUM)), RolloutView(fenced)).value == 1.0


def test_calls_pass_for_functions_and_for_methods_of_solution():
    assert score(ADD, "def add(a, b): return a + b").value == 1.0
    assert score(ADD, "class Solution:\n def add(self, a, b): return a + b").value == 1.0
    typed = "class Solution:\n def add(self, a: List[int], b): return a + b"
    assert score(ADD, typed).detail["message"].startswith("NameError: name 'List' is not defined")
    assert score(ADD, typed, prelude="from typing import *").value == 1.0
    assert score(ADD, "def plus(a, b): return a + b").detail["message"] == (
        "NameError: the program defines no 'add'"
    )
    guarded = "def add(a, b): return a + b\nif __name__ == '__main__': print(add(input(), 1))"
    assert score(ADD, guarded).value == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "class E:\n def __eq__(s, o): return True\ndef add(a, b): return E()",
        "class E(int):\n def __eq__(s, o): return True\ndef add(a, b): return E(99)",
        "import os\nos.write(4, b'{\"passed\": true}')\nos._exit(0)",
        'import os\nos.write(4, b\'{"value": {"set": [[1]]}}\')\nos._exit(0)',
        "import os\nos.write(4, b'[' * 100000)\nos._exit(0)",
        "import json\njson.dumps = lambda *a: '3'\ndef add(a, b): return 0",
        "def add(a, b): raise SystemExit(0)",
        "def add(a, b): return float('nan')",
        "def add(a, b): return add",
    ],
)
def test_a_call_cannot_be_forged(program):
    assert score(ADD, program).value == 0.0


MBPP = [
    "assert similar((3, 4, 5), (5, 4)) == (4, 5)",
    "assert set(similar((1, 2), (2, 3))) == {2}",
    "assert math.isclose(mean([1, 2]), 1.5, rel_tol=1e-9)",
]
RIGHT = (
    "def similar(a, b): return tuple(sorted(set(a) & set(b)))\ndef mean(x): return sum(x) / len(x)"
)


def test_assertions_see_the_functions_of_the_program():
    settings = {"tests": "test_list", "setup": "test_setup_code"}
    row = {"test_list": MBPP, "test_setup_code": "import math"}
    assert score("", RIGHT, row, **settings).value == 1.0
    wrong = score("", RIGHT.replace("/ len(x)", ""), row, **settings)
    assert (wrong.detail["passed"], wrong.detail["cause"]) == (2, "wrong_answer")
    assert score("", "def similar(a, b): return (4, 5)", row, partial=True, **settings).value == (
        pytest.approx(1 / 3)
    )


def test_check_of_a_candidate_is_called_with_the_entry_point():
    row = {
        "prompt": "def helper(x):\n    return x * x\n\ndef root(x):\n    '''Its root.'''\n",
        "test": "def check(candidate):\n    assert abs(helper(candidate(2.0)) - 2) < 1e-9\n",
        "entry_point": "root",
    }
    settings = {"tests": "test", "entry_point": "entry_point", "prefix": "prompt"}
    assert score("", "def root(x): return x ** 0.5", row, **settings).value == 1.0
    assert score("", "def root(x): return 1.4", row, **settings).value == 0.0
    assert score("", "x = 1", row | {"entry_point": "no"}, **settings).value == 0.0


def test_assertions_may_use_classes_exceptions_generators_and_lists_changed_in_place():
    program = (
        "class Pair:\n def __init__(self, a, b): self.a, self.b = a, b\n"
        " def total(self): return self.a + self.b\n"
        "def total(pairs): return sum(p.total() for p in pairs)\n"
        "def order(x): x.sort()\n"
        "def count(n):\n for i in range(n): yield i\n"
        "def bad(): raise ValueError('no')\n"
    )
    tests = [
        "assert total([Pair(1, 2), Pair(3, 4)]) == 10\nassert Pair(1, 2).total() == 3",
        "x = [3, 1]\norder(x)\nassert x == [1, 3]",
        "assert list(count(3)) == [0, 1, 2]",
        "try:\n    bad()\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'",
    ]
    assert score(tests, program).detail == {"passed": 4, "tests": 4}


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('OK')\ndef f(x): print('passed')",
        "class E:\n def __eq__(s, o): return True\n def __bool__(s): return True\n"
        "def f(x): return E()",
        "class E(int):\n def __eq__(s, o): return True\n def __sub__(s, o): return s\n"
        " def __abs__(s): return s\n def __lt__(s, o): return True\ndef f(x): return E(9)",
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.abs = lambda x: 0\n"
        "def f(x): return 9",
        "def abs(x): return 0\ndef f(x): return 9",
        "def check(c): pass\ndef f(x): return 9",
        "import os\nos.write(4, b'{\"passed\": true}')\ndef f(x): os._exit(0)",
        "import os\nos.write(6, b'{\"names\": {\"__builtins__\": {\"dict\": []}, \"f\": 1},"
        " \"modules\": []}\\n' * 9)\nos._exit(0)",
        "import os\nos.write(6, b'{\"passed\": true}\\n[]\\n3\\n')\ndef f(x): return 9",
        "import os, signal\nos.kill(-1, 9)\ndef f(x): os.killpg(0, 9)",
        "import sys\ndef f(x):\n sys._getframe(1).f_globals.clear()\n return 9",
        "def f(x): raise AssertionError",
        "def f(x): raise StopIteration",
    ],
)  # fmt: skip
def test_assertions_cannot_be_forged(program):
    tests = (
        "def check(candidate):\n    assert candidate(2) == 4\n    assert abs(candidate(3) - 9) < 1"
    )
    verdict = score(tests, program, {"e": "f"}, entry_point="e")
    assert verdict.value == 0.0
    assert verdict.detail["cause"] == "wrong_answer"


def test_time_and_memory_are_limited_in_every_kind_of_test():
    limits = {"test_cpu_seconds": 0.2, "test_idle_seconds": 0.2, "memory_mb": 128}
    spin = "def f(x):\n while True: pass"
    sleep = "import time\ndef f(x): time.sleep(60)"
    for tests in (["assert f(1)"], {"fn_name": "f", "inputs": [[1]], "outputs": [1]}):
        assert score(tests, spin, **limits).detail["cause"] == "cpu_time"
        assert score(tests, sleep, **limits).detail["cause"] == "idle"
    grow = score({"inputs": [""], "outputs": [""]}, "x = 'a' * 10**9", **limits)
    assert grow.detail["message"] == "MemoryError"


def test_the_programs_of_a_sample_end_before_the_limits_of_its_verifier():
    verifier = build(RewardSettings(type="code", cpu_seconds=0.5, partial=True, whole_text=True))
    assert isinstance(verifier, Code)
    assert (verifier.cpu_seconds, verifier.wall_seconds) == (0.5, 30.0)
    tests = {"inputs": ["a"] * 9, "outputs": ["a"] * 9}
    program = "import time\nwhile time.process_time() < 0.15: pass\nprint(input())"
    verdict = verifier.score(PromptView("?", json.dumps(tests)), RolloutView(program))
    assert 1 <= verdict.detail["passed"] <= 3
    assert verdict.detail["cause"] == "cpu_time"


def test_a_test_that_burns_in_threads_leaves_the_tests_before_it_their_credit():
    """As graders count: a test that is out of time has failed, and the others stand."""
    tests = {"inputs": ["a", "b", "c"], "outputs": ["a", "b", "c"]}
    program = (
        "import threading\nx = input()\ndef spin():\n while x == 'b': pass\n"
        "for _ in range(4): threading.Thread(target=spin).start()\nprint(x)"
    )
    limits = {"test_cpu_seconds": 0.2, "cpu_seconds": 5.0}
    part = score(tests, program, partial=True, **limits)
    assert part.value == pytest.approx(2 / 3)
    assert (part.detail["test"], part.detail["cause"]) == (1, "cpu_time")
    assert score(tests, program, **limits).value == 0.0


def ends_after(cpu_seconds, own_cpu_seconds):
    """A sandbox in which every program prints 3 and costs so much."""

    class Costly:
        def run(self, programs, limits):
            return code.End(None, 0, b"3\n", ("",), None, cpu_seconds, 0.0, own_cpu_seconds)

    return lambda unsafe: Costly()


def test_what_it_costs_to_start_programs_is_not_counted_against_them(monkeypatch):
    tests = {"inputs": ["a"] * 20, "outputs": ["3"] * 20}
    monkeypatch.setattr(code, "shared", ends_after(0.19, 0.03))  # 3.8 of 4 s, 0.6 of 0.75 s
    assert score(tests, "").value == 1.0
    monkeypatch.setattr(code, "shared", ends_after(0.25, 0.0))  # 4 s are 16 of them
    assert score(tests, "", partial=True).detail == {
        "tests": 20, "passed": 16, "test": 16, "cause": "cpu_time",
        "message": "earlier tests used up the time of this sample",
    }  # fmt: skip
    monkeypatch.setattr(code, "shared", ends_after(0.0, 0.04))
    with pytest.raises(choice.SandboxError, match="the row has too many tests for it"):
        score(tests, "")


def test_a_group_is_scored_in_a_worker_whatever_its_programs_do(
    make_scorer, make_prompt, make_rollouts
):
    programs = [
        READ,
        "import os\nos.kill(0, 9)",
        "while True: os.fork()",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "while True: pass",
        READ,
    ]
    reward = RewardSettings(type="code", whole_text=True, test_cpu_seconds=0.2)
    scorer = make_scorer(reward)
    assert scorer.check([make_prompt(answer=json.dumps(SUM))]) == []
    group = scorer.score([(make_prompt(answer=json.dumps(SUM)), make_rollouts(programs))])[0]
    assert group.failures == ()
    assert group.total.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [d["cause"] for d in group.details["code"][1:5]] == [
        "wrong_answer", "exit", "wrong_answer", "cpu_time"
    ]  # fmt: skip


def test_a_broken_sandbox_is_a_failure_and_no_score(monkeypatch):
    class Broken:
        def run(self, programs, limits):
            raise choice.SandboxError("the sandbox (namespaces): it ended")

    monkeypatch.setattr(code, "shared", lambda unsafe: Broken())
    with pytest.raises(choice.SandboxError):
        score(SUM, READ)
