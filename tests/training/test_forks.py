"""A fork that goes on has the bits of the run that it is from, for every job."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import JOBS, write_recipe
from helpers.runs import lines, tensors
from postgrad.api.run import Run
from postgrad.cli.main import main
from postgrad.tools.verify_resume import fingerprint

pytestmark = pytest.mark.slow

# Between them these have every kind of state that a checkpoint holds.
STATES = (
    "sft", "grpo with kl and ema", "dapo with a reference that follows", "grpo of stale samples",
    "grpo with lora", "ppo", "reward model with ema", "dpo",
)  # fmt: skip
KEPT = ("--checkpoint.max_ckpt_num", "9", "--quiet")


def run(*words: Any) -> None:
    assert main([*map(str, words)]) == 0


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=() if job in STATES else pytest.mark.long) for job in JOBS]
)
def test_a_fork_that_goes_on_has_the_same_bits(job: str, tmp_path: Path) -> None:
    source_run, fork = tmp_path / "run", tmp_path / "fork"
    packed = job in ("grpo with lora", "grpo of stale samples")
    compress = ("--observe.compress", "gzip" if packed else "none")
    run("train", write_recipe(job, tmp_path), "--run_dir", source_run, *KEPT, *compress)
    names = {path.name for path in (source_run / "checkpoints" / "step-000002").iterdir()}
    assert ("pending.safetensors" in names) == (job == "grpo of stale samples")
    assert (source_run / "samples.jsonl.gz").exists() == packed
    run("fork", source_run, "--checkpoint", "2", "--to", fork)
    assert [line["step"] for line in lines(fork / "metrics.jsonl")] == [1, 2]
    run("verify", fork)
    run("resume", fork, "--quiet")
    assert fingerprint(fork) == fingerprint(source_run)


def test_two_forks_try_two_ways_and_the_run_keeps_its_own(tmp_path: Path) -> None:
    source_run = tmp_path / "run"
    run("train", write_recipe("dpo", tmp_path), "--run_dir", source_run, *KEPT)
    before = fingerprint(source_run)
    for name, lr in (("low", "1e-3"), ("high", "1e-1")):
        run("fork", source_run, "--checkpoint", "2", "--to", tmp_path / name)
        words = ("--learner.lr", lr, "--allow-change", "learner.lr", "--quiet")
        assert main(["resume", str(tmp_path / name), *words[:2], "--quiet"]) == 2  # it is a change
        run("resume", tmp_path / name, *words)
        metrics = lines(tmp_path / name / "metrics.jsonl")
        assert [line["policy/lr"] for line in metrics] == [0.01, 0.01, float(lr), float(lr)]
    weights = [tensors(str(tmp_path / name), 4) for name in ("run", "low", "high")]
    name = next(name for name in weights[0] if name.startswith("policy.weights/"))
    assert (
        len({tuple(tensors_of_fork[name].flatten().tolist()) for tensors_of_fork in weights}) == 3
    )
    assert fingerprint(source_run) == before
    run("report", source_run, tmp_path / "low", "--to", tmp_path / "both.html")
    run("checkpoints", tmp_path / "low")


def test_a_run_that_is_under_way_is_forked_at_any_moment(tmp_path: Path) -> None:
    """It keeps one checkpoint, so that it removes those that are being read."""
    source_run, forks = tmp_path / "run", list[Path]()
    words = [
        "train",
        str(write_recipe("sft", tmp_path)),
        "--run_dir",
        str(source_run),
        "--steps",
        "24",
    ]
    command = [sys.executable, "-m", "postgrad", *words, "--quiet"]
    with subprocess.Popen([*command, "--eval.every", "0"]) as process:
        while process.poll() is None:
            to = tmp_path / f"fork-{len(forks)}"
            code = main(["fork", str(source_run), "--to", str(to)])
            assert (code == 0) == to.exists()
            if code == 0:
                assert all(info.complete for info in Run(to).checkpoints)
                forks.append(to)
    assert process.returncode == 0
    steps = [max(info.step for info in Run(to).checkpoints) for to in forks]
    assert len(set(steps)) > 3
    wanted = fingerprint(source_run)
    run("resume", forks[len(forks) // 2], "--quiet")
    assert fingerprint(forks[len(forks) // 2]) == wanted
    assert not list(tmp_path.glob(".fork-*"))


@pytest.mark.ranks
@pytest.mark.usefixtures("ray_cluster")
def test_a_fork_of_a_run_on_ranks_has_the_parts_of_each_and_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    source_run, fork = tmp_path / "run", tmp_path / "fork"
    ranks = ("--learner.ranks", "2", "--learner.sharding", "zero3", "--cluster.type", "ray")
    run("train", write_recipe("reward model", tmp_path), "--run_dir", source_run, *KEPT, *ranks)
    run("fork", source_run, "--checkpoint", "2", "--to", fork)
    (checkpoint,) = (fork / "checkpoints").glob("step-*")
    parts = sorted(path.name for path in checkpoint.glob("reward_model.weights.*"))
    assert [name.split(".")[2] for name in parts] == ["rank-0000-of-0002", "rank-0001-of-0002"]
    run("resume", fork, "--quiet")
    assert fingerprint(fork) == fingerprint(source_run)
