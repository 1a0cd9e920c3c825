"""The most memory of a phase, and nothing where that cannot be known."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.training import peaks, run
from postgrad.training.peaks import Peaks, Resident, gauges_for


class Tank:
    """A gauge whose level the test sets."""

    column = "memory_bytes"

    def __init__(self) -> None:
        self.level = self.most = 0

    def fill(self, level: int) -> None:
        self.level = level
        self.most = max(self.most, level)

    def held(self) -> int:
        return self.level

    def peak(self) -> int:
        return self.most

    def restart(self) -> None:
        self.most = self.level


class Pages(Tank):
    """A gauge of the same device that counts in pages of 64, and whose peak the tank's reset
    begins anew, as torch does it.
    """

    column = "reserved_bytes"

    def __init__(self, tank: Tank) -> None:
        super().__init__()
        self._tank = tank

    def held(self) -> int:
        return -(-self._tank.level // 64) * 64

    def peak(self) -> int:
        return -(-self._tank.most // 64) * 64

    def restart(self) -> None:
        self._tank.restart()


def test_each_gauge_of_a_device_has_a_column_of_its_own() -> None:
    tank = Tank()
    run_peaks = Peaks(tank, Pages(tank))
    tank.fill(10)
    run_peaks.set_baseline()
    with run_peaks.within("sample"):
        tank.fill(100)
        with run_peaks.within("sample/decode"):
            tank.fill(70)
    assert run_peaks.baseline == 10
    assert run_peaks.take_step() == {
        "sample_memory_bytes": 90,
        "sample_reserved_bytes": 64,  # of two pages, the first was there before
        "sample/decode_memory_bytes": 90,
        "sample/decode_reserved_bytes": 64,
    }


@given(st.lists(st.integers(0, 100), min_size=4, max_size=4))
def test_a_span_has_the_most_within_it_and_not_of_its_neighbours(
    levels: list[int],
) -> None:
    before, first, between, second = (level + 10 for level in levels)
    tank = Tank()
    run_peaks = Peaks(tank)
    tank.fill(10)
    run_peaks.set_baseline()
    tank.fill(before)
    tank.fill(10)
    with run_peaks.within("whole"):
        with run_peaks.within("whole/first"):
            tank.fill(first)
            tank.fill(10)
        tank.fill(between)
        tank.fill(10)
        with run_peaks.within("whole/second"):
            tank.fill(second)
            tank.fill(10)
    assert run_peaks.take_step() == {
        "whole/first_memory_bytes": first - 10,
        "whole/second_memory_bytes": second - 10,
        "whole_memory_bytes": max(first, between, second) - 10,
    }
    assert run_peaks.take_step() == {}
    assert run_peaks.total["whole_memory_bytes"] == max(first, between, second) - 10


def test_what_was_held_before_the_baseline_is_not_the_runs() -> None:
    tank = Tank()
    run_peaks = Peaks(tank)
    with run_peaks.within("load"):
        tank.fill(1000)
        tank.fill(300)
        run_peaks.set_baseline()
        tank.fill(350)
        run_peaks.set_baseline()  # the first one counts
    assert run_peaks.take_step() == {"load_memory_bytes": 50}


def test_a_span_that_is_raised_leaves_the_others_right() -> None:
    tank = Tank()
    run_peaks = Peaks(tank)
    run_peaks.set_baseline()

    def fail() -> None:
        with run_peaks.within("whole/part"):
            tank.fill(70)
            raise KeyError

    with run_peaks.within("whole"):
        with pytest.raises(KeyError):
            fail()
        tank.fill(20)
    assert run_peaks.take_step() == {"whole_memory_bytes": 70}


def test_resident_memory_of_this_process_is_measured_phase_by_phase() -> None:
    gauges = gauges_for("cpu")
    if not gauges:
        pytest.skip("this system does not say what a process holds at most")
    run_peaks = Peaks(*gauges)
    run_peaks.set_baseline()
    with run_peaks.within("large"):
        np.ones(60_000_000, np.uint8)
    with run_peaks.within("small"):
        np.ones(1_000_000, np.uint8)
    measured = run_peaks.take_step()
    assert 50_000_000 < measured["large_memory_bytes"] < 120_000_000
    assert measured["small_memory_bytes"] < 40_000_000
    assert Resident.most >= measured["large_memory_bytes"]


@pytest.mark.parametrize("text", [None, "Name: python\n"])
def test_where_the_system_does_not_tell_nothing_is_said(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    if text is not None:
        status.write_text(text)
    monkeypatch.setattr(peaks, "STATUS", status)
    monkeypatch.setattr(peaks, "FORGET", tmp_path / "none" / "clear_refs")
    assert gauges_for("cpu") == ()
    silent = Peaks(*gauges_for("cpu"))
    silent.set_baseline()
    with silent.within("load"):
        pass
    assert silent.take_step() == silent.total == {}


def test_a_run_counts_from_what_a_gpu_holds_without_torchs_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the process did before may have left memory there, which the run is going to use."""
    order: list[str] = []
    monkeypatch.setattr(run, "empty_cache", lambda device: order.append(f"gives back on {device}"))
    counted = SimpleNamespace(set_baseline=lambda: order.append("counts from here"))
    fake: Any = SimpleNamespace(
        choices=SimpleNamespace(device="cuda"),
        clock=SimpleNamespace(peaks=counted),
        recipe=SimpleNamespace(geometry=lambda rows: rows),
    )
    run.Run.count_rows(fake, 9)
    assert order == ["gives back on cuda", "counts from here"]
