"""RL in verl's configs: batches, sampling, losses, samples ahead, rows and rewards."""

import math
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.verl import (
    ACTOR,
    AGGREGATIONS,
    ESTIMATORS,
    KLS,
    LOSSES,
    ROLLOUT,
    SOURCES,
)

SAMPLES = f"{ROLLOUT}n"
_CORRECTION = "algorithm.rollout_correction."
_HOME = re.compile(r"^(?:\$HOME|\$\{HOME\})(?=/|$)")
_REWARD = "reward."


def home(path: str) -> str:
    """A path in which "~" stands for $HOME."""
    return _HOME.sub("~", path)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A program whose engines sample while the policy learns."""

    gpus: int  # of the engines
    steps: int  # how old samples may be
    updates: int  # between two publishes, each of ppo_mini_batch_size prompts; 0: of a whole step
    in_flight: bool  # samples go on with new weights


def ahead(options: Options, program: str) -> Ahead | None:
    """What a program says of samples ahead; None for one whose engines wait for the policy."""
    if program not in ("fully_async_main", "one_step_off"):
        return None
    gpus = options.number("rollout.nnodes", 1) * options.number("rollout.n_gpus_per_node", 8)
    options.take("rollout.n")
    if program == "one_step_off":
        return Ahead(gpus, 1, 0, in_flight=False)
    share = decimal(options.take("async_training.staleness_threshold", 0.1))
    updates = options.number("async_training.require_batches", 1) * options.number(
        "async_training.trigger_parameter_sync_step", 4
    )
    partial = flag(options.take("async_training.partial_rollout", True))
    return Ahead(gpus, math.ceil(share), updates, partial)


def batch(draft: Draft, options: Options, ahead: Ahead | None) -> None:
    """[batch]. An update there has `ppo_mini_batch_size` prompts, with all of their samples."""
    prompts = options.number("data.train_batch_size")
    samples = options.number(SAMPLES, 1)
    mini = options.number(f"{ACTOR}ppo_mini_batch_size")
    if ahead is not None and ahead.updates:
        prompts = mini * ahead.updates
        draft.put("batch.rollout_batch_size", prompts, f"prompts of {ahead.updates} updates, after "
                  "which engines get the weights there")  # fmt: skip
    else:
        draft.put("batch.rollout_batch_size", prompts, "prompts")
    draft.put("batch.n_samples_per_prompt", samples)
    common.update_size(draft, mini * samples, f"samples; ppo_mini_batch_size counts {mini} prompts")
    passes = options.number(f"{ACTOR}ppo_epochs", 1)
    draft.put("batch.epochs_per_rollout", passes if passes > 1 else None)
    longest = options.number("data.max_prompt_length") + options.number("data.max_response_length")
    draft.put("data.max_len", longest, "max_prompt_length and max_response_length")
    _micro(draft, options)


def _micro(draft: Draft, options: Options) -> None:
    tokens = options.number(f"{ACTOR}ppo_max_token_len_per_gpu", 16_384)
    each = options.take(f"{ACTOR}ppo_micro_batch_size_per_gpu")
    together = options.take(f"{ACTOR}ppo_micro_batch_size")
    if flag(options.take(f"{ACTOR}use_dynamic_bsz", False)):
        size = int(draft.get("learner.context_parallel") or 1)
        common.micro_tokens(draft, tokens * size, "of a replica: ppo_max_token_len_per_gpu")
    elif each is not None:
        common.micro_batch(draft, int(decimal(each)), "samples, a replica")
    elif together is not None:
        ranks = int(draft.get("learner.ranks") or 1)
        common.micro_batch(draft, max(1, int(decimal(together)) // ranks), "samples, a replica")


def sampling(draft: Draft, options: Options) -> None:
    """[rollout]'s sampling, and which groups are replaced."""
    draft.put("rollout.max_new_tokens", options.number("data.max_response_length"))
    warmth = decimal(options.take(f"{ROLLOUT}temperature", 1.0))
    draft.put("rollout.temperature", warmth if warmth != 1.0 else None)
    top_p = decimal(options.take(f"{ROLLOUT}top_p", 1.0))
    draft.put("rollout.top_p", top_p if top_p < 1.0 else None)
    top_k = options.number(f"{ROLLOUT}top_k", -1)
    draft.put("rollout.top_k", top_k if top_k > 0 else None)
    rounds = options.number("algorithm.filter_groups.max_num_gen_batches", 0)
    if flag(options.take("algorithm.filter_groups.enable", False)):
        draft.put("rollout.dynamic_sampling", True, "by the first reward's score")
        draft.put("rollout.max_rounds", rounds if rounds > 0 else None)


def algorithm(draft: Draft, options: Options, ahead: Ahead | None) -> None:
    """[algorithm]: advantages, the loss, KL and corrections."""
    estimator = str(options.take("algorithm.adv_estimator"))
    loss = str(options.take(f"{ACTOR}policy_loss.loss_mode", "vanilla"))
    name = ESTIMATORS.get(estimator, "grpo")
    if estimator not in ESTIMATORS:
        draft.miss("algorithm.adv_estimator", estimator, f"here are {', '.join(ESTIMATORS)}")
    divided = flag(options.take("algorithm.norm_adv_by_std_in_grpo", True))
    if name == "grpo":
        name = LOSSES.get(loss, "grpo" if divided else "dr_grpo")
        if not divided and name not in ("dr_grpo", "gpg"):
            draft.put("algorithm.std_norm", False)
    elif loss in LOSSES and LOSSES[loss] != name:
        draft.miss(f"{ACTOR}policy_loss.loss_mode", loss, f"{name} has PPO's clip here")
    if _teacher(draft, options):
        name = "on_policy_distillation"
    draft.put("algorithm.type", name, estimator if name != estimator else "")
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


def _aggregation(draft: Draft, options: Options, name: str) -> None:
    mode = str(options.take(f"{ACTOR}loss_agg_mode", "token-mean"))
    factor = options.take(f"{ACTOR}loss_scale_factor")
    if name in ("gspo", "sapo", "gmpo"):  # of sequences, whatever is stated
        if mode not in ("token-mean", "seq-mean-token-mean"):
            draft.miss(f"{ACTOR}loss_agg_mode", mode, f"{name} has the mean of sequences")
        draft.put("algorithm.aggregation", "sequence")
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
    low, high = (0.2 if bound is None else decimal(bound) for bound in (low, high))
    if name == "cispo":
        if low < 1.0:
            draft.miss(f"{ACTOR}clip_ratio_low", low, "cispo bounds ratios from above alone")
    elif name not in ("sapo", "gpg"):
        draft.put("algorithm.clip_low", low)
    if name not in ("sapo", "gpg"):
        draft.put("algorithm.clip_high", high)
    dual = decimal(options.take(f"{ACTOR}clip_ratio_c", 3.0))
    if name not in ("sapo", "gpg", "cispo", "gmpo", "gspo"):
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
    values = {key: options.take(f"{place}{key}") for key in (
        "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")}  # fmt: skip
    if loss not in ("clip_cov", "kl_cov"):
        if loss not in ("vanilla", *LOSSES):
            draft.miss(f"{place}loss_mode", loss, "PPO's clip stands for it")
        return
    draft.put("algorithm.covariance", loss.removesuffix("_cov"))
    keys = {"clip_cov_ratio": "fraction", "clip_cov_lb": "low", "clip_cov_ub": "high"}
    if loss == "kl_cov":
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
    draft.put("algorithm.kl_in", "loss" if in_loss else "reward")
    name = f"{ACTOR}kl_loss_type" if in_loss else "algorithm.kl_penalty"
    base = str(kind).removesuffix("+")
    if base not in KLS:
        draft.miss(name, kind, f"here are {', '.join(KLS)}")
        return
    through = str(kind).endswith("+")
    draft.put("algorithm.kl_estimator", "k2" if through else KLS[base],
              f"{kind}: its gradient is that of k2" if through else str(kind))  # fmt: skip
    if KLS[base] == "k3" and not through:
        draft.put("algorithm.kl_max", 10.0, "a token's KL, as there")
    if adapted and not in_loss:
        draft.put("algorithm.kl_target", 0.1 if target is None else decimal(target))
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
    elif kind == "token":
        low, _, high = str(2.0 if bound is None else bound).rpartition("_")
        draft.put("algorithm.correction", "icepop" if low else "tis")
        draft.put("algorithm.correction_low", decimal(low) if low else None)
        draft.put("algorithm.correction_high", decimal(high))
    elif kind is not None:
        why = '"tis" weighs tokens, "sequence_mask" drops sequences: algorithm.correction'
        draft.miss(name, kind, why)
    if masks is not None:
        _rejection(draft, str(masks), str(range_), alone=kind is None and not bypass)
    if filtered and draft.get("algorithm.correction"):
        draft.put("algorithm.correction_with_filters", True, "as there")
    if bypass and not filtered:
        draft.put("algorithm.old_logprobs", "sampled", "bypass_mode")
    if ahead is not None and ahead.steps:
        comment = "a share of a batch may be stale there: staleness_threshold"
        common.samples_ahead(draft, ahead.steps, comment if ahead.updates else "",
                             0.0 if filtered else 1.0)  # fmt: skip
        if not ahead.in_flight:
            draft.put("rollout.in_flight_updates", False)


def _rejection(draft: Draft, kind: str, bounds: str, *, alone: bool) -> None:
    """Samples that are left out where engine and learner are far apart."""
    low, _, high = bounds.partition("_")
    if alone and kind == "seq_mean_k1" and high:
        draft.put("algorithm.correction", "sequence_mask", kind)
        draft.put("algorithm.correction_low", decimal(low))
        draft.put("algorithm.correction_high", decimal(high))
        return
    why = 'algorithm.correction is one: "icepop" drops tokens, "sequence_mask" sequences'
    draft.miss(f"{_CORRECTION}rollout_rs", kind, why)


def _teacher(draft: Draft, options: Options) -> bool:
    """[teacher] of on-policy distillation. Returns whether there is one."""
    if not flag(options.take("distillation.enabled", False)):
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
    loss = "distillation.distillation_loss."
    kind = str(options.take(f"{loss}loss_mode", "k3"))
    if kind not in ("k1", "kl"):
        draft.miss(f"{loss}loss_mode", kind, "a token's advantage is the teacher's logprob minus "
                   "its own: k1")  # fmt: skip
    coefficient = decimal(options.take(f"{loss}distillation_loss_coef", 1.0))
    draft.put("algorithm.teacher_coef", coefficient if coefficient != 1.0 else None)
    if flag(options.take(f"{loss}use_task_rewards", True)):
        draft.put("algorithm.reward_coef", 1.0)
    return True


def rows(draft: Draft, options: Options) -> list[str]:
    """[data]. Returns its files."""
    files = [home(name) for name in options.texts("data.train_files")]
    common.sources(draft, [{"path": name} for name in files])
    draft.put("data.messages", str(options.take("data.prompt_key", "prompt")))
    draft.put("data.answer", "reward_model.ground_truth", "within the column reward_model")
    limit = options.number("data.train_max_samples", -1)
    draft.put("data.limit", limit if limit > 0 else None)
    kwargs(draft, options)
    if not files:
        draft.miss("data.train_files", "verl's default", "give data.path")
    return files


def kwargs(draft: Draft, options: Options) -> None:
    """Variables of the chat template."""
    place = "data.apply_chat_template_kwargs."
    for name in [name for name in options.stated if name.startswith(place)]:
        draft.put(f"data.chat_template_kwargs.{name.removeprefix(place)}", options.take(name))


def held_out(draft: Draft, options: Options) -> bool:
    """[eval]: the rows of data.val_files, and how they are answered. Returns whether there are
    some.
    """
    files = [home(name) for name in options.texts("data.val_files")]
    every = options.number("trainer.test_freq", -1)
    first = flag(options.take("trainer.val_before_train", True))
    warmth = decimal(options.take(f"{ROLLOUT}val_kwargs.temperature", 0.0))
    samples = options.number(f"{ROLLOUT}val_kwargs.n", 1)
    if not files or (every <= 0 and not first):
        return False
    common.held_out(draft, [{"path": name} for name in files])
    draft.put("eval.at_start", first or None)
    draft.put("eval.n_samples", samples if samples > 1 else None)
    if warmth > 0:
        draft.put("eval.temperature", warmth if warmth != 1.0 else None)
    else:
        draft.put("eval.greedy", True, "greedy_accuracy is what is measured there")
    return True


def rewards(draft: Draft, options: Options, files: list[str]) -> None:
    """[[rewards]]: a function of the user's, verl's scores by data_source, a reward model."""
    path = options.take(f"{_REWARD}custom_reward_function.path")
    function = options.take(f"{_REWARD}custom_reward_function.name", "compute_score")
    model = options.take(f"{_REWARD}reward_model.model_path")
    if path is not None:
        module = PurePosixPath(str(path)).stem
        draft.reward(f"{module}:{function}", f"{path}: write it as (prompt, rollout) -> float")
    elif flag(options.take(f"{_REWARD}reward_model.enable", False)):
        draft.put("reward_model.model.path", None if model is None else home(str(model)))
        draft.reward("reward_model")
    else:
        _by_source(draft, files)
    _shaping(draft, options)


def _by_source(draft: Draft, files: list[str]) -> None:
    """verl's own scores, which the column data_source chooses."""
    kinds = {
        source: entries
        for name in files
        for pattern, source, entries in SOURCES
        if re.search(pattern, name, re.I)
        and pattern == next(p for p, _, _ in SOURCES if re.search(p, name, re.I))
    }
    for source, entries in kinds.items():
        for kind, settings, comment in entries:
            chosen = {"when": {"data_source": source}} if len(kinds) > 1 else {}
            draft.reward(kind, comment, **settings, **chosen)
    if not kinds:
        draft.reward("my_rewards:score", "verl scores by the column data_source: write this one")


def _shaping(draft: Draft, options: Options) -> None:
    """DAPO's punishment of long answers."""
    manager = str(options.take(f"{_REWARD}reward_manager.name", "naive"))
    place = f"{_REWARD}reward_kwargs."
    buffer = f"{place}overlong_buffer_cfg."
    length, factor = (options.take(f"{buffer}{key}") for key in ("len", "penalty_factor"))
    longest = options.take(f"{place}max_resp_len")
    options.take(f"{buffer}log")
    if manager not in ("naive", "dapo", "prime", "batch", "gdpo", "limited"):
        draft.miss(f"{_REWARD}reward_manager.name", manager, "a verifier: docs/rewards.md")
    if not flag(options.take(f"{buffer}enable", False)) or not length:
        return
    most = int(decimal(longest or draft.get("rollout.max_new_tokens")))
    draft.reward("overlong", buffer=int(decimal(length)), factor=decimal(factor or 1.0),
                 max_new_tokens=most)  # fmt: skip
