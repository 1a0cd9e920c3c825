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
from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.trl import DEFAULTS, FUNCTIONS, LOSSES, RULES, SHARED

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

_PROMPT_ROOM = 512  # tokens: TRL no longer bounds prompts


def program_of(word: str, after: str | None) -> str | None:
    """sft of `trl sft`, of trl/scripts/sft.py, trl.scripts.sft or examples/scripts/sft.py."""
    if after is None:
        return word if word in JOBS else None
    if word == "trl" and after in JOBS:
        return after
    match = re.search(r"(?:^|[./])scripts[./](?:ppo/)?(\w+?)(?:\.py)?$", word)
    name = _SCRIPTS.get(match[1], match[1]) if match else ""
    return name if name in JOBS else None


def draft_recipe(source: SourceCommand) -> Draft:
    """The recipe of one of TRL's commands."""
    program = source.program or _guessed(source.options)
    if program not in JOBS:
        raise UsageError(
            f"what does it train? put the command before it, one of {', '.join(JOBS)}: "
            "postgrad translate trl sft FILE"
        )
    job, algorithm = JOBS[program]
    draft = Draft(job, "TRL")
    options = Options(common.positive(source.options), {**SHARED, **DEFAULTS[program]})
    common.run_dir(draft, options.take("output_dir"))
    draft.put("algorithm.type", algorithm)
    _model(draft, options)
    _data(draft, options)
    devices = common.processes(draft, "devices", source.devices)
    common.divided(draft, ("ZeRO stage", source.stage), {})
    if job == "rl":
        answers(draft, options, program, devices)
    else:
        _batch(draft, options, devices)
        _loss(draft, options, program)
    _length(draft, options)
    _learner(draft, options)
    _times(draft, options)
    apply(RULES, options, draft)
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
    half = flag(options.take("bf16")) and not flag(options.take("fp16", False))
    draft.put("model.dtype", "bfloat16" if half else "float32")
    names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    if flag(options.take("use_peft", False)):
        common.adapter(draft, options, names, "load_in_4bit")
    else:
        for name in names:
            options.take(name)


def _data(draft: Draft, options: Options) -> None:
    columns: dict[str, Any] = {}
    if draft.job == "sft":
        columns = {"messages": "messages"}
    elif draft.job == "rl":
        columns = {"messages": "prompt", "answer": "solution"}
    mixed, path = options.tables("datasets"), options.take("dataset_name")
    if mixed:
        common.sources(draft, [_entry(dataset) for dataset in mixed])
    else:
        draft.put("data.path", path)
    for key, value in columns.items():
        comment = "TRL finds the columns itself: say here which they are"
        draft.put(f"data.{key}", value, comment if key == "messages" else "")
    length = options.take("max_length")
    if draft.job != "rl":
        draft.put("data.max_len", int(length or 1024), "longer rows are cut, as there")
        draft.put("data.on_too_long", "truncate")


def _entry(dataset: dict[str, Any]) -> dict[str, Any]:
    """The entry of [[data.sets]] for one of TRL's `datasets`."""
    files = dataset.get("data_files")
    entry = {
        "path": files if isinstance(files, str) else dataset.get("path"),
        "name": dataset.get("name"),
        "split": dataset.get("split"),
    }
    share = dataset.get("fraction")
    if isinstance(share, float) and share < 1:
        entry["split"] = f"{entry['split'] or 'train'}[:{share * 100:g}%]"
    return {key: value for key, value in entry.items() if value is not None}


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


def _loss(draft: Draft, options: Options, program: str) -> None:
    losses = options.texts("loss_type")
    if program == "dpo" and losses:
        draft.put("algorithm.type", _PAIR_LOSSES.get(losses[0], "dpo"))
        if losses[0] not in _PAIR_LOSSES or len(losses) > 1:
            why = "of its losses dpo and ipo are here; simpo, kto and orpo are algorithms"
            draft.miss("loss_type", ", ".join(losses), why)
    elif losses and losses[0] not in ("nll", "kto", "sigmoid", "chunked_nll"):
        draft.miss("loss_type", losses[0], f"{program} has one loss here")
    if program == "orpo":
        draft.put("algorithm.odds_coef", decimal(options.take("beta")), "beta there")


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
    more = options.table("lr_scheduler_kwargs")
    least = more.get("min_lr_rate")
    if least is None and more.get("min_lr") is not None:
        least = decimal(more["min_lr"]) / decimal(options.take("learning_rate"))
    common.schedule(draft, options.take("lr_scheduler_type"), least)
    betas = [float(options.take("adam_beta1", 0.9)), float(options.take("adam_beta2", 0.999))]
    if betas != [0.9, 0.999]:
        draft.put("learner.betas", betas)
    count, share = float(options.take("warmup_steps", 0)), float(options.take("warmup_ratio", 0))
    if count >= 1:
        draft.put("learner.warmup_updates", int(count))
    else:
        common.warmup(draft, count or share, comment="" if share else "warmup_steps there")


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
        draft.miss(
            "save_strategy", kind, "say checkpoint.save_steps; the last step is always saved"
        )
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
    if kind == "no":
        return
    share = decimal(options.take("eval_steps", 0))
    if 0 < share < 1:
        draft.miss("eval_steps", share, "a share of the run there; eval.every is a number of steps")
    held_out = "its loss, as there" if draft.job == "sft" else ""
    draft.put("eval.split", split, held_out)
    draft.put("eval.every", max(1, every // updates) if every else None, note)
    draft.put("eval.at_start", flag(options.take("eval_on_start", False)) or None)
    if draft.job == "sft":
        draft.put("eval.on_too_long", "truncate", "longer rows are cut, as there")
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


def answers(draft: Draft, options: Options, program: str, devices: int) -> None:
    """Everything of an RL job but data and learner: rollout, batch, algorithm and rewards."""
    new = options.number("response_length" if program == "ppo" else "max_completion_length")
    draft.put("rollout.max_new_tokens", new)
    room = options.take("max_prompt_length")
    comment = "" if room else f"; TRL bounds no prompts, {_PROMPT_ROOM} are assumed"
    draft.put("data.max_len", int(room or _PROMPT_ROOM) + new, f"prompt and response{comment}")
    _policy_kl(draft, options, program)
    if program == "ppo":
        _ppo_batch(draft, options, devices)
        draft.put("reward_model.model.path", options.take("reward_model_path"))
        draft.put("model.path", options.take("sft_model_path"), "sft_model_path")
        draft.reward("reward_model")
        missed = options.take("missing_eos_penalty")
        if missed is not None and decimal(missed):
            draft.reward("stop_properly", "missing_eos_penalty is taken from what was cut off",
                        penalty=-decimal(missed))  # fmt: skip
        return
    _generation_batch(draft, options, devices)
    _advantages(draft, options, program)
    _rewards(draft, options)


def _generation_batch(draft: Draft, options: Options, devices: int) -> None:
    """A generation is steps_per_generation micro-batches of completions on every device, and each
    gradient_accumulation_steps of them are an update.
    """
    micro = options.number("per_device_train_batch_size")
    accumulation = options.number("gradient_accumulation_steps")
    samples, n = options.number("num_generations"), options.number("num_iterations")
    stated = options.number("generation_batch_size", 0)
    per_generation = options.number("steps_per_generation", accumulation)
    step = stated or micro * devices * per_generation
    update = micro * devices * accumulation
    prompts = max(1, step // samples)
    draft.put(
        "batch.rollout_batch_size",
        prompts,
        f"prompts: {step} completions of a generation / {samples} a prompt",
    )
    if step % samples:
        draft.notes.append(f"{step} completions are no whole groups of {samples}: TRL refuses that")
    draft.put("batch.n_samples_per_prompt", samples)
    draft.put("batch.epochs_per_rollout", n)
    size = f"completions: per device {micro} * accumulation {accumulation} * devices {devices}"
    common.update_size(draft, update, size)
    common.micro_batch(draft, micro, "completions")


def _ppo_batch(draft: Draft, options: Options, devices: int) -> None:
    """A rollout is per_device_train_batch_size * gradient_accumulation_steps * num_mini_batches *
    devices episodes, one a prompt.
    """
    micro, parts = options.number("per_device_train_batch_size"), options.number("num_mini_batches")
    accumulation = options.number("gradient_accumulation_steps")
    step = micro * accumulation * parts * devices
    size = f"per device {micro} * accumulation {accumulation} * mini-batches {parts}"
    draft.put("batch.rollout_batch_size", step, f"{size} * devices {devices}")
    draft.put("batch.n_samples_per_prompt", 1)
    draft.put("batch.epochs_per_rollout", options.number("num_ppo_epochs"))
    common.update_size(draft, micro * accumulation * devices, "samples, over all devices")
    common.micro_batch(draft, micro)
    episodes = options.take("total_episodes")
    if episodes is not None:
        draft.put("total_episodes", int(episodes))


def _policy_kl(draft: Draft, options: Options, program: str) -> None:
    name = "kl_coef" if program == "ppo" else "beta"
    coefficient, estimator = decimal(options.take(name, 0.0)), options.take("kl_estimator")
    draft.put("algorithm.kl_coef", coefficient, "beta there" if name == "beta" else "")
    if program == "ppo":
        draft.put("algorithm.kl_estimator", estimator)
        clip = decimal(options.take("cliprange"))
        draft.put("algorithm.clip_low", clip)
        draft.put("algorithm.clip_high", clip)
    if flag(options.take("sync_ref_model", False)):
        every = options.number("ref_model_sync_steps", 512)
        share = options.take("ref_model_mixup_alpha", 0.6)
        draft.put("reference.refresh_steps", every, "takes the policy's weights whole")
        draft.miss("ref_model_mixup_alpha", share, "a reference takes the policy's weights whole")


def _advantages(draft: Draft, options: Options, program: str) -> None:
    low, high = options.take("epsilon"), options.take("epsilon_high")
    level = options.take("importance_sampling_level", "token")
    loss, scale = str(options.take("loss_type", "")), str(options.take("scale_rewards", "group"))
    normalise = flag(options.take("normalize_advantages", False))
    if options.stated.get("scale_rewards", scale) is None:  # "none" is read as no value
        scale = "none"
    undivided = scale.lower() in ("none", "false")
    if program == "grpo":
        name, aggregation = LOSSES.get(loss, ("grpo", "token"))
        if loss not in LOSSES:
            draft.miss("loss_type", loss, f"{', '.join(LOSSES)} are here")
        if level == "sequence":
            name, aggregation = "gspo", aggregation
        elif undivided and name == "grpo":
            name, aggregation = "dr_grpo", aggregation or "sequence"
        elif scale.lower() == "batch":
            draft.miss("scale_rewards", scale, "rewards are divided by their group's deviation")
        draft.put("algorithm.type", name, f"loss_type {loss}")
        if undivided and name != "dr_grpo":
            draft.put("algorithm.std_norm", False, f"scale_rewards {scale}")
        _aggregated(draft, name, aggregation)
        if name == "cispo":
            _cispo_bound(draft, decimal(low if high is None else high))
            return
    elif normalise:
        draft.miss("normalize_advantages", True, "rloo's advantages stay as they are")
    if bounds := options.numbers("reward_clip_range"):
        draft.put("algorithm.reward_clip", bounds)
    draft.put("algorithm.clip_low", decimal(low))
    draft.put("algorithm.clip_high", decimal(low if high is None else high))


def _cispo_bound(draft: Draft, high: float) -> None:
    """epsilon_high bounds the ratio itself there; 1 + clip_high does here."""
    if high >= 1.0:
        draft.put(
            "algorithm.clip_high", high - 1.0, f"epsilon_high {high:g} bounds the ratio itself"
        )
    else:
        why = "bounds the ratio itself, below 1, where every token's weight is cut; 1.28 is taken"
        draft.miss("epsilon_high", high, why)


def _aggregated(draft: Draft, name: str, aggregation: str | None) -> None:
    """algorithm.aggregation, where it is not the algorithm's default."""
    default = {"dr_grpo": "constant", "grpo": "sequence", "gspo": "sequence"}.get(name)
    if aggregation and aggregation != default:
        draft.put("algorithm.aggregation", aggregation)


def _rewards(draft: Draft, options: Options) -> None:
    weights = options.numbers("reward_weights")
    model = options.take("reward_model_name_or_path")
    names = [*(["reward_model"] if model else []), *options.texts("reward_funcs")]
    draft.put("reward_model.model.path", model)
    for place, name in enumerate(names):
        kind, settings = FUNCTIONS.get(name, (name, {}))
        comment = name if name in FUNCTIONS else ""
        if "." in kind:
            module, _, function = kind.rpartition(".")
            kind, comment = f"{module}:{function}", "as (prompt, rollout) -> float"
        if place < len(weights) and weights[place] != 1.0:
            settings = {**settings, "weight": weights[place]}
        draft.reward(kind, comment, **settings)
    if not names:
        draft.reward("my_rewards:score", "the source names no reward: write this function")
