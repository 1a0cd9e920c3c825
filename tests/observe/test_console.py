"""What a person sees, in every mode."""

from io import StringIO

import pytest

from postgrad.observe.console import Console, Mode

METRICS = {"reward": 0.5, "loss": 0.25, "sample_seconds": 1.0, "train_seconds": 0.5, "other": 1.0}


def told(mode: Mode) -> str:
    stream = StringIO()
    console = Console(mode, stream)
    console.heading("part")
    console.note("a note")
    with console.phase("sample", 4) as phase:
        phase.advance(2)
    console.step(7, 100, METRICS)
    console.table("figures", ("name", "value"), [("a", "1")])
    console.warn("look out")
    return stream.getvalue()


def test_plain_mode_has_one_line_a_step() -> None:
    text = told("plain")
    assert "step   7/100  reward 0.500  loss 0.2500  1.50 s\n" in text
    assert "a note\n" in text
    assert "part\n" in text
    assert "figures" in text
    assert "warning: look out\n" in text
    assert "\x1b" not in text


def test_quiet_mode_shows_warnings_alone() -> None:
    assert told("quiet") == "warning: look out\n"


def test_json_mode_leaves_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Console("json").note("a note")
    out, error = capsys.readouterr()
    assert (out, error) == ("", "a note\n")


def test_text_of_models_is_shown_as_it_is_and_never_as_markup() -> None:
    stream = StringIO()
    console = Console("plain", stream)
    console.note("[red]1[/red] [/]")
    console.table("[bold]t", ("a",), [("[link=x]b[/link]",)])
    text = stream.getvalue()
    assert "[red]1[/red] [/]" in text
    assert "[link=x]b[/link]" in text
    assert "[bold]t" in text


def test_long_lines_are_not_broken() -> None:
    stream = StringIO()
    Console("plain", stream).note("x" * 500)
    assert stream.getvalue() == "x" * 500 + "\n"
