"""Benchmarks that no suite needs still run: each at a small size, in a process of its own."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ANSWERS = {"chosen": "some miles", "rejected": "I do not know"}
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if "argparse.ArgumentParser(" in path.read_text("utf-8")
)


def run(name: str, *options: str) -> None:
    """Runs a benchmark to its end."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests", "."))
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        capture_output=True,
        text=True,
        timeout=600.0,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def result(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """The JSON that it writes, which names the command that made it."""
    path = folder / f"{name}.json"
    run(name, *options, "--to", str(path))
    found = json.loads(path.read_text("utf-8"))
    assert name in found["command"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_what_it_measures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.slow
def test_the_chunked_head_has_the_logprobs_of_whole_logits(tmp_path: Path) -> None:
    found = result("head_memory", tmp_path, "--entries", "64", "--vocabulary", "1000")
    chunked, whole = found["chunked"]["mean_logprob"], found["whole"]["mean_logprob"]
    assert chunked == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_a_save_is_timed_beside_a_copy_of_real_tensors(tmp_path: Path) -> None:
    size = ["--hidden", "64", "--layers", "1", "--steps", "4"]
    found = result("save_pause", tmp_path, *size)
    assert found["checkpoint_bytes"] > 1e6
    seconds = ("step_seconds", "pause_seconds", "one_copy_seconds", "torch_save_seconds")
    assert all(found[name] > 0 for name in seconds)


@pytest.mark.slow
def test_programs_and_verifiers_are_scored_inside_the_sandbox_and_outside(tmp_path: Path) -> None:
    programs = ["--programs", "4", "--workers", "1", "--rounds", "1"]
    assert result("sandbox", tmp_path, *programs)
    assert result("verifier_sandbox", tmp_path, "--samples", "4", "--rounds", "1")


@pytest.mark.slow
def test_observing_is_timed_in_pairs_of_runs(tmp_path: Path) -> None:
    small = ["--pairs", "1", "--steps", "5", "--hidden", "32", "--prompts", "4"]
    assert result("observing", tmp_path, *small)


@pytest.mark.slow
def test_pairs_share_their_opening_and_an_adapter_its_base(tmp_path: Path) -> None:
    said = "\n\nHuman: how far is place {0}?\n\nAssistant: "
    rows = [{side: said.format(n) + answer for side, answer in ANSWERS.items()} for n in range(40)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    found = result("pairs", tmp_path, str(data))
    assert found["sharing"]["tokens"]["shared"] < found["sharing"]["tokens"]["whole"]
    assert found["lora"]["lora"]["trained_bytes"] < found["lora"]["full"]["trained_bytes"] / 10


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["overlapped", "free"])
def test_steps_that_overlap_are_timed_beside_steps_that_do_not(kind: str, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("each side is bound to a core of its own")
    small = ["--pairs", "2", "--warm", "1", "--prompts", "4", "--mean", "8", "--most", "16"]
    found = result("overlap", tmp_path, "--of", kind, *small, "--hidden", "64")
    assert len(found["ratios"]) == 2
    assert found["steps"]
