"""PPO's options of OpenRLHF (train_ppo_ray): where things run, the algorithm, its rewards."""

from pathlib import PurePosixPath
from typing import Any

from postgrad.translate import common, places
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.openrlhf import ESTIMATORS

_ENGINES = places.EngineOptions(
    count="vllm.num_engines", tensor_parallel="vllm.tensor_parallel_size",
    memory="vllm.gpu_memory_utilization", eager="vllm.enforce_eager", sleep="vllm.enable_sleep",
)  # fmt: skip
_AFTER_BASELINE = "taken from rewards before the baseline; there after it, token by token"


def layout(draft: Draft, options: Options) -> None:
    """Ranks and engines. Without vllm.num_engines the policy itself samples."""
    nodes, each = options.number("actor.num_nodes"), options.number("actor.num_gpus_per_node")
    default = "" if options.states("actor.num_gpus_per_node") else ": OpenRLHF's default"
    places.processes(draft, f"GPUs of the policy{default}", nodes * each, nodes)
    together = flag(options.take("train.colocate_all", False))
    apart = flag(options.stated.get("train.async_enable", False))  # engines sample meanwhile
    if options.number("vllm.num_engines", 0) > 0:
        places.engines(draft, options, _ENGINES, shared=together and not apart)
    elif not options.states("vllm.gpu_memory_utilization"):
        options.take("vllm.gpu_memory_utilization")


def roles(draft: Draft, options: Options) -> None:
    """Roles that the run has, on devices of their own."""
    together = flag(options.take("train.colocate_all", False))
    with_policy = flag(options.take("train.colocate_actor_ref", False))
    critic_reward = flag(options.take("train.colocate_critic_reward", False))
    trained = draft.get("algorithm.type") == "ppo"
    roles = {
        "ref": ("reference", bool(draft.get("algorithm.kl_coef")) and not with_policy),
        "critic": ("critic", trained),
        "reward": ("reward_model", draft.get("reward_model.model.path") is not None),
    }
    placed: set[str] = set()
    for prefix, (role, is_apart) in roles.items():
        name = f"{prefix}.num_gpus_per_node"
        gpus = options.number(f"{prefix}.num_nodes") * options.number(name, 8)
        if is_apart and not together and options.states(name):
            with_critic = prefix == "reward" and critic_reward and "critic" in placed
            places.role_elsewhere(draft, role, gpus, "critic" if with_critic else None)
            placed.add(role)
    _offload(draft, options, placed)


def _offload(draft: Draft, options: Options, placed: set[str]) -> None:
    """Frozen models that lie in the host's memory between their passes: [cluster] offload. placed:
    roles with devices of their own. One flag said it of both models before 0.9.
    """
    both = flag(options.take("ref_reward_offload", False))
    lora, reward = options.stated.get("ds.lora.rank"), draft.get("reward_model.model.path")
    critic = options.stated.get("critic.model_name_or_path") or reward
    adapted = {  # roles whose weights are those under an adapter that is trained beside them
        "reference": lora and "reference" not in placed,
        "reward_model": lora and critic == reward and draft.get("algorithm.type") == "ppo",
    }
    present = {
        "reference": bool(draft.get("algorithm.kl_coef")),
        "reward_model": reward is not None,
    }
    for prefix, role in (("ref", "reference"), ("reward", "reward_model")):
        if not flag(options.take(f"{prefix}.offload", False)) and not both:
            continue
        if present[role] and not adapted[role]:
            draft.put(f"cluster.{role}.offload", True, "in the host's memory between its passes")
        else:
            name = "ref_reward_offload" if both else f"{prefix}.offload"
            absent = "the run has no such model"
            draft.skip(name, True, "its weights lie under an adapter" if present[role] else absent)


def algorithm(draft: Draft, options: Options) -> None:
    """[algorithm], and dynamic sampling."""
    estimator = str(options.take("algo.advantage.estimator"))
    loss = options.take("actor.policy_loss_type")
    name, aggregation = ESTIMATORS.get(estimator, ("grpo", None))
    if estimator not in ESTIMATORS:
        draft.miss("algo.advantage.estimator", estimator, "no algorithm here is called so")
    if loss == "gspo":
        name, aggregation = "gspo", None
        if estimator not in ("group_norm", "dr_grpo"):
            why = "gspo here has the advantages of group_norm"
            draft.miss("algo.advantage.estimator", estimator, why)
    means = "; a KL or an entropy in the loss is a mean over tokens there" if name == "gspo" else ""
    draft.put("algorithm.type", name, f"{estimator}{means}")
    if estimator == "group_norm":
        draft.put("algorithm.std_eps", 1e-9, "added to the deviation, as there")
    _deviation(draft, options, name, estimator)
    if aggregation:
        draft.put("algorithm.aggregation", aggregation, "every token counts the same there")
    clip = decimal(options.take("actor.eps_clip", 0.2))
    bounds = options.numbers("actor.eps_clip_low_high") or [clip, clip]
    low, high = bounds[0], bounds[-1]
    if (low, high) != (0.2, 0.2) or name == "gspo":
        draft.put("algorithm.clip_low", low)
        draft.put("algorithm.clip_high", high)
    _critic(draft, options, name)
    _kl(draft, options)
    _correction(draft, options)
    if flag(options.take("train.async_enable", False)):
        batches = options.number("train.async_queue_size")
        top_p = decimal(options.stated.get("rollout.top_p", 1.0))
        common.samples_ahead(draft, batches, "train.async_queue_size", top_p)
        if not flag(options.take("train.partial_rollout_enable", False)):
            draft.put("rollout.in_flight_updates", False, "a lock keeps weights from them there")
    if flag(options.take("algo.dynamic_filtering_enable", False)):
        above, below = options.pair("algo.dynamic_filtering_range") or (0.0, 1.0)
        draft.put("rollout.dynamic_sampling", True,
                 "by the first reward's score; in max_rounds, there until it is full. Here groups "
                 "of equal scores too")  # fmt: skip
        draft.put("rollout.keep_above", decimal(above))
        draft.put("rollout.keep_below", decimal(below))


def as_before(draft: Draft) -> None:
    """What versions before 0.11 computed in another way, where the recipe cannot say so: their
    options have the same names.
    """
    name = str(draft.get("algorithm.type"))
    comment = f"{draft.comments[('algorithm', 'type')]}; before 0.11 within each micro-batch there"
    if name == "rloo":
        comment += "; before 0.8.5 whitened too: reinforce_pp_baseline has these advantages"
    draft.put("algorithm.type", name, comment)
    if draft.get("algorithm.kl_max") is not None:
        draft.put("algorithm.kl_max", 10.0, "a token's KL, as there since 0.8.6")


def _deviation(draft: Draft, options: Options, name: str, estimator: str) -> None:
    """algorithm.std_norm: whether advantages are divided by their standard deviation."""
    option = "algo.advantage.no_std_norm"
    undivided = flag(options.take(option, False))
    if name == "gspo":
        undivided = estimator == "dr_grpo"
    elif estimator in ("rloo", "group_norm", "dr_grpo"):
        if undivided:
            draft.skip(option, True, f"{estimator} does not ask it there either")
        return
    if undivided:
        draft.put("algorithm.std_norm", False, "the mean is still taken, as there")


def _critic(draft: Draft, options: Options, name: str) -> None:
    lam, gamma = options.take("algo.advantage.lambd"), options.take("algo.advantage.gamma", 1.0)
    clip, freezing = options.take("critic.value_clip"), options.number("actor.freezing_steps", -1)
    path, rate = options.take("critic.model_name_or_path"), options.take("critic.adam.lr")
    _reward_clip(draft, options, name)
    if name == "ppo":
        draft.put("algorithm.critic_warmup_steps", freezing if freezing > 0 else None)
        draft.put("algorithm.gamma", decimal(gamma))
        draft.put("algorithm.lam", decimal(lam))
        draft.put("algorithm.value_clip", decimal(clip))
        draft.put("critic.model.path", path)
        draft.put("critic.learner.lr", decimal(rate))
        return
    if freezing > 0:
        draft.miss("actor.freezing_steps", freezing, "there is no critic that would learn alone")
    if name == "reinforce_pp" and float(gamma) != 1.0:
        why = f"rewards are not discounted by token in {name}"
        draft.miss_always("algo.advantage.gamma", gamma, why)


def _reward_clip(draft: Draft, options: Options, name: str) -> None:
    """algorithm.reward_clip. Where a baseline is taken first, the default of 10 is left out: it
    bounds nothing that occurs.
    """
    bounds = options.pair("reward.clip_range")
    first = name in ("ppo", "reinforce_pp")
    if bounds is None or not (first or options.states("reward.clip_range")):
        return
    low, high = bounds
    comment = "" if first else "of rewards; there of what the baseline leaves of them"
    draft.put("algorithm.reward_clip", high if low == -high else [low, high], comment)


def _kl(draft: Draft, options: Options) -> None:
    # OpenRLHF takes a coefficient below 0 for 0.
    coefficient = max(0.0, decimal(options.take("algo.kl.init_coef")))
    in_loss = flag(options.take("algo.kl.use_loss", False))
    estimator, target = options.take("algo.kl.estimator"), options.take("algo.kl.target")
    horizon = options.take("algo.kl.horizon")
    draft.put("algorithm.kl_coef", coefficient)
    if not coefficient:
        return
    late = "" if draft.get("algorithm.type") in ("ppo", "reinforce_pp") else _AFTER_BASELINE
    draft.put("algorithm.kl_in", "loss" if in_loss else "reward", "" if in_loss else late)
    draft.put("algorithm.kl_estimator", estimator)
    draft.put("algorithm.kl_max", 10.0, "a token's KL, as there")
    if target is not None and in_loss:
        why = "adapts a KL in the reward; the one in the loss keeps its coefficient"
        draft.miss("algo.kl.target", target, why)
    elif target is not None:
        draft.put("algorithm.kl_target", decimal(target), common.ADAPTED)
        draft.put("algorithm.kl_horizon", horizon)


def _correction(draft: Draft, options: Options) -> None:
    kind = str(options.take("algo.advantage.is_correction_type", "tis"))
    bounds = options.numbers("algo.advantage.is_correction_threshold") or [0.5, 5.0]
    low, high = bounds[0], bounds[-1]  # a single number is the upper bound
    if not flag(options.take("algo.advantage.is_correction_enable", False)):
        return
    if draft.get("algorithm.type") == "gspo":
        draft.put("algorithm.old_logprobs", "sampled", "GSPO's ratio is to the sampler, as there")
        return
    if kind == "seq-mask-tis":
        draft.put("algorithm.correction", "tis", "weights of tokens have no bound there")
        draft.put("algorithm.correction_high", common.UNBOUNDED)
        common.reject(draft, "geometric_mean", [low, high], kind)
        return
    name = "icepop" if kind == "icepop" else "tis"
    draft.put("algorithm.correction", name)
    if len(bounds) > 1 or name != "tis":
        draft.put("algorithm.correction_low", low)
    draft.put("algorithm.correction_high", high)


def rewards(draft: Draft, options: Options) -> None:
    """[[rewards]]: a reward model, a server, or a Python function of the user's own."""
    model, urls = options.take("reward.model_name_or_path"), options.texts("reward.remote_url")
    normalise = flag(options.take("reward.normalize_enable", False))
    agent = options.take("train.agent_func_path")
    servers = [url for url in urls if url.startswith("http")]
    files = [url for url in [*urls, str(agent or "")] if url.endswith(".py")]
    if servers:
        draft.reward("remote", "asks as docs/serve-reward.md says, not as OpenRLHF's server",
                    urls=servers)  # fmt: skip
    if agent:
        why = "an agent of several turns is an environment: docs/environments.md"
        draft.miss("train.agent_func_path", agent, why)
    for file in files:
        name = PurePosixPath(file).stem
        draft.reward(f"{name}:score", f"{file}: write score(prompt, rollout) there")
    if model and not urls and not agent:
        draft.put("reward_model.model.path", str(model).split(",")[0])
        extra: dict[str, Any] = {"normalise": True} if normalise else {}
        draft.reward("reward_model", **extra)
    elif normalise:
        why = "takes the mean and deviation of a reward model; these rewards have none"
        draft.miss("reward.normalize_enable", True, why)
    if not (servers or files or model):
        draft.reward("my_rewards:score", "the source names no reward: write this function")
    length = options.take("reward.overlong_buffer_len")
    factor = decimal(options.take("reward.overlong_penalty_factor", 1.0))
    if length and factor < 0:
        why = f"a factor of {factor:g} pays for length, and overlong only takes"
        draft.miss_always("reward.overlong_penalty_factor", factor, why)
    elif length and factor:
        draft.reward("overlong", buffer=int(length), factor=factor)
    coefficient = options.take("reward.stop_properly_penalty_coef")
    if coefficient is not None:
        _stop_properly(draft, decimal(coefficient))


def _stop_properly(draft: Draft, coefficient: float) -> None:
    """A coefficient below 0 is the reward of what was cut off, any other scales it."""
    if coefficient < 0:
        common.cut_off(draft, coefficient, "replaces the reward of what was cut off, as there")
    else:
        draft.reward("stop_properly", "scales the reward of what was cut off", stopped=1.0,
                    penalty=coefficient, multiply=True)  # fmt: skip
