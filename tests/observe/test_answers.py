"""Answers on a stream, on a terminal, and side by side."""

from collections.abc import Iterator
from io import StringIO

import pyte
import pytest

from postgrad.observe.samples import AnswerDisplay

NASTY = "\x1b]0;owned\x07[red]x[/red]\u202e\x9b2Jend"
SHOWN = r"\x1b]0;owned\x07[red]x[/red]\u202e\x9b2Jend"


class Screen(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "12")
    return Screen()


def seen(output: str, columns: int = 100) -> list[str]:
    screen = pyte.Screen(columns, 60)
    pyte.Stream(screen).feed(output.replace("\n", "\r\n"))
    return [line.rstrip() for line in screen.display if line.strip()]


def test_one_answer_is_written_as_it_comes() -> None:
    stream = StringIO()
    screens: list[str] = []

    def pieces() -> Iterator[str]:
        for piece in ("one ", "", "two\n", "three"):
            yield piece
            screens.append(stream.getvalue())

    AnswerDisplay(stream).show(["a"], [pieces()])
    assert screens == ["one ", "one ", "one two\n", "one two\nthree"]
    assert stream.getvalue() == "one two\nthree\n"


def test_a_long_answer_in_a_file_is_one_line() -> None:
    stream = StringIO()
    AnswerDisplay(stream).show(["a"], [iter(["word "] * 100)])
    assert stream.getvalue() == "word " * 100 + "\n"


def test_two_answers_in_a_file_stand_under_their_names() -> None:
    stream = StringIO()
    AnswerDisplay(stream).show(["[b]a", "b"], [iter("one"), iter(["two"])])
    assert stream.getvalue() == "[[b]a]\none\n[b]\ntwo\n"


@pytest.mark.parametrize("columns", ["60", "100"])
def test_what_a_model_writes_is_never_executed(
    columns: str, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    AnswerDisplay(screen).show([NASTY, "b"], [iter([NASTY]), iter([NASTY])])
    text = screen.getvalue()
    assert not set(text) & set("\x07\x9b\u202e")
    assert "\x1b]0" not in text
    joined_lines = "".join(line[:49].strip() for line in seen(text, int(columns)))
    assert SHOWN in joined_lines


def test_two_answers_on_a_wide_terminal_stand_side_by_side(screen: Screen) -> None:
    answers = [iter(["left " * 10] * 3), iter(["right"])]
    AnswerDisplay(screen).show(["a", "b"], answers)
    lines = seen(screen.getvalue())
    assert lines[0].split() == ["a", "b"]
    assert lines[1].split()[-1] == "right"
    assert sum(line.count("left") for line in lines) == 30
    assert all(len(line) < 100 for line in lines)


def test_answers_longer_than_the_screen_are_whole_in_the_end(screen: Screen) -> None:
    long = [f"line {number}\n" for number in range(40)]
    AnswerDisplay(screen).show(["a", "b"], [iter(long), iter(["short"])])
    assert [f"line {number}" for number in range(40)] == [
        line.split("  ")[0] for line in seen(screen.getvalue())[1:]
    ]


def test_a_name_wider_than_its_column_is_folded(screen: Screen) -> None:
    AnswerDisplay(screen).show(["x" * 120, "b"], [iter("1"), iter("2")])
    assert sum(line.count("x") for line in seen(screen.getvalue())) == 120
