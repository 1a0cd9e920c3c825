"""prime-rl (`rl`): its configs of trainer, orchestrator and inference as recipes.

Keys at the top of a config (model.name, seq_len, ckpt) stand for those of its sections, which win.
Its samples are always ahead of the policy, by up to 8 steps where nothing is said, and its loss is
around the sampler.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.translate import common, launch, learning, places
from postgrad.translate.draft import Draft
from postgrad.translate.files import config_table
from postgrad.translate.nested import flattened
from postgrad.translate.prime_rl_sources import TRAIN, tasks
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.prime_rl import (
    ALGORITHMS,
    DEFAULTS,
    JOBS,
    LORA_DEFAULTS,
    RULES,
)
from postgrad.translate.tables.prime_rl import (
    OTHERS as OTHERS,
)

_ENGINES = places.EngineOptions(
    tensor_parallel="inference.vllm.tensor_parallel_size",
    memory="inference.vllm.gpu_memory_utilization", eager="inference.vllm.enforce_eager",
)  # fmt: skip
_OF_LENGTH = (("output_tokens", 0.25), ("input_tokens", 0.1), ("turns", 0.1))
_OF_LOSS = (  # settings of trainer.loss with their defaults
    ("dppo_mask_low", 0.2), ("dppo_mask_high", 0.2), ("ipo_threshold", 0.1), ("kl_tau", 0.001),
)  # fmt: skip
_DEMONSTRATED = (  # the default of its template
    "Here is an example of an expert response:\n<demonstration>\n{demonstration}\n</demonstration>"
)
_ADVANTAGES = {
    "dr_grpo": "rewards minus the group's mean",
    "on_policy_distillation": "the teacher's logprob minus the sampler's; there minus that of the "
    "policy in the update",
}


def program_of(word: str, after: str | None) -> str | None:
    """ "rl" of `uv run rl @ FILE` and of prime_rl/entrypoints/rl.py."""
    if after is None or after == "@":
        return word if word in (*JOBS, "sft", "trainer", "orchestrator", "inference") else None
    match = re.search(r"prime_rl[./](?:\w+[./])*(\w+?)(?:\.py)?$", word)
    return match[1] if match else None


def config_of(path: Path) -> dict[str, Any]:
    """The options of a TOML config, by dotted names."""
    return flattened(config_table(path))


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """The options of a command, by dotted names."""
    return launch.flags(words)


def names_of(source: SourceCommand) -> list[str]:
    """The options that a source states, by the names that its draft has."""
    return list(common.positive(source.options))


def draft_recipe(source: SourceCommand) -> Draft:
    """The recipe of a config of `rl`."""
    stated = common.positive(source.options)
    program = source.program or ("rl" if any(map(_of_rl, stated)) else "")
    if program not in JOBS:
        raise UsageError(
            "what does it train? translate reads configs of the program rl, with [orchestrator]: "
            "postgrad translate prime-rl rl FILE"
        )
    if source.images is not None and source.images.in_rows:
        raise UsageError(
            f"{source.images.needed}: this run needs images, and tasks of prime-rl, which the "
            "environment `verifiers` plays here, have not been tried with any"
        )
    job, _ = JOBS[program]
    draft = Draft(job, "prime-rl", source.images)
    lora = any(name.startswith("trainer.model.lora") for name in stated)
    options = Options(stated, {**DEFAULTS, **(LORA_DEFAULTS if lora else {})})
    options.take("trainer.model.lora", {})
    if str(stated.get("trainer.model.impl")) == "hf":
        dtype = "trainer.model.moe_router_dtype"
        draft.skip(dtype, options.take(dtype), "layers of transformers do not read it")
    _named(draft, options)
    _algorithm(draft, options)
    _placed(draft, options, source)
    _batch(draft, options)
    _sampling(draft, options)
    tasks(draft, options)
    _learner(draft, options)
    _checkpoints(draft, options)
    apply(RULES, options, draft)
    return draft


def _of_rl(name: str) -> bool:
    return name.startswith("orchestrator.") or name == "orchestrator"


def _first(options: Options, *names: str) -> Any:
    """The value that wins of options for the same thing: the first one that is stated."""
    values = {name: options.take(name) for name in names}
    return next((values[name] for name in names if options.states(name)), values[names[-1]])


def _named(draft: Draft, options: Options) -> None:
    """Where the run writes, its model and tokenizer."""
    folder, name = options.take("output_dir", "outputs"), options.take("run.name")
    common.run_dir(draft, f"{folder}/{name}" if name else folder)
    path = _first(options, "trainer.model.name", "model.name")
    draft.put("model.path", path, "" if options.states("model.name") else "prime-rl's default")
    if options.states("trainer.model.name"):
        draft.comments.pop(("model", "path"), None)
    draft.put("model.dtype", "bfloat16")
    for section in ("", "trainer.", "orchestrator."):
        common.tokenizer(draft, options, f"{section}tokenizer.name", f"{section}tokenizer.revision")
        template = options.take(f"{section}tokenizer.chat_template")
        if template is not None:
            common.chat_template(draft, f"{section}tokenizer.chat_template", template, "")
    names = tuple(
        f"trainer.model.lora.{key}" for key in ("rank", "alpha", "dropout", "target_modules")
    )
    learning.adapter(draft, options, names, "")


def _algorithm(draft: Draft, options: Options) -> None:
    kind = str(options.take("orchestrator.algo.type", "grpo"))
    name = ALGORITHMS.get(kind)
    if name is None:
        draft.miss("orchestrator.algo.type", kind, f"here are {', '.join(ALGORITHMS)}")
    draft.put(
        "algorithm.type",
        name or "dr_grpo",
        _ADVANTAGES.get(name or "", ""),
    )
    kept = flag(options.stated.get("orchestrator.train.filter_zero_advantages", True))
    zeros = kept and name != "on_policy_distillation"  # which has no advantages there
    draft.put("algorithm.aggregation", "token", "over all tokens of the step: also those whose "
              "advantage is 0, which are left out there" if zeros else "")  # fmt: skip
    _loss(draft, options, taught=name == "on_policy_distillation")
    _length_penalty(draft, options)
    if kind == "opsd":
        _self_distillation(draft, options)
    if kind == "echo":
        _observations(draft, options)
    teacher = "orchestrator.algo.teacher."
    place, served = options.take(f"{teacher}base_url"), options.take(f"{teacher}name")
    if kind == "opd":
        draft.put("teacher.server.base_url", place)
        draft.put("teacher.server.model", served)
    elif place or served:
        draft.miss("orchestrator.algo.teacher", served or place, "of an algorithm that is not here")


def _length_penalty(draft: Draft, options: Options) -> None:
    """algorithm.length_penalty; a section that says nothing of an amount has its default there."""
    place = "orchestrator.algo.length_penalty."
    if not any(name.startswith(place) for name in options.stated):
        return
    kind = options.take(f"{place}type", "linear")
    shares = {
        amount: decimal(options.take(f"{place}num_{amount}_weight", default))
        for amount, default in _OF_LENGTH
    }
    if kind == "linear":
        kept = {amount: share for amount, share in shares.items() if share}
        draft.put("algorithm.length_penalty", kept or None)
    else:
        draft.miss(f"{place}type", kind, "the linear penalty is here")


def _observations(draft: Draft, options: Options) -> None:
    """algorithm.observation_coef: of all that an environment replies, whatever role says it."""
    place = "orchestrator.algo.roles."
    stated = [name for name in options.stated if name.startswith(place)]
    coefficients = {decimal(options.take(name)) for name in stated} or {0.1}
    draft.put(
        "algorithm.observation_coef",
        max(coefficients),
        "of whole replies; there of the text of messages with some roles: "
        + (", ".join(name.removeprefix(place).partition(".")[0] for name in stated) or "tool"),
    )
    if len(coefficients) > 1:
        draft.miss(f"{place}*.alpha", sorted(coefficients), "the largest holds for all replies")
    for name in [name for name in options.stated if name.startswith("orchestrator.algo.filter.")]:
        draft.miss(name, options.take(name), "all tokens of a reply count")


def _self_distillation(draft: Draft, options: Options) -> None:
    """The policy grades itself, with a demonstration among what it reads."""
    key = str(options.take("orchestrator.algo.demo_key", "demonstration"))
    template = str(options.take("orchestrator.algo.template", _DEMONSTRATED))
    draft.put("algorithm.graded_by", "policy", "as it is before the step; there as it is then")
    draft.put(
        "data.hint",
        template.replace("{demonstration}", f"{{{key}}}"),
        "a column of the rows, behind the user's last text; there a system message before it",
    )


def _loss(draft: Draft, options: Options, *, taught: bool) -> None:
    """The ratio to the sampler, what bounds it, and the penalty on its logarithm."""
    place = "trainer.loss."
    kind = str(options.take(f"{place}type", "default"))
    low, high, threshold, drift = (
        decimal(options.take(f"{place}{key}", default)) for key, default in _OF_LOSS
    )
    draft.put("algorithm.old_logprobs", "sampled", "as there")
    if kind == "custom" and not taught:
        return
    comment = "DPPO's mask"
    if taught:  # a loss of its own, without settings
        low, high, drift = 0.2, 1.0, 0.001
        comment = "a token that moved down by more than 0.2 is dropped there whatever its advantage"
    elif kind == "ipo":
        low = high = threshold
        comment = "there a token that moved far against its advantage is dropped too"
    draft.put("algorithm.clip_by", "probability", comment)
    draft.put("algorithm.clip_low", None if low == 0.2 else min(low, 1.0))
    draft.put("algorithm.clip_high", None if high == 0.2 else high)
    draft.put("algorithm.drift_coef", drift or None, "kl_tau")


def _placed(draft: Draft, options: Options, source: SourceCommand) -> None:
    """Ranks that train and engines that sample, each on GPUs of their own."""
    each = options.number("deployment.gpus_per_node", 8)
    trained = {key: options.number(f"deployment.num_train_{key}") for key in ("gpus", "nodes")}
    sampled = {key: options.number(f"deployment.num_infer_{key}") for key in ("gpus", "nodes")}
    replicas = options.number("deployment.num_infer_replicas")
    machines = None
    ranks, infer = trained["gpus"], sampled["gpus"]
    if str(options.take("deployment.type", "single_node")) == "multi_node":
        machines = trained["nodes"]
        ranks, infer = machines * each, sampled["nodes"] * replicas * each
    ranks = places.processes(draft, "GPUs of the trainer", source.devices or ranks, machines)
    names = {"context_parallel": "trainer.model.cp", "expert_parallel": "trainer.model.ep"}
    shares = {key: (name, options.number(name)) for key, name in names.items()}
    places.divided(draft, ("FSDP", 3 if ranks > 1 else None), shares)
    places.engines(draft, options, _ENGINES, shared=False)
    tensor = int(draft.get("rollout.vllm.tensor_parallel") or 1)
    workers = max(1, infer // tensor)
    gpus = f"engines of {tensor} GPUs each" if tensor > 1 else "engines, a GPU each"
    draft.put("cluster.rollout.workers", workers, f"{gpus}: {infer} GPUs of inference")


def _batch(draft: Draft, options: Options) -> None:
    """A step is one update. Rows of the trainer are packed to seq_len tokens."""
    samples, n = (options.number(f"orchestrator.{key}_size") for key in ("batch", "group"))
    if options.states(f"{TRAIN}.0.group_size"):
        n = options.number(f"{TRAIN}.0.group_size")
    draft.put("batch.rollout_batch_size", max(1, samples // n),
              f"prompts: batch_size {samples} / group_size {n}")  # fmt: skip
    draft.put("batch.n_samples_per_prompt", n)
    common.update_size(draft, samples, "samples: one update a step")
    draft.put("data.max_len", int(_first(options, "orchestrator.seq_len", "seq_len")), "seq_len")
    packed = int(_first(options, "trainer.model.seq_len", "seq_len"))
    common.micro_tokens(draft, packed, "a packed row of the trainer")


def _sampling(draft: Draft, options: Options) -> None:
    """[rollout]: how answers are sampled, and how far ahead of the policy."""
    name = "orchestrator.train.sampling.max_completion_tokens"
    new, longest = options.take(name), int(draft.get("data.max_len"))
    fits = new is not None and int(new) < longest
    comment = "" if fits else "half of data.max_len; there what the prompt leaves of it"
    draft.put("rollout.max_new_tokens", int(new or 0) if fits else longest // 2, comment)
    temperature = options.take("orchestrator.train.sampling.temperature", 1.0)
    draft.put("rollout.temperature", decimal(temperature))
    kwargs = "orchestrator.train.sampling.extra_body.chat_template_kwargs."
    stated = [option for option in options.stated if option.startswith(kwargs)]
    for option in stated:
        draft.put(f"data.chat_template_kwargs.{option.removeprefix(kwargs)}", options.take(option))
    bound = "orchestrator.max_off_policy_steps"
    default = "" if options.states(bound) else ", prime-rl's default"
    draft.put("rollout.max_staleness", options.number(bound),
              f"max_off_policy_steps{default}; nothing is dropped here")  # fmt: skip


def _learner(draft: Draft, options: Options) -> None:
    kind = str(options.take("trainer.optim.type", "adamw"))
    if kind in ("adamw", "muon"):
        draft.put("learner.optimizer", None if kind == "adamw" else kind)
    else:
        draft.miss("trainer.optim.type", kind, "learner.optimizer knows adamw and muon")
    betas = [decimal(options.take(f"trainer.optim.betas{n}", default))
             for n, default in ((1, 0.9), (2, 0.95 if kind == "muon" else 0.999))]  # fmt: skip
    draft.put("learner.betas", betas if betas != [0.9, 0.999] else None)
    rate = decimal(options.take("trainer.optim.lr"))
    stated = options.states("trainer.optim.lr")
    draft.put("learner.lr", rate, "" if stated else "prime-rl's default")
    name = str(options.take("trainer.scheduler.type", "constant"))
    warm = options.number("trainer.scheduler.warmup_steps", 0 if name == "constant" else 10)
    least = decimal(options.take("trainer.scheduler.min_lr", 0.0))
    if name == "linear":
        decays = options.number("trainer.scheduler.decay_steps", 10)
        stated = options.states("trainer.scheduler.decay_steps")
        draft.put("learner.schedule", "linear" if decays else None,
                  "to the least rate one update after the last; there in the last")  # fmt: skip
        draft.put("learner.decay_updates", decays or None,
                  "" if stated else "prime-rl's default")  # fmt: skip
    elif name == "cosine":
        draft.put("learner.schedule", "cosine")
    if draft.get("learner.schedule"):
        draft.put("learner.min_lr_ratio", round(least / rate, 12) if least and rate else None)
    draft.put("learner.warmup_updates", warm or None)
    if warm and least and rate:
        draft.put("learner.warmup_start_ratio", round(least / rate, 12), "min_lr")
    # The learner keeps one activation a layer unless the source turns that off.
    stated = any(f"{name}.".startswith("trainer.model.ac.") for name in options.stated)
    checkpointed = options.stated.get("trainer.model.ac", True) is not None
    default = "" if stated else "prime-rl's default"
    draft.put("model.gradient_checkpointing", checkpointed, default)


def _checkpoints(draft: Draft, options: Options) -> None:
    sections = ("trainer.ckpt", "orchestrator.ckpt", "ckpt")
    saves = any(
        name == part or name.startswith(f"{part}.") for name in options.stated for part in sections
    )
    every = _first(options, *(f"{part}.interval" for part in sections))
    kept = _first(options, *(f"{part}.keep_last" for part in sections))
    draft.put("checkpoint.save_steps", every)
    always = _first(options, *(f"{part}.keep_interval" for part in sections))
    if always is not None and every is None:
        draft.miss("ckpt.keep_interval", always, "the run saves after no number of steps")
    elif always is not None:
        both = math.lcm(int(always), int(every))
        only = "" if both == int(always) else f"every {always} there, as far as they are saved"
        draft.put("checkpoint.keep_steps", both, only)
    if kept is not None:
        draft.put("checkpoint.max_ckpt_num", int(kept))
    elif saves and every is not None and always is None:
        why = "not stated: keeps all of them there; here the newest checkpoint.max_ckpt_num (3)"
        draft.notes.append(f"ckpt.keep_last is {why}, and with checkpoint.keep_steps = {every} all")
    draft.put("checkpoint.save_hf", True)
