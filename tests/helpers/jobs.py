"""Every job there is, so small that a run lasts a second. A new job joins with one line."""

import json
import tomllib
from pathlib import Path
from typing import NamedTuple

# The least that is a model; the table of its tokenizer stays open.
MODEL = """
[model.init]
type = "qwen3"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
[model.init.tokenizer]
kind = "characters"
"""
PHRASES = 'phrases = ["Spell this word backward (example: sun -> nus): "]\n'
COMMON = (
    """
job = "{job}"
run_dir = "run"
steps = 4
"""
    + MODEL
    + PHRASES
    + """[checkpoint]
save_steps = 1
max_ckpt_num = 1
[learner]
lr = 1e-2
threads = 1
ema_decay = {ema_decay}
"""
)
WORDS = """
[data]
path = "reasoning-gym:spell_backward"
size = 40
max_len = 48
task = { min_word_len = 3, max_word_len = 4 }
[eval]
seed = 1
size = 4
every = 2
max_new_tokens = 6
[[rewards]]
type = "regex"
pattern = "[a-m]"
[scoring]
workers = 1
"""
PAIRS = """
[data]
path = "{rows}"
max_len = 64
cache = {cache}
[eval]
path = "{held_out}"
every = 2
[batch]
train_batch_size = 6
"""
STEPS = PAIRS.replace("rows}", "step_rows}").replace("held_out}", "held_out_steps}") + (
    '[algorithm]\ntype = "process_reward"\n'
)
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
GRPO = f'{RL}[algorithm]\ntype = "grpo"\nkl_coef = 0.05\nreward_scaling = "running"\n'
STALE = RL.replace("max_new_tokens", "max_staleness = 2\nslots = 5\nmax_new_tokens") + (
    '[algorithm]\ntype = "grpo"\ncorrection = "tis"\n'
)
PPO = f"""{RL}epochs_per_rollout = 2
train_batch_size = 8
[algorithm]
type = "ppo"
critic_warmup_steps = 1
reward_scaling = "running"
kl_coef = 0.05
kl_target = 0.01
kl_horizon = 16
[critic.learner]
lr = 2e-2
"""
OPD = f"""{RL}[algorithm]
type = "on_policy_distillation"
reward_coef = 0.5
[teacher.model]
path = "{{teacher}}"
"""
TEXT = OPD.replace("[teacher.model]", '[teacher]\nalign = "text"\n[teacher.model]').replace(
    "{teacher}", "{other}"
)
LORA = "[model.lora]\nrank = 4\nalpha = 8\ndropout = 0.2\n"


class Job(NamedTuple):
    """role: what its files in a checkpoint begin with."""

    job: str
    ema_decay: float
    sections: str
    role: str = "policy"


JOBS = {
    "sft": Job("sft", 0.0, WORDS + SFT),
    "sft with ema": Job("sft", 0.9, WORDS + SFT),
    "grpo with kl": Job("rl", 0.0, WORDS + GRPO),
    "dapo with a reference that follows": Job("rl", 0.0, WORDS + BATCH + DAPO),
    "grpo with kl and ema": Job("rl", 0.9, WORDS + GRPO),
    "grpo of stale samples": Job("rl", 0.0, WORDS + STALE),
    "grpo with lora": Job("rl", 0.0, WORDS + GRPO + LORA),
    "grpo in four bits": Job("rl", 0.0, WORDS + GRPO + LORA + '[model]\nquantize = "4bit"\n'),
    "on-policy distillation": Job("rl", 0.0, WORDS + OPD),
    "on-policy distillation by text": Job("rl", 0.0, WORDS + TEXT),
    "ppo": Job("rl", 0.0, WORDS + PPO),
    "reward model": Job("reward", 0.0, PAIRS, "reward_model"),
    "reward model with ema": Job("reward", 0.9, PAIRS, "reward_model"),
    "reward model with lora": Job("reward", 0.0, PAIRS + LORA, "reward_model"),
    "process reward model": Job("reward", 0.0, STEPS, "reward_model"),
    "dpo": Job("preference", 0.0, PAIRS),
    "kto": Job("preference", 0.0, PAIRS + '[algorithm]\ntype = "kto"\n'),
}


def write_recipe(name: str, to: Path) -> Path:
    """The recipe of a job, as a file in the folder `to`."""
    job = JOBS[name]
    path = to / "recipe.toml"
    text = COMMON.format(job=job.job, ema_decay=job.ema_decay) + job.sections
    if job.job == "rl":  # fresh models never stop, and what a run tells is compared
        text += '[sentinels]\ntruncation = "off"\n'
    best = "eval/reward" if job.sections.startswith(WORDS) else "eval/accuracy"
    text = text.replace("max_ckpt_num = 1", f'max_ckpt_num = 1\nbest_metric = "{best}"')
    for place, (first, rows) in {"rows": (0, 30), "held_out": (30, 6)}.items():
        text = text.replace(f"{{{place}}}", str(write_pairs(to / f"{place}.jsonl", first, rows)))
    if "{teacher}" in text:
        text = text.replace("{teacher}", str(write_teacher(to / "teacher")))
    if "{other}" in text:
        pairs = MODEL.replace("characters", "bpe") + "vocab_size = 500\n"
        text = text.replace("{other}", str(write_teacher(to / "other", pairs)))
    for place, (first, rows) in {"step_rows": (0, 30), "held_out_steps": (30, 6)}.items():
        text = text.replace(f"{{{place}}}", str(write_steps(to / f"{place}.jsonl", first, rows)))
    # One keeps its reference logprobs for the next process, the other computes them each time.
    path.write_text(text.replace("{cache}", "false" if name == "kto" else "true"), "utf-8")
    return path


def write_teacher(path: Path, model: str = MODEL) -> Path:
    """A fresh model with other weights than the jobs' models, and the tokens of `model`."""
    from postgrad.models.fresh import make_fresh  # torch, which few readers of this file need
    from postgrad.models.settings import ModelInit

    table = tomllib.loads(model + PHRASES)["model"]["init"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = () if model == MODEL else [f"{a}{b}" for a in letters for b in letters]
    make_fresh(ModelInit.model_validate_json(json.dumps(table)), texts, 7, path)
    return path


def write_pairs(path: Path, first: int = 0, rows: int = 30) -> Path:
    """Preferences of numbers: what is preferred is one more, with a full stop."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(first, first + rows):
            chosen, rejected = f"{number + 1}.", f"{number - 1}"
            row = {"prompt": f"after {number}?", "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(row) + "\n")
    return path


def write_steps(path: Path, first: int = 0, rows: int = 30) -> Path:
    """Counting in three steps, each with a label: in every other row the second step is wrong."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(first, first + rows):
            steps = [str(number + n) for n in (1, 2 if number % 2 else 4, 3)]
            labels = [True, bool(number % 2), True]
            row = {"prompt": f"from {number}?", "completions": steps, "labels": labels}
            file.write(json.dumps(row) + "\n")
    return path
