"""What a person sees, in every mode."""

import re
import threading
from io import BytesIO, StringIO, TextIOWrapper

import pyte
import pytest
from rich.progress import Progress

from postgrad.observe import console as module
from postgrad.observe.console import Console, Lasting, Mode

METRICS = {
    "reward": 0.5,
    "loss": 0.25,
    "sample_seconds": 1.0,
    "sample/decode_seconds": 0.75,  # is in the second above
    "train_seconds": 0.5,
    "other": 1.0,
}


def printed_by(mode: Mode) -> str:
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
    text = printed_by("plain")
    assert "step   7/100  reward 0.500  1.50 s\n" in text
    assert "a note\n" in text
    assert "part\n" in text
    assert "figures" in text
    assert "warning: look out\n" in text
    assert "\x1b" not in text


def test_quiet_mode_shows_warnings_alone() -> None:
    assert printed_by("quiet") == "warning: look out\n"


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


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases are drawn from their start: Timer.start runs what it would wait with."""

    class AtOnce(threading.Timer):
        def start(self) -> None:
            self.function()
            super().start()

        def run(self) -> None:
            pass

    monkeypatch.setattr(threading, "Timer", AtOnce)


@pytest.mark.usefixtures("at_once")
def test_a_phase_is_named_on_a_terminal_without_markup(terminal: Terminal) -> None:
    """A phase may name a path, and a path may hold anything."""
    with Console("auto", terminal).phase("evaluate [/] [red]x[/red]", 4) as phase:
        phase.advance(3)
        phase.advance()
    text = terminal.getvalue()
    assert "evaluate [/] [red]x[/red]" in text
    assert "4/4" in text


@pytest.mark.usefixtures("at_once")
def test_a_phase_without_a_count_shows_that_it_lives(terminal: Terminal) -> None:
    with Console("auto", terminal).phase("load") as phase:
        phase.advance()
    assert "load" in terminal.getvalue()
    assert "/" not in terminal.getvalue()


@pytest.mark.usefixtures("at_once")
def test_a_phase_shows_what_is_counted_meanwhile(terminal: Terminal) -> None:
    with Console("auto", terminal).phase("load") as phase:
        phase.count("rows tokenised", 40_960, 120_000)
    assert "load: 40,960 of 120,000 rows tokenised, 34%" in terminal.getvalue()


def test_a_slow_count_is_a_line_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    with Console("plain", stream).phase("load") as phase:
        phase.count("rows tokenised", 1, 10)
        monkeypatch.setattr(module, "SLOW_SECONDS", -1.0)
        phase.count("rows tokenised", 2, 10)
    assert stream.getvalue().startswith("load: 2 of 10 rows tokenised, 20%\n")


def test_a_phase_that_is_over_at_once_is_not_drawn(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHORT_SECONDS", 3600.0)
    before = set(threading.enumerate())
    with Console("auto", terminal).phase("sample", 4) as phase:
        phase.advance(4)
    assert terminal.getvalue() == ""
    assert set(threading.enumerate()) <= before


def test_a_phase_that_lasts_is_drawn_though_it_says_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHORT_SECONDS", 0.0)
    drawn = threading.Event()
    start = Progress.start
    monkeypatch.setattr(Progress, "start", lambda self: (start(self), drawn.set()))
    with Console("auto", terminal).phase("load"):
        assert drawn.wait(60)
    assert "load" in terminal.getvalue()


@pytest.mark.usefixtures("at_once")
def test_a_phase_that_fails_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    def fail() -> None:
        with Console("auto", terminal).phase("sample", 4):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert terminal.getvalue().count("\x1b[?25h") == terminal.getvalue().count("\x1b[?25l") == 1


FULL = {
    "reward": 0.5,
    "loss": 0.25,
    "policy/entropy": 1.5,
    "policy/kl": 0.01,
    "policy/grad_norm": 1.25,
    "response_length": 12.5,
    "groups/equal_fraction": 0.5,
    "truncated_fraction": 0.25,
    "response_tokens_per_second": 12345.0,
    "train_tokens_per_second": 54321.0,
    "sample_seconds": 1.5,
}


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        (
            "80",
            "step   7/100  reward 0.500  entropy 1.500  kl 0.0100  length 12.5  1.50 s",
        ),
        ("40", "step   7/100  reward 0.500  1.50 s"),
        ("20", "step   7/100  1.50 s"),
    ],
)
def test_a_step_drops_what_matters_least_to_fit_a_terminal(
    columns: str, wanted: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    Console("auto", terminal).step(7, 100, FULL)
    assert terminal.getvalue() == wanted + "\n"


@pytest.mark.parametrize("live", [True, False])
def test_a_step_in_a_file_or_a_wide_terminal_has_everything(
    live: bool, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200" if live else "80")
    stream = terminal if live else StringIO()
    Console("auto", stream).step(7, 100, FULL)
    assert stream.getvalue() == (
        "step   7/100  reward 0.500  entropy 1.500  kl 0.0100  grad norm 1.250  "
        "length 12.5  zero-std groups 50%  truncated 25%  sampled 12,345 tok/s  "
        "trained 54,321 tok/s  1.50 s\n"
    )


def test_everything_that_is_shown_has_its_place_among_what_is_dropped() -> None:
    assert sorted(module.LEAST_FIRST) == sorted(key for key, _, _ in module.SHOWN)


def test_a_step_without_a_reward_shows_its_loss_and_what_was_clipped_where_anything_was() -> None:
    for metrics, wanted in (
        ({"loss": -1e-9}, "loss 0"),
        ({"loss": -0.00003}, "loss -3e-05"),
        ({"loss": 0.1, "reward": 0.5, "policy/clip_fraction": 0.0}, "reward 0.500"),
        ({"reward": 0.5, "policy/clip_fraction": 0.125}, "reward 0.500  clipped 12.5%"),
    ):
        stream = StringIO()
        Console("plain", stream).step(7, 100, {**metrics, "train_seconds": 1.5})
        assert stream.getvalue() == f"step   7/100  {wanted}  1.50 s\n"


def test_a_terminal_gets_lines_cut_at_words_and_a_file_gets_them_whole(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    path = "/a/path/that/is/longer/than/the/line"
    text = f"  some words here and {path} too"
    Console("auto", terminal).note(text)
    assert terminal.getvalue() == f"  some words here and\n  {path}\n  too\n"
    stream = StringIO()
    Console("plain", stream).note(text)
    assert stream.getvalue() == text + "\n"


@pytest.mark.parametrize("mode", ["plain", "quiet"])
def test_nothing_moves_on_a_terminal_where_that_is_not_wanted(
    mode: Mode, terminal: Terminal
) -> None:
    with Console(mode, terminal).phase("sample", 4) as phase:
        phase.advance()
    assert terminal.getvalue() == ""


def test_text_of_models_does_not_steer_the_terminal(terminal: Terminal) -> None:
    console = Console("auto", terminal)
    console.table("answers", ("a",), [("\x1b]0;owned\x07\x1b[2J\x9b5A\r\x08end\tof\nit",)])
    console.note("a\x00b\x1b[8m")
    text = terminal.getvalue()
    assert r"\x1b]0;owned\x07\x1b[2J\x9b5A\r\x08end" in text
    assert r"a\x00b\x1b[8m" in text
    assert not set(text) & set("\x00\x07\x08\r\x9b")
    assert "\x1b[2J" not in text


@pytest.mark.parametrize(
    ("encoding", "wanted"), [("ascii", r"\u20ac \ud800"), ("utf-8", r"€ \ud800")]
)
def test_what_a_stream_cannot_encode_is_escaped(encoding: str, wanted: str) -> None:
    """A log file in another locale ends no run."""
    raw = BytesIO()
    stream = TextIOWrapper(raw, encoding=encoding)
    console = Console("plain", stream)
    console.note("€ \ud800")
    console.table("t €", ("€",), [("€",)])
    stream.flush()
    assert raw.getvalue().decode(encoding).splitlines()[0] == wanted


def test_a_slow_phase_is_told_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    with Console("plain", stream).phase("load"):
        pass
    assert stream.getvalue() == ""
    monkeypatch.setattr(module, "SLOW_SECONDS", -1.0)
    with Console("plain", stream).phase("load"):
        pass
    assert stream.getvalue() == "load: 0 s\n"


def test_a_step_shows_what_its_metrics_have_and_no_negative_zero() -> None:
    stream = StringIO()
    Console("plain", stream).step(3, 3, {"policy/kl": -1e-9, "truncated_fraction": 0.125})
    assert stream.getvalue() == "step 3/3  kl 0  truncated 12%  0.00 s\n"


def test_json_mode_warns_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("json")
    console.heading("part")
    console.table("figures", ("name",), [("a",)])
    console.warn("look out")
    out, error = capsys.readouterr()
    assert out == ""
    assert "figures" in error
    assert error.endswith("warning: look out\n")


def test_long_lines_are_not_broken() -> None:
    stream = StringIO()
    Console("plain", stream).note("x" * 500)
    assert stream.getvalue() == "x" * 500 + "\n"


def test_a_run_on_a_terminal_has_a_block_under_its_lines(terminal: Terminal) -> None:
    console = Console("auto", terminal)
    with console.run(100, 4):
        with console.phase("sample [b]x[/b]", 4) as phase:
            phase.advance(2)
        console.step(5, 100, METRICS)
        console.spoken("kl", "\x1b[2J[red]far[/red]")
        console.evaluated(5, {"eval/accuracy": 0.5})
        console.warn("look out")
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(terminal.getvalue().replace("\n", "\r\n"))
    left = [line.rstrip() for line in screen.display if line.strip()]
    assert left == ["step   5/100  reward 0.500  1.50 s", "warning: look out"]
    assert r"\x1b[2J[red]far[/red]" in terminal.getvalue()
    assert "eval acc" in terminal.getvalue()
    assert "\x1b[2J" not in terminal.getvalue()


@pytest.mark.parametrize("columns", ["60", "100"])
def test_the_block_stands_whole_at_the_foot_of_the_screen(
    columns: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn again and again, above it a line each time: nothing of an older block is left over."""
    monkeypatch.setenv("COLUMNS", columns)
    console = Console("auto", terminal)
    screens: list[list[str]] = []

    def look() -> None:
        screen = pyte.Screen(int(columns), 40)
        pyte.Stream(screen).feed(terminal.getvalue().replace("\n", "\r\n"))
        screens.append([line.rstrip() for line in screen.display if line.strip()])

    with console.run(100, 0):
        for step in range(1, 6):
            console.spoken("kl", "too far" if step % 2 else None)  # the block's height changes
            console.step(step, 100, METRICS)
            console.note(f"after step {step}")  # what is said shows the line of the step too
            look()
    for number, lines in enumerate(screens, 1):
        history = [line for line in lines if line.startswith("step ") and "reward" in line]
        assert len(history) == number
        assert lines[2 * number - 1] == f"after step {number}"
        assert lines[2 * number].startswith("───")
        assert sum(line.startswith("───") for line in lines) == 1
        assert ("too far" in lines[-1]) == bool(number % 2)


@pytest.mark.parametrize("mode", ["plain", "quiet"])
def test_a_run_elsewhere_has_no_block(mode: Mode, terminal: Terminal) -> None:
    console = Console(mode, terminal)
    with console.run(100, 0):
        console.spoken("kl", "far")
        console.evaluated(1, {"eval/accuracy": 0.5})
        with console.phase("sample", 4):
            pass
    assert terminal.getvalue() == ""


def test_a_dumb_terminal_gets_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = Console("auto", terminal)
    with console.run(100, 0):
        console.step(1, 100, {"reward": 1.0})
    assert terminal.getvalue() == "step   1/100  reward 1.000  0.00 s\n"


class Closed(Terminal):
    """A terminal whose window was closed."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.asked = 0

    def write(self, text: str) -> int:
        self.asked += 1
        raise self.error


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), BrokenPipeError(), ValueError("closed file")]
)
def test_a_terminal_that_goes_away_ends_no_run(error: Exception) -> None:
    stream = Closed(error)
    console = Console("auto", stream)
    with console.run(100, 0):
        console.step(1, 100, METRICS)
        console.warn("nobody reads this")
        with console.phase("sample", 4) as phase:
            phase.advance()
    assert stream.asked == 1  # it is not tried again


def test_what_cannot_be_encoded_is_an_error_of_ours() -> None:
    """Lasting hides a lost stream, not a mistake."""
    stream = Lasting(TextIOWrapper(BytesIO(), encoding="ascii"))
    with pytest.raises(UnicodeEncodeError):
        stream.write("€")


WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen /a/" + "x" * 50


def test_lines_on_a_terminal_are_cut_at_words(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console = Console("auto", terminal)
    for show in (console.note, console.warn, console.error):
        show(WORDS)
    console.spans([("one two ", "bold"), (WORDS[8:], "")])
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()
    assert all(len(line.rstrip()) <= 40 or line.startswith("/a/xxx") for line in lines)
    assert lines.count("/a/" + "x" * 50) == 4
    words = " ".join(line.strip() for line in lines).replace("warning: ", "")
    assert words == " ".join([WORDS] * 4)


def test_lines_in_a_file_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = StringIO()
    console = Console("plain", stream)
    console.note(WORDS)
    console.spans([(WORDS, "")])
    assert stream.getvalue() == f"{WORDS}\n{WORDS}\n"


PARTS = ("step", "evaluation", "state")
OF_A_STEP = [("8", "eval/accuracy 0.500", "complete, latest"), ("16", "", "damaged")]


def test_a_table_that_would_cut_words_is_a_block_of_lines_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = StringIO()
    Console("plain", stream).table("checkpoints", PARTS, OF_A_STEP)
    assert stream.getvalue() == (
        "\ncheckpoints\n\nstep        8\nevaluation  eval/accuracy 0.500\n"
        "state       complete, latest\n\nstep        16\nstate       damaged\n"
    )


def test_without_names_of_columns_a_narrow_table_is_a_line_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = StringIO()
    rows = [("rollout_batch_size", "4", "prompts per step"), ("steps", "16", "")]
    Console("plain", stream).table("batches", ("", "", ""), rows)
    text = "\nbatches\nrollout_batch_size  4  prompts per step\nsteps  16\n"
    assert stream.getvalue() == text


@pytest.mark.parametrize("width", [36, 60, 200])
def test_a_table_that_cuts_no_word_has_its_columns(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = StringIO()
    Console("plain", stream).table("checkpoints", PARTS, OF_A_STEP)
    head, *cells = stream.getvalue().splitlines()[3:]
    assert head.split() == [*PARTS]
    for word in ["eval/accuracy", "0.500", "complete,", "latest", "16", "damaged"]:
        assert any(word in line for line in cells)
    assert max(map(len, cells)) <= width
