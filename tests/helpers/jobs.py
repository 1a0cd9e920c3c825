"""Every job there is, so small that a run lasts a second. A new job joins with one line."""

from pathlib import Path

COMMON = """
job = "{job}"
run_dir = "run"
steps = 4
[model.init]
type = "qwen3"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
[model.init.tokenizer]
kind = "characters"
phrases = ["Spell this word backward (example: sun -> nus): "]
[data]
path = "reasoning-gym:spell_backward"
size = 40
max_len = 48
task = {{ min_word_len = 3, max_word_len = 4 }}
[eval]
seed = 1
size = 4
every = 2
max_new_tokens = 6
[[rewards]]
type = "reasoning_gym"
[scoring]
workers = 1
[checkpoint]
save_steps = 1
max_ckpt_num = 1
best_metric = "eval/reward"
[learner]
lr = 1e-2
threads = 1
ema_decay = {ema_decay}
"""
SFT = "[batch]\ntrain_batch_size = 8\n"
BATCH = "[batch]\nrollout_batch_size = 4\nn_samples_per_prompt = 4\n"
RL = f"[rollout]\nmax_new_tokens = 6\n{BATCH}"
DAPO = """[rollout]
dynamic_sampling = true
max_rounds = 2
curriculum = { retire_at = 0.9 }
max_new_tokens = 6
[algorithm]
type = "dapo"
kl_coef = 0.05
[reference]
ema_decay = 0.5
"""

JOBS = {  # name: job, ema_decay, sections
    "sft": ("sft", 0.0, SFT),
    "sft with ema": ("sft", 0.9, SFT),
    "grpo with kl": ("rl", 0.0, f'{RL}[algorithm]\ntype = "grpo"\nkl_coef = 0.05\n'),
    "dapo with a reference that follows": ("rl", 0.0, f"{BATCH}{DAPO}"),
    "grpo with kl and ema": ("rl", 0.9, f'{RL}[algorithm]\ntype = "grpo"\nkl_coef = 0.05\n'),
}


def write_recipe(name: str, to: Path) -> Path:
    """The recipe of a job, as a file in the folder `to`."""
    job, ema_decay, sections = JOBS[name]
    path = to / "recipe.toml"
    path.write_text(COMMON.format(job=job, ema_decay=ema_decay) + sections, "utf-8")
    return path
