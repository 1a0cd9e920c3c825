"""Benchmarks that no suite needs still run: each at a small size, in a process of its own.

Those that take over 15 CPU seconds, and those on ranks, are long: run them when you change one.
"""

import gzip
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak

ROOT = Path(__file__).parents[2]
PAIRS = "hh-rlhf-harmless.jsonl.gz"
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
    measured = json.loads(path.read_text("utf-8"))
    assert name in measured["command"]
    return measured


def needs_faults() -> None:
    """As tests/faults."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("faults are injected by a preloaded C library: Linux and a C compiler")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two files that benchmarks read, of a few rows."""
    folder = tmp_path_factory.mktemp("data")
    questions = [
        {"question": f"Ann has {n} pens and buys {n % 7}. How many?", "answer": f"#### {n + n % 7}"}
        for n in range(64)
    ]
    prompt = "\n\nHuman: how far is place {0}?\n\nAssistant: "
    pairs = [{side: prompt.format(n) + text for side, text in ANSWERS.items()} for n in range(340)]
    for name, rows in (("gsm8k.jsonl", questions), (PAIRS, pairs)):
        text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        (folder / name).write_bytes(gzip.compress(text) if name == PAIRS else text)
    return folder


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
    measured = result("head_memory", tmp_path, "--entries", "64", "--vocabulary", "1000")
    chunked, unchunked = measured["chunked"]["mean_logprob"], measured["whole"]["mean_logprob"]
    assert chunked == pytest.approx(unchunked, abs=1e-5)


@pytest.mark.slow
def test_a_save_is_timed_beside_a_copy_of_real_tensors(tmp_path: Path) -> None:
    size = ["--hidden", "64", "--layers", "1", "--steps", "4"]
    measured = result("save_pause", tmp_path, *size)
    assert measured["checkpoint_bytes"] > 1e6
    seconds = ("step_seconds", "pause_seconds", "one_copy_seconds", "torch_save_seconds")
    assert all(measured[name] > 0 for name in seconds)


@pytest.mark.slow
def test_programs_and_verifiers_are_scored_inside_the_sandbox_and_outside(tmp_path: Path) -> None:
    programs = ["--programs", "4", "--workers", "1", "--rounds", "1"]
    assert result("sandbox", tmp_path, *programs)
    assert result("verifier_sandbox", tmp_path, "--samples", "4", "--rounds", "1")


@pytest.mark.long
def test_observing_is_timed_in_pairs_of_runs(tmp_path: Path) -> None:
    small = ["--pairs", "1", "--steps", "5", "--hidden", "32", "--prompts", "4"]
    assert result("observing", tmp_path, *small)


@pytest.mark.long
def test_pairs_share_their_opening_and_an_adapter_its_base(data: Path, tmp_path: Path) -> None:
    measured = result("pairs", tmp_path, str(data / PAIRS), "--rounds", "1", "--heads", "1")
    assert measured["sharing"]["tokens"]["shared"] < measured["sharing"]["tokens"]["whole"]
    assert (
        measured["lora"]["lora"]["trained_bytes"] < measured["lora"]["full"]["trained_bytes"] / 10
    )
    assert all(other["distance"] < 1e-5 for other in measured["invariance"].values())


@pytest.mark.slow
def test_packed_and_padded_updates_are_the_same_update(tmp_path: Path) -> None:
    small = ["--rounds", "1", "--threads", "1", "--prompts", "2"]
    measured = result("learner", tmp_path, *small)
    assert measured["samples"] == 16
    assert measured["first_update_distance"] < 1e-3
    assert all(len(seconds) == 1 for seconds in measured["seconds"].values())


@pytest.mark.slow
def test_an_update_with_shared_states_is_that_with_copies_of_prompts(tmp_path: Path) -> None:
    small = ["--rounds", "1", "--prompts", "64", "--budget", "1024"]
    cases = result("hybrids", tmp_path, *small)["cases"]
    assert [case["type"] for case in cases] == ["qwen3_next", "mamba2"]
    for case in cases:
        assert case["tokens"]["shared"] < case["tokens"]["copies"]
        assert case["first_update_distance"] < 1e-3


@pytest.mark.long
def test_replay_wide_routers_and_a_balance_loss_do_what_they_are_for(tmp_path: Path) -> None:
    small = ["--tokens", "16", "--updates", "20", "--seeds", "1", "--rows", "8"]
    measured = result("mixtures", tmp_path, *small)
    replay = measured["replay"]["4 experts, 2 a token"]
    half, full = replay["bfloat16"], replay["float32"]
    assert half["routed_apart"] > full["routed_apart"] == 0.0
    assert half["sampled"]["kl"] < half["off"]["kl"]
    many = measured["choices"]["128 experts, 8 a token"]
    assert many["auto"] > 0.01 > many["float32"]
    without, balanced = (measured["balance"][key][0]["router_balance"] for key in ("0.0", "0.01"))
    assert len(without) == 20
    assert balanced[0] == without[0]
    assert balanced[-1] < without[-1]


@pytest.mark.slow
def test_sampling_is_timed_without_a_grammar_and_with_each(data: Path, tmp_path: Path) -> None:
    small = ["--rounds", "1", "--samples", "2", "--tokens", "16"]
    measured = result("grammar", tmp_path, "--data", str(data), *small)["grammars"]
    assert measured["none"]["ratio"] == 1.0
    assert len(measured) == 4
    assert all(grammar["median"] > 0 for grammar in measured.values())


@pytest.mark.slow
def test_episodes_with_what_is_kept_compute_fewer_tokens(data: Path, tmp_path: Path) -> None:
    small = ["--rounds", "1", "--turns", "3", "--tokens", "4"]
    (measured,) = result("turns", tmp_path, "--data", str(data), *small)["rounds"]
    kept, again = measured["kept"], measured["computed again"]
    assert 300 < kept["sampled_tokens"] == again["sampled_tokens"] <= 32 * 3 * 4
    assert kept["prompt_tokens"] < again["prompt_tokens"] / 3


@pytest.mark.long
def test_slow_calls_of_samples_wait_for_each_other_only_one_after_the_other(tmp_path: Path) -> None:
    measured = result("side_by_side", tmp_path, "--steps", "1")
    call, samples = measured["call_seconds"], measured["samples"]
    assert min(measured["one_after_the_other"]["seconds"]) >= call * samples
    assert min(measured["side_by_side"]["seconds"]) >= call


@pytest.mark.long
def test_longer_updates_are_estimated_longer_and_are(data: Path, tmp_path: Path) -> None:
    small = ["--jobs", "sft", "--rounds", "1", "--cases", "2", "--size", "0.4M"]
    short, long = result("plan_time", tmp_path, "--data", str(data), *small)["rows"]
    assert (short["phase"], long["phase"]) == ("train", "train")
    assert "batch 8" in short["name"]
    assert "batch 128" in long["name"]
    for key in ("estimated", "measured"):
        assert 0 < short[key] < long[key]


@pytest.mark.long
@pytest.mark.skipif("POSTGRAD_TEST_DATA" not in os.environ, reason="no real data")
def test_the_memory_of_a_run_is_the_one_estimated(tmp_path: Path) -> None:
    data = os.environ["POSTGRAD_TEST_DATA"]  # rows that fill micro-batches, as a plan assumes
    path = tmp_path / "plan_memory.json"
    run("plan_memory", "--data", data, "--name", "sft 6M", "--to", str(path))
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert row["name"] == "sft 6M"
    assert row["within"]
    assert abs(row["miss"]) < 0.25
    assert row["miss"] == pytest.approx(row["estimated"] / row["measured"] - 1, abs=1e-4)


@pytest.mark.long
def test_a_reward_model_and_that_of_trl_read_the_same_tokens_and_learn_the_same(
    data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    small = ["--steps", "2", "--seeds", "1"]
    measured = result("reward_model", tmp_path, str(data / PAIRS), *small)
    (seed,) = measured["seeds"]
    assert seed["trl"]["tokens"]["different"] == 0
    assert seed["first_losses_apart"] < 1e-5
    assert seed["postgrad"]["held_out"] == seed["trl"]["held_out"]
    assert seed["postgrad"]["own_held_out"] == pytest.approx(seed["postgrad"]["held_out"])


@pytest.mark.slow
def test_killed_runs_are_counted_and_compared(tmp_path: Path) -> None:
    needs_faults()
    measured = result("random_kills", tmp_path, "--kills", "3", "--steps", "3")
    assert measured["kills"] == sum(measured["kills_by_max_staleness"].values()) == 3
    assert sum(measured["runs_compared_by_max_staleness"].values()) >= 1
    assert measured["tickets"]["trained"] > 0


@pytest.mark.long
def test_a_soak_counts_kills_and_looks_at_memory(tmp_path: Path) -> None:
    needs_faults()
    short = ["--hours", "0", "--kills", "3", "--steps", "8", "--life", "1"]
    looks = ["--settled", "0.2", "--look", "0.05", "--flat", "100"]
    measured = result("soak", tmp_path, *short, *looks)
    assert measured["whole"]
    assert sum(measured["kills_by_max_staleness"].values()) == 3
    assert sum(measured["ended_runs_by_max_staleness"].values()) >= 1
    assert measured["memory"]["looks"] > 0


def test_a_soak_names_memory_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = soak.Memory(settled=1.0, every=1.0, server=[100, 105])
    memory.looks = [soak.Look(float(at), 1.0 + at % 3, 100 + at) for at in range(30)]
    figures = memory.figures()
    assert figures["median_bytes_by_tenth"] == [101 + 3 * tenth for tenth in range(10)]
    assert figures["median_bytes_by_age"] == {"1 s": 114, "2 s": 115}  # of 10 looks, of 20
    assert soak.grown(figures, 1.1) == ["over the soak"]
    assert soak.grown(figures, 1.3) == []
    monkeypatch.setattr(soak.Soak, "__init__", lambda *_: None)
    monkeypatch.setattr(soak.Soak, "run", lambda _: {"memory": {}})
    monkeypatch.setattr(sys, "argv", ["soak"])
    with pytest.raises(SystemExit, match=r"no life was older than 10 s.*shorter --settled"):
        soak.main()


@pytest.mark.ranks
@pytest.mark.long
def test_two_ranks_share_the_state_of_a_sharded_model(tmp_path: Path) -> None:
    model = ["--layers", "4", "--hidden", "256"]
    measured = result("ranks_memory", tmp_path, "--only", "stage none", "stage zero3", *model)
    none, sharded = measured["bytes_per_parameter"].values()
    assert none["between"] - sharded["between"] == pytest.approx(6.0, abs=1.0)  # of 12, half
    assert sharded["update"] < none["update"]


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize("kind", ["overlapped", "free"])
def test_steps_that_overlap_are_timed_beside_steps_that_do_not(kind: str, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("each side is bound to a core of its own")
    small = ["--pairs", "2", "--warm", "1", "--prompts", "4", "--mean", "8", "--most", "16"]
    measured = result("overlap", tmp_path, "--of", kind, *small, "--hidden", "64")
    assert len(measured["ratios"]) == 2
    assert measured["steps"]
