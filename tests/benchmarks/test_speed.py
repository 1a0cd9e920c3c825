"""The harness of benchmarks/speed: turns, arithmetic, and what it refuses. Sides are fake."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.speed.harness import (
    Contestant,
    Measured,
    Refused,
    Results,
    check_equal,
    compete,
    fastest,
    ratio,
)
from benchmarks.speed.report import machine, measured_on, report, table
from benchmarks.speed.side import Options, Precision


def fake(name: str, precision: Precision = "float32", **extra: Any) -> Contestant:
    options = Options(precision, 1, {"name": name, **extra})
    return Contestant(name, "tests.helpers.speed_side", sys.executable, options)


def results(name: str, seconds: list[float], precision: Precision = "float32") -> Results:
    rounds = [Measured(s, 2 * s, {"tokens": 7}, 10) for s in seconds]
    return Results(fake(name, precision), {"python": "3"}, rounds)


def order(folder: Path) -> list[str]:
    return [line.removesuffix("-float32") for line in (folder / "order").read_text().split()]


def test_sides_take_turns_after_one_round_to_warm_up(tmp_path: Path) -> None:
    side_results = compete([fake("a"), fake("b")], tmp_path, rounds=2, equal=["tokens"])
    assert order(tmp_path) == ["a", "b"] * 3
    assert [len(side_result.rounds) for side_result in side_results] == [2, 2]
    assert side_results[0].rounds[0].counts == {"tokens": 7}
    assert side_results[0].versions["python"] == sys.version.split()[0]


def test_sides_that_do_unequal_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"tokens must be the same .*'a-float32': 7, 'b-float32': 6"):
        compete([fake("a"), fake("b", tokens=6)], tmp_path, rounds=1, equal=["tokens"])
    assert order(tmp_path) == ["a", "b"]  # the first round shows it


def test_a_count_that_a_side_does_not_give_is_refused() -> None:
    check_equal({"a": {"tokens": 1, "other": 1}, "b": {"tokens": 1, "other": 2}}, ["tokens"])
    with pytest.raises(Refused, match="samples"):
        check_equal({"a": {"tokens": 1}, "b": {"tokens": 1}}, ["tokens", "samples"])


def test_a_side_that_fails_is_refused_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"(?s)b-float32 ended before its answer:.*out of luck"):
        compete([fake("a"), fake("b", fail=True)], tmp_path, rounds=1, equal=["tokens"])


def test_ratios_are_of_medians_with_the_least_and_the_most_of_paired_rounds() -> None:
    ours, theirs = results("a", [1.0, 2.0, 4.0]), results("b", [3.0, 10.0, 4.0])
    assert ratio(ours, theirs, "seconds") == {"of_medians": 2.0, "min": 1.0, "max": 5.0}


def test_of_a_side_at_two_precisions_the_faster_one_counts() -> None:
    side_results = [
        results("a", [1.0, 1.0, 9.0], "float32"),
        results("a", [2.0, 2.0, 2.0], "bfloat16"),
        results("b", [8.0, 8.0, 8.0], "float32"),
        results("b", [4.0, 4.0, 4.0], "bfloat16"),
    ]
    assert fastest(side_results, "b") is side_results[3]
    summed = report(side_results, "a", "b")
    assert summed["compared"] == ["a-float32", "b-bfloat16"]
    assert summed["ratio"]["seconds"]["of_medians"] == 4.0
    text = table(summed)
    assert "wall: b-bfloat16 / a-float32 = 4.00 (0.44 to 4.00)" in text
    assert "7 tokens" in text


def test_a_precision_that_is_far_behind_ends_after_its_trial(tmp_path: Path) -> None:
    cpu = {"float32": 0.2, "bfloat16": 0.025}
    sides = [fake("a", p, cpu=cpu) for p in ("float32", "bfloat16")]
    side_results = compete([*sides, fake("b")], tmp_path, rounds=2, equal=["tokens"])
    assert [side_result.contestant.name for side_result in side_results] == [
        "a-bfloat16",
        "b-float32",
    ]
    assert order(tmp_path).count("a") == 2  # to warm up, and the trial


def test_cpu_time_counts_the_processes_that_a_side_starts(tmp_path: Path) -> None:
    side_results = compete([fake("a", child=True)], tmp_path, rounds=1, equal=["tokens"])
    assert 0.25 < side_results[0].rounds[0].cpu_seconds < 2.0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux forgets peaks")
def test_the_peak_of_memory_is_that_of_the_round(tmp_path: Path) -> None:
    size = 200 * 2**20
    side_results = compete([fake("a", allocate=size)], tmp_path, rounds=1, equal=["tokens"])
    assert 2**20 < side_results[0].rounds[0].peak_bytes < size  # it was allocated in the warm-up


def test_lengths_are_mixed_reach_the_longest_and_average_under_half_of_it() -> None:
    from benchmarks.speed.workload import lengths

    sample_lengths = np.array(lengths(16, 8, 128))
    assert sample_lengths.shape == (16, 8)
    assert (sample_lengths.min(), sample_lengths.max()) == (1, 128)
    assert sample_lengths.mean() <= 64
    assert not (np.diff(sample_lengths.ravel()) >= 0).all()
    assert lengths(16, 8, 128) == sample_lengths.tolist()


def test_the_processor_stands_above_the_figures() -> None:
    machine_facts = {
        "cpu": "A Processor",
        "instructions": ["avx2", "avx512f"],
        "load_average": [0.5, 1, 2],
    }
    assert measured_on(machine_facts, 1) == "A Processor (avx2, avx512f); 1 threads; load 0.5"
    assert measured_on(machine(), 2).startswith(machine()["cpu"])
