"""What verl's configs optimise: advantages, losses, KL, corrections of the sampler, teachers."""

import math
import re
from typing import Any

from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.verl import ACTOR, AGGREGATIONS, ESTIMATORS, KLS, LOSSES
from postgrad.translate.verl_rl import Ahead, home

_CORRECTION = "algorithm.rollout_correction."
_DISTILLED = "distillation.distillation_loss."
_SCALES = {  # comments on types whose advantages differ by a factor
    "gpg": "advantages are scaled there by samples / rewards that are not 0; here by samples / "
    "those whose group has a gradient",
    "on_policy_distillation": "a token's advantage is the teacher's logprob minus that of the "
    "policy before the step; there minus that of the policy in the update",
    "gdpo": "the sum of components is whitened over tokens there, over samples here",
}
_REJECTIONS = {  # rollout_rs by statistic here; bounds of those without "_k" are of w
    **{f"token_k{n}": "token" for n in (1, 2, 3)},
    **{f"seq_max_k{n}": "any_token" for n in (2, 3)},
    "seq_mean_k1": "geometric_mean", "seq_sum_k1": "product",
    **{f"seq_{form}_k{n}": f"{form}_k{n}" for form in ("mean", "sum") for n in (2, 3)},
}  # fmt: skip
_NO_CLIP = 1e9  # clip_high: no ratio here is above exp(20) = 4.9e8


def algorithm(draft: Draft, options: Options, ahead: Ahead | None) -> None:
    """[algorithm]: advantages, the loss, KL and corrections."""
    estimator = str(options.take("algorithm.adv_estimator"))
    loss = str(options.take(f"{ACTOR}policy_loss.loss_mode", "vanilla"))
    name = ESTIMATORS.get(estimator, "grpo")
    if estimator not in ESTIMATORS:
        draft.miss("algorithm.adv_estimator", estimator, f"here are {', '.join(ESTIMATORS)}")
    divided = _divided(draft, options, estimator)
    if name == "grpo":
        name = LOSSES.get(loss, "grpo" if divided else "dr_grpo")
        if not divided and name not in ("dr_grpo", "gpg"):
            draft.put("algorithm.std_norm", False)
    elif loss in LOSSES and LOSSES[loss] != name:
        clipped = "dr_grpo" if name == "gpg" else name
        draft.miss(f"{ACTOR}policy_loss.loss_mode", loss, f"{clipped} has PPO's clip here")
    name = _gpg(draft, estimator, loss, name)
    if _teacher(draft, options):
        name = "on_policy_distillation"
    why = _SCALES.get(name, estimator if name != estimator else "")
    draft.put("algorithm.type", name, why)
    for key in ("gamma", "lam"):
        value = decimal(options.take(f"algorithm.{key}", 1.0))
        if name == "ppo":
            draft.put(f"algorithm.{key}", value)
        elif key == "gamma" and name == "reinforce_pp" and value != 1.0:
            draft.miss("algorithm.gamma", value, "rewards are not discounted by token here")
        elif options.states(f"algorithm.{key}"):
            draft.skip(f"algorithm.{key}", value, "of a critic, which the run does not have")
    _aggregation(draft, options, name)
    _clip(draft, options, name, loss)
    draft.put("algorithm.entropy_coef", decimal(options.take(f"{ACTOR}entropy_coeff", 0.0)) or None)
    _kl(draft, options)
    _correction(draft, options, ahead)


def _divided(draft: Draft, options: Options, estimator: str) -> bool:
    """Whether advantages are divided by the group's deviation: the estimator "grpo" alone is told
    what `norm_adv_by_std_in_grpo` says.
    """
    name = "algorithm.norm_adv_by_std_in_grpo"
    divided = flag(options.take(name, True))
    if estimator == "grpo" or divided:
        return divided
    draft.skip(name, divided, f"{estimator} does not read it there")
    return True


def _gpg(draft: Draft, estimator: str, loss: str, name: str) -> str:
    """The type where advantages or loss are GPG's: it has both here, and each alone there. Its loss
    is lost where other advantages than GRPO's are stated.
    """
    if name == "gpg" and estimator != "gpg":
        why = "gpg has its own advantages here: rewards minus their mean, over the share of samples"
        draft.miss("algorithm.adv_estimator", estimator, f"{why} whose group has a gradient")
        return "gpg"
    if estimator == "gpg" and loss != "gpg":
        why = "advantages are rewards minus their mean here, and not scaled with the share of"
        draft.miss("algorithm.adv_estimator", estimator, f"{why} rewards that are not 0")
        return "dr_grpo"
    return name


def _aggregation(draft: Draft, options: Options, name: str) -> None:
    mode = str(options.take(f"{ACTOR}loss_agg_mode", "token-mean"))
    factor = options.take(f"{ACTOR}loss_scale_factor")
    if name in ("gspo", "sapo", "gmpo"):  # of sequences, whatever is stated
        if mode not in ("token-mean", "seq-mean-token-mean"):
            draft.miss(f"{ACTOR}loss_agg_mode", mode, f"{name} has the mean of sequences")
        draft.put("algorithm.aggregation", "sequence",
                  "" if mode == "seq-mean-token-mean" else
                  f"its policy loss; a KL or an entropy in the loss has {mode} there")  # fmt: skip
        return
    if mode not in AGGREGATIONS:
        draft.miss(f"{ACTOR}loss_agg_mode", mode, f"here are {', '.join(AGGREGATIONS)}")
        return
    draft.put("algorithm.aggregation", AGGREGATIONS[mode], mode)
    if mode == "seq-mean-token-sum":
        draft.put("algorithm.constant_length", 1, "sums of tokens are divided by nothing there")
    elif mode == "seq-mean-token-sum-norm":
        longest = options.number("data.max_response_length")
        draft.put("algorithm.constant_length", int(decimal(factor)) if factor else longest)


def _clip(draft: Draft, options: Options, name: str, loss: str) -> None:
    both, low, high = (options.take(f"{ACTOR}clip_ratio{key}") for key in ("", "_low", "_high"))
    if both is not None and (low is None or high is None):
        why = "clip_ratio_low and clip_ratio_high win there, and have a default of 0.2"
        draft.skip(f"{ACTOR}clip_ratio", both, why)
    if name == "on_policy_distillation":
        low, high = _taught_clip(draft, options, low, high)
    low, high = (0.2 if bound is None else decimal(bound) for bound in (low, high))
    if name not in ("sapo", "gpg"):
        # a weight of CISPO is never below 0: a lower bound of 10 is none
        draft.put("algorithm.clip_low", min(low, 1.0) if name == "cispo" else low)
        draft.put("algorithm.clip_high", high)
    dual = decimal(options.take(f"{ACTOR}clip_ratio_c", 3.0))
    covariance = loss in ("clip_cov", "kl_cov")
    if name not in ("sapo", "gpg", "cispo", "gmpo", "gspo") and not covariance:
        default = "" if options.states(f"{ACTOR}clip_ratio_c") else "verl's default"
        draft.put("algorithm.dual_clip", dual, default)
    gates = [options.take(f"{ACTOR}{place}tau_{side}") for side in ("pos", "neg")
             for place in ("policy_loss.", "")]  # fmt: skip
    if name == "sapo":
        positive, negative = (next((g for g in gates[n : n + 2] if g), None) for n in (0, 2))
        draft.put("algorithm.gate_positive", None if positive is None else decimal(positive))
        draft.put("algorithm.gate_negative", None if negative is None else decimal(negative))
    _covariance(draft, options, loss)


def _covariance(draft: Draft, options: Options, loss: str) -> None:
    place = f"{ACTOR}policy_loss."
    values = {key: options.take(f"{place}{key}", default) for key, default in (
        ("clip_cov_ratio", None), ("clip_cov_lb", None), ("clip_cov_ub", None),
        ("kl_cov_ratio", None), ("ppo_kl_coef", 0.1))}  # fmt: skip
    if loss not in ("clip_cov", "kl_cov"):
        if loss not in ("vanilla", *LOSSES):
            draft.miss(f"{place}loss_mode", loss, "PPO's clip stands for it")
        return
    draft.put("algorithm.covariance", loss.removesuffix("_cov"), "tokens are selected over the "
              "step, before its updates; selected in each micro-batch there")  # fmt: skip
    keys = {"clip_cov_ratio": "fraction", "clip_cov_lb": "low", "clip_cov_ub": "high"}
    if loss == "kl_cov":
        draft.put("algorithm.clip_low", 1.0, "kl_cov has no clip there")
        draft.put("algorithm.clip_high", _NO_CLIP)
        keys = {"kl_cov_ratio": "fraction", "ppo_kl_coef": "kl_coef"}
    for name, key in keys.items():
        value = values[name]
        draft.put(f"algorithm.covariance_{key}", None if value is None else decimal(value))


def _kl(draft: Draft, options: Options) -> None:
    in_loss = flag(options.take(f"{ACTOR}use_kl_loss", False))
    in_reward = flag(options.take("algorithm.use_kl_in_reward", False))
    of_loss = (options.take(f"{ACTOR}kl_loss_coef", 0.001),
               options.take(f"{ACTOR}kl_loss_type", "low_var_kl"))  # fmt: skip
    of_reward = (options.take("algorithm.kl_ctrl.kl_coef", 0.001),
                 options.take("algorithm.kl_penalty", "kl"))  # fmt: skip
    adapted = str(options.take("algorithm.kl_ctrl.type", "fixed")) == "adaptive"
    target, horizon = (options.take(f"algorithm.kl_ctrl.{key}") for key in ("target_kl", "horizon"))
    coefficient, kind = of_loss if in_loss else of_reward
    if not (in_loss or in_reward) or not decimal(coefficient):
        draft.put("algorithm.kl_coef", 0.0)
        return
    if in_loss and in_reward and decimal(of_reward[0]):
        draft.miss("algorithm.use_kl_in_reward", True, "the KL is in the loss or in the reward")
    draft.put("algorithm.kl_coef", decimal(coefficient))
    late = draft.get("algorithm.type") == "remax" and not in_loss
    draft.put("algorithm.kl_in", "loss" if in_loss else "reward",
              "of the whole response; there from each token on" if late else "")  # fmt: skip
    name = f"{ACTOR}kl_loss_type" if in_loss else "algorithm.kl_penalty"
    base = str(kind).removesuffix("+")
    if base not in KLS:
        draft.miss(name, kind, f"here are {', '.join(KLS)}")
        return
    through = in_loss and str(kind).endswith("+")  # a reward has no gradient
    draft.put("algorithm.kl_estimator", "k2" if through else KLS[base],
              f"{kind}: its gradient is that of k2" if through else str(kind))  # fmt: skip
    if KLS[base] == "k3" and not through:
        draft.put("algorithm.kl_max", 10.0, "a token's KL, as there")
    if adapted and not in_loss:
        bound = 0.1 if target is None else decimal(target)
        draft.put("algorithm.kl_target", bound, common.ADAPTED)
        draft.put("algorithm.kl_horizon", None if horizon is None else int(decimal(horizon)))


def _correction(draft: Draft, options: Options, ahead: Ahead | None) -> None:
    """Weights of the difference between engine and learner, and which policy a ratio is of."""
    kind, bound = (options.take(f"{_CORRECTION}rollout_is{key}") for key in ("", "_threshold"))
    masks, range_ = (options.take(f"{_CORRECTION}rollout_rs{key}") for key in ("", "_threshold"))
    bypass = flag(options.take(f"{_CORRECTION}bypass_mode", ahead is not None))
    filtered = draft.get("rollout.top_p") or draft.get("rollout.top_k")
    name = f"{_CORRECTION}rollout_is"
    if bypass and kind is not None:
        draft.skip(name, kind, "with bypass_mode the ratio itself is of the sampler")
    elif kind in ("token", "sequence"):
        low, _, high = str(2.0 if bound is None else bound).rpartition("_")
        draft.put("algorithm.correction", "icepop" if low else "tis")
        draft.put("algorithm.correction_level", kind if kind == "sequence" else None)
        draft.put("algorithm.correction_low", decimal(low) if low else None)
        draft.put("algorithm.correction_high", decimal(high))
        normalised = flag(options.take(f"{name}_batch_normalize", False))
        draft.put("algorithm.correction_normalised", normalised or None)
        _of_sequences(draft, kind)
    elif kind is not None:
        draft.miss(name, kind, "algorithm.correction weighs tokens or sequences")
    if options.states(f"{name}_batch_normalize") and not draft.get("algorithm.correction"):
        value = options.take(f"{name}_batch_normalize")
        if options.stated.get(f"{_CORRECTION}loss_type") == "reinforce" and flag(value):
            draft.miss(f"{name}_batch_normalize", value, "of the loss reinforce, which is lost")
        else:
            draft.skip(f"{name}_batch_normalize", value, "of weights that the run does not have")
    if masks is not None:
        _rejections(draft, str(masks), str(range_), bypass=bypass)
    if filtered and (draft.get("algorithm.correction") or draft.get("algorithm.rejection")):
        draft.put("algorithm.correction_with_filters", True, "as there")
    if bypass and not filtered:
        draft.put("algorithm.old_logprobs", "sampled", "bypass_mode")
    if ahead is not None and ahead.steps:
        comment = "a share of a batch may be stale there: staleness_threshold"
        common.samples_ahead(draft, ahead.steps, comment if ahead.updates else "",
                             0.0 if filtered else 1.0)  # fmt: skip
        if not ahead.in_flight:
            draft.put("rollout.in_flight_updates", False)


def _of_sequences(draft: Draft, kind: str) -> None:
    """Weights of tokens in a loss whose ratio is a sequence's."""
    name = draft.get("algorithm.type")
    if kind == "token" and name == "gspo":
        draft.put(
            "algorithm.by_token", True, "each token's weight is on its own gradient, as there"
        )
    elif kind == "token" and name == "gmpo":
        draft.miss(f"{_CORRECTION}rollout_is", kind, "a token keeps its own weight; geo_mean takes "
                   "the geometric mean over the response")  # fmt: skip


def _rejections(draft: Draft, kinds: str, bounds: str, *, bypass: bool) -> None:
    """algorithm.rejection: what is left out where engine and learner are far apart. There one bound
    holds for all kinds, or each has its own.
    """
    name = f"{_CORRECTION}rollout_rs"
    listed, stated = ([part.strip() for part in text.split(",")] for text in (kinds, bounds))
    shared = len(stated) == 1
    for place, kind in enumerate(listed):
        bound = stated[0] if shared else stated[place] if place < len(stated) else "None"
        statistic = _REJECTIONS.get(kind)
        if statistic is None or bound == "None":
            draft.miss(name, kind, f"here are {', '.join(_REJECTIONS)}, with a bound")
        elif statistic.endswith(("_k2", "_k3")):
            common.reject(draft, statistic, decimal(bound))
        else:
            common.reject(draft, statistic, _range_of_w(kind[-2:], bound))
    aggregation = draft.get("algorithm.aggregation")
    others = draft.get("algorithm.kl_in") == "loss" or draft.get("algorithm.entropy_coef")
    leave = not bypass and (aggregation == "token" or bool(others))
    if leave or ("token_" in kinds and aggregation == "sequence"):
        stays = "rejected tokens stay in denominators, KL and entropy here, and leave them there"
        draft.put("algorithm.rejection", draft.get("algorithm.rejection"), stays)


def _range_of_w(measure: str, bound: str) -> list[float]:
    """The [low, high] of a weight w that a bound allows. k1 is -log w, and its bounds are of its
    exponential: those of w are one over them, in the other order. k2 and k3 are 0 at w = 1 and grow
    to both sides.
    """
    if measure == "k1":
        low, _, high = bound.rpartition("_")
        most = decimal(high)
        return [1.0 / most, 1.0 / decimal(low) if low else most]
    most = decimal(bound)
    if measure == "k2":
        return [math.exp(-math.sqrt(2.0 * most)), math.exp(math.sqrt(2.0 * most))]
    ends: list[float] = []
    for inside, outside in ((0.0, -most - 1.0), (0.0, most + 2.0)):  # of log w, around a root
        for _ in range(200):
            middle = (inside + outside) / 2
            if math.expm1(middle) - middle <= most:
                inside = middle
            else:
                outside = middle
        ends.append(math.exp(inside))
    return ends


def _teacher(draft: Draft, options: Options) -> bool:
    """[teacher] of on-policy distillation. Returns whether there is one."""
    if not flag(options.take("distillation.enabled", False)):
        for name in [name for name in options.stated if name.startswith("distillation.")]:
            if (value := options.take(name)) is not None:
                draft.skip(name, value, "of a teacher, which distillation.enabled leaves out")
        return False
    place = re.compile(r"distillation\.teacher_models\.\w+\.model_path")
    models = [options.take(name) for name in options.stated if place.fullmatch(name)]
    keys = [name for name in options.stated if re.fullmatch(
        r"distillation\.teacher_models\.\w+\.key", name)]  # fmt: skip
    if models:
        draft.put("teacher.model.path", home(str(models[0])))
    for other in models[1:]:
        draft.miss("distillation.teacher_models", other, "several teachers: [[teacher.sets]], one "
                   "for each dataset")  # fmt: skip
    for name in keys:
        options.take(name)
    loss = _DISTILLED
    kind = str(options.take(f"{loss}loss_mode", "k3"))
    if kind not in ("k1", "kl"):
        draft.miss(f"{loss}loss_mode", kind, "a token's advantage is the teacher's logprob minus "
                   "its own: k1")  # fmt: skip
    if (most := options.take(f"{loss}loss_max_clamp")) is not None:
        draft.put("algorithm.teacher_clip", decimal(most))
    coefficient = decimal(options.take(f"{loss}distillation_loss_coef", 1.0))
    if flag(options.take(f"{loss}use_task_rewards", True)):
        draft.put("algorithm.teacher_coef", coefficient if coefficient != 1.0 else None)
        draft.put("algorithm.reward_coef", 1.0)
    elif coefficient != 1.0:
        draft.skip(f"{loss}distillation_loss_coef", coefficient, "it is read with rewards alone")
    return True


def _taught_clip(draft: Draft, options: Options, low: Any, high: Any) -> tuple[Any, Any]:
    """The bounds of the teacher's loss, where it is the only one; low, high: of the policy's."""
    alone = draft.get("algorithm.reward_coef") is None
    for side in ("low", "high"):
        bound = options.take(f"{_DISTILLED}clip_ratio_{side}")
        if not alone and options.states(f"{_DISTILLED}clip_ratio_{side}"):
            draft.miss(
                f"{_DISTILLED}clip_ratio_{side}", bound, "rewards and teacher have one clip here"
            )
        elif alone:
            low, high = (bound, high) if side == "low" else (low, bound)
    return low, high
