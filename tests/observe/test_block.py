"""What is drawn at the foot of a terminal, and when."""

import time
from io import StringIO

import pyte
import pytest
from rich.console import Console as Rich
from rich.text import Text

from helpers.pages import ROOT
from postgrad.observe import board
from postgrad.observe.board import Board, LiveBlock


@pytest.fixture
def rich(monkeypatch: pytest.MonkeyPatch) -> Rich:
    monkeypatch.setenv("TERM", "xterm")
    return Rich(file=StringIO(), force_terminal=True, width=80, soft_wrap=True)


def drawn(rich: Rich) -> str:
    assert isinstance(rich.file, StringIO)
    return rich.file.getvalue()


def screen(rich: Rich) -> list[str]:
    terminal = pyte.Screen(80, 24)
    pyte.Stream(terminal).feed(drawn(rich).replace("\n", "\r\n"))
    return [line.rstrip() for line in terminal.display if line.strip()]


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn by the clock."""
    monkeypatch.setattr(board, "PERIOD_SECONDS", 1e6)


@pytest.mark.usefixtures("never")
def test_lines_wait_for_the_next_drawing_and_keep_their_order(rich: Rich) -> None:
    with LiveBlock(Board(10, 0, 0.0), rich) as block:
        for step in (1, 2, 3):
            block.soon(Text(f"step {step}"))
        assert "step 1" not in drawn(rich)
        block.print(Text("a warning"))
        assert screen(rich)[:4] == ["step 1", "step 2", "step 3", "a warning"]
        block.soon(Text("step 4"))
        block.draw()
        assert screen(rich)[4] == "step 4"
        assert screen(rich)[5].startswith("───")


@pytest.mark.usefixtures("never")
def test_what_waits_when_a_run_fails_is_still_shown(rich: Rich) -> None:
    def fail() -> None:
        with LiveBlock(Board(10, 0, 0.0), rich) as block:
            block.soon(Text("step 1"))
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert screen(rich) == ["step 1"]


def test_the_clock_draws_what_nobody_asked_for(rich: Rich, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "PERIOD_SECONDS", 0.001)
    with LiveBlock(Board(10, 0, 0.0), rich) as block:
        block.soon(Text("step 1"))
        until = time.monotonic() + 60
        while "step 1" not in drawn(rich):
            assert time.monotonic() < until
            time.sleep(0.001)


def test_the_block_is_drawn_as_often_as_the_docs_and_its_whole_seconds_say() -> None:
    assert board.PERIOD_SECONDS == 1.0
    text = " ".join((ROOT / "docs" / "loggers.md").read_text("utf-8").split())
    assert "redrawn once a second" in text
