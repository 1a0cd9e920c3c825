"""What Open-Instruct's GRPO, and the PPO that it had, say beside data and learner."""

from typing import Any

from postgrad.recipe.translate import common
from postgrad.recipe.translate.draft import Draft
from postgrad.recipe.translate.open_instruct_mixture import mixture
from postgrad.recipe.translate.options import Options
from postgrad.recipe.translate.rules import decimal, flag

_KL = {0: "k1", 1: "k2", 2: "k3", "kl1": "k1", "kl2": "k2", "kl3": "k3"}
_VERIFIERS: dict[str, tuple[list[str], str, dict[str, Any]]] = {  # in a name -> column, type
    "gsm": (["gsm8k"], "gsm8k", {"flexible": True}),
    "math": (["math", "MATH"], "math", {}),
    "if": (["ifeval"], "ifeval", {}),
}

_SEQUENCES = ("sequence_parallel_size", "context_parallel_degree", "cp_degree")


def answers(made: Draft, options: Options, program: str) -> None:
    """Rollout, batch, algorithm and rewards."""
    prompt, new = options.number("max_prompt_token_length"), options.number("response_length")
    made.put("rollout.max_new_tokens", new)
    made.put("data.max_len", prompt + new, f"prompts of {prompt}, answers of {new}")
    local = program == "ppo" or options.said("local_rollout_batch_size")
    gpus = "actor_num_gpus_per_node" if local else "num_learners_per_node"
    learners = options.texts(gpus)
    count = sum(int(word) for text in learners for word in text.split()) or 1
    common.processes(made, "learner GPUs", count)
    ranks(made, options, None)
    episodes = options.number("total_episodes")
    made.put("total_episodes", episodes, "samples, as there")
    if local:
        _local_batch(made, options, count)
    else:
        _global_batch(made, options)
    if program == "ppo":
        _ppo(made, options)
    else:
        _grpo(made, options)
    _rewards(made, options, program)
    _non_stop(made, options, program)
    _times(made, options)


def ranks(made: Draft, options: Options, launched: int | None) -> None:
    """What the learner's ranks share. launched: the stage that the launcher's config names."""
    stage = options.take("deepspeed_stage", options.take("zero_stage", launched))
    shares = {
        key: next(((n, options.take(n)) for n in names if options.said(n)), (names[0], None))
        for key, names in (
            ("tensor_parallel", ("tensor_parallel_degree",)),
            (
                "context_parallel",
                ("sequence_parallel_size", "context_parallel_degree", "cp_degree"),
            ),
        )
    }
    common.divided(made, ("deepspeed_stage", None if stage is None else int(stage)), shares)


def _global_batch(made: Draft, options: Options) -> None:
    prompts = options.number("num_unique_prompts_rollout")
    samples = options.number("num_samples_per_prompt_rollout")
    made.put("batch.rollout_batch_size", prompts, "prompts")
    made.put("batch.n_samples_per_prompt", samples)
    made.put("batch.epochs_per_rollout", options.number("num_epochs"), "num_epochs there")
    parts = options.number("num_mini_batches")
    fitting = max(n for n in range(1, parts + 1) if prompts * samples % n == 0)
    said = "of samples; there of packs" if parts > 1 else ""
    made.put("batch.num_mini_batches", fitting, said)
    packs, tokens = options.number("per_device_train_batch_size"), options.number("pack_length")
    common.micro_tokens(made, packs * tokens, f"{packs} packs of {tokens} tokens a device")


def _grpo(made: Draft, options: Options) -> None:
    centred = str(options.take("advantage_normalization_type")) == "centered"
    cispo = str(options.take("loss_fn")) == "cispo"
    name = "cispo" if cispo else "dr_grpo" if centred else "grpo"
    made.put("algorithm.type", name, "advantages are centred" if centred and not cispo else "")
    if centred and cispo:
        made.put("algorithm.std_norm", False, "advantages are centred")
    divided = options.take("loss_denominator", "token")
    if divided == "token":
        made.put("algorithm.aggregation", "token", "loss_denominator there")
    else:
        made.miss("loss_denominator", divided, "algorithm.aggregation says what divides the loss")
    low = decimal(options.take("clip_lower"))
    made.put("algorithm.clip_low", None if cispo else low)
    made.put("algorithm.clip_high", decimal(options.take("clip_higher")))
    _kl(made, options, "loss")
    _correction(made, options)
    filtered = flag(options.take("filter_zero_std_samples"))
    if flag(options.take("active_sampling", False)):
        made.put("rollout.dynamic_sampling", True, "active_sampling: in up to max_rounds here")
    elif not filtered:
        why = "groups without gradient stay in the denominator"
        made.skip("filter_zero_std_samples", False, why)


def _kl(made: Draft, options: Options, where: str) -> None:
    beta, estimator = decimal(options.take("beta")), options.take("kl_estimator")
    loads, every = options.take("load_ref_policy"), options.take("ref_policy_update_freq")
    alpha = options.take("alpha")
    made.put("algorithm.kl_coef", beta, "beta there")
    if beta and loads is not False:
        made.put("algorithm.kl_in", where)
        if estimator in _KL:
            made.put("algorithm.kl_estimator", _KL[estimator], f"{estimator} there")
        else:
            made.miss("kl_estimator", estimator, "k1, k2 and k3 are here")
        if every is not None:
            made.put("reference.refresh_steps", int(every), "takes the policy's weights whole")
            made.miss("alpha", alpha or 0.6, "a reference takes the policy's weights whole")


def _correction(made: Draft, options: Options) -> None:
    enabled = flag(options.take("use_rho_correction"))
    high = decimal(options.take("rho_clamp_upper_bound"))
    low_mask, high_mask = (
        decimal(options.take(f"rho_mask_{side}_bound", 0.0)) for side in ("lower", "upper")
    )
    by_sequence = flag(options.take("rho_mask_sequence_level", False))
    if not enabled:
        return
    if low_mask or high_mask:
        made.put("algorithm.correction", "sequence_mask" if by_sequence else "icepop")
        if low_mask:
            made.put("algorithm.correction_low", low_mask)
        if high_mask:
            made.put("algorithm.correction_high", high_mask)
    elif high:
        made.put("algorithm.correction", "tis", "rho correction")
        made.put("algorithm.correction_high", high)


def _local_batch(made: Draft, options: Options, learners: int) -> None:
    """`local_` numbers are one learner GPU's; GPUs that only sample do not count."""
    prompts = options.number("local_rollout_batch_size")
    update = options.number("local_mini_batch_size")
    made.put("batch.rollout_batch_size", prompts * learners,
             f"prompts: local_rollout_batch_size {prompts} * {learners} learner GPUs")  # fmt: skip
    made.put("batch.n_samples_per_prompt", options.number("number_samples_per_prompt"))
    made.put("batch.epochs_per_rollout", options.number("num_epochs"), "num_epochs there")
    common.update_size(made, update * learners,
                       f"local_mini_batch_size {update} * {learners} learner GPUs")  # fmt: skip
    common.micro_batch(made, options.number("per_device_train_batch_size"))
    for name in (
        "num_unique_prompts_rollout",
        "num_samples_per_prompt_rollout",
        "num_mini_batches",
    ):
        options.take(name)
    options.take("pack_length")


def _ppo(made: Draft, options: Options) -> None:
    clip = decimal(options.take("cliprange"))
    made.put("algorithm.clip_low", clip)
    made.put("algorithm.clip_high", clip)
    _kl(made, options, "reward")
    if options.said("vf_coef"):
        made.miss("vf_coef", options.take("vf_coef"), "the critic has an optimizer of its own")


def _rewards(made: Draft, options: Options, program: str) -> None:
    weight = decimal(options.take("verification_reward"))
    verified = flag(options.take("apply_verifiable_reward", program == "grpo"))
    path = options.take("reward_model_path")
    factor = decimal(options.take("reward_model_multiplier", 1.0))
    if program == "ppo" and path:
        made.put("reward_model.model.path", path, "the critic starts from it, as there")
        if factor:
            made.reward("reward_model", weight=factor)
    if not verified:
        if not (program == "ppo" and path and factor):
            made.reward("my_rewards:score", "the source names no reward: write this function")
        return
    paths = [
        str(value).lower()
        for place, value in made.values.items()
        if place[0] == "data" and place[-1] == "path"
    ]
    found = [kind for word, kind in _VERIFIERS.items() if word in _parts(" ".join(paths))]
    if len(found) < 2:
        _, type, settings = found[0] if found else _VERIFIERS["math"]
        said = "as the dataset's name says" if found else "which one the rows want is not said"
        made.reward(type, said, weight=weight, **settings)
        return
    for column, type, settings in found:
        made.reward(type, "rows say their verifier in the column dataset", weight=weight,
                    when={"dataset": column}, **settings)  # fmt: skip


def _non_stop(made: Draft, options: Options, program: str) -> None:
    """What was cut off has this reward and no other."""
    values = [options.take(name) for name in ("non_stop_penalty_value", "penalty_reward_value")]
    if flag(options.take("non_stop_penalty", False)):
        unsaid = -10.0 if program == "ppo" else 0.0
        value = next((decimal(one) for one in values if one is not None), unsaid)
        common.cut_off(made, value, "non_stop_penalty replaces the reward of what was cut off")


def _parts(name: str) -> set[str]:
    words = set(name.replace("/", " ").replace("-", " ").replace("_", " ").split())
    return words | {"gsm" for word in words if word.startswith("gsm")}


def _times(made: Draft, options: Options) -> None:
    every = options.number("local_eval_every", -1)
    at_start = flag(options.take("eval_on_step_0", False))
    save, splits = options.number("save_freq", -1), options.texts("dataset_mixer_eval_list_splits")
    count, mixed = options.number("num_evals", 0), options.take("dataset_mixer_eval_list")
    made.put("checkpoint.save_steps", save if save > 0 else None)
    if not mixed:
        return
    if count and every <= 0:
        step, _ = common.per_step(made)
        every = max(1, int(made.get("total_episodes")) // step // count)
    sets = mixture(mixed, [part for text in splits for part in text.split()])
    if len(sets) == 1:
        common.sources(made, sets, "eval")
    else:
        names = [one["path"].rpartition("/")[2] for one in sets]
        named = [
            {"name": name if names.index(name) == number else f"{name}-{number + 1}", **one}
            for number, (name, one) in enumerate(zip(names, sets, strict=True))
        ]
        common.sources(made, named, "eval")
    made.put("eval.every", every if every > 0 else None)
    made.put("eval.at_start", at_start or None)
