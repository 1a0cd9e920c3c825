"""TRL (trl sft|dpo|kto|reward|grpo|rloo, its scripts): options and YAML configs as recipes.

Its batch numbers are one device's: an update takes per_device_train_batch_size *
gradient_accumulation_steps * devices, and for GRPO and RLOO that counts completions, not prompts.
Its steps are updates.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.recipe.translate import common
from postgrad.recipe.translate.draft import Draft
from postgrad.recipe.translate.options import Options
from postgrad.recipe.translate.reader import Source
from postgrad.recipe.translate.rules import apply, decimal, flag
from postgrad.recipe.translate.trl_options import RULES, SHARED, UNSAID
from postgrad.recipe.translate.trl_rl import answers

JOBS = {
    "sft": ("sft", "sft"),
    "dpo": ("preference", "dpo"),
    "kto": ("preference", "kto"),
    "orpo": ("preference", "orpo"),
    "reward": ("reward", "bradley_terry"),
    "grpo": ("rl", "grpo"),
    "rloo": ("rl", "rloo"),
    "ppo": ("rl", "ppo"),
}
_SCRIPTS = {"reward_modeling": "reward", "gspo": "grpo", "ppo_tldr": "ppo"}
_PAIR_LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}


def program_of(word: str, after: str | None) -> str | None:
    """sft of `trl sft`, of trl/scripts/sft.py, trl.scripts.sft or examples/scripts/sft.py."""
    if after is None:
        return word if word in JOBS else None
    if word == "trl" and after in JOBS:
        return after
    found = re.search(r"(?:^|[./])scripts[./](?:ppo/)?(\w+?)(?:\.py)?$", word)
    name = _SCRIPTS.get(found.group(1), found.group(1)) if found else ""
    return name if name in JOBS else None


def draft(source: Source) -> Draft:
    """The recipe of one of TRL's commands."""
    program = source.program or _guessed(source.options)
    if program not in JOBS:
        raise UsageError(
            f"what does it train? put the command before it, one of {', '.join(JOBS)}: "
            "postgrad translate trl sft FILE"
        )
    job, algorithm = JOBS[program]
    made = Draft(job, "TRL")
    options = Options(common.positive(source.options), {**SHARED, **UNSAID[program]})
    common.run_dir(made, options.take("output_dir"))
    made.put("algorithm.type", algorithm)
    _model(made, options)
    _data(made, options)
    devices = common.processes(made, "devices", source.devices)
    common.divided(made, ("ZeRO stage", source.stage), {})
    if job == "rl":
        answers(made, options, program, devices)
    else:
        _batch(made, options, devices)
        _loss(made, options, program)
    _length(made, options)
    _learner(made, options)
    _times(made, options)
    apply(RULES, options, made)
    return made


def _guessed(options: Mapping[str, Any]) -> str:
    """From options that one trainer alone has."""
    telling = {
        "num_generations": "grpo",
        "reward_funcs": "grpo",
        "max_completion_length": "grpo",
        "desirable_weight": "kto",
        "center_rewards_coefficient": "reward",
        "packing": "sft",
        "assistant_only_loss": "sft",
        "precompute_ref_log_probs": "dpo",
        "num_ppo_epochs": "ppo",
    }
    return next((program for name, program in telling.items() if name in options), "")


def _model(made: Draft, options: Options) -> None:
    half = flag(options.take("bf16")) and not flag(options.take("fp16", False))
    made.put("model.dtype", "bfloat16" if half else "float32")
    names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    if flag(options.take("use_peft", False)):
        common.adapter(made, options, names, "load_in_4bit")
    else:
        for name in names:
            options.take(name)


def _data(made: Draft, options: Options) -> None:
    columns: dict[str, Any] = {}
    if made.job == "sft":
        columns = {"messages": "messages"}
    elif made.job == "rl":
        columns = {"messages": "prompt", "answer": "solution"}
    mixed, path = options.tables("datasets"), options.take("dataset_name")
    if mixed:
        common.sources(made, [_entry(one) for one in mixed])
    else:
        made.put("data.path", path)
    for key, value in columns.items():
        comment = "TRL finds the columns itself: say here which they are"
        made.put(f"data.{key}", value, comment if key == "messages" else "")
    length = options.take("max_length")
    if made.job != "rl":
        made.put("data.max_len", int(length or 1024), "longer rows are cut, as there")
        made.put("data.on_too_long", "truncate")


def _entry(given: dict[str, Any]) -> dict[str, Any]:
    files = given.get("data_files")
    entry = {
        "path": files if isinstance(files, str) else given.get("path"),
        "name": given.get("name"),
        "split": given.get("split"),
    }
    share = given.get("fraction")
    if isinstance(share, float) and share < 1:
        entry["split"] = f"{entry['split'] or 'train'}[:{share * 100:g}%]"
    return {key: value for key, value in entry.items() if value is not None}


def _batch(made: Draft, options: Options, devices: int) -> None:
    micro = options.number("per_device_train_batch_size")
    steps = options.number("gradient_accumulation_steps")
    made.put(
        "batch.train_batch_size",
        micro * steps * devices,
        f"per device {micro} * accumulation {steps} * devices {devices}",
    )
    if flag(options.take("packing", False)):
        made.comments[("batch", "train_batch_size")] += ": there packed rows, here conversations"
    common.micro_batch(made, micro)


def _loss(made: Draft, options: Options, program: str) -> None:
    given = options.texts("loss_type")
    if program == "dpo" and given:
        made.put("algorithm.type", _PAIR_LOSSES.get(given[0], "dpo"))
        if given[0] not in _PAIR_LOSSES or len(given) > 1:
            why = "of its losses dpo and ipo are here; simpo, kto and orpo are algorithms"
            made.miss("loss_type", ", ".join(given), why)
    elif given and given[0] not in ("nll", "kto", "sigmoid", "chunked_nll"):
        made.miss("loss_type", given[0], f"{program} has one loss here")
    if program == "orpo":
        made.put("algorithm.odds_coef", decimal(options.take("beta")), "beta there")


def _length(made: Draft, options: Options) -> None:
    epochs, steps = options.take("num_train_epochs"), options.number("max_steps", -1)
    if made.get("total_episodes") is not None:
        return
    _, each = common.per_step(made)
    if steps > 0:
        comment = f"{steps} updates, {each} a step" if each > 1 else ""
        made.put("steps", max(1, -(-steps // each)), comment)
    else:
        made.put("epochs", epochs, "" if options.said("num_train_epochs") else "TRL's default")


def _learner(made: Draft, options: Options) -> None:
    more = options.table("lr_scheduler_kwargs")
    least = more.get("min_lr_rate")
    if least is None and more.get("min_lr") is not None:
        least = decimal(more["min_lr"]) / decimal(options.take("learning_rate"))
    common.schedule(made, options.take("lr_scheduler_type"), least)
    betas = [float(options.take("adam_beta1", 0.9)), float(options.take("adam_beta2", 0.999))]
    if betas != [0.9, 0.999]:
        made.put("learner.betas", betas)
    count, share = float(options.take("warmup_steps", 0)), float(options.take("warmup_ratio", 0))
    if count >= 1:
        made.put("learner.warmup_updates", int(count))
    else:
        common.warmup(made, count or share, comment="" if share else "warmup_steps there")


def _times(made: Draft, options: Options) -> None:
    """What TRL counts in updates is counted in steps here."""
    _, each = common.per_step(made)
    kind, every = str(options.take("save_strategy", "steps")), options.number("save_steps")
    note = f"{each} updates a step" if each > 1 else ""
    share = decimal(options.take("save_steps"))
    if kind == "steps" and 0 < share < 1:
        made.miss(
            "save_steps", share, "a share of the run there; checkpoint.save_steps is a number"
        )
    elif kind == "steps" and every >= 1:
        made.put("checkpoint.save_steps", max(1, every // each), note)
    elif kind == "epoch":
        made.miss("save_strategy", kind, "say checkpoint.save_steps; the last step is always saved")
    made.put("checkpoint.save_hf", True)
    common.revision(made, options.take("model_revision"))
    named = (
        options.take("hub_model_id") or PurePosixPath(str(options.take("output_dir") or "")).name
    )
    private = options.take("hub_private_repo")
    if flag(options.take("push_to_hub", False)):
        common.push(made, named, private)
    split, every = options.take("dataset_test_split", "test"), options.number("eval_steps", 0)
    kind = str(options.take("eval_strategy", options.take("evaluation_strategy", "no")))
    options.take("per_device_eval_batch_size")
    if kind == "no":
        return
    share = decimal(options.take("eval_steps", 0))
    if 0 < share < 1:
        made.miss("eval_steps", share, "a share of the run there; eval.every is a number of steps")
    held_out = "its loss, as there" if made.job == "sft" else ""
    made.put("eval.split", split, held_out)
    made.put("eval.every", max(1, every // each) if every else None, note)
    made.put("eval.at_start", flag(options.take("eval_on_start", False)) or None)
    if made.job == "sft":
        made.put("eval.on_too_long", "truncate", "longer rows are cut, as there")
        _best(made, options)


def _best(made: Draft, options: Options) -> None:
    """load_best_model_at_end: by the held-out loss unless another metric is named."""
    wanted = flag(options.take("load_best_model_at_end", False))
    metric = str(options.take("metric_for_best_model", "loss")).removeprefix("eval_")
    options.take("greater_is_better")
    if wanted and metric == "loss":
        made.put("checkpoint.best_metric", "eval/loss", "postgrad export --checkpoint best")
        made.put("checkpoint.best_mode", "min")
    elif wanted:
        made.miss("metric_for_best_model", metric, "eval/loss and eval/perplexity are measured")
