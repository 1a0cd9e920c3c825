"""Open-Instruct (open_instruct/finetune.py, dpo.py, reward_modeling.py, grpo_fast.py, ppo_*.py):
scripts, flags and YAML configs as recipes.

Its batch numbers are one device's in SFT, DPO and reward models. In GRPO a rollout is counted in
prompts and samples over all, and a micro-batch in packs of pack_length tokens; in its former PPO
`local_` numbers are one learner GPU's.
"""

import re
from collections.abc import Mapping
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.recipe.translate import common
from postgrad.recipe.translate.draft import Draft
from postgrad.recipe.translate.open_instruct_mixture import mixture
from postgrad.recipe.translate.open_instruct_options import RENAMED, RULES, UNSAID
from postgrad.recipe.translate.open_instruct_rl import answers, ranks
from postgrad.recipe.translate.options import Options
from postgrad.recipe.translate.reader import Source
from postgrad.recipe.translate.rules import apply, decimal, flag

JOBS = {
    "sft": ("sft", "sft"),
    "dpo": ("preference", "dpo"),
    "reward": ("reward", "bradley_terry"),
    "grpo": ("rl", "grpo"),
    "ppo": ("rl", "ppo"),
}
_SCRIPTS = {
    "finetune": "sft",
    "dpo": "dpo",
    "dpo_tune": "dpo",
    "dpo_tune_cache": "dpo",
    "reward_modeling": "reward",
    "grpo": "grpo",
    "grpo_fast": "grpo",
    "grpo_vllm_thread_ray_gtrl": "grpo",
    "ppo_fast": "ppo",
    "ppo_vllm_thread_ray_gtrl": "ppo",
}


def program_of(word: str, after: str | None) -> str | None:
    """dpo of open_instruct/dpo_tune_cache.py; dpo alone where it is the first word."""
    if after is None and word in (*JOBS, *_SCRIPTS):
        return _SCRIPTS.get(word, word)
    found = re.search(r"(?:^|/)open_instruct[./](\w+?)(?:\.py)?$", word)
    return _SCRIPTS.get(found.group(1)) if found else None


def draft(source: Source) -> Draft:
    """The recipe of one of Open-Instruct's commands or configs."""
    said = common.positive(source.options)
    given = {RENAMED.get(name, name): value for name, value in said.items()}
    program = source.program or _guessed(given)
    if program not in JOBS:
        raise UsageError(
            f"what does it train? put one of {', '.join(JOBS)} before it: "
            "postgrad translate open-instruct sft FILE"
        )
    job, algorithm = JOBS[program]
    made = Draft(job, "Open-Instruct")
    options = Options(given, UNSAID[program])
    name = options.given.get("exp_name") or options.given.get("run_name")
    common.run_dir(made, options.take("output_dir", f"runs/{name}" if name else None))
    made.put("algorithm.type", algorithm)
    made.put("model.dtype", "bfloat16")
    _data(made, options)
    if job == "rl":
        answers(made, options, program)
    else:
        _batch(made, options, source.devices, source.stage)
        if program == "dpo":
            _loss(made, options)
        _adapter(made, options)
    _learner(made, options)
    made.put("checkpoint.save_hf", True)
    _on_hub(made, options)
    apply(RULES, options, made)
    return made


def _on_hub(made: Draft, options: Options) -> None:
    """It pushes where nothing is said, too, to a repository of its own users: not taken over."""
    common.revision(made, options.take("model_revision"))
    owner, repository = options.take("hf_entity"), options.take("hf_repo_id")
    named = repository if owner is None or "/" in str(repository) else f"{owner}/{repository}"
    if flag(options.take("push_to_hub", False)) and repository:
        common.push(made, named)


def _guessed(options: Mapping[str, Any]) -> str:
    telling = {
        "num_unique_prompts_rollout": "grpo",
        "local_rollout_batch_size": "ppo",
        "loss_type": "dpo",
        "beta": "dpo",
        "max_seq_length": "sft",
    }
    return next((program for name, program in telling.items() if name in options), "")


def _data(made: Draft, options: Options) -> None:
    named, table = options.take("dataset_name"), options.take("dataset_mixer")
    mixed = options.take("dataset_mixer_list") or table
    splits = [part for text in options.texts("dataset_mixer_list_splits") for part in text.split()]
    entries = mixture(mixed, splits) if mixed else [{"path": str(named)}] if named else []
    common.sources(made, entries)
    if made.drop("data.weight"):
        made.notes.append("a weight above 1 of a single dataset is more epochs")
    if made.job in ("sft", "rl"):
        made.put("data.messages", options.take("sft_messages_key", "messages"))
    if made.job == "rl":
        made.put("data.answer", options.take("ground_truths_key", "ground_truth"))
        options.take("max_seq_length")  # of rows, before they are prompts
        return
    made.put("data.max_len", options.number("max_seq_length"))
    if made.job == "sft":
        made.put("data.on_too_long", "truncate", "as there")


def _batch(made: Draft, options: Options, devices: int | None, stage: int | None) -> None:
    count = common.processes(made, "devices", devices)
    ranks(made, options, stage)
    micro = options.number("per_device_train_batch_size")
    steps = options.number("gradient_accumulation_steps")
    size = f"per device {micro} * accumulation {steps} * devices {count}"
    made.put("batch.train_batch_size", micro * steps * count, size)
    common.micro_batch(made, micro, "" if made.job == "sft" else "pairs")
    epochs, updates = options.take("num_epochs"), options.number("max_train_steps", 0)
    if updates > 0:
        made.put("steps", updates)
    else:
        said = options.said("num_epochs")
        made.put("epochs", epochs, "" if said else "Open-Instruct's default")


def _loss(made: Draft, options: Options) -> None:
    kind, beta = str(options.take("loss_type")), decimal(options.take("beta"))
    ratio = decimal(options.take("gamma_beta_ratio", 0.3))
    if kind == "simpo":
        made.put("algorithm.type", "simpo")
        made.put("algorithm.gamma", beta * ratio, "beta * gamma_beta_ratio")
    elif kind == "dpo_norm":
        why = (
            "divides each answer's log-ratio by its length; dpo here sums it, so that its beta is "
            "about 0.1: set algorithm.beta yourself"
        )
        made.miss("loss_type", kind, why)
        made.put("algorithm.beta", 0.1, f"{beta:g} there, of a mean over tokens")
        return
    elif kind != "dpo":
        made.miss("loss_type", kind, "dpo, ipo, simpo, kto and orpo are here")
    made.put("algorithm.beta", beta)


def _adapter(made: Draft, options: Options) -> None:
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
    if flag(options.take("use_lora", False)) or flag(options.take("use_qlora", False)):
        common.adapter(made, options, names, "use_qlora")
    else:
        for name in names:
            options.take(name)


def _learner(made: Draft, options: Options) -> None:
    final = options.take("final_lr_ratio")
    common.schedule(made, options.take("lr_scheduler_type"))
    if final is not None and made.get("learner.schedule") == "linear":
        made.put("learner.min_lr_ratio", decimal(final) or None)
    share, count = float(options.take("warmup_ratio", 0.0)), options.number("warm_up_steps", 0)
    if share:
        common.warmup(made, share, comment="rounded up; down there")
    elif count:
        made.put("learner.warmup_updates", count)
