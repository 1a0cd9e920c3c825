"""The conversation as it is held: in a terminal, and with lines of standard input."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.terminal import Terminal
from postgrad.cli.main import main
from postgrad.tools.chat.session import PROMPT

FLAGS = ("--max-new-tokens", "4", "--temperature", "0")
Models = Callable[[int], str]


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """piped(input, *words): exit code, standard output, standard error."""

    def run(stdin_bytes: bytes, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin_bytes)))
        code = main(["chat", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_lines_of_standard_input_are_answered_plainly(piped, models: Models) -> None:
    code, out, error = piped(b"hi\n\n  \nhi\n", models(0), *FLAGS)
    assert (code, error) == (0, "")
    assert len(out.splitlines()) == 2
    again = piped(b"hi\n/reset\nhi\n/quit\nnever said\n", models(0), *FLAGS)[1].splitlines()
    assert again == [out.splitlines()[0]] * 2


def test_two_models_answer_under_their_names(piped, models: Models) -> None:
    alone = [piped(b"hi", models(number), *FLAGS)[1] for number in (0, 1)]
    _, out, _ = piped(b"hi", models(0), models(1), *FLAGS)
    assert out == f"[{models(0)}]\n{alone[0]}[{models(1)}]\n{alone[1]}"


def test_json_has_what_was_said(piped, models: Models) -> None:
    stdin_bytes = b"a\n/seed 7\n/temperature 1.5\nb\n"
    code, out, error = piped(stdin_bytes, models(0), models(0), *FLAGS, "--json")
    transcript = json.loads(out)
    assert code == 0
    assert transcript["models"] == [f"{models(0)}, float32"] * 2
    assert [turn["seed"] for turn in transcript["turns"]] == [0, 7]
    first = transcript["turns"][0]["answers"]
    first_answer, second_answer = (first[f"{models(0)} ({number})"] for number in (1, 2))
    assert first_answer == second_answer
    assert not first_answer["ended"]  # cut after 4 tokens
    assert first_answer["text"] in error  # where people read


def test_filters_leave_the_likeliest_token(piped, models: Models) -> None:
    hot = ("--max-new-tokens", "4", "--temperature", "9")
    _, greedy, _ = piped(b"a\n", models(0), *FLAGS)
    for stdin_bytes, words in (
        (b"/top_k 1\na\n", ()),
        (b"a\n", ("--top-k", "1")),
        (b"a\n", ("--top-p", "1e-9")),
        (b"/min_p 0.999999\na\n", ()),
    ):
        assert piped(stdin_bytes, models(0), *hot, *words)[:2] == (0, greedy)
    assert piped(b"a\n", models(0), *hot)[1] != greedy


@pytest.mark.parametrize(
    ("stdin_bytes", "words", "problem"),
    [
        (b"/no\n", (), "/no is no command"),
        (b"/seed x\n", (), "/seed x: a whole number"),
        (b"/temperature nan\n", (), "/temperature nan: a number from 0 on is expected"),
        (b"/top_p 0\n", (), "/top_p 0: a number above 0 and at most 1 is expected"),
        (b"/top_k 1.5\n", (), "/top_k 1.5: a whole number"),
        (b"/min_p\n", (), "/min_p : a number"),
        (b"", ("--top-p", "0", "--min-p", "1"), "--top-p 0.0: above 0"),
        (b"ok\n\xff\n", (), "line 2 of standard input is not UTF-8"),
        (b"", ("--temperature", "-1"), "--temperature -1.0: 0 or more"),
        (b"", ("--max-new-tokens", "0"), "--max-new-tokens 0: 1 or more"),
        (b"", ("--checkpoint", "best"), "--checkpoint best"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    stdin_bytes: bytes, words: tuple[str, ...], problem: str, piped, models: Models
) -> None:
    code, _, error = piped(stdin_bytes, models(0), *FLAGS[:2], *words)
    assert code == 2
    assert problem in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_person_talks_to_two_models_side_by_side(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(models(0)).parent)
    two = [os.path.relpath(models(number)) for number in (0, 1)]
    command = [sys.executable, "-m", "postgrad", "chat", *two]
    with Terminal([*command, *FLAGS], columns=120) as terminal:
        terminal.wait_for("/help lists commands")
        terminal.type("hi\n")
        terminal.wait_for("was cut short")
        both = [line for line in terminal.lines if all(name in line for name in two)]
        assert len(both) == 1, terminal.lines  # their names, beside each other
        terminal.type("/bla\n")
        terminal.wait_for("/bla is no command")  # and the conversation goes on
        terminal.type(" /said to the model\n")
        terminal.wait_for("the limit is 64")  # it has 64 positions
        # the end of input that comes before input() edits the line is lost, as in any shell
        terminal.wait_for(lambda lines: lines[-1] == PROMPT.rstrip())
        terminal.type("\x04")
        assert terminal.ended() == 0
