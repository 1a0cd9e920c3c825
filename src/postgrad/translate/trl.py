"""TRL (trl sft|dpo|kto|reward|distillation|grpo|rloo, its other trainers and scripts): options and
YAML configs as recipes.

Its batch numbers are one device's: an update takes per_device_train_batch_size *
gradient_accumulation_steps * devices, and for GRPO and RLOO that counts completions, not prompts.
Its steps are updates.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.translate import (
    common,
    learning,
    mixtures,
    places,
    trl_advantages,
    trl_engines,
    trl_graded,
    trl_losses,
    trl_rl,
    trl_rows,
)
from postgrad.translate.draft import Draft
from postgrad.translate.files import config_table
from postgrad.translate.launch import flags
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.trl import (
    BALANCED,
    DEFAULTS,
    JOBS,
    OWN_REWARDS,
    RULES,
    SCRIPTS,
    SHARED,
)
from postgrad.translate.tables.trl import (
    OTHERS as OTHERS,
)

config_of = config_table
flags_of = flags


def program_of(word: str, after: str | None) -> str | None:
    """sft of `trl sft`, of trl/scripts/sft.py, trl.scripts.sft or examples/scripts/sft.py."""
    if after is None:
        is_program = word in JOBS or any(re.fullmatch(pattern, word) for pattern in OTHERS)
        return word if is_program else None
    if word == "trl" and re.fullmatch(r"[a-z][\w-]*", after):
        return after
    if word == "vllm" and after == "serve":  # which `trl vllm-serve` starts
        return "vllm-serve"
    match = re.search(r"(?:^|[./])scripts[./](?:ppo/)?(\w+?)(?:\.py)?$", word)
    name = SCRIPTS.get(match[1], match[1]) if match else ""
    if name in JOBS:
        return name
    match = re.search(r"(?:examples|trl)[./]scripts[./]((?:\w+/)*\w+?)(?:\.py)?$", word)
    return match[1] if match else None


def names_of(source: SourceCommand) -> list[str]:
    """The options that a source states, by the names that its draft has."""
    return list(common.positive(source.options))


def draft_recipe(source: SourceCommand) -> Draft:
    """The recipe of one of TRL's commands."""
    program = source.program or _guessed(source.options)
    if program not in JOBS:
        raise UsageError(
            f"what does it train? put the command before it, one of {', '.join(JOBS)}: "
            "postgrad translate trl sft FILE"
        )
    job, algorithm = JOBS[program]
    program, of_images = program.removesuffix("_vlm"), program.endswith("_vlm")
    draft = Draft(job, "TRL", source.images)
    options = Options(common.positive(source.options), {**SHARED, **DEFAULTS[program]})
    common.run_dir(draft, options.take("output_dir"))
    draft.put("algorithm.type", algorithm)
    _model(draft, options)
    functions = OWN_REWARDS if of_images and job == "rl" else ()
    if functions:
        trl_rows.own_rows(draft, options)
    else:
        trl_rows.rows(draft, options, bounded=program != "sft" or not of_images)
    devices = places.processes(draft, "devices", source.devices, source.machines)
    places.divided(draft, ("ZeRO stage", source.stage), {})
    if job == "rl":
        trl_engines.engines(draft, options, source, program)
        trl_rl.answers(draft, options, program, devices, functions)
        if algorithm == "on_policy_distillation":
            trl_graded.grades(draft, options, program)
    else:
        _batch(draft, options, devices)
        trl_losses.losses(draft, options, program, source)
    _length(draft, options)
    _learner(draft, options)
    _times(draft, options)
    apply(RULES, options, draft)
    if program not in BALANCED:
        mixtures.balanced(draft)
    if program in ("grpo", "gmpo", "sdpo", "rloo"):
        trl_advantages.means(draft, options, program)
    common.sampled_as_trained(draft)
    return draft


def _guessed(options: Mapping[str, Any]) -> str:
    """The program, from options that one trainer alone has; "" where none of them is stated."""
    programs = {
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
    return next((program for name, program in programs.items() if name in options), "")


def _model(draft: Draft, options: Options) -> None:
    if (again := options.take("activation_checkpointing")) is not None:  # its newer name
        options.stated["gradient_checkpointing"] = again
    half = "bfloat16" if flag(options.take("bf16")) else "float32"
    draft.put("model.dtype", "float16" if flag(options.take("fp16", False)) else half)
    names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    saved = options.texts("lora_modules_to_save")
    if flag(options.take("use_peft", False)):
        learning.adapter(draft, options, names, "load_in_4bit")
        draft.put("model.lora.modules_to_save", saved or None)
        _all_layers(draft, options)
    else:
        for name in names:
            options.take(name)
        why = "weights in four bits are frozen: they need an adapter"
        draft.miss("load_in_4bit", options.take("load_in_4bit", False), why)


def _all_layers(draft: Draft, options: Options) -> None:
    """That an adapter without targets is on all linear layers; PEFT chooses some by the type."""
    place = ("model", "lora", "rank")
    if place in draft.values and not options.texts("lora_target_modules"):
        layers = "on all linear layers; there PEFT chooses, q_proj and v_proj of most types"
        before = draft.comments.get(place)
        draft.comments[place] = f"{before}; {layers}" if before else layers


def _batch(draft: Draft, options: Options, devices: int) -> None:
    micro = options.number("per_device_train_batch_size")
    steps = options.number("gradient_accumulation_steps")
    draft.put(
        "batch.train_batch_size",
        micro * steps * devices,
        f"per device {micro} * accumulation {steps} * devices {devices}",
    )
    if flag(options.take("packing", False)):
        draft.comments[("batch", "train_batch_size")] += ": there packed rows, here conversations"
    common.micro_batch(draft, micro)


def _length(draft: Draft, options: Options) -> None:
    epochs, steps = options.take("num_train_epochs"), options.number("max_steps", -1)
    if draft.get("total_episodes") is not None:
        return
    _, updates = common.per_step(draft)
    if steps > 0:
        comment = f"{steps} updates, {updates} a step" if updates > 1 else ""
        draft.put("steps", max(1, -(-steps // updates)), comment)
    else:
        draft.put("epochs", epochs, "" if options.states("num_train_epochs") else "TRL's default")


def _learner(draft: Draft, options: Options) -> None:
    kind, more = options.take("lr_scheduler_type"), options.table("lr_scheduler_kwargs")
    read = ("min_lr", "min_lr_rate", "warmup_lr_rate")
    if learning.is_stable(kind):
        read = ("min_lr_ratio", "num_decay_steps", "decay_type")
    usual = (("num_cycles", 0.5), ("warmup_type", "linear"))
    unread = {
        name: value
        for name, value in more.items()
        if name not in read and (name, value) not in usual
    }
    draft.miss("lr_scheduler_kwargs", unread, "learner.schedule falls once, to min_lr_ratio")
    if learning.is_stable(kind):
        falling, shape = int(decimal(more.get("num_decay_steps", 0))), more.get("decay_type")
        unsaid = "num_decay_steps is not said, an error there: give learner.decay_updates"
        draft.put("learner.schedule", str(shape or "cosine"), "" if falling else unsaid)
        draft.put("learner.decay_updates", falling or None)
        draft.put("learner.min_lr_ratio", decimal(more.get("min_lr_ratio", 0.0)) or None)
    else:
        least = more.get("min_lr_rate")
        if least is None and more.get("min_lr") is not None:
            least = decimal(more["min_lr"]) / decimal(options.take("learning_rate"))
        learning.schedule(draft, kind, least)
    betas = [float(options.take("adam_beta1", 0.9)), float(options.take("adam_beta2", 0.999))]
    if betas != [0.9, 0.999]:
        draft.put("learner.betas", betas)
    count, share = float(options.take("warmup_steps", 0)), float(options.take("warmup_ratio", 0))
    names = ("warmup_steps", "warmup_ratio")
    if learning.unwarmed(draft, options, kind, names):
        return
    if count >= 1:
        draft.put("learner.warmup_updates", int(count))
    else:
        learning.warmup(draft, count or share, comment="" if share else "warmup_steps there")
    if (start := more.get("warmup_lr_rate")) is not None and (count or share):
        draft.put("learner.warmup_start_ratio", decimal(start),
                  "lr behind the warm-up; there at its last update")  # fmt: skip


def _times(draft: Draft, options: Options) -> None:
    """[checkpoint] and [eval]. TRL counts in updates; a step here can be several."""
    _, updates = common.per_step(draft)
    kind, every = str(options.take("save_strategy", "steps")), options.number("save_steps")
    note = f"{updates} updates a step" if updates > 1 else ""
    share = decimal(options.take("save_steps"))
    if kind == "steps" and 0 < share < 1:
        draft.miss(
            "save_steps", share, "a share of the run there; checkpoint.save_steps is a number"
        )
    elif kind == "steps" and every >= 1:
        draft.put("checkpoint.save_steps", max(1, every // updates), note)
    elif kind == "epoch":
        draft.put("checkpoint.save_epochs", 1, "save_strategy there")
    draft.put("checkpoint.save_hf", True)
    common.revision(draft, options.take("model_revision"))
    named = (
        options.take("hub_model_id") or PurePosixPath(str(options.take("output_dir") or "")).name
    )
    private = options.take("hub_private_repo")
    if flag(options.take("push_to_hub", False)):
        common.push(draft, named, private)
    split, every = options.take("dataset_test_split", "test"), options.number("eval_steps", 0)
    kind = str(options.take("eval_strategy", options.take("evaluation_strategy", "no")))
    options.take("per_device_eval_batch_size")
    unread = options.take("eval_dataset") == [] and draft.get("data.eval_fraction") is None
    if kind == "no" or unread:
        return
    share = decimal(options.take("eval_steps", 0))
    if 0 < share < 1:
        draft.miss("eval_steps", share, "a share of the run there; eval.every is a number of steps")
    trl_rows.held_out(draft, options, split)
    draft.put("eval.every", max(1, every // updates) if every else None, note)
    draft.put("eval.at_start", flag(options.take("eval_on_start", False)) or None)
    if draft.job == "sft":
        cut = draft.get("data.on_too_long")
        draft.put("eval.on_too_long", cut, "longer rows are cut, as there")
        _best(draft, options)


def _best(draft: Draft, options: Options) -> None:
    """load_best_model_at_end: by the held-out loss unless another metric is named."""
    wanted = flag(options.take("load_best_model_at_end", False))
    metric = str(options.take("metric_for_best_model", "loss")).removeprefix("eval_")
    options.take("greater_is_better")
    if wanted and metric == "loss":
        draft.put("checkpoint.best_metric", "eval/loss", "postgrad export --checkpoint best")
        draft.put("checkpoint.best_mode", "min")
    elif wanted:
        draft.miss("metric_for_best_model", metric, "eval/loss and eval/perplexity are measured")
