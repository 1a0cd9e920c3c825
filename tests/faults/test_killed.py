"""SIGKILL at any moment: a real process, killed again and again, ends with the same bits."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from postgrad.core.seeds import uniform

RECIPE = """
job = "rl"
run_dir = "RUN"
steps = 12
[model.init]
type = "qwen3"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
[model.init.tokenizer]
kind = "characters"
[data]
path = "reasoning-gym:spell_backward"
size = 100
max_len = 96
[eval]
seed = 1
size = 8
every = 2
max_new_tokens = 8
[[rewards]]
type = "reasoning_gym"
[algorithm]
type = "grpo"
[batch]
rollout_batch_size = 8
n_samples_per_prompt = 4
[rollout]
max_new_tokens = 8
[learner]
lr = 1e-2
threads = 1
[checkpoint]
save_steps = 1
"""
ENDINGS = ("_seconds", "_bytes", "_per_second")


def start(recipe: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "postgrad", "train", str(recipe), "--quiet"]
    return subprocess.Popen(command, start_new_session=True)


def recipe_in(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "recipe.toml"
    path.write_text(RECIPE.replace("RUN", str(folder / "run")), "utf-8")
    return path


def fingerprint(run: Path) -> dict[str, str]:
    """Hashes of the last checkpoint's tensors and of the logs without times."""
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (run / "checkpoints" / "step-000012").glob("*.safetensors")
    }
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text("utf-8").splitlines()]
        timeless = [{k: v for k, v in line.items() if not k.endswith(ENDINGS)} for line in lines]
        found[name] = hashlib.sha256(json.dumps(timeless).encode()).hexdigest()
    return found


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = recipe_in(tmp_path / "whole")
    began = time.monotonic()
    assert start(whole).wait() == 0
    seconds = time.monotonic() - began
    killed = recipe_in(tmp_path / "killed")
    kills = 0
    for moment in uniform(0, "kills", range(6)):
        process = start(killed)
        try:
            assert process.wait(timeout=seconds * (0.3 + 0.6 * float(moment))) == 0
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    assert start(killed).wait() == 0
    assert kills >= 1
    assert fingerprint(tmp_path / "killed" / "run") == fingerprint(tmp_path / "whole" / "run")
