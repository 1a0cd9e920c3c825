"""SIGKILL at random moments: a real process, killed again and again, ends with the same bits."""

from pathlib import Path

import pytest

from postgrad.jobs.verify_resume import verify_resume
from postgrad.observe.console import Console

RECIPE = """
job = "rl"
run_dir = "run"
steps = 8
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
[rollout]
max_new_tokens = 8
[learner]
lr = 1e-2
threads = 1
[checkpoint]
save_steps = 1
"""

SFT = ('"rl"', '"sft"')  # every further job joins with one line
GRPO = '[algorithm]\ntype = "grpo"\nkl_coef = 0.05\n'
BATCH = "[batch]\nrollout_batch_size = 8\nn_samples_per_prompt = 4\n"


@pytest.mark.slow
@pytest.mark.parametrize("ema_decay", ["0.0", "0.9"])
@pytest.mark.parametrize("job", ["sft", "grpo with kl"])
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(
    job: str, ema_decay: str, tmp_path: Path
) -> None:
    text = RECIPE.replace(*SFT) if job == "sft" else f"{RECIPE}{GRPO}{BATCH}"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text, "utf-8")
    words = ["--steps", "8", "--learner.ema_decay", ema_decay]
    report = verify_resume(recipe, words, 5, Console("quiet"), seed=len(job))
    assert report["kills"] >= 1
    assert {"policy.weights.safetensors", "policy.optimizer.safetensors"} <= set(report["same"])
    assert {"metrics.jsonl", "eval.jsonl"} <= set(report["same"])
    assert ("policy.ema.safetensors" in report["same"]) == (ema_decay != "0.0")
