"""GRPO and PPO of Open-Instruct: where things run, batches, the algorithm, times."""

from postgrad.translate import common, open_instruct_scored, places
from postgrad.translate.common import mixture
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.open_instruct import KL_ESTIMATORS

_ENGINES = places.EngineOptions(
    count="vllm_num_engines", tensor_parallel="vllm_tensor_parallel_size",
    memory="vllm_gpu_memory_utilization", eager="vllm_enforce_eager",
)  # fmt: skip


def answers(draft: Draft, options: Options, program: str) -> None:
    """Everything of an RL job but data and learner: rollout, batch, algorithm, rewards, times."""
    prompt, new = options.number("max_prompt_token_length"), options.number("response_length")
    draft.put("rollout.max_new_tokens", new)
    draft.put("data.max_len", prompt + new, f"prompts of {prompt}, answers of {new}")
    local = program == "ppo" or options.states("local_rollout_batch_size")
    gpus = "actor_num_gpus_per_node" if local else "num_learners_per_node"
    learners = [int(word) for text in options.texts(gpus) for word in text.split()] or [1]
    count = sum(learners)
    machines = len(learners) if len(set(learners)) == 1 else None
    places.processes(draft, "learner GPUs", count, machines)
    ranks(draft, options, None)
    together = flag(options.take("single_gpu_mode", False))
    places.engines(draft, options, _ENGINES, shared=together)
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
    _ahead(draft, options)
    open_instruct_scored.scored(draft, options, program)
    _times(draft, options)


def _ahead(draft: Draft, options: Options) -> None:
    """Samples ahead of the policy, where the source says how far."""
    steps = options.number("async_steps", 0) if flag(options.take("async_mode", True)) else 0
    in_flight = flag(options.take("inflight_updates", False))
    former = options.states("local_rollout_batch_size") and not options.states("async_steps")
    if steps < 1 or former:  # the former programs had no such option
        return
    top_p = decimal(options.stated.get("vllm_top_p", 1.0))
    default = "" if options.states("async_steps") else ", Open-Instruct's default"
    common.samples_ahead(draft, steps, f"async_steps{default}; nothing is dropped here", top_p)
    if not in_flight:
        draft.put("rollout.in_flight_updates", False)


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
    replicas = options.number("fsdp_num_replicas")
    degree = options.number("fsdp_shard_degree", 0) or None
    is_fsdp = stage is None and (degree is not None or replicas > 1)
    level = 3 if is_fsdp else None if stage is None else int(stage)
    places.divided(draft, ("fsdp_shard_degree" if is_fsdp else "deepspeed_stage", level), shares)
    if replicas > 1 and draft.get("learner.sharding") and places.replicas(draft) % replicas == 0:
        draft.put("learner.shard_groups", replicas, "fsdp_num_replicas: each has all of the state")
    elif replicas > 1:
        why = f"{places.replicas(draft)} replicas do not divide into groups of that number"
        draft.miss("fsdp_num_replicas", replicas, why)


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
    of_group = "the deviation is of a sample here (n - 1), of the group (n) there"
    centring = "" if cispo else "advantages are centred"
    draft.put("algorithm.type", name, centring if centred else of_group)
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
        draft.put("rollout.filter_on", "total", "scores are of all verifiers and penalties")
    elif not filtered:
        why = "groups without gradient stay in the denominator"
        draft.skip("filter_zero_std_samples", False, why)
    else:
        stay = ("groups of equal scores stay in the denominator, which filter_zero_std_samples "
                "leaves out there")  # fmt: skip
        comment = draft.comments.get(("algorithm", "type"))
        draft.put("algorithm.type", name, f"{comment}; {stay}" if comment else stay)


def _kl(draft: Draft, options: Options, where: str) -> None:
    beta, estimator = decimal(options.take("beta")), options.take("kl_estimator")
    loads, every = options.take("load_ref_policy"), options.take("ref_policy_update_freq")
    alpha = options.take("alpha")
    draft.put("algorithm.kl_coef", beta, "beta there")
    if beta and loads is not False:
        draft.put("algorithm.kl_in", where)
        if str(estimator) == "3" and where == "loss":
            draft.put("algorithm.kl_estimator", "k1", "3 there: the ratio times k1")
            draft.put("algorithm.kl_corrected", True)
        elif estimator in KL_ESTIMATORS:
            draft.put("algorithm.kl_estimator", KL_ESTIMATORS[estimator], f"{estimator} there")
        else:
            draft.miss("kl_estimator", estimator, "k1, k2 and k3 are here")
        if every is not None:
            draft.put("reference.refresh_steps", int(every))
            kept = round(1.0 - decimal(alpha or 0.6), 9)
            draft.put("reference.ema_decay", kept or None, "1 - alpha there")


def _correction(draft: Draft, options: Options) -> None:
    stated = options.states("use_rho_correction")
    enabled = flag(options.take("use_rho_correction"))
    high = decimal(options.take("rho_clamp_upper_bound"))
    low_mask, high_mask = (
        decimal(options.take(f"rho_mask_{side}_bound", 0.0)) for side in ("lower", "upper")
    )
    by_sequence = flag(options.take("rho_mask_sequence_level", False))
    least = decimal(options.take("rho_clamp_lower_bound", 0.0))
    if not enabled:
        return
    free = common.UNBOUNDED  # a bound of 0 is none
    if not (low_mask or high_mask):
        if not (high or stated):  # its name before turned it off with 0
            return
        draft.put("algorithm.correction", "tis", "rho correction")
        draft.put("algorithm.correction_low", least or None)
        draft.put("algorithm.correction_high", high or free)
        return
    kept = [low_mask, high_mask or free]
    if by_sequence:
        stays = "a response that stays has weight 1; there its mean ratio"
        draft.put("algorithm.correction", "sequence_mask", stays)
        draft.put("algorithm.correction_low", kept[0])
        draft.put("algorithm.correction_high", kept[1])
        return
    draft.put("algorithm.correction", "tis", "rho correction")
    draft.put("algorithm.correction_low", least or None)
    draft.put("algorithm.correction_high", high or free)
    common.reject(draft, "token", kept)


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


def _times(draft: Draft, options: Options) -> None:
    every = options.number("local_eval_every", -1)
    at_start = flag(options.take("eval_on_step_0", False))
    save, splits = options.number("save_freq", -1), options.texts("dataset_mixer_eval_list_splits")
    count, mixed = options.number("num_evals", 0), options.take("dataset_mixer_eval_list")
    state = options.number("checkpoint_state_freq", -1)
    draft.put("checkpoint.save_steps", next((n for n in (state, save) if n > 0), None))
    if state > 0 and options.states("save_freq") and save != state:
        why = 'the model is written at the end; checkpoint.save_hf = "each" writes it at each save'
        draft.miss("save_freq", save, why)
    if not mixed:
        return
    if count and not options.states("local_eval_every"):  # a default of 100 says nothing beside it
        step, _ = common.per_step(draft)
        every = max(1, int(draft.get("total_episodes")) // step // count)
    common.held_out(draft, mixture(mixed, [part for text in splits for part in text.split()]))
    draft.put("eval.every", every if every > 0 else None)
    draft.put("eval.at_start", at_start or None)
    top_p = options.take("eval_top_p")
    draft.put("eval.top_p", None if top_p is None else decimal(top_p))
    if (samples := options.number("eval_pass_at_k")) > 1:
        draft.put("eval.n_samples", samples)
        draft.put("eval.pass_at", [1, samples])
