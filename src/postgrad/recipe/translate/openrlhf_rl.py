"""What OpenRLHF's train_ppo_ray says about the algorithm and its rewards."""

from pathlib import PurePosixPath
from typing import Any

from postgrad.recipe.translate import common
from postgrad.recipe.translate.draft import Draft
from postgrad.recipe.translate.options import Options
from postgrad.recipe.translate.rules import decimal, flag

_ESTIMATORS: dict[str, tuple[str, str | None]] = {  # -> type, what the loss is divided by
    "gae": ("ppo", None),
    "reinforce": ("reinforce_pp", None),
    "reinforce_baseline": ("reinforce_pp_baseline", None),
    "rloo": ("rloo", "token"),
    "group_norm": ("grpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
}
_AFTER_BASELINE = "taken from rewards before the baseline; there after it, token by token"
_CORRECTIONS = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "sequence_mask"}


def algorithm(made: Draft, options: Options) -> None:
    """[algorithm] and what filters groups."""
    estimator = str(options.take("algo.advantage.estimator"))
    loss = options.take("actor.policy_loss_type")
    name, aggregation = _ESTIMATORS.get(estimator, ("grpo", None))
    if estimator not in _ESTIMATORS:
        made.miss("algo.advantage.estimator", estimator, "no algorithm here is called so")
    if loss == "gspo":
        name, aggregation = "gspo", None
        if estimator not in ("group_norm", "dr_grpo"):
            why = "gspo here has the advantages of group_norm"
            made.miss("algo.advantage.estimator", estimator, why)
    made.put("algorithm.type", name, estimator)
    _deviation(made, options, name, estimator)
    if aggregation:
        made.put("algorithm.aggregation", aggregation, "every token counts the same there")
    clip = decimal(options.take("actor.eps_clip", 0.2))
    bounds = options.numbers("actor.eps_clip_low_high") or [clip, clip]
    low, high = bounds[0], bounds[-1]
    if (low, high) != (0.2, 0.2) or name == "gspo":
        made.put("algorithm.clip_low", low)
        made.put("algorithm.clip_high", high)
    _critic(made, options, name)
    _kl(made, options)
    _correction(made, options)
    if flag(options.take("algo.dynamic_filtering_enable", False)):
        above, below = options.pair("algo.dynamic_filtering_range") or (0.0, 1.0)
        made.put("rollout.dynamic_sampling", True,
                 "by the first reward's score; in max_rounds, there until it is full")  # fmt: skip
        made.put("rollout.keep_above", decimal(above))
        made.put("rollout.keep_below", decimal(below))


def _deviation(made: Draft, options: Options, name: str, estimator: str) -> None:
    """Whether advantages are divided by their standard deviation."""
    option = "algo.advantage.no_std_norm"
    undivided = flag(options.take(option, False))
    if name == "gspo":
        undivided = estimator == "dr_grpo"
    elif estimator in ("rloo", "group_norm", "dr_grpo"):
        if undivided:
            made.skip(option, True, f"{estimator} does not ask it there either")
        return
    if undivided:
        made.put("algorithm.std_norm", False, "the mean is still taken, as there")


def _critic(made: Draft, options: Options, name: str) -> None:
    lam, gamma = options.take("algo.advantage.lambd"), options.take("algo.advantage.gamma", 1.0)
    clip, freezing = options.take("critic.value_clip"), options.number("actor.freezing_steps", -1)
    path, rate = options.take("critic.model_name_or_path"), options.take("critic.adam.lr")
    _reward_clip(made, options, name)
    if name == "ppo":
        made.put("algorithm.critic_warmup_steps", freezing if freezing > 0 else None)
        made.put("algorithm.gamma", decimal(gamma))
        made.put("algorithm.lam", decimal(lam))
        made.put("algorithm.value_clip", decimal(clip))
        made.put("critic.model.path", path)
        made.put("critic.learner.lr", decimal(rate))
        return
    if freezing > 0:
        made.miss("actor.freezing_steps", freezing, "there is no critic that would learn alone")
    if name == "reinforce_pp" and float(gamma) != 1.0:
        why = f"rewards are not discounted by token in {name}"
        made.unknown("algo.advantage.gamma", gamma, why)


def _reward_clip(made: Draft, options: Options, name: str) -> None:
    """Both bounds; where a baseline is taken, the default of 10 bounds nothing that is met."""
    bounds = options.pair("reward.clip_range")
    first = name in ("ppo", "reinforce_pp")
    if bounds is None or not (first or options.said("reward.clip_range")):
        return
    low, high = bounds
    comment = "" if first else "of rewards; there of what the baseline leaves of them"
    made.put("algorithm.reward_clip", high if low == -high else [low, high], comment)


def _kl(made: Draft, options: Options) -> None:
    coefficient = max(0.0, decimal(options.take("algo.kl.init_coef")))  # none below 0, as there
    in_loss = flag(options.take("algo.kl.use_loss", False))
    estimator, target = options.take("algo.kl.estimator"), options.take("algo.kl.target")
    horizon = options.take("algo.kl.horizon")
    made.put("algorithm.kl_coef", coefficient)
    if not coefficient:
        return
    late = "" if made.get("algorithm.type") in ("ppo", "reinforce_pp") else _AFTER_BASELINE
    made.put("algorithm.kl_in", "loss" if in_loss else "reward", "" if in_loss else late)
    made.put("algorithm.kl_estimator", estimator)
    if target is not None and not in_loss:
        made.put("algorithm.kl_target", decimal(target))
        made.put("algorithm.kl_horizon", horizon)


def _correction(made: Draft, options: Options) -> None:
    kind = str(options.take("algo.advantage.is_correction_type", "tis"))
    bounds = options.numbers("algo.advantage.is_correction_threshold") or [0.5, 5.0]
    low, high = bounds[0], bounds[-1]  # one number was the upper bound, when tis alone was there
    if not flag(options.take("algo.advantage.is_correction_enable", False)):
        return
    name = _CORRECTIONS.get(kind, "tis")
    masks = "keeps or drops a response; there its tokens are weighed too"
    made.put("algorithm.correction", name, masks if name == "sequence_mask" else "")
    if name != "tis":
        made.put("algorithm.correction_low", low)
    elif len(bounds) > 1:
        made.miss("algo.advantage.is_correction_threshold", low, "tis bounds weights from above")
    made.put("algorithm.correction_high", high)


def rewards(made: Draft, options: Options) -> None:
    """[[rewards]]: a reward model, a server, or a Python function of the user's own."""
    model, urls = options.take("reward.model_name_or_path"), options.texts("reward.remote_url")
    normalise = flag(options.take("reward.normalize_enable", False))
    agent = options.take("train.agent_func_path")
    servers = [url for url in urls if url.startswith("http")]
    files = [url for url in [*urls, str(agent or "")] if url.endswith(".py")]
    if servers:
        made.reward("remote", "asks as docs/serve-reward.md says, not as OpenRLHF's server",
                    urls=servers)  # fmt: skip
    if agent:
        why = "an agent of several turns is an environment: docs/environments.md"
        made.miss("train.agent_func_path", agent, why)
    for file in files:
        name = PurePosixPath(file).stem
        made.reward(f"{name}:score", f"{file}: write score(prompt, rollout) there")
    if model and not urls and not agent:
        made.put("reward_model.model.path", str(model).split(",")[0])
        extra: dict[str, Any] = {"normalise": True} if normalise else {}
        made.reward("reward_model", **extra)
    elif normalise:
        why = "takes the mean and deviation of a reward model; these rewards have none"
        made.miss("reward.normalize_enable", True, why)
    if not (servers or files or model):
        made.reward("my_rewards:score", "the source names no reward: write this function")
    length = options.take("reward.overlong_buffer_len")
    factor = decimal(options.take("reward.overlong_penalty_factor", 1.0))
    if length and factor < 0:
        why = f"a factor of {factor:g} pays for length, and overlong only takes"
        made.unknown("reward.overlong_penalty_factor", factor, why)
    elif length and factor:
        made.reward("overlong", buffer=int(length), factor=factor)
    coefficient = options.take("reward.stop_properly_penalty_coef")
    if coefficient is not None:
        _stop_properly(made, decimal(coefficient))


def _stop_properly(made: Draft, coefficient: float) -> None:
    """A coefficient below 0 is the reward of what was cut off, any other scales it."""
    if coefficient < 0:
        common.cut_off(made, coefficient, "replaces the reward of what was cut off, as there")
    else:
        made.reward("stop_properly", "scales the reward of what was cut off", stopped=1.0,
                    penalty=coefficient, multiply=True)  # fmt: skip
