"""Losses of TRL's GRPO, its relatives and RLOO: types, divisors of advantages, bounds of ratios,
and means that are others there.
"""

from postgrad.translate import common, trl_engines
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.trl import LOSSES

# Beside a mean over tokens.
_OF_MICRO_BATCHES = "a mean over an update's tokens, there over each micro-batch's"
_BY_TOKEN = ("dapo", "bnpo", "cispo", "vespo")  # losses that are means over tokens


def advantages(draft: Draft, options: Options, program: str) -> None:
    """Everything of [algorithm] but its KL. To be called when [batch] is known."""
    if program == "gmpo":
        _geometric(draft, options)
    elif program == "async_grpo":
        _ahead(draft, options)
    elif program == "grpo":
        _of_groups(draft, options)
    else:
        if flag(options.take("normalize_advantages", False)):
            draft.miss("normalize_advantages", True, "rloo's advantages stay as they are")
        draft.put("algorithm.constant_length", 1, "a response's logprobs are summed, as there")
        if common.per_step(draft)[1] > 1:  # in one update every ratio is 1
            draft.put("algorithm.by_response", True, "the ratio is the response's, as there")
        clip(draft, options)
    if bounds := options.numbers("reward_clip_range"):
        draft.put("algorithm.reward_clip", bounds)


def clip(draft: Draft, options: Options, comment: str = "") -> None:
    """The bounds of a ratio."""
    low, high = options.take("epsilon"), options.take("epsilon_high")
    draft.put("algorithm.clip_low", min(decimal(low), 1.0), comment)  # no ratio is below 0
    draft.put("algorithm.clip_high", decimal(low if high is None else high))


def _delta(draft: Draft, options: Options) -> None:
    """A bound of every ratio, which leaves that of good answers alone where it is above it. Where
    it is below, it takes its place, and bad answers are bounded by epsilon_high.
    """
    delta = options.take("delta")
    if delta is None:
        return
    bound, high = decimal(delta), 1.0 + float(draft.get("algorithm.clip_high"))
    if bound >= high:
        draft.put("algorithm.dual_clip", bound, "a bound of the ratio, for bad answers only")
    elif bound > 1.0:
        why = f"delta {bound:g} is below 1 + epsilon_high, so that"
        draft.put("algorithm.clip_high", round(bound - 1.0, 9), f"{why} it bounds good answers")
        draft.put("algorithm.dual_clip", round(high, 9), f"{why} this bounds bad ones")
    else:
        draft.miss("delta", delta, "algorithm.dual_clip is above 1, the ratio of an equal policy")


_OF_ADAPTIVE = ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")


def _adaptive(draft: Draft, options: Options) -> None:
    """A coefficient of the entropy that moves by its distance from a target."""
    if not flag(options.take("use_adaptive_entropy", False)):
        for name in _OF_ADAPTIVE:
            if options.states(name):
                draft.skip(name, options.take(name), "of use_adaptive_entropy, which is off")
        return
    target, step, least, most = (
        decimal(options.take(name, default))
        for name, default in zip(_OF_ADAPTIVE, (0.2, 0.005, 0.0, 1.0), strict=True)
    )
    why = "of the policy before each step; there of the update before, after which the coefficient"
    draft.put("algorithm.entropy_target", target, f"{why} moves")
    draft.put("algorithm.entropy_coef_step", step)
    draft.put("algorithm.entropy_coef_max", most)
    draft.miss("entropy_coef_min", least, "the coefficient falls to 0")


def deviation(draft: Draft, options: Options) -> None:
    """What a group's advantages are divided by, unless the type is dr_grpo, which does not."""
    scale = scaling(options)
    if draft.get("algorithm.type") == "dr_grpo":
        return
    if draft.get("algorithm.type") == "gdpo":
        scale = "group"  # whatever is stated, as there
    if scale in ("none", "false"):
        draft.put("algorithm.std_norm", False, f"scale_rewards {scale}")
    else:
        draft.put("algorithm.std_norm", "batch" if scale == "batch" else None)
        draft.put("algorithm.std_eps", 1e-4, "added to the deviation, as there")


def scaling(options: Options) -> str:
    """scale_rewards: "group", "batch", "none" or "false". "none" is read as no value."""
    scale = options.take("scale_rewards", "group")
    return str(options.stated.get("scale_rewards", scale)).lower()


def _of_groups(draft: Draft, options: Options) -> None:
    """GRPOTrainer: the loss, what advantages are divided by, and what bounds a ratio."""
    loss = str(options.take("loss_type", ""))
    level = options.take("importance_sampling_level", "token")
    name, aggregation = _type(draft, options, loss)
    _of_other_losses(draft, options, name)
    deviation(draft, options)
    _aggregated(draft, name, aggregation)
    if loss == "luspo":
        draft.put("algorithm.constant_length", 1, "luspo: not divided by a length")
        if level != "sequence":
            draft.miss("importance_sampling_level", level, "LUSPO's ratio is a response's")
    if name == "vespo":
        _weights_in_ratio(draft)
    low, high = options.take("epsilon"), options.take("epsilon_high")
    if name == "cispo":
        _cispo_bound(draft, decimal(low if high is None else high))
    elif name not in ("sapo", "vespo"):  # they have no clip
        clip(draft, options)
        _delta(draft, options)
    _adaptive(draft, options)
    if options.states("off_policy_mask_threshold") and trl_engines.filters(options):
        why = "filters move a sampled token's logprob, which off_policy_threshold reads"
        comment = f"{why}; without vLLM they do not there"
        draft.put("algorithm.correction_with_filters", True, comment)
    if name == "gspo" and draft.get("algorithm.kl_corrected"):
        draft.put("algorithm.kl_corrected", True, "by each token's ratio; there by the response's")


_CLIPPED = ("grpo", "dr_grpo", "gspo", "gdpo")
_READ_BY = {  # option -> types whose loss reads it there
    "delta": _CLIPPED,
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), ("sapo",)),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
                    ("vespo",)),
}  # fmt: skip


def _of_other_losses(draft: Draft, options: Options, name: str) -> None:
    for option, types in _READ_BY.items():
        if name not in types and options.states(option):
            draft.skip(option, options.take(option), "the loss does not read it, as there")


_OF_GRPO_LOSS = (  # options of GRPOConfig that GMPOTrainer's loss does not read
    "loss_type", "importance_sampling_level", "delta", "entropy_coef", "off_policy_mask_threshold",
    "use_bias_correction_kl", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
)  # fmt: skip


def _geometric(draft: Draft, options: Options) -> None:
    """GMPOTrainer, whose bounds are those of a ratio's logarithm, as here."""
    low, high = decimal(options.take("epsilon")), options.take("epsilon_high")
    draft.put("algorithm.clip_low", low, "of a ratio's logarithm, as there")
    draft.put("algorithm.clip_high", low if high is None else decimal(high))
    deviation(draft, options)
    for name in _OF_GRPO_LOSS:
        if options.states(name):
            draft.skip(name, options.take(name), "GMPOTrainer does not read it")
    if str(options.take("multi_objective_aggregation", "")) == "normalize_then_sum":
        draft.miss("multi_objective_aggregation", "normalize_then_sum", "is the type gdpo here, "
                   "which is not gmpo")  # fmt: skip


def _ahead(draft: Draft, options: Options) -> None:
    """AsyncGRPOTrainer: GRPO's loss over tokens, of samples that are older than the policy."""
    draft.put("algorithm.type", "grpo", _OF_MICRO_BATCHES)
    draft.put("algorithm.aggregation", "token")
    draft.put("algorithm.std_eps", 1e-8, "added to the deviation, as there; that of all samples of "
              "a group (n) there, of a sample (n - 1) here")  # fmt: skip
    clip(draft, options)


def _type(draft: Draft, options: Options, loss: str) -> tuple[str, str | None]:
    """algorithm.type of a loss_type of GRPO, and its aggregation."""
    name, aggregation = LOSSES.get(loss, ("grpo", "token"))
    if loss not in LOSSES:
        draft.miss("loss_type", loss, f"{', '.join(LOSSES)} are here")
    if options.take("importance_sampling_level", "token") == "sequence":
        name = _of_responses(draft, name)
    if options.take("multi_objective_aggregation") == "normalize_then_sum":
        if name == "grpo":
            name = "gdpo"
        else:
            why = f"is the type gdpo here, which is not {name}"
            draft.miss("multi_objective_aggregation", "normalize_then_sum", why)
    if scaling(options) in ("none", "false") and name == "grpo":
        name, aggregation = "dr_grpo", aggregation or "sequence"
    of_sum = "; the sum's deviation is of a sample there (n - 1), of all samples here (n)"
    more = f"{of_sum if name == 'gdpo' else ''}{_mean_of_tokens(draft, loss)}"
    draft.put("algorithm.type", name, f"loss_type {loss}{more}")
    return name, aggregation


def _of_responses(draft: Draft, name: str) -> str:
    """The type with importance_sampling_level sequence, from that without."""
    if name == "vespo":
        why = "VESPO's ratio is the response's in any case, as there"
        draft.skip("importance_sampling_level", "sequence", why)
    elif name in ("sapo", "cispo"):
        why = f"{name}'s ratio is a token's here"
        draft.miss("importance_sampling_level", "sequence", why)
    return "gspo" if name == "grpo" else name


def _in_parts(draft: Draft) -> bool:
    """Whether an update is several forward passes."""
    update = int(draft.get("batch.train_batch_size") or 0)
    return int(draft.get("batch.micro_train_batch_size") or update) < update


def _mean_of_tokens(draft: Draft, loss: str) -> str:
    """What a comment adds on the tokens that a loss is divided by, where they are others there."""
    samples, _ = common.per_step(draft)
    if loss == "bnpo" and _in_parts(draft):
        return f"; {_OF_MICRO_BATCHES}"
    if loss in ("dapo", "cispo", "vespo") and samples > draft.get("batch.train_batch_size"):
        return "; a mean over an update's tokens, there divided by an average update's"
    return ""


def means(draft: Draft, options: Options, program: str) -> None:
    """Comments on settings whose mean or number of tokens is another one there."""
    loss = str(options.take("loss_type", ""))
    by_token = program == "grpo" and loss in _BY_TOKEN
    others = "; the others leave the geometric mean there" if program == "gmpo" else ""
    comments = {
        "entropy_coef": (_OF_MICRO_BATCHES if _in_parts(draft) else "")
        if by_token
        else f"a mean over tokens there, also with {loss}",
        "mask_truncated_completions": _masked(draft, by_token=by_token),
        "top_entropy_fraction": "of the step's tokens, rounded down here; there a quantile of each "
        f"forward pass{others}",
    }
    for name, comment in comments.items():
        draft.put(f"algorithm.{name}", draft.get(f"algorithm.{name}"), comment)


def _masked(draft: Draft, *, by_token: bool) -> str:
    """What differs where responses are masked."""
    if not by_token:
        return "masked responses leave the mean here, and count in it there"
    samples, _ = common.per_step(draft)
    if samples > draft.get("batch.train_batch_size"):
        return (
            "the other responses are spread evenly over a step's updates; there each stays in its"
        )
    return "no update of a step without others; there one without a gradient"


def _weights_in_ratio(draft: Draft) -> None:
    """vLLM's weights are a factor of VESPO's ratio there, not of its loss: that is the ratio to
    the sampler.
    """
    if draft.get("algorithm.correction") is None:
        return
    for key in ("", "_level", "_low", "_high", "_with_filters"):
        draft.drop(f"algorithm.correction{key}")
    draft.put("algorithm.old_logprobs", "sampled", "vLLM's weights are in the ratio, as there")
    draft.miss(
        "vllm_importance_sampling_mode", "of vespo", "the weights in its ratio have no bound"
    )


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
    default = {
        "dr_grpo": "constant",
        "grpo": "sequence",
        "gdpo": "sequence",
        "gspo": "sequence",
    }.get(name)
    if aggregation and aggregation != default:
        draft.put("algorithm.aggregation", aggregation)
