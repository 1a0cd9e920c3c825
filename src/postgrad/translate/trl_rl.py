"""GRPO and its relatives, RLOO, PPO and online DPO of TRL: batches, the KL, rewards."""

from collections.abc import Sequence
from typing import Any, cast

from postgrad.translate import common, trl_advantages, trl_engines
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.trl import FUNCTIONS, MADE_FROM

_WITHOUT_KL = ("sdpo", "sdft", "async_grpo")
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
        followed(draft, options)
        draft.put("reward_model.model.path", options.take("reward_model_path"))
        named = options.take("model_name_or_path")  # there of the tokenizer
        draft.put("model.path", options.take("sft_model_path", named), "sft_model_path")
        draft.reward("reward_model")
        _unfinished(draft, options)
        return
    _generation_batch(draft, options, devices)
    if program not in _WITHOUT_KL:
        followed(draft, options)
    if program == "async_grpo":
        trl_engines.samples_ahead(draft, options)
    if draft.get("algorithm.type") != "on_policy_distillation":
        trl_advantages.advantages(draft, options, program)
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
    gradient_accumulation_steps of them are an update. Where several generations are one update,
    nothing is learnt between them: they are a step.
    """
    micro = options.number("per_device_train_batch_size")
    accumulation = options.number("gradient_accumulation_steps")
    samples, n = options.number("num_generations"), options.number("num_iterations")
    stated = options.number("generation_batch_size", 0)
    per_generation = options.number("steps_per_generation", accumulation)
    step = stated or micro * devices * per_generation
    update = micro * devices * accumulation
    comment = f"prompts: {step} completions of a generation / {samples} a prompt"
    if step % samples:
        draft.notes.append(
            f"{step} completions do not divide into groups of {samples}: TRL refuses that"
        )
    elif update > step and update % (step * n) == 0:
        comment = (
            f"prompts: {update // n // step} generations of {step} completions are an update / "
            f"{samples} a prompt; there each with its own mean over tokens and deviation of a batch"
        )
        step, update, n = update // n, update // n, 1  # the same completions again add nothing
    draft.put("batch.rollout_batch_size", max(1, step // samples), comment)
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
    if program in _WITHOUT_KL:  # the first has a beta, and reads it nowhere
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


def followed(draft: Draft, options: Options) -> None:
    """A reference that moves towards the policy (TR-DPO). To be called when [batch] is known: there
    it moves after so many updates, and here after steps.
    """
    if flag(options.take("sync_ref_model", False)):
        every = options.number("ref_model_sync_steps", 512)
        share = decimal(options.take("ref_model_mixup_alpha", 0.6))
        _, updates = common.per_step(draft)
        copied = share == 1.0 and updates % every == 0  # the last copy of a step is what is read
        comment = f"{every} updates there, of {updates} a step" if updates > 1 else ""
        if every % updates and not copied:
            comment += ", which is no number of steps"
        draft.put("reference.refresh_steps", max(1, round(every / updates)), comment)
        draft.put("reference.ema_decay", round(1.0 - share, 9) or None, "1 - the alpha there")


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
