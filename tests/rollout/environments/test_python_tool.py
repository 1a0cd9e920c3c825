"""The tool that runs a model's Python: what it prints, what goes wrong, what it cannot do."""

import sys

import pytest

from postgrad.core.errors import RunError, UsageError
from postgrad.rewards.sandbox.client import SandboxError
from postgrad.rollout.environments import tools
from postgrad.rollout.environments.tools import Tools, load_tool, python, ready


@pytest.fixture(autouse=True)
def _sandbox() -> None:
    try:
        ready()
    except UsageError as error:
        if sys.platform == "linux":
            raise
        pytest.skip(str(error))


def test_what_a_program_prints_is_the_result() -> None:
    assert python("print(sum(range(10)))\nprint('done')") == "45\ndone\n"
    assert python("import math\nprint(math.comb(10, 3))") == "120\n"
    assert python("x = 1") == ""


def test_an_error_is_told_with_what_was_printed_before_it() -> None:
    output = python("print('so far')\n1 / 0")
    assert output.startswith("so far\n")
    assert output.endswith("ZeroDivisionError: division by zero")
    assert "SyntaxError" in python("print(")


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("while True: pass", "it used up its 2 s of CPU time"),
        ("x = bytearray(10**10)", "MemoryError"),
        ("open('/etc/passwd').read()", "No such file"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "Error"),
        ("import os; os.fork()", "Error"),
    ],
)
def test_what_a_program_may_not_do_is_told_to_the_model(code: str, output: str) -> None:
    assert output in python(code)


def test_nothing_is_kept_for_the_next_program() -> None:
    python("open('/tmp/note', 'w').write('x'); import builtins; builtins.kept = 1")
    assert "No such file" in python("print(open('/tmp/note').read())")
    assert "NameError" in python("print(kept)")


def test_it_is_a_tool_with_a_schema_and_the_template_is_asked_for_it() -> None:
    schema = load_tool("python").schema["function"]
    assert schema["name"] == "python"
    assert list(schema["parameters"]["properties"]) == ["code"]
    assert Tools(tools=("python", "calculator")).variables()["tools"][0]["function"] == schema


def test_a_sandbox_that_fails_stops_the_run_and_none_at_all_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def run(self, *args: object) -> None:
            raise SandboxError("gone")

    monkeypatch.setattr(tools, "shared", Broken)
    with pytest.raises(RunError, match="the sandbox of the tool `python` failed: gone"):
        python("print(1)")

    def none() -> None:
        raise UsageError("no sandbox here")

    monkeypatch.setattr(tools, "shared", none)
    with pytest.raises(UsageError, match="no sandbox here"):
        Tools(tools=("python",)).for_template("<tool_call>")
