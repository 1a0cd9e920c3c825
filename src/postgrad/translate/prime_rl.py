"""prime-rl (`rl`): its configs of trainer, orchestrator and inference as recipes.

Keys at the top of a config (model.name, seq_len, ckpt) stand for those of its sections, which win.
Its samples are always ahead of the policy, by up to 8 steps where nothing is said, and its loss is
around the sampler.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.translate import common, launch, places
from postgrad.translate.draft import Draft, Missing
from postgrad.translate.files import config_table
from postgrad.translate.images import no_images
from postgrad.translate.nested import flattened, nested
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.prime_rl import (
    ALGORITHMS,
    DEFAULTS,
    JOBS,
    LORA_DEFAULTS,
    RULES,
    SOURCE_RULES,
)
from postgrad.translate.tables.prime_rl import (
    OTHERS as OTHERS,
)

_ROWS = "postgrad.rollout.environments.verifiers:rows"
_TRAIN, _EVAL = "orchestrator.train.source", "orchestrator.eval.source"
_ENGINES = places.EngineOptions(
    tensor_parallel="inference.vllm.tensor_parallel_size",
    memory="inference.vllm.gpu_memory_utilization", eager="inference.vllm.enforce_eager",
)  # fmt: skip


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
    if source.images is not None:
        raise UsageError(
            f"{source.images.needed}: this run needs images, and {no_images('[environment]')}, "
            "which plays the tasks of prime-rl here"
        )
    job, _ = JOBS[program]
    draft = Draft(job, "prime-rl")
    lora = any(name.startswith("trainer.model.lora") for name in stated)
    options = Options(stated, {**DEFAULTS, **(LORA_DEFAULTS if lora else {})})
    options.take("trainer.model.lora", {})
    _named(draft, options)
    _algorithm(draft, options)
    _placed(draft, options, source)
    _batch(draft, options)
    _sampling(draft, options)
    _tasks(draft, options)
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
    common.adapter(draft, options, names, "")


def _algorithm(draft: Draft, options: Options) -> None:
    kind = str(options.take("orchestrator.algo.type", "grpo"))
    name = ALGORITHMS.get(kind)
    if name is None:
        draft.miss("orchestrator.algo.type", kind, f"here are {', '.join(ALGORITHMS)}")
    draft.put(
        "algorithm.type",
        name or "dr_grpo",
        "rewards minus the group's mean" if name == "dr_grpo" else "",
    )
    draft.put("algorithm.aggregation", "token", "over all tokens of the step: also those of groups "
              "without gradient, which are left out there")  # fmt: skip
    teacher = "orchestrator.algo.teacher."
    place, served = options.take(f"{teacher}base_url"), options.take(f"{teacher}name")
    if name == "on_policy_distillation":
        draft.put("teacher.server.base_url", place)
        draft.put("teacher.server.model", served)
    elif place or served:
        draft.miss("orchestrator.algo.teacher", served or place, "of an algorithm that is not here")


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
    if options.states(f"{_TRAIN}.0.group_size"):
        n = options.number(f"{_TRAIN}.0.group_size")
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
    draft.put("algorithm.old_logprobs", "sampled", "as there. Its DPPO mask bounds how far a "
              "probability moves, the clip here how far its ratio does")  # fmt: skip


def _sources(options: Options, prefix: str) -> list[dict[str, Any]]:
    """The options of each source, by what stands after its number."""
    rows: dict[int, dict[str, Any]] = {}
    for name in [name for name in options.stated if name.startswith(f"{prefix}.")]:
        number, _, rest = name.removeprefix(f"{prefix}.").partition(".")
        if number.isdigit() and rest:
            rows.setdefault(int(number), {})[rest] = options.take(name)
    return [rows[number] for number in sorted(rows)]


def _tasks(draft: Draft, options: Options) -> None:
    """The taskset of the first source as [data] and [environment], and [eval] of the same one."""
    sources, task = _sources(options, _TRAIN), dict[str, Any]()
    for number, source in enumerate(sources):
        prefix = f"{_TRAIN}.{number}"
        if number:
            _lose(
                draft, prefix, source, "an environment plays one taskset: give this one its own run"
            )
            continue
        task = _task(source)
        source.pop("group_size", None)  # batch.n_samples_per_prompt
        draft.put("data.path", _ROWS)
        draft.put("data.task", task, "data.size says how many of its tasks are rows")
        draft.put("environment.type", "verifiers")
        draft.put("environment.taskset", task["taskset"],
                  "environment.python: an interpreter with verifiers and this taskset")  # fmt: skip
        draft.put("environment.settings", task.get("settings"))
        _limits(draft, prefix, source)
        _rest(draft, prefix, source)
    for number, source in enumerate(_sources(options, _EVAL)):
        prefix, stated = f"{_EVAL}.{number}", dict(source)
        if _task(source) != task or draft.get("eval.path"):
            why = "[eval] is played in [environment], which has another taskset"
            _lose(draft, prefix, stated, why)
            continue
        _held_out(draft, options, source, task)
        _rest(draft, prefix, source)
    for name in ("interval", "num_examples", "group_size", "skip_first_step",
                 "sampling.temperature", "sampling.max_completion_tokens"):  # fmt: skip
        name = f"orchestrator.eval.{name}"
        if options.states(name) and not draft.get("eval.path"):
            draft.miss(name, options.take(name), "there is no [eval]")


def _task(source: dict[str, Any]) -> dict[str, Any]:
    """A taskset and its settings, as data.task has them; taken out of its source's options."""
    names = [name for name in source if name.startswith("env.taskset.")]
    settings = nested({name.removeprefix("env.taskset."): source.pop(name) for name in names})
    taskset = str(settings.pop("id", ""))
    return {"taskset": taskset, **({"settings": settings} if settings else {})}


def _lose(draft: Draft, prefix: str, source: Mapping[str, Any], why: str) -> None:
    """Lists all that a source states as missing."""
    draft.missing += [Missing(f"{prefix}.{name}", value, why) for name, value in source.items()]


def _limits(draft: Draft, prefix: str, source: dict[str, Any]) -> None:
    """What of a source is said here: the time of a task, and groups without gradient."""
    agents = {match[1] for name in source if (match := re.match(r"env\.(\w+)\.harness\.", name))}
    if len(agents) > 1:
        draft.miss(f"{prefix}.env", ", ".join(sorted(agents)), "the environment has one agent")
    for name in [name for name in source if re.fullmatch(r"env\.\w+\.timeout\.rollout", name)]:
        draft.put("environment.episode_seconds", decimal(source.pop(name)))
    for name in [name for name in source if re.fullmatch(r"curriculum\.gates\.\w+\.type", name)]:
        gate = name.removesuffix("type")
        bounds = [source.get(f"{gate}{side}", 0.0) for side in ("reject_min", "reject_max")]
        if source[name] == "advantage_range" and bounds == [0.0, 0.0]:
            draft.put("rollout.dynamic_sampling", True, "advantage_range; in up to max_rounds")
            for key in ("type", "reject_min", "reject_max"):
                source.pop(f"{gate}{key}", None)


def _rest(draft: Draft, prefix: str, source: Mapping[str, Any]) -> None:
    """The rules for what a source states beside its taskset."""
    for name, value in source.items():
        rule = next(
            (rule for pattern, rule in SOURCE_RULES.items() if re.fullmatch(pattern, name)), None
        )
        if rule is None:
            draft.unknown(f"{prefix}.{name}", value, "not an option that this translator knows")
        else:
            rule(draft, f"{prefix}.{name}", value, "")


def _held_out(
    draft: Draft, options: Options, source: dict[str, Any], task: Mapping[str, Any]
) -> None:
    def take(key: str, default: Any = None) -> Any:
        shared = options.take(f"orchestrator.eval.{key}", default)
        of_source = source.pop(key, None)
        return shared if of_source is None else of_source

    draft.put("eval.path", _ROWS)
    draft.put("eval.task", dict(task))
    count = int(take("num_examples", -1))
    draft.put("eval.size", count if count > 0 else None)
    draft.put("eval.every", int(take("interval", 100)))
    draft.put("eval.at_start", not flag(options.take("orchestrator.eval.skip_first_step", False)))
    draft.put("eval.n_samples", int(take("group_size", 1)))
    temperature, new = take("sampling.temperature"), take("sampling.max_completion_tokens")
    draft.put("eval.temperature", None if temperature is None else decimal(temperature))
    draft.put("eval.max_new_tokens", None if new is None else int(new))


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
        draft.miss("trainer.scheduler.decay_steps", decays, "falls in the last steps alone; "
                   'learner.schedule = "linear" falls from the warm-up on')  # fmt: skip
    elif name == "cosine":
        draft.put("learner.schedule", "cosine")
        draft.put("learner.min_lr_ratio", round(least / rate, 12) if least and rate else None)
    draft.put("learner.warmup_updates", warm or None)
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
    if kept is not None:
        draft.put("checkpoint.max_ckpt_num", int(kept))
    elif saves and every is not None:
        why = "not stated: keeps all of them there; here the newest checkpoint.max_ckpt_num (3)"
        draft.notes.append(f"ckpt.keep_last is {why}")
    draft.put("checkpoint.save_hf", True)
