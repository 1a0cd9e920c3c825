"""The live block: what it says, and that it fits."""

import math
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from postgrad.observe.board import Board, PhaseShown, duration, sparkline, step_seconds
from postgrad.observe.console import Console

METRICS = {
    "reward": 0.5,
    "loss": -0.00001,
    "policy/kl": 0.0123,
    "sampled_entropy": 1.25,
    "response_length": 123.4,
    "truncated_fraction": 0.02,
    "policy/grad_norm": 0.53,
    "response_tokens_per_second": 12345.0,
    "peak_memory_bytes": 3.0 * 2**30,
    "estimated/sample_seconds": 1.25,
    "estimated/train_seconds": 0.5,
    "estimated/export_seconds": 9.0,
    "sample_seconds": 1.5,
    "sample/decode_seconds": 1.0,
    "train_seconds": 0.5,
}


def board(steps: int = 3) -> Board:
    filled_board = Board(total=200, before=40, began=100.0)
    for step in range(41, 41 + steps):
        filled_board.stepped(step, {**METRICS, "reward": step / 100})
    return filled_board


def text(of: Board, width: int = 80, now: float = 190.0) -> str:
    return "\n".join(line.plain for line in of.lines(width, now))


def test_it_says_where_the_run_stands_and_how_long_it_takes() -> None:
    """Three steps in 90 s: 157 more take 78 minutes and a half."""
    assert "43/200  22%  1:30 elapsed, 1:18:30 left" in text(board())
    assert "left" not in text(board(0))  # nothing is known yet


def test_it_shows_figures_with_their_curves_speeds_and_forecasts() -> None:
    shown = text(board())
    assert "reward        0.430 ▁▅█" in shown
    assert "loss" not in shown  # of RL it says nothing
    assert "entropy       1.250" in shown
    assert "length        123.4" in shown
    assert "sampled 12,345 tok/s   memory 3.00 GiB   a step 2.00 s of 1.75 estimated" in shown
    assert "accuracy" not in shown


AHEAD = {
    "staleness/mean": 0.75,
    "staleness/max": 2.0,
    "staleness/mixed_samples": 0.125,
    "ahead/groups": 32.0,
    "ahead/ended_groups": 8.0,
    "ahead/open_samples": 96.0,
    "idle/learner_time_fraction": 0.27,
    "idle/engines_time_fraction": 0.29,
    "publish/send_seconds": 0.1,
    "publish/sent_bytes": 1_234_567.0,
}


def test_of_samples_ahead_it_shows_how_old_they_are_what_is_under_way_and_who_is_idle() -> None:
    board_shown = board(0)
    board_shown.stepped(41, METRICS | AHEAD)
    shown = text(board_shown)
    assert "staleness 0.75 (most 2), mixed 12%   under way 32 groups (8 ended), 96 samples" in shown
    assert "learner idle 27%   engines idle 29%   weights sent in 0.10 s, 1,234,567 bytes" in shown
    assert "empty rows" not in shown  # of an engine that does not count them
    board_shown.stepped(42, METRICS | AHEAD | {"idle/empty_rows_fraction": 0.5})
    assert "engines idle 29%   empty rows 50%\nweights sent" in text(board_shown)
    board_shown.stepped(43, METRICS | {"idle/learner_time_fraction": 0.27})  # a synchronous run
    assert "idle" not in text(board_shown)


def test_it_shows_the_loss_of_a_step_without_a_reward() -> None:
    supervised = Board(total=200, before=40, began=100.0)
    supervised.stepped(41, {name: METRICS[name] for name in METRICS if name != "reward"})
    assert "loss         -1e-05" in text(supervised)


def test_memory_is_that_of_the_phases_where_both_are_known() -> None:
    """The process's own peak has the loading in it, which the forecast of a step has not."""
    measured = {"train_memory_bytes": 2.0, "sample_memory_bytes": 1.0}
    estimated = {"estimated/train_memory_bytes": 1.5, "estimated/sample_memory_bytes": 2.5}
    board_shown = board()
    scaled = {name: value * 2**30 for name, value in (measured | estimated).items()}
    board_shown.stepped(44, {**METRICS, **scaled})
    assert "memory 2.00 GiB of 2.50 estimated" in text(board_shown)


def test_a_step_lasts_as_long_as_its_phases_in_the_block_and_in_its_line() -> None:
    stream = StringIO()
    Console("plain", stream).step(43, 200, METRICS)
    assert stream.getvalue().endswith("  2.00 s\n")
    assert step_seconds(METRICS) == 2.0  # the parts of a phase and forecasts are no phases
    assert "a step 2.00 s of 1.75 estimated" in text(board())


def test_pairs_put_right_and_held_out_accuracy_have_labels_of_their_own() -> None:
    board_shown = board(0)
    board_shown.stepped(41, {"reward_model/accuracy": 0.75})
    board_shown.evaluated(41, {"eval/accuracy": 0.5})
    board_shown.stepped(42, {"reward_model/accuracy": 1.0})
    shown = text(board_shown)
    assert "accuracy     100.0% ▁█" in shown
    assert "eval acc      50.0% at step 41" in shown


def test_an_evaluation_shows_its_first_accuracy() -> None:
    board_shown = board()
    board_shown.evaluated(
        40, {"eval/reward": 0.1, "eval/accuracy": 0.61, "eval/hard/accuracy": 0.2}
    )
    assert "eval acc      61.0% at step 40" in text(board_shown)
    board_shown.evaluated(50, {"eval/accuracy": math.nan})
    board_shown.evaluated(60, {"eval/accuracy": 0.7})
    assert "eval acc      70.0% ▁█" in text(board_shown)


def test_an_evaluation_whose_rates_mean_nothing_shows_its_mean_reward() -> None:
    board_shown = board()
    board_shown.evaluated(40, {"eval/reward": 1.25, "eval/reward/reward_model": 1.25})
    assert "eval mean     1.250 at step 40" in text(board_shown)


def test_an_evaluation_without_accuracy_shows_its_first_loss() -> None:
    board_shown = board()
    board_shown.evaluated(
        40, {"eval/near/loss": 2.5, "eval/near/perplexity": 12.2, "eval/far/loss": 3.0}
    )
    assert "eval loss    2.5000 at step 40" in text(board_shown)
    board_shown.evaluated(60, {"eval/near/loss": 2.25})
    assert "eval loss    2.2500 █▁" in text(board_shown)


def test_before_the_first_step_no_sentinel_has_looked() -> None:
    board_shown = board(0)
    assert "sentinels wait for the first step" in text(board_shown)
    board_shown.spoken("stall", "phase sample made no progress")
    assert "▲ stall: phase sample made no progress" in text(board_shown)
    assert "wait" not in text(board_shown)


def test_sentinels_are_silent_or_say_what_they_see() -> None:
    board_shown = board()
    assert "sentinels silent: nothing looks wrong" in text(board_shown)
    for name in ("kl", "length", "entropy", "mismatch", "gradient"):
        board_shown.spoken(name, f"{name} is 3 (limit 1)")
    shown = text(board_shown)
    assert "▲ kl: kl is 3 (limit 1)" in shown
    assert "gradient is" not in shown
    assert "▲ and 1 more" in shown
    for name in ("kl", "length", "entropy", "mismatch", "gradient", "stall"):
        board_shown.spoken(name, None)
    assert "sentinels silent" in text(board_shown)


def test_a_phase_moves_and_one_that_cannot_be_counted_lives() -> None:
    board_shown = board()
    board_shown.phase = PhaseShown("sample", 64, 185.0)
    board_shown.phase.advance(16)
    assert "16/64  5 s" in text(board_shown)
    board_shown.phase = PhaseShown("export", None, 188.0)
    assert "export    2 s" in text(board_shown)


@pytest.mark.parametrize("unicode", [True, False])
@given(
    width=st.integers(1, 200),
    name=st.text(max_size=30),
    warning=st.text(max_size=300),
    step=st.integers(0, 10**7),
)
def test_no_line_is_wider_than_the_terminal(
    unicode: bool, width: int, name: str, warning: str, step: int
) -> None:
    board_shown = board()
    board_shown.unicode, board_shown.total, board_shown.step = unicode, 10**7, step
    board_shown.phase = PhaseShown(name, 10**9, 0.0, 10**8)
    board_shown.evaluated(1, {"eval/accuracy": 0.5})
    board_shown.spoken("kl", warning)
    for line in board_shown.lines(width, 1e7):
        assert cell_len(line.plain) <= max(20, width - 1)


def test_without_unicode_every_character_is_ascii() -> None:
    board_shown = board()
    board_shown.unicode = False
    board_shown.phase = PhaseShown("sample", 64, 185.0, 20)
    board_shown.spoken("kl", "too far")
    assert text(board_shown, 60).isascii()


@given(st.lists(st.floats(-1e9, 1e9), max_size=100), st.integers(1, 50))
def test_a_curve_is_no_longer_than_asked_and_goes_from_bottom_to_top(
    values: list[float], most: int
) -> None:
    curve = sparkline(values, most)
    assert len(curve) == (min(most, len(values)) if len(values) > 1 else 0)
    rising = sparkline(sorted(values), most)
    assert list(rising) == sorted(rising)


def test_a_curve_shows_all_that_is_kept_in_the_room_there_is() -> None:
    assert sparkline([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], 3) == "▁▅█"
    assert sparkline([1.0, 1.0], 8) == "▁▁"


@pytest.mark.parametrize(
    ("seconds", "duration_text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1:00"), (3599, "59:59"), (7425, "2:03:45")],
)
def test_durations_are_short(seconds: float, duration_text: str) -> None:
    assert duration(seconds) == duration_text


def test_a_long_run_keeps_no_more_than_it_can_show() -> None:
    assert all(len(curve) == 240 for curve in board(1000).curves.values())
