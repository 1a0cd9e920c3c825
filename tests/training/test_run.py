"""The clock of a run: phases of a step, and what passes outside of them."""

import time

import pytest

from postgrad.training.run import Clock


def test_phases_and_other_seconds_add_up_to_the_elapsed_time_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of 10 s: 4 sampling, 3 of them decoding, 5 training, 1 outside of both."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock(started=now, step_started=now)
    with clock.timed("sample"):
        now += 4.0
    clock.add("sample/decode", 3.0)
    now += 1.0
    with clock.timed("train"):
        now += 5.0
    assert clock.step_seconds == 10.0
    of_step = {name: s for name, s in clock.take_step().items() if name.endswith("_seconds")}
    assert of_step == {
        "sample_seconds": 4.0,
        "sample/decode_seconds": 3.0,
        "train_seconds": 5.0,
        "other_seconds": 1.0,
    }
    now += 2.0  # the next step begins where this one ended
    assert clock.take_step()["other_seconds"] == 2.0
