"""GRPO and its relatives, RLOO, PPO and online DPO of TRL: batches, advantages, rewards."""

from collections.abc import Sequence
from typing import Any, cast

from postgrad.translate import common, trl_engines
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.trl import FUNCTIONS, LOSSES, MADE_FROM

_BY_TOKEN = ("dapo", "bnpo", "cispo", "vespo")  # losses that are means over tokens
# Tokens of a prompt, which TRL no longer bounds.
_PROMPT_ROOM, _ROOM_FOR_IMAGES = 512, 2048


def answers(
    draft: Draft, options: Options, program: str, devices: int, functions: Sequence[str] = ()
) -> None:
    """Everything of an RL job but data and learner: rollout, batch, algorithm and rewards.
    functions: of reward, that the script names itself.
    """
    if program == "online_dpo":
        _sampled_pairs(draft, options, devices, functions)
        return
    new = options.number("response_length" if program == "ppo" else "max_completion_length")
    draft.put("rollout.max_new_tokens", new)
    room = options.take("max_prompt_length")
    assumed = _ROOM_FOR_IMAGES if draft.has_images else _PROMPT_ROOM
    comment = "" if room else f"; TRL bounds no prompts, {assumed} are assumed"
    draft.put("data.max_len", int(room or assumed) + new, f"prompt and response{comment}")
    _policy_kl(draft, options, program)
    if program == "ppo":
        _ppo_batch(draft, options, devices)
        draft.put("reward_model.model.path", options.take("reward_model_path"))
        named = options.take("model_name_or_path")  # there of the tokenizer
        draft.put("model.path", options.take("sft_model_path", named), "sft_model_path")
        draft.reward("reward_model")
        _unfinished(draft, options)
        return
    _generation_batch(draft, options, devices)
    if program == "async_grpo":
        trl_engines.samples_ahead(draft, options)
    if draft.get("algorithm.type") != "on_policy_distillation":
        _advantages(draft, options, program)
    _rewards(draft, options, functions)


def _unfinished(draft: Draft, options: Options) -> None:
    missed = options.take("missing_eos_penalty")
    if missed is not None and decimal(missed):
        draft.reward("stop_properly", "missing_eos_penalty is taken from what was cut off",
                    penalty=-decimal(missed))  # fmt: skip


def _sampled_pairs(draft: Draft, options: Options, devices: int, functions: Sequence[str]) -> None:
    """online_dpo: two completions of a prompt are a pair; a micro-batch counts prompts."""
    new, length = options.number("max_new_tokens"), options.number("max_length")
    draft.put("rollout.max_new_tokens", new)
    draft.put("data.max_len", length, "prompt and response")
    if draft.has_images and length < new + _ROOM_FOR_IMAGES:
        comment = f"{length} there, where prompts are cut; room for a prompt with its image"
        draft.put("data.max_len", new + _ROOM_FOR_IMAGES, comment)
    micro = options.number("per_device_train_batch_size")
    accumulation = options.number("gradient_accumulation_steps")
    prompts = micro * accumulation * devices
    draft.put("batch.rollout_batch_size", prompts,
              f"per device {micro} * accumulation {accumulation} * devices {devices}")  # fmt: skip
    draft.put("batch.n_samples_per_prompt", 2)
    common.micro_batch(draft, 2 * micro, "completions")
    temperature = decimal(options.take("temperature"))
    draft.put("rollout.temperature", temperature,
              "" if temperature == 1.0 else "of the policy's logprobs too; there at 1")  # fmt: skip
    draft.put("algorithm.type", "online_dpo", "pairs of equal rewards have no gradient; of equal "
              "rewards there the first answer is the better one")  # fmt: skip
    betas = options.numbers("beta")
    draft.put("algorithm.beta", betas[0])
    if len(betas) > 1:
        draft.miss("beta", betas, "beta stays the same over all epochs")
    loss = str(options.take("loss_type", "sigmoid"))
    if loss != "sigmoid":
        draft.miss("loss_type", loss, "of its losses sigmoid is here")
    path = options.take("reward_model_path")
    if path and functions:
        draft.skip("reward_model_path", path, "the script does not read it")
    elif path and not options.states("reward_model_name_or_path"):
        options.stated["reward_model_name_or_path"] = path
    _rewards(draft, options, functions)
    _unfinished(draft, options)


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
        draft.notes.append(
            f"{step} completions do not divide into groups of {samples}: TRL refuses that"
        )
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
    if program in ("sdpo", "sdft", "async_grpo"):  # the first has a beta, and reads it nowhere
        return
    draft.put("algorithm.kl_coef", coefficient, "beta there" if name == "beta" else "")
    corrected = program != "gmpo" and flag(options.take("use_bias_correction_kl", False))
    if corrected and coefficient:
        stated = options.states("use_bias_correction_kl")
        draft.put(
            "algorithm.kl_corrected", True, "" if stated else "TRL's default; in 1.9 it was off"
        )
    if program == "ppo":
        draft.put("algorithm.kl_estimator", estimator)
        clip = decimal(options.take("cliprange"))
        draft.put("algorithm.clip_low", clip)
        draft.put("algorithm.clip_high", clip)
    followed(draft, options)


def followed(draft: Draft, options: Options) -> None:
    """A reference that moves towards the policy (TR-DPO)."""
    if flag(options.take("sync_ref_model", False)):
        every = options.number("ref_model_sync_steps", 512)
        share = decimal(options.take("ref_model_mixup_alpha", 0.6))
        draft.put("reference.refresh_steps", every)
        draft.put("reference.ema_decay", round(1.0 - share, 9) or None, "1 - the alpha there")


def _advantages(draft: Draft, options: Options, program: str) -> None:
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
        of_response = "of each token's ratio; there of the response's, the product over its tokens"
        clip(draft, options, of_response)
    if bounds := options.numbers("reward_clip_range"):
        draft.put("algorithm.reward_clip", bounds)


def clip(draft: Draft, options: Options, comment: str = "") -> None:
    """The bounds of a ratio."""
    low, high = options.take("epsilon"), options.take("epsilon_high")
    draft.put("algorithm.clip_low", min(decimal(low), 1.0), comment)  # no ratio is below 0
    draft.put("algorithm.clip_high", decimal(low if high is None else high))


def deviation(draft: Draft, options: Options) -> None:
    """What a group's advantages are divided by, unless the type is dr_grpo, which does not."""
    scale = scaling(options)
    if draft.get("algorithm.type") == "dr_grpo":
        return
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
    draft.put("algorithm.type", "grpo", "a mean over an update's tokens; there over each "
              "micro-batch's")  # fmt: skip
    draft.put("algorithm.aggregation", "token")
    draft.put("algorithm.std_eps", 1e-8, "added to the deviation, as there; that of all samples of "
              "a group (n) there, of a sample (n - 1) here")  # fmt: skip
    clip(draft, options)


def _type(draft: Draft, options: Options, loss: str) -> tuple[str, str | None]:
    """algorithm.type of a loss_type of GRPO, and its aggregation."""
    name, aggregation = LOSSES.get(loss, ("grpo", "token"))
    if loss not in LOSSES:
        draft.miss("loss_type", loss, f"{', '.join(LOSSES)} are here")
    if options.take("importance_sampling_level", "token") == "sequence" and name != "sapo":
        name = "gspo"
    elif scaling(options) in ("none", "false") and name == "grpo":
        name, aggregation = "dr_grpo", aggregation or "sequence"
    if options.take("multi_objective_aggregation") == "normalize_then_sum":
        if name == "grpo":
            name = "gdpo"
        else:
            why = f"is the type gdpo here, which is not {name}"
            draft.miss("multi_objective_aggregation", "normalize_then_sum", why)
    of_sum = "; the sum's deviation is of a sample there (n - 1), of all samples here (n)"
    draft.put("algorithm.type", name, f"loss_type {loss}{of_sum if name == 'gdpo' else ''}")
    return name, aggregation


def means(draft: Draft, options: Options, program: str) -> None:
    """Comments on settings whose mean or number of tokens is another one there."""
    loss = str(options.take("loss_type", ""))
    by_token = program == "grpo" and loss in _BY_TOKEN
    others = "; the others leave the geometric mean there" if program == "gmpo" else ""
    comments = {
        "entropy_coef": "" if by_token else f"a mean over tokens there, also with {loss}",
        "mask_truncated_completions": "" if by_token else
        "masked responses leave the mean here, and count in it there",
        "top_entropy_fraction": "of the step's tokens, rounded down here; there a quantile of each "
        f"forward pass{others}",
    }  # fmt: skip
    for name, comment in comments.items():
        draft.put(f"algorithm.{name}", draft.get(f"algorithm.{name}"), comment)


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


def _rewards(draft: Draft, options: Options, functions: Sequence[str]) -> None:
    weights = options.numbers("reward_weights")
    model = options.take("reward_model_name_or_path")
    stated = options.take("reward_funcs")
    calls = cast(list[Any], stated) if isinstance(stated, list) else options.texts("reward_funcs")
    names = [*(["reward_model"] if model else []), *(calls or functions)]
    draft.put("reward_model.model.path", model)
    for place, name in enumerate(names):
        kind, settings, comment = _reward(name)
        if place < len(weights) and weights[place] != 1.0:
            settings = {**settings, "weight": weights[place]}
        draft.reward(kind, comment, **settings)
    if not names:
        draft.reward("my_rewards:score", "the source names no reward: write this function")


def _reward(stated: Any) -> tuple[str, dict[str, Any], str]:
    """A function of reward as (type, settings, comment). stated: its name, or what a program makes
    it from: a table with the name and the arguments.
    """
    arguments = {**stated} if isinstance(stated, dict) else {"name": str(stated).strip()}
    name = str(arguments.pop("name"))
    kind, settings, comment = FUNCTIONS.get(name, (name, {}, ""))
    comment = (f"{name}: {comment}" if comment else name) if name in FUNCTIONS else ""
    if name in MADE_FROM:
        read = {
            MADE_FROM[name][key]: value
            for key, value in arguments.items()
            if key in MADE_FROM[name]
        }
        settings = {**settings, **read}
        if "penalty" in settings:
            settings["penalty"] = abs(decimal(settings["penalty"]))
    elif name not in FUNCTIONS:
        settings = arguments
    if "." in kind:
        module, _, function = kind.rpartition(".")
        kind = f"{module}:{function}"
        comment = "as (prompt, rollout) -> float, or (prompt, rollouts) -> a float each"
    return kind, settings, comment
