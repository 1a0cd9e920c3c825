"""Whole runs that sample with real vLLM, and what happens to them when it dies."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import postgrad
from helpers.runs import lines
from postgrad.core.errors import RunError
from postgrad.observe.console import Console
from postgrad.observe.sentinels.publish import NOISE
from postgrad.rollout.vllm import process
from postgrad.tools.verify_resume import fingerprint
from postgrad.training.rl import RLJob
from postgrad.training.start import train

pytestmark = pytest.mark.vllm

# Heads as wide as vLLM's attention on CPUs wants them; learning rate and step that move weights.
MODEL = {
    "init": {
        "type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tokenizer": {
            "kind": "characters",
            "phrases": ["Spell this word backward (example: sun -> nus): "],
        },
    }
}
RUN: dict[str, Any] = {
    "model": MODEL,
    "batch": {"rollout_batch_size": 16, "n_samples_per_prompt": 8},
    "eval": {"every": 1, "at_start": True},
}


def by_step(recipe: Any, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / name)


def left_behind() -> set[str]:
    """What a run may leave outside its directory: shared memory that nobody holds any more (others
    on this machine may hold some), and temporary folders.
    """
    names = ("postgrad-vllm", "vllm_dist_", "psm_", "torch_")
    folders = (Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp")))
    paths = {str(p) for folder in folders for p in folder.iterdir() if p.name.startswith(names)}
    return paths - {path for path in paths if path.startswith("/dev/shm") and path in held()}


def left_in_the_end(before: set[str]) -> set[str]:
    """What is left besides, once processes that Ray has ended have been tidied up after."""
    end = time.monotonic() + 60.0
    while (left := left_behind() - before) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def held() -> set[str]:
    """Files in the memory of a process of this machine."""
    mappings: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has just ended, or is another user's
            lines = maps.read_text("utf-8", "replace").splitlines()
            mappings |= {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
    return mappings


def children_with_vllm() -> list[psutil.Process]:
    vllm_processes: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if str(process.ENTRY) in child.cmdline():
                vllm_processes.append(child)
    return vllm_processes


OTHERS: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _engines_of_other_tests() -> None:
    """tests/contracts keeps one for the whole session."""
    OTHERS.update(children_with_vllm())


def processes() -> list[psutil.Process]:
    """Of vLLM, that this test started."""
    return [vllm_process for vllm_process in children_with_vllm() if vllm_process not in OTHERS]


def lives(vllm_process: psutil.Process) -> bool:
    """Whether a process does more than be waited for."""
    with suppress(psutil.NoSuchProcess):
        return vllm_process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def stopped_after(condition: Callable[[], bool], action: Callable[[], None]) -> Iterator[None]:
    """Does `what` beside the block, once the condition holds."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            if condition():
                action()
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture(scope="module")
def sampled_by_vllm(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Any], Any]:
    """The run that several tests look at, made once."""
    recipes: list[Any] = []

    def run(make: Any) -> Any:
        if not recipes:
            folder = tmp_path_factory.mktemp("vllm") / "run"
            recipe = make("rl", **RUN, rollout={"type": "vllm"}).model_copy(
                update={"run_dir": str(folder)}
            )
            train(recipe, Console("quiet"))
            recipes.append(recipe)
        return recipes[0]

    return run


def test_a_grpo_run_gets_fresh_weights_at_every_step(sampled_by_vllm, make_recipe):
    recipe = sampled_by_vllm(make_recipe)
    metrics = by_step(recipe)
    assert len(metrics) == 3
    for metric_line in metrics:
        assert metric_line["sentinel/publish_difference"] < 1e-4
        assert metric_line["sentinel/policy_moved"] > 1e-2
    samples = by_step(recipe, "samples.jsonl")
    for step in (1, 2, 3):
        versions = {
            version
            for sample in samples
            if sample["step"] == step
            for version, _ in sample["policy_version"]
        }
        assert versions == {step - 1}


def test_its_rewards_agree_with_those_of_the_built_in_engine(sampled_by_vllm, make_recipe, console):
    ours = make_recipe("rl", run_dir="ours", **RUN)
    ours = ours.model_copy(update={"steps": 1})
    train(ours, console)
    theirs = sampled_by_vllm(make_recipe)
    rewards_by_engine = [
        np.array(
            [sample["total"] for sample in by_step(recipe, "samples.jsonl") if sample["step"] == 1]
        )
        for recipe in (ours, theirs)
    ]
    assert [len(rewards) for rewards in rewards_by_engine] == [128, 128]
    noise = np.sqrt(sum(rewards.var(ddof=1) / len(rewards) for rewards in rewards_by_engine))
    assert noise > 0
    assert abs(rewards_by_engine[0].mean() - rewards_by_engine[1].mean()) < 4 * noise


def test_greedy_answers_equal_the_built_in_engines_after_every_publish(
    sampled_by_vllm, make_recipe, console
):
    """The built-in engine's run replays the samples, so that its policy goes through the same
    weights.
    """
    theirs = sampled_by_vllm(make_recipe)
    rollout = {"source": "replay", "replay_path": theirs.run_dir}
    ours = make_recipe("rl", run_dir="ours", **RUN, rollout=rollout)
    train(ours, console)
    evaluations = [by_step(recipe, "eval.jsonl") for recipe in (ours, theirs)]
    assert len(evaluations[0]) == len(evaluations[1]) == 4
    for our_line, their_line in zip(*evaluations, strict=True):
        assert our_line["greedy_accuracy"] == their_line["greedy_accuracy"]


def test_a_run_in_bfloat16_gets_fresh_weights_at_every_step(make_recipe, console):
    recipe = make_recipe("rl", **RUN, rollout={"type": "vllm", "dtype": "bfloat16"})
    train(recipe.model_copy(update={"steps": 2}), console)
    metrics = by_step(recipe)
    assert len(metrics) == 2
    for metric_line in metrics:
        assert 1e-3 < metric_line["sentinel/publish_difference"] < NOISE["bfloat16"]
        assert metric_line["sentinel/policy_moved"] > 4 * NOISE["bfloat16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stale_head_is_caught(dtype, make_recipe, console, monkeypatch, tmp_path):
    """vLLM 0.32 leaves the packed head of a tied model as it was; our part that mends it is taken
    out. In bfloat16 it packs weights where the processor has AVX-512: elsewhere no head is stale.
    """
    packed = dtype == "float32" or torch.cpu._is_avx512_supported()
    package = tmp_path / "postgrad"
    shutil.copytree(Path(postgrad.__file__).parent, package)
    transfer = package / "rollout" / "vllm" / "transfer.py"
    text = transfer.read_text("utf-8")
    broken = text.replace("            pack_tied_heads(self.model)\n", "            pass\n")
    assert broken != text
    transfer.write_text(broken, "utf-8")
    monkeypatch.setattr(process, "ENTRY", transfer.parent / "entry.py")
    stale = pytest.raises(RunError, match="does not have the policy's weights")
    with stale if packed else nullcontext():
        train(make_recipe("rl", **RUN, rollout={"type": "vllm", "dtype": dtype}), console)
    assert processes() == []


def test_a_vllm_that_does_not_start_ends_the_run_with_its_log(make_recipe, console, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "NO SUCH LEVEL")
    before = left_behind()
    with pytest.raises(RunError, match=r"(?s)vLLM engine 0 .*NO SUCH LEVEL"):
        train(make_recipe("rl", **RUN, rollout={"type": "vllm"}), console)
    assert processes() == []
    assert left_behind() == before


def test_a_vllm_that_is_killed_ends_the_run_with_its_cause_and_its_workers(make_recipe, console):
    """Of two workers, which share the model and know nothing of the run."""
    recipe = make_recipe("rl", **RUN, rollout={"type": "vllm", "vllm": {"tensor_parallel": 2}})
    metrics = Path(recipe.run_dir) / "metrics.jsonl"
    before = left_behind()
    workers: list[psutil.Process] = []

    def kill() -> None:
        (engine,) = processes()
        workers.extend(engine.children(recursive=True))
        engine.kill()

    killed = stopped_after(lambda: metrics.exists() and bool(metrics.read_text("utf-8")), kill)
    once = recipe.cluster.model_copy(update={"max_restarts": 0})  # else it goes on by itself
    long = recipe.model_copy(update={"steps": 10000, "cluster": once})
    with killed, pytest.raises(RunError, match=r"vLLM engine 0 died \(exit code -9\)"):
        train(long, console)
    assert len(workers) >= 2
    assert [worker for worker in workers if lives(worker)] == []
    assert left_behind() == before
    for metric_line in by_step(recipe):
        assert metric_line["sentinel/publish_difference"] < 1e-4
        assert metric_line["sentinel/policy_moved"] > 1e-2
    events = [event["event"] for event in by_step(recipe, "events.jsonl")]
    assert "started" in events


def test_a_resumed_run_goes_on_with_the_checkpoints_weights(make_recipe, console):
    recipe = make_recipe("rl", **RUN, rollout={"type": "vllm", "vllm": {"engines": 2}})
    train(recipe.model_copy(update={"steps": 1}), console)
    train(recipe.model_copy(update={"steps": 2}), console)
    metrics = by_step(recipe)
    assert [metric_line["step"] for metric_line in metrics] == [1, 2]
    assert json.loads((Path(recipe.run_dir) / "summary.json").read_text("utf-8"))["steps"] == 2
    assert all(metric_line["sentinel/publish_difference"] < 1e-4 for metric_line in metrics)


def test_two_vllm_engines_in_each_of_two_ray_workers_sample_and_one_that_dies_is_replaced(
    make_recipe, console, monkeypatch
):
    cluster = {"type": "ray", "rollout": {"workers": 2}, "start_seconds": 600.0}
    rollout = {"type": "vllm", "vllm": {"engines": 2}}
    recipe = make_recipe("rl", **RUN, rollout=rollout, cluster=cluster)
    before, step = left_behind(), RLJob.step

    def disturbed(self: Any, state: Any) -> Any:
        if state.step == 1:  # one of the two processes of worker 1
            placed = [e for e in by_step(recipe, "events.jsonl") if e.get("role") == "rollout"]
            descendants = psutil.Process(placed[1]["places"][0][1]).children(recursive=True)
            next(
                descendant
                for descendant in descendants
                if str(process.ENTRY) in descendant.cmdline()
            ).kill()
        elif state.step == 2:
            starting = self._parts.engine._members[1].starting
            assert not wait([starting], 600.0).not_done
        return step(self, state)

    monkeypatch.setattr(RLJob, "step", disturbed)
    train(recipe, console)
    metrics = by_step(recipe)
    assert len(metrics) == 3
    for metric_line in metrics:
        assert metric_line["sentinel/publish_difference"] < 1e-4
        assert metric_line["sentinel/policy_moved"] > 1e-2
    # 16 prompts of 8 samples, dealt in turn to the workers and in each to its engines
    request_counts = [metrics[0][f"engine/{n}.{m}/requests"] for n in range(2) for m in range(2)]
    assert request_counts == [32.0] * 4
    samples = by_step(recipe, "samples.jsonl")
    drawn = sorted((sample["ticket"], sample["sample"]) for sample in samples)
    assert drawn == [(ticket, sample) for ticket in range(48) for sample in range(8)]
    versions = {
        (sample["step"], version) for sample in samples for version, _ in sample["policy_version"]
    }
    assert versions == {(1, 0), (2, 1), (3, 2)}
    events = [event for event in by_step(recipe, "events.jsonl") if event.get("engine") == 1]
    assert [event["event"] for event in events] == ["engine_lost", "engine_joined"]
    assert "died (exit code -9)" in events[0]["message"]
    assert processes() == []
    assert left_in_the_end(before) == set()
    for worker in range(2):
        for engine in range(2):
            log = Path(recipe.run_dir) / f"rollout-{worker}" / f"vllm-{engine}.log"
            assert "vLLM" in log.read_text("utf-8")


TRAINS = """\
import json, sys
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.training.rl import RLJob
from postgrad.training.start import train
train(parse_recipe(json.load(sys.stdin)), Console("quiet"))
"""


def killed_after(steps: int, recipe: Any) -> None:
    """A run in a process of its own, which SIGKILL ends in the step after `steps`."""
    metrics = Path(recipe.run_dir) / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-c", TRAINS], stdin=subprocess.PIPE) as run:
        assert run.stdin is not None
        run.stdin.write(json.dumps(recipe.dump()).encode())
        run.stdin.close()
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
            assert run.poll() is None
            time.sleep(0.02)
        run.kill()


LIVE = {"type": "vllm", "dynamic_sampling": True, "max_rounds": 2}


@pytest.mark.parametrize("in_flight", [True, pytest.param(False, marks=pytest.mark.long)])
def test_samples_ahead_are_neither_lost_nor_doubled_by_a_kill_and_replay_to_the_same_weights(
    in_flight, make_recipe, console
):
    rollout = {
        "max_staleness": 2,
        "in_flight_updates": in_flight,
        "max_new_tokens": 12,
        "slots": 8,
        "stop": list("fgjqvyz0123456789"),  # of no phrase of the tokenizer
    }
    sections = {
        "model": MODEL,
        "steps": 6,
        "algorithm": {"correction": "tis"},
        "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
        "eval": {"at_start": False},
    }
    recipe = make_recipe("rl", **sections, rollout={**rollout, **LIVE})
    run = Path(recipe.run_dir)
    killed_after(3, recipe)
    assert list(run.glob("checkpoints/step-*/pending.safetensors"))
    assert (run / "metrics.jsonl").read_bytes().count(b"\n") < 6  # the last may be half a line
    train(recipe, console)
    assert [metric_line["step"] for metric_line in by_step(recipe)] == [1, 2, 3, 4, 5, 6]
    samples = by_step(recipe, "samples.jsonl")
    # trained, filtered or failed: every ticket in a single step, with all of its samples
    assert len({(sample["ticket"], sample["step"]) for sample in samples}) * 4 == len(samples)
    assert any(sample["finish_reason"] == "stop" for sample in samples)
    tickets = Counter(sample["ticket"] for sample in samples)
    assert tickets == dict.fromkeys(range(len(tickets)), 4)
    assert len(tickets) >= 6 * 4
    spans = {(sample["ticket"], sample["sample"]): sample["policy_version"] for sample in samples}
    ages = {
        sample["step"] - 1 - version
        for sample in samples
        for version, _ in sample["policy_version"]
    }
    assert {0, 1} <= ages <= {0, 1, 2}
    across = [
        sample for sample in samples if sample["step"] > 3 and sample["policy_version"][0][0] < 3
    ]
    assert across  # begun before the kill, trained on after it
    assert any(len(sample["policy_version"]) > 1 for sample in across) == in_flight
    for sample in samples:
        (turn,) = sample["turns"]
        written = len(turn["token_ids"])
        assert sum(n for _, n in spans[sample["ticket"], sample["sample"]]) == written <= 12
        assert np.isfinite(turn["logprobs"]).all()
        assert sample["finish_reason"] == "stop" or written == 12
        assert not any(stop in turn["text"][:-1] for stop in rollout["stop"])
    replayed = {**rollout, "source": "replay", "replay_path": recipe.run_dir}
    again = make_recipe("rl", run_dir="replayed", **sections, rollout=replayed)
    train(again, console)
    first, second = fingerprint(run), fingerprint(Path(again.run_dir))
    for name in ("policy.weights.safetensors", "policy.optimizer.safetensors"):
        assert first[name] == second[name]


ADAPTED: dict[str, Any] = {
    **RUN,
    "model": {**MODEL, "lora": {"rank": 4, "alpha": 16}},
    "learner": {"lr": 0.03},
    "rollout": {"type": "vllm", "vllm": {"lora": "adapter"}},
}


def of_an_adapter(recipe: Any) -> int:
    """Bytes of the adapter on all linear layers of MODEL's decoder, in float32."""
    init, rank = MODEL["init"], 4
    hidden, inside = init["hidden_size"], init["intermediate_size"]
    query, key = 64, 32  # widths: two heads and one of 32
    pairs = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    pairs += [(hidden, inside), (hidden, inside), (inside, hidden)]
    return 4 * rank * init["num_hidden_layers"] * sum(sum(pair) for pair in pairs)


@pytest.mark.parametrize(
    "cluster",
    [None, pytest.param({"type": "ray", "rollout": {"workers": 2}}, marks=pytest.mark.long)],
)
def test_an_adapter_is_sent_alone_and_samples_are_the_policys(cluster, make_recipe, console):
    placed = {} if cluster is None else {"cluster": {**cluster, "start_seconds": 600.0}}
    recipe = make_recipe("rl", **ADAPTED, **placed)
    before = left_behind()
    train(recipe.model_copy(update={"steps": 2}), console)
    metrics = by_step(recipe)
    assert len(metrics) == 2
    for metric_line in metrics:
        assert metric_line["sentinel/publish_difference"] < 1e-4
        assert metric_line["sentinel/policy_moved"] > 1e-2
        assert metric_line["publish/sent_bytes"] == pytest.approx(of_an_adapter(recipe), rel=0.01)
        assert metric_line["publish/by_file" if cluster is None else "publish/by_memory"] == 1.0
    assert left_in_the_end(before) == set()


def test_an_adapter_that_vllm_does_not_read_again_is_caught(
    make_recipe, console, monkeypatch, tmp_path
):
    """vLLM takes an adapter of a known number for one that it has, unless it is told."""
    package = tmp_path / "postgrad"
    shutil.copytree(Path(postgrad.__file__).parent, package)
    child = package / "rollout" / "vllm" / "child.py"
    text = child.read_text("utf-8")
    broken = text.replace("load_inplace=True", "load_inplace=False")
    assert broken != text
    child.write_text(broken, "utf-8")
    monkeypatch.setattr(process, "ENTRY", child.parent / "entry.py")
    with pytest.raises(RunError, match=r"does not have the policy's weights"):
        train(make_recipe("rl", **ADAPTED), console)
    assert processes() == []
