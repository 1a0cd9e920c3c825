"""What NeMo RL's configs optimise: advantages, losses, samples ahead of the policy, rewards."""

import re

from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.nemo_rl import ESTIMATORS, FUNCTIONS, VERIFIERS

_ENDS = (("min", 0.0), ("max", 1.0))  # of a range of rewards, with NeMo RL's defaults
_LEFT_OUT = ("grpo.use_leave_one_out_baseline", "grpo.adv_estimator.use_leave_one_out_baseline")
_NO_BOUND = 1e6  # of an advantage that nothing bounds
_BY_VALUE = "formulas by their values; there the text behind Answer: is compared as text"


def algorithm(draft: Draft, options: Options) -> None:
    """[algorithm]: advantages, the clip, the KL and the correction."""
    kind = str(options.take("grpo.adv_estimator.name", "grpo"))
    name = ESTIMATORS.get(kind, "grpo")
    if kind not in ESTIMATORS:
        draft.miss("grpo.adv_estimator.name", kind, f"here are {', '.join(ESTIMATORS)}")
    divided, left_out = (
        flag(options.take(f"grpo.adv_estimator.{key}", options.take(f"grpo.{key}", True)))
        for key in ("normalize_rewards", "use_leave_one_out_baseline")
    )
    if name == "reinforce_pp" and flag(options.take("grpo.adv_estimator.minus_baseline", True)):
        name = "reinforce_pp_baseline"
    by_sequence = flag(options.take("loss_fn.sequence_level_importance_ratios", False))
    cispo = flag(options.take("loss_fn.use_cispo", False))
    if name == "grpo" and (by_sequence or cispo):
        name = "gspo" if by_sequence else "cispo"
        draft.put("algorithm.std_norm", None if divided else False)
    elif name == "grpo" and not divided:
        name = "rloo" if left_out else "dr_grpo"
    of_sum = "the sum's deviation is of a sample there (n - 1), of all samples here (n)"
    draft.put("algorithm.type", name, of_sum if name == "gdpo" else "")
    if left_out and name not in ("rloo", "reinforce_pp", "reinforce_pp_baseline", "dr_grpo"):
        default = "" if any(map(options.states, _LEFT_OUT)) else "NeMo RL's default"
        draft.put("algorithm.leave_one_out", True, default)
    _advantage_clip(draft, options)
    by_token = flag(options.take("loss_fn.token_level_loss", True))
    if name != "gspo":
        draft.put("algorithm.aggregation", "token" if by_token else "sequence")
    low, high = (
        decimal(options.take(f"loss_fn.ratio_clip_{side}", 0.2)) for side in ("min", "max")
    )
    # a weight of CISPO is never below 0: a lower bound beyond 1 is none
    draft.put("algorithm.clip_low", min(low, 1.0) if name == "cispo" else low)
    draft.put("algorithm.clip_high", high)
    _kl(draft, options, name)
    _correction(draft, options, by_sequence=by_sequence)


def _advantage_clip(draft: Draft, options: Options) -> None:
    names = [f"grpo.advantage_clip_{side}" for side in ("low", "high")]
    stated = [options.take(name) for name in names]
    if stated == [None, None]:
        return
    low, high = (
        none if bound is None else decimal(bound)
        for bound, none in zip(stated, (-_NO_BOUND, _NO_BOUND), strict=True)
    )
    if not (low <= 0.0 <= high and low < high):
        draft.miss(names[0], stated, "algorithm.advantage_clip holds 0, and low is below high")
        return
    comment = "one of them has no bound there" if None in stated else ""
    draft.put("algorithm.advantage_clip", high if low == -high else [low, high], comment)


def _kl(draft: Draft, options: Options, name: str) -> None:
    """The KL. In the loss its gradient goes through the chance of the sample too, as `kl_corrected`
    has it; in the reward only REINFORCE++ charges it there.
    """
    beta = decimal(options.take("loss_fn.reference_policy_kl_penalty"))
    kind = str(options.take("loss_fn.reference_policy_kl_type"))
    in_reward = flag(options.take("loss_fn.use_kl_in_reward", False))
    corrected = flag(options.take("loss_fn.use_on_policy_kl_approximation", False))
    default = "" if options.states("loss_fn.reference_policy_kl_penalty") else "NeMo RL's default"
    if in_reward and not name.startswith("reinforce_pp"):
        beta, default = 0.0, "use_kl_in_reward takes it out of the loss, and grpo reads no other"
    draft.put("algorithm.kl_coef", beta, default)
    if not beta:
        for bound in ("kl_input_clamp_value", "kl_output_clamp_value"):
            if options.take(f"loss_fn.{bound}") is not None:
                draft.skip(f"loss_fn.{bound}", options.take(f"loss_fn.{bound}"), "there is no KL")
        return
    _bounded_kl(draft, options, kind, in_reward=in_reward)
    draft.put("algorithm.kl_in", "reward" if in_reward else "loss",
              "there a token is charged its own KL alone" if in_reward else "")  # fmt: skip
    draft.put("algorithm.kl_estimator", kind)
    if not in_reward:
        factor = "the KL is multiplied by the ratio to the policy before the step; there "
        factor += "to the sampler" if corrected else "by 1, with the gradient of a ratio"
        draft.put("algorithm.kl_corrected", True, factor)


def _bounded_kl(draft: Draft, options: Options, kind: str, *, in_reward: bool) -> None:
    """algorithm.kl_max. There the log ratio has a bound of its own, beyond which nothing changes
    where it lies beyond that of the KL. A KL in the reward has the defaults, whatever is stated.
    """
    of_ratio, of_kl = "loss_fn.kl_input_clamp_value", "loss_fn.kl_output_clamp_value"
    bounds = dict[str, float | None]()
    for name, default in ((of_ratio, 20.0), (of_kl, 10.0)):
        value = options.take(name, default)
        off = name in options.stated and options.stated[name] is None  # null
        bounds[name] = default if in_reward else None if off else decimal(value)
    log_ratio, most = bounds.values()
    stated = options.states(of_kl) and not in_reward
    draft.put("algorithm.kl_max", most, "kl_output_clamp_value" if stated else "NeMo RL's default")
    if log_ratio is None or not options.states(of_ratio):
        return
    largest = {"k1": log_ratio, "k2": log_ratio**2 / 2}.get(kind, log_ratio - 1.0)
    if in_reward or (most is not None and largest >= most):
        draft.skip(of_ratio, options.take(of_ratio), "kl_max bounds the KL before that")
    else:
        draft.miss(of_ratio, options.take(of_ratio), "only the exponent of k3 is bounded, at 20")


def _correction(draft: Draft, options: Options, *, by_sequence: bool) -> None:
    """Weights of the difference between engine and learner."""
    prefix = "loss_fn.truncated_importance_sampling_"
    kind, high, low = (options.take(f"{prefix}{key}") for key in ("type", "ratio", "ratio_min"))
    if (most := options.take("grpo.seq_logprob_error_threshold")) is not None:
        stays = "rejected responses stay in denominators and in a KL here, and leave them there"
        common.reject(draft, "mean_error", decimal(most), stays)
    if flag(options.take("loss_fn.use_importance_sampling_correction", False)):
        draft.put("algorithm.correction", "icepop" if kind == "icepop" else "tis",
                  str(kind) if kind else "there without a bound")  # fmt: skip
        if kind == "seq-mask-tis" and None not in (low, high):
            comment = draft.comments.get(("algorithm", "rejection"), "")
            common.reject(draft, "geometric_mean", [decimal(low), decimal(high)], comment)
            low, high = None, common.UNBOUNDED  # of tokens' weights
        elif by_sequence:
            draft.put("algorithm.correction_level", "sequence", "of GSPO's ratios, as there")
        draft.put("algorithm.correction_high", None if high is None else decimal(high))
        draft.put("algorithm.correction_low", None if low is None else decimal(low))
    reads = draft.get("algorithm.correction") or draft.get("algorithm.rejection")
    filters = draft.get("rollout.top_p") or draft.get("rollout.top_k")
    draft.put("algorithm.correction_with_filters", True if filters and reads else None, "as there")


def ahead(draft: Draft, options: Options) -> None:
    """Samples ahead of the policy: [rollout] max_staleness, where async_grpo is on."""
    prefix = "grpo.async_grpo."
    options.take("grpo.async_grpo")  # null: off
    if any(name.startswith("async_rl.") for name in options.stated):
        _single_controller(draft, options)
        return
    if not flag(options.stated.get(f"{prefix}enabled", False)):
        return
    options.take(f"{prefix}enabled")
    age = options.number(f"{prefix}max_trajectory_age_steps", 1)
    in_flight = flag(options.take(f"{prefix}in_flight_weight_updates", False))
    _older(draft, options, prefix, age, "max_trajectory_age_steps; nothing is dropped here")
    if not in_flight:
        draft.put("rollout.in_flight_updates", False)


def _older(draft: Draft, options: Options, prefix: str, age: int, comment: str) -> None:
    """[rollout] max_staleness = age. prefix: of the options of asynchronous training."""
    name = f"{prefix}recompute_kv_cache_after_weight_updates"
    again = options.take(name)
    filtered = draft.get("rollout.top_p") or draft.get("rollout.top_k")
    common.samples_ahead(draft, age, comment, 0.0 if filtered else 1.0)
    in_flight = f"{prefix}in_flight_weight_updates"  # always so where there is no such option
    if again is not None and not flag(again) and flag(options.stated.get(in_flight, True)):
        draft.miss_always(name, again, "keys and values are computed again with new weights")


def _single_controller(draft: Draft, options: Options) -> None:
    """run_grpo_single_controller.py: a sampler says how far ahead samples are, and weights change
    while they are being written.
    """
    prefix = "async_rl."
    kind = str(options.take(f"{prefix}sampler.name", "in_order"))
    key = "max_lookahead_versions" if kind == "in_order" else "max_staleness_versions"
    age = 0 if kind == "custom" else options.number(f"{prefix}sampler.{key}", 1)
    if kind == "custom":
        draft.miss(f"{prefix}sampler.name", kind, "steps train in the order of their prompts")
    elif age:
        ready = "" if kind == "in_order" else f"; {kind} trains on what is ready first"
        _older(draft, options, prefix, age, f"{key}, in order here and nothing dropped{ready}")
    else:
        name = f"{prefix}recompute_kv_cache_after_weight_updates"
        if options.take(name) is not None and options.states(name):
            draft.skip(name, options.take(name), "no sample is ahead of its weights")
    name = f"{prefix}min_groups_for_streaming_train"
    groups, prompts = options.take(name), options.number("grpo.num_prompts_per_step")
    if groups is not None and int(groups) < prompts:
        draft.miss(name, groups, "an update begins when all of its samples are there")
    elif options.states(name):
        draft.skip(name, groups, "an update begins when all of its samples are there, as there")


def rewards(draft: Draft, options: Options) -> None:
    """[[rewards]]: the verifier or the functions of an environment, and what shapes its rewards."""
    environment = options.take("data.default.env_name", options.take("data.train.env_name"))
    of_gym = flag(options.take("env.should_use_nemo_gym", False))
    environment = "nemo_gym" if of_gym else environment or "math"
    _idle_environments(draft, options, environment)
    verifier = VERIFIERS.get(str(environment))
    workers = f"env.{environment}.num_workers"
    if verifier == "math" and draft.get("data.path") == "openai/gsm8k":
        draft.reward("gsm8k", "references end in #### and the number", flexible=True)
    elif verifier is not None:
        comment, kind = "", "env.math.math_verify_impl"
        if verifier == "math" and options.stated.get(kind) == "dapo_math_verify":
            options.take(kind)
            comment = _BY_VALUE
        draft.reward(verifier, comment)
    elif of_gym:
        draft.put("environment.type", "my_environment:NeMoGym",
                  "write it: servers of NeMo Gym play and score the tasks there")  # fmt: skip
        workers = ""
    elif not _functions(draft, options, f"env.{environment}.reward_functions."):
        draft.miss("data.default.env_name", environment, "write a verifier or an environment: "
                   "docs/rewards.md, docs/environments.md")  # fmt: skip
        workers = ""
    if workers and options.states(workers):
        draft.put("scoring.workers", options.number(workers))
    draft.put("reward_model.model.path", options.take("env.reward_model.model_name"))
    _scaling(draft, options)
    _shaping(draft, options)


def _idle_environments(draft: Draft, options: Options, environment: str) -> None:
    """A base config has sections of environments that a config above it does not play."""
    names = [name for name in options.stated if re.fullmatch(r"data\.(.*\.)?env_name", name)]
    played = {environment, *(str(options.take(name)) for name in names)}
    for name in list(options.stated):
        section, *places = name.split(".")
        if section == "env" and len(places) > 1 and places[0] not in played:
            draft.skip(name, options.take(name), "of an environment that the run does not play")


def _functions(draft: Draft, options: Options, prefix: str) -> bool:
    """[[rewards]] for the functions that an environment lists, with weights that add up to 1.
    Returns whether there are some.
    """
    stated = [name for name in options.stated if name.startswith(prefix)]
    numbers = {int(name.removeprefix(prefix).split(".")[0]) for name in stated}
    named = [(str(options.take(f"{prefix}{n}.name")), n) for n in sorted(numbers)]
    named.sort(key=lambda entry: entry[0] == "format")  # the first one says what is right
    weights = [decimal(options.take(f"{prefix}{n}.weight", 1.0)) for _, n in named]
    for (name, n), weight in zip(named, weights, strict=True):
        arguments = [other for other in stated if other.startswith(f"{prefix}{n}.kwargs")]
        share = weight / sum(weights)
        if name not in FUNCTIONS or arguments:
            for other in arguments:
                draft.miss(other, options.take(other), "say it in your function")
            draft.reward(f"my_rewards:{name}", "write it as (prompt, rollout) -> float",
                         weight=round(share, 9))  # fmt: skip
            continue
        for kind, part, settings in FUNCTIONS[name]:
            comment = f"{name}: letters and digits count there" if kind == "exact_match" else name
            draft.reward(kind, comment, **settings, weight=round(share * part, 9))
    return bool(numbers)


def _scaling(draft: Draft, options: Options) -> None:
    """Weights for rewards that are mapped from one range to another, such as 0 to 1 to -1 to 1.

    The groups' means take the offset away again, but not where a factor on the sum follows.
    """
    place = "grpo.reward_scaling."
    if not flag(options.stated.get(f"{place}enabled", False)):
        return
    options.take(f"{place}enabled")
    (low, high), (least, most) = (
        [decimal(options.take(f"{place}{side}_{end}", default)) for end, default in _ENDS]
        for side in ("source", "target")
    )
    if high <= low:
        draft.miss(f"{place}source_max", high, "a range ends above source_min")
        return
    if options.states("grpo.reward_shaping.stop_properly_penalty_coef") and least != 0.0:
        draft.miss(f"{place}target_min", least, "a reward has no offset, and here a factor follows")
    kinds = [str(draft.get(f"rewards.{number}.type")) for number in range(draft.rewards)]
    if low > 0.0 or high < 1.0 or any(":" in kind or kind == "reward_model" for kind in kinds):
        draft.miss_always(f"{place}source_max", high, "scores outside the range are not clipped")
    factor = (most - least) / (high - low)
    for number in range(draft.rewards):
        weight = draft.get(f"rewards.{number}.weight", 1.0) * factor
        if weight != 1.0:
            draft.put(f"rewards.{number}.weight", round(weight, 9), f"times {factor:g}: scaled")


def _shaping(draft: Draft, options: Options) -> None:
    shaping = "grpo.reward_shaping."
    if not flag(options.stated.get(f"{shaping}enabled", False)):
        return
    options.take(f"{shaping}enabled")
    coefficient, buffer, penalty, longest = (
        options.take(f"{shaping}{key}")
        for key in ("stop_properly_penalty_coef", "overlong_buffer_length",
                    "overlong_buffer_penalty", "max_response_length")
    )  # fmt: skip
    if coefficient is not None:
        draft.reward("stop_properly", penalty=decimal(coefficient), stopped=1.0, multiply=True)
    elif buffer is not None:
        most = int(longest or draft.get("rollout.max_new_tokens"))
        common.overlong(draft, int(buffer), decimal(penalty or 1.0), most)
