"""Open-Instruct (finetune, dpo, reward_modeling, grpo, ppo): its options as recipes."""

import re
from collections.abc import Mapping
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.translate import common
from postgrad.translate.common import mixture
from postgrad.translate.draft import Draft
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.open_instruct import (
    DEFAULTS,
    KL_ESTIMATORS,
    RENAMED,
    RULES,
    VERIFIERS,
)

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

_SEQUENCES = ("sequence_parallel_size", "context_parallel_degree", "cp_degree")


def program_of(word: str, after: str | None) -> str | None:
    """ "dpo" of open_instruct/dpo_tune_cache.py, and of "dpo" itself where it is the first word."""
    if after is None and word in (*JOBS, *_SCRIPTS):
        return _SCRIPTS.get(word, word)
    match = re.search(r"(?:^|/)open_instruct[./](\w+?)(?:\.py)?$", word)
    return _SCRIPTS.get(match[1]) if match else None


def draft_recipe(source: SourceCommand) -> Draft:
    """The recipe of one of Open-Instruct's commands or configs."""
    stated = {
        RENAMED.get(name, name): value for name, value in common.positive(source.options).items()
    }
    program = source.program or _guessed(stated)
    if program not in JOBS:
        raise UsageError(
            f"what does it train? put one of {', '.join(JOBS)} before it: "
            "postgrad translate open-instruct sft FILE"
        )
    job, algorithm = JOBS[program]
    draft = Draft(job, "Open-Instruct")
    options = Options(stated, DEFAULTS[program])
    name = options.stated.get("exp_name") or options.stated.get("run_name")
    common.run_dir(draft, options.take("output_dir", f"runs/{name}" if name else None))
    draft.put("algorithm.type", algorithm)
    draft.put("model.dtype", "bfloat16")
    _data(draft, options)
    if job == "rl":
        answers(draft, options, program)
    else:
        _batch(draft, options, source.devices, source.stage)
        if program == "dpo":
            _loss(draft, options)
        _adapter(draft, options)
    _learner(draft, options)
    draft.put("checkpoint.save_hf", True)
    _on_hub(draft, options)
    apply(RULES, options, draft)
    return draft


def _on_hub(draft: Draft, options: Options) -> None:
    """The model's revision and where it is pushed. Open-Instruct also pushes by default, to a
    repository of its authors: that is not taken over.
    """
    common.revision(draft, options.take("model_revision"))
    owner, repository = options.take("hf_entity"), options.take("hf_repo_id")
    target = repository if owner is None or "/" in str(repository) else f"{owner}/{repository}"
    if flag(options.take("push_to_hub", False)) and repository:
        common.push(draft, target)


def _guessed(options: Mapping[str, Any]) -> str:
    """The program, from options that one program alone has; "" where none of them is stated."""
    programs = {
        "num_unique_prompts_rollout": "grpo",
        "local_rollout_batch_size": "ppo",
        "loss_type": "dpo",
        "beta": "dpo",
        "max_seq_length": "sft",
    }
    return next((program for name, program in programs.items() if name in options), "")


def _data(draft: Draft, options: Options) -> None:
    named, table = options.take("dataset_name"), options.take("dataset_mixer")
    mixed = options.take("dataset_mixer_list") or table
    splits = [part for text in options.texts("dataset_mixer_list_splits") for part in text.split()]
    entries = mixture(mixed, splits) if mixed else [{"path": str(named)}] if named else []
    common.sources(draft, entries)
    if draft.drop("data.weight"):
        draft.notes.append("a weight above 1 of a single dataset is more epochs")
    if draft.job in ("sft", "rl"):
        draft.put("data.messages", options.take("sft_messages_key", "messages"))
    if draft.job == "rl":
        draft.put("data.answer", options.take("ground_truths_key", "ground_truth"))
        options.take("max_seq_length")  # of rows, before they are prompts
        return
    draft.put("data.max_len", options.number("max_seq_length"))
    if draft.job == "sft":
        draft.put("data.on_too_long", "truncate", "as there")


def _batch(draft: Draft, options: Options, devices: int | None, stage: int | None) -> None:
    count = common.processes(draft, "devices", devices)
    ranks(draft, options, stage)
    micro = options.number("per_device_train_batch_size")
    steps = options.number("gradient_accumulation_steps")
    size = f"per device {micro} * accumulation {steps} * devices {count}"
    draft.put("batch.train_batch_size", micro * steps * count, size)
    common.micro_batch(draft, micro, "" if draft.job == "sft" else "pairs")
    epochs, updates = options.take("num_epochs"), options.number("max_train_steps", 0)
    if updates > 0:
        draft.put("steps", updates)
    else:
        is_stated = options.states("num_epochs")
        draft.put("epochs", epochs, "" if is_stated else "Open-Instruct's default")


def _loss(draft: Draft, options: Options) -> None:
    kind, beta = str(options.take("loss_type")), decimal(options.take("beta"))
    ratio = decimal(options.take("gamma_beta_ratio", 0.3))
    if kind == "simpo":
        draft.put("algorithm.type", "simpo")
        draft.put("algorithm.gamma", beta * ratio, "beta * gamma_beta_ratio")
    elif kind == "dpo_norm":
        why = (
            "divides each answer's log-ratio by its length; dpo here sums it, so that its beta is "
            "about 0.1: set algorithm.beta yourself"
        )
        draft.miss("loss_type", kind, why)
        draft.put("algorithm.beta", 0.1, f"{beta:g} there, of a mean over tokens")
        return
    elif kind != "dpo":
        draft.miss("loss_type", kind, "dpo, ipo, simpo, kto and orpo are here")
    draft.put("algorithm.beta", beta)


def _adapter(draft: Draft, options: Options) -> None:
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
    if flag(options.take("use_lora", False)) or flag(options.take("use_qlora", False)):
        common.adapter(draft, options, names, "use_qlora")
    else:
        for name in names:
            options.take(name)


def _learner(draft: Draft, options: Options) -> None:
    final = options.take("final_lr_ratio")
    common.schedule(draft, options.take("lr_scheduler_type"))
    if final is not None and draft.get("learner.schedule") == "linear":
        draft.put("learner.min_lr_ratio", decimal(final) or None)
    share, count = float(options.take("warmup_ratio", 0.0)), options.number("warm_up_steps", 0)
    if share:
        common.warmup(draft, share, comment="rounded up; down there")
    elif count:
        draft.put("learner.warmup_updates", count)


def answers(draft: Draft, options: Options, program: str) -> None:
    """Everything of an RL job but data and learner: rollout, batch, algorithm, rewards, times."""
    prompt, new = options.number("max_prompt_token_length"), options.number("response_length")
    draft.put("rollout.max_new_tokens", new)
    draft.put("data.max_len", prompt + new, f"prompts of {prompt}, answers of {new}")
    local = program == "ppo" or options.states("local_rollout_batch_size")
    gpus = "actor_num_gpus_per_node" if local else "num_learners_per_node"
    learners = options.texts(gpus)
    count = sum(int(word) for text in learners for word in text.split()) or 1
    common.processes(draft, "learner GPUs", count)
    ranks(draft, options, None)
    episodes = options.number("total_episodes")
    draft.put("total_episodes", episodes, "samples, as there")
    if local:
        _local_batch(draft, options, count)
    else:
        _global_batch(draft, options)
    if program == "ppo":
        _ppo(draft, options)
    else:
        _grpo(draft, options)
    _rewards(draft, options, program)
    _non_stop(draft, options, program)
    _times(draft, options)


def ranks(draft: Draft, options: Options, launched: int | None) -> None:
    """Sharding and parallelism of the learner's ranks. launched: the ZeRO stage that the launcher's
    config names.
    """
    stage = options.take("deepspeed_stage", options.take("zero_stage", launched))
    shares = {
        key: next(((n, options.take(n)) for n in names if options.states(n)), (names[0], None))
        for key, names in (
            ("tensor_parallel", ("tensor_parallel_degree",)),
            (
                "context_parallel",
                ("sequence_parallel_size", "context_parallel_degree", "cp_degree"),
            ),
        )
    }
    common.divided(draft, ("deepspeed_stage", None if stage is None else int(stage)), shares)


def _global_batch(draft: Draft, options: Options) -> None:
    prompts = options.number("num_unique_prompts_rollout")
    samples = options.number("num_samples_per_prompt_rollout")
    draft.put("batch.rollout_batch_size", prompts, "prompts")
    draft.put("batch.n_samples_per_prompt", samples)
    draft.put("batch.epochs_per_rollout", options.number("num_epochs"), "num_epochs there")
    parts = options.number("num_mini_batches")
    fitting = max(n for n in range(1, parts + 1) if prompts * samples % n == 0)
    comment = "of samples; there of packs" if parts > 1 else ""
    draft.put("batch.num_mini_batches", fitting, comment)
    packs, tokens = options.number("per_device_train_batch_size"), options.number("pack_length")
    common.micro_tokens(draft, packs * tokens, f"{packs} packs of {tokens} tokens a device")


def _grpo(draft: Draft, options: Options) -> None:
    centred = str(options.take("advantage_normalization_type")) == "centered"
    cispo = str(options.take("loss_fn")) == "cispo"
    name = "cispo" if cispo else "dr_grpo" if centred else "grpo"
    draft.put("algorithm.type", name, "advantages are centred" if centred and not cispo else "")
    if centred and cispo:
        draft.put("algorithm.std_norm", False, "advantages are centred")
    divided = options.take("loss_denominator", "token")
    if divided == "token":
        draft.put("algorithm.aggregation", "token", "loss_denominator there")
    else:
        draft.miss("loss_denominator", divided, "algorithm.aggregation says what divides the loss")
    low = decimal(options.take("clip_lower"))
    draft.put("algorithm.clip_low", None if cispo else low)
    draft.put("algorithm.clip_high", decimal(options.take("clip_higher")))
    _kl(draft, options, "loss")
    _correction(draft, options)
    filtered = flag(options.take("filter_zero_std_samples"))
    if flag(options.take("active_sampling", False)):
        draft.put("rollout.dynamic_sampling", True, "active_sampling: in up to max_rounds here")
    elif not filtered:
        why = "groups without gradient stay in the denominator"
        draft.skip("filter_zero_std_samples", False, why)


def _kl(draft: Draft, options: Options, where: str) -> None:
    beta, estimator = decimal(options.take("beta")), options.take("kl_estimator")
    loads, every = options.take("load_ref_policy"), options.take("ref_policy_update_freq")
    alpha = options.take("alpha")
    draft.put("algorithm.kl_coef", beta, "beta there")
    if beta and loads is not False:
        draft.put("algorithm.kl_in", where)
        if estimator in KL_ESTIMATORS:
            draft.put("algorithm.kl_estimator", KL_ESTIMATORS[estimator], f"{estimator} there")
        else:
            draft.miss("kl_estimator", estimator, "k1, k2 and k3 are here")
        if every is not None:
            draft.put("reference.refresh_steps", int(every), "takes the policy's weights whole")
            draft.miss("alpha", alpha or 0.6, "a reference takes the policy's weights whole")


def _correction(draft: Draft, options: Options) -> None:
    enabled = flag(options.take("use_rho_correction"))
    high = decimal(options.take("rho_clamp_upper_bound"))
    low_mask, high_mask = (
        decimal(options.take(f"rho_mask_{side}_bound", 0.0)) for side in ("lower", "upper")
    )
    by_sequence = flag(options.take("rho_mask_sequence_level", False))
    if not enabled:
        return
    if low_mask or high_mask:
        draft.put("algorithm.correction", "sequence_mask" if by_sequence else "icepop")
        if low_mask:
            draft.put("algorithm.correction_low", low_mask)
        if high_mask:
            draft.put("algorithm.correction_high", high_mask)
    elif high:
        draft.put("algorithm.correction", "tis", "rho correction")
        draft.put("algorithm.correction_high", high)


def _local_batch(draft: Draft, options: Options, learners: int) -> None:
    """`local_` numbers are one learner GPU's; GPUs that only sample do not count."""
    prompts = options.number("local_rollout_batch_size")
    update = options.number("local_mini_batch_size")
    draft.put("batch.rollout_batch_size", prompts * learners,
             f"prompts: local_rollout_batch_size {prompts} * {learners} learner GPUs")  # fmt: skip
    draft.put("batch.n_samples_per_prompt", options.number("number_samples_per_prompt"))
    draft.put("batch.epochs_per_rollout", options.number("num_epochs"), "num_epochs there")
    common.update_size(draft, update * learners,
                       f"local_mini_batch_size {update} * {learners} learner GPUs")  # fmt: skip
    common.micro_batch(draft, options.number("per_device_train_batch_size"))
    for name in (
        "num_unique_prompts_rollout",
        "num_samples_per_prompt_rollout",
        "num_mini_batches",
    ):
        options.take(name)
    options.take("pack_length")


def _ppo(draft: Draft, options: Options) -> None:
    clip = decimal(options.take("cliprange"))
    draft.put("algorithm.clip_low", clip)
    draft.put("algorithm.clip_high", clip)
    _kl(draft, options, "reward")
    if options.states("vf_coef"):
        draft.miss("vf_coef", options.take("vf_coef"), "the critic has an optimizer of its own")


def _rewards(draft: Draft, options: Options, program: str) -> None:
    weight = decimal(options.take("verification_reward"))
    verified = flag(options.take("apply_verifiable_reward", program == "grpo"))
    path = options.take("reward_model_path")
    factor = decimal(options.take("reward_model_multiplier", 1.0))
    if program == "ppo" and path:
        draft.put("reward_model.model.path", path, "the critic starts from it, as there")
        if factor:
            draft.reward("reward_model", weight=factor)
    if not verified:
        if not (program == "ppo" and path and factor):
            draft.reward("my_rewards:score", "the source names no reward: write this function")
        return
    paths = [
        str(value).lower()
        for place, value in draft.values.items()
        if place[0] == "data" and place[-1] == "path"
    ]
    verifiers = [kind for word, kind in VERIFIERS.items() if word in _parts(" ".join(paths))]
    if len(verifiers) < 2:
        _, type, settings = verifiers[0] if verifiers else VERIFIERS["math"]
        comment = (
            "as the dataset's name says" if verifiers else "which one the rows want is not said"
        )
        draft.reward(type, comment, weight=weight, **settings)
        return
    for column, type, settings in verifiers:
        draft.reward(type, "rows say their verifier in the column dataset", weight=weight,
                    when={"dataset": column}, **settings)  # fmt: skip


def _non_stop(draft: Draft, options: Options, program: str) -> None:
    """A reward that replaces all others of a sample that was cut off."""
    values = [options.take(name) for name in ("non_stop_penalty_value", "penalty_reward_value")]
    if flag(options.take("non_stop_penalty", False)):
        default = -10.0 if program == "ppo" else 0.0
        value = next((decimal(stated) for stated in values if stated is not None), default)
        common.cut_off(draft, value, "non_stop_penalty replaces the reward of what was cut off")


def _parts(name: str) -> set[str]:
    """The words of dataset names; "gsm8k" counts as "gsm" too."""
    words = set(name.replace("/", " ").replace("-", " ").replace("_", " ").split())
    return words | {"gsm" for word in words if word.startswith("gsm")}


def _times(draft: Draft, options: Options) -> None:
    every = options.number("local_eval_every", -1)
    at_start = flag(options.take("eval_on_step_0", False))
    save, splits = options.number("save_freq", -1), options.texts("dataset_mixer_eval_list_splits")
    count, mixed = options.number("num_evals", 0), options.take("dataset_mixer_eval_list")
    draft.put("checkpoint.save_steps", save if save > 0 else None)
    if not mixed:
        return
    if count and every <= 0:
        step, _ = common.per_step(draft)
        every = max(1, int(draft.get("total_episodes")) // step // count)
    sets = mixture(mixed, [part for text in splits for part in text.split()])
    if len(sets) == 1:
        common.sources(draft, sets, "eval")
    else:
        names = [eval_set["path"].rpartition("/")[2] for eval_set in sets]
        named = [
            {"name": name if names.index(name) == number else f"{name}-{number + 1}", **eval_set}
            for number, (name, eval_set) in enumerate(zip(names, sets, strict=True))
        ]
        common.sources(draft, named, "eval")
    draft.put("eval.every", every if every > 0 else None)
    draft.put("eval.at_start", at_start or None)
