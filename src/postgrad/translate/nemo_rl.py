"""NeMo RL (examples/run_grpo.py): its YAML configs, and Hydra's overrides after them, as recipes.

A config inherits from those that it names in `defaults`. Values refer to others, `${grpo.seed}`;
they are resolved when a command's overrides are known.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.translate import common, nemo_rl_loss, nemo_rl_policy
from postgrad.translate.draft import Draft
from postgrad.translate.files import checked, config_table, parse_yaml, plain
from postgrad.translate.nested import flattened, overlaid, resolved
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.nemo_rl import (
    DATASETS,
    DEFAULTS,
    JOBS,
    RULES,
    SWITCHED,
)
from postgrad.translate.tables.nemo_rl import (
    OTHERS as OTHERS,
)

_MOST_PARENTS = 20
_OVERRIDE = re.compile(r"(\+{0,2}|~)([\w.@-]+)(?:=(.*))?", re.S)
_FOR_EVER = 1_000_000  # steps: what stands there for "no limit"


def program_of(word: str, after: str | None) -> str | None:
    """ "grpo" of examples/run_grpo.py, and of "grpo" itself where it is the first word."""
    if after is None:
        is_program = word in JOBS or any(re.fullmatch(pattern, word) for pattern in OTHERS)
        return word if is_program else None
    match = re.search(r"(?:^|/)run_(\w+)\.py$", word)
    return match[1] if match else None


def config_of(path: Path) -> dict[str, Any]:
    """The options of a YAML config and of those that it inherits from, by dotted names."""
    return flattened(_inherited(path, _MOST_PARENTS))


def _inherited(path: Path, most: int) -> dict[str, Any]:
    if most == 0:
        raise UsageError(f"{path}: its `defaults` lead through more than {_MOST_PARENTS} files")
    stated = config_table(path)
    parents = stated.pop("defaults", None) or []
    table: dict[str, Any] = {}
    for name in cast(list[Any], parents) if isinstance(parents, list) else [parents]:
        table = _merged(table, _inherited(path.parent / str(name), most - 1))
    return _merged(table, stated)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables with those of `above` winning, entry by entry; `_override_` in a table of `above`
    replaces the one below as a whole.
    """
    table = dict(below)
    for key, value in above.items():
        under = table.get(key)
        if isinstance(value, dict):
            inner = cast(dict[str, Any], value)
            replaces = bool(inner.get("_override_")) or not isinstance(under, dict)
            inner = {name: entry for name, entry in inner.items() if name != "_override_"}
            table[key] = _merged({} if replaces else cast(dict[str, Any], under), inner)
        else:
            table[key] = value
    return table


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Overrides, `key=value` with `+` or `++` before it, and `--config FILE`; `~key` takes one
    away.
    """
    options: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = value if equals else next(rest, "")
        elif (match := _OVERRIDE.fullmatch(word)) and (match[3] is not None or match[1] == "~"):
            value = None if match[1] == "~" else _value(match[2], match[3])
            override = {match[2]: value}
            override = flattened(override) if isinstance(value, dict) else override
            options = overlaid(options, override)
    return options


def _value(name: str, text: str) -> Any:
    """The value of an override: a number, a switch, a list or a table as YAML has them, or text."""
    try:
        value = parse_yaml(text) if text[:1] in ("[", "{", "'", '"') and text else plain(text)
    except ValueError:
        return text
    return checked(name, value)


def names_of(source: SourceCommand) -> list[str]:
    """The options that a source states, by the names that its draft has."""
    return list(source.options)


def draft_recipe(source: SourceCommand) -> Draft:
    """The recipe of a config of run_grpo.py."""
    stated = resolved(source.options)
    program = source.program or _guessed(stated)
    if program in OTHERS:
        raise UsageError(f"{program}: {OTHERS[program]}")
    if program not in JOBS:
        raise UsageError(
            "what does it train? translate reads configs of run_grpo.py, with a section grpo: "
            "postgrad translate nemo-rl grpo FILE"
        )
    job, _ = JOBS[program]
    draft = Draft(job, "NeMo RL")
    options = Options(stated, DEFAULTS)
    _length(draft, options)
    nemo_rl_policy.policy(draft, options, source)
    _batch(draft, options)
    _sampling(draft, options)
    nemo_rl_loss.algorithm(draft, options)
    nemo_rl_loss.ahead(draft, options)
    _data(draft, options)
    nemo_rl_loss.rewards(draft, options)
    _held_out(draft, options)
    _checkpoints(draft, options)
    for section in SWITCHED:
        if not flag(options.stated.get(f"{section}.enabled", False)):
            for name in [name for name in options.stated if name.startswith(f"{section}.")]:
                draft.skip(name, options.take(name), "of a section that is off")
    apply({**nemo_rl_policy.rules(options), **RULES}, options, draft)
    return draft


def _guessed(options: Mapping[str, Any]) -> str:
    """The program that reads such a config; "" where it has no section grpo."""
    if flag(options.get("env.should_use_nemo_gym", False)):
        return "grpo_nemo_gym"
    if options.get("data.default.processor") == "vlm_hf_data_processor":
        return "vlm_grpo"
    if "env.sliding_puzzle_game.cfg.max_moves" in options:
        return "grpo_sliding_puzzle"
    if any(name.startswith("async_rl.") for name in options):
        return "grpo_single_controller"
    return "grpo" if any(name.startswith("grpo.") for name in options) else ""


def _length(draft: Draft, options: Options) -> None:
    """A run ends at its steps or epochs there, whichever is first."""
    steps, epochs = options.number("grpo.max_num_steps"), options.take("grpo.max_num_epochs")
    if steps < _FOR_EVER:
        draft.put("steps", steps, "max_num_steps, or the end of max_num_epochs, there")
        if options.states("grpo.max_num_epochs"):
            draft.skip("grpo.max_num_epochs", epochs, "steps say how long the run is")
    else:
        draft.put("epochs", float(epochs))


def _batch(draft: Draft, options: Options) -> None:
    prompts = options.number("grpo.num_prompts_per_step")
    samples = options.number("grpo.num_generations_per_prompt")
    draft.put("batch.rollout_batch_size", prompts, "prompts")
    draft.put("batch.n_samples_per_prompt", samples)
    update = options.number("policy.train_global_batch_size", prompts * samples)
    common.update_size(draft, update, "train_global_batch_size, samples")
    longest = options.number("policy.max_total_sequence_length", 512)
    draft.put("data.max_len", longest, "max_total_sequence_length")
    micro = options.number("policy.train_micro_batch_size", 1)
    for kind in ("sequence_packing", "dynamic_batching"):
        tokens = options.number(f"policy.{kind}.train_mb_tokens", micro * longest)
        enabled = flag(options.take(f"policy.{kind}.enabled", False))
        if enabled and draft.get("batch.micro_train_tokens") is None:
            common.micro_tokens(draft, tokens, f"{kind} there")
    if draft.get("batch.micro_train_tokens") is None:
        common.micro_batch(draft, micro)


def _sampling(draft: Draft, options: Options) -> None:
    new, longest = options.take("policy.generation.max_new_tokens"), int(draft.get("data.max_len"))
    fits = isinstance(new, int) and new < longest
    comment = "" if fits else "half of data.max_len; there what the prompt leaves of it"
    draft.put("rollout.max_new_tokens", int(new or 0) if fits else longest // 2, comment)
    draft.put("rollout.temperature", decimal(options.take("policy.generation.temperature")))
    top_p, top_k = (options.take(f"policy.generation.{name}") for name in ("top_p", "top_k"))
    draft.put("rollout.top_p", decimal(top_p) if top_p not in (None, 1, 1.0) else None)
    draft.put("rollout.top_k", int(top_k) if top_k and int(top_k) > 0 else None)
    rounds = options.take("grpo.dynamic_sampling_max_gen_batches")
    if flag(options.stated.get("grpo.use_dynamic_sampling", False)) and rounds:
        draft.put("rollout.max_rounds", int(rounds))
    elif options.states("grpo.dynamic_sampling_max_gen_batches"):
        draft.skip(
            "grpo.dynamic_sampling_max_gen_batches", rounds, "of dynamic sampling, which is off"
        )


def _dataset(draft: Draft, options: Options, prefix: str) -> dict[str, Any]:
    """The keys of a dataset that the options below a prefix name; an empty table for none."""
    name = options.take(f"{prefix}.dataset_name", options.take("data.default.dataset_name"))
    path = options.take(f"{prefix}.data_path")
    split, subset = options.take(f"{prefix}.split"), options.take(f"{prefix}.subset")
    columns = {key: options.take(f"{prefix}.{key}_key", options.take(f"data.default.{key}_key"))
               for key in ("input", "output")}  # fmt: skip
    if str(name) in DATASETS:
        entry = dict(DATASETS[str(name)])
        if options.states(f"{prefix}.output_key"):
            entry["answer"] = str(columns["output"])
        if entry.get("answer") == "reward_model":
            why = "its answer is within the column reward_model: data.map takes it out"
            draft.miss(f"{prefix}.dataset_name", name, why)
    elif path is not None:
        entry = {
            "path": str(path),
            "prompt": columns["input"] or "input",
            "answer": columns["output"] or "output",
        }
    else:
        if name is not None:
            draft.miss(
                f"{prefix}.dataset_name", name, "no dataset here has this name: give data.path"
            )
        return {}
    return {**entry, **{key: value for key, value in (("split", split), ("name", subset)) if value}}


def _numbered(options: Options, prefix: str) -> list[str]:
    """The prefixes of a list of datasets; the one itself for a single dataset."""
    numbers = {
        name.removeprefix(f"{prefix}.").split(".")[0]
        for name in options.stated
        if name.startswith(f"{prefix}.")
    }
    return (
        [f"{prefix}.{n}" for n in sorted(numbers, key=int)]
        if numbers and all(map(str.isdigit, numbers))
        else [prefix]
    )


def _data(draft: Draft, options: Options) -> None:
    prefixes = _numbered(options, "data.train")
    if options.states("data.dataset_name"):  # as configs had it before data.train
        prefixes = ["data"]
    entries = [entry for prefix in prefixes if (entry := _dataset(draft, options, prefix))]
    common.sources(draft, entries)
    validated = any(name.startswith("data.validation.") for name in options.stated)
    for prefix in _numbered(options, "data.train"):
        share, seed = (options.take(f"{prefix}.{key}") for key in ("split_validation_size", "seed"))
        if share and decimal(share) < 1 and len(entries) == 1 and not validated:
            draft.put("data.eval_fraction", decimal(share), "rows that are only evaluated")
        elif share:
            why = "data.eval_fraction is a share of a single dataset, where [eval] names no other"
            draft.miss(f"{prefix}.split_validation_size", share, why)
        if share is None and seed is not None:
            draft.skip(f"{prefix}.seed", seed, "of a split that is not made")
    for key, counterpart in (
        ("prompt_file", "data.template"),
        ("system_prompt_file", "data.system"),
    ):
        for name in (f"data.default.{key}", f"data.{key}"):
            if options.take(name) is not None:
                draft.miss(
                    name, options.take(name), f"put the text of this file into {counterpart}"
                )
    if options.take("data.default.processor") is not None:
        draft.skip("data.default.processor", options.take("data.default.processor"), common.SO_HERE)


_VALIDATION = (  # options that say when and how to validate
    "grpo.val_period",
    "grpo.max_val_samples",
    "grpo.val_num_generations_per_prompt",
    "grpo.num_val_generations_per_prompt",
    "grpo.val_at_start",
    "grpo.val_at_end",
    "policy.generation.val_temperature",
)


def _held_out(draft: Draft, options: Options) -> None:
    prefixes = _numbered(options, "data.validation")
    stated = any(name.startswith("data.validation.") for name in options.stated)
    sets = [entry for prefix in prefixes if stated and (entry := _dataset(draft, options, prefix))]
    for prefix in prefixes:
        if (times := options.take(f"{prefix}.repeat")) is not None:
            draft.miss(f"{prefix}.repeat", times, "eval.n_samples samples a question several times")
    if sets:
        common.held_out(draft, sets)
    every, most = options.number("grpo.val_period"), options.take("grpo.max_val_samples")
    samples = options.take(
        "grpo.val_num_generations_per_prompt", options.take("grpo.num_val_generations_per_prompt")
    )
    first, last = options.take("grpo.val_at_start"), options.take("grpo.val_at_end")
    warmth = options.take("policy.generation.val_temperature")
    if not sets and draft.get("data.eval_fraction") is None:
        for name in _VALIDATION:
            if options.states(name):
                draft.miss(name, options.take(name), "there is no [eval]")
        return
    draft.put("eval.every", max(every, 0))
    draft.put("eval.at_start", flag(first) if first is not None else None)
    draft.put("eval.at_end", flag(last) if last is not None else None)
    draft.put("eval.n_samples", None if samples is None else int(samples))
    draft.put("eval.temperature", None if warmth is None else decimal(warmth))
    if len(sets) == 1:
        draft.put("eval.limit", None if most is None else int(most), "max_val_samples: questions")
    elif most is not None and options.states("grpo.max_val_samples"):
        why = (
            "each of eval.sets has a limit of its own"
            if sets
            else "all rows that are held out are evaluated"
        )
        draft.miss("grpo.max_val_samples", most, why)


def _checkpoints(draft: Draft, options: Options) -> None:
    enabled = flag(options.take("checkpointing.enabled", True))
    common.run_dir(draft, options.take("checkpointing.checkpoint_dir", "results/grpo"))
    every, kept = (
        options.take("checkpointing.save_period"),
        options.take("checkpointing.keep_top_k"),
    )
    metric = options.take("checkpointing.metric_name")
    higher = flag(options.take("checkpointing.higher_is_better", True))
    draft.put("checkpoint.save_hf", True)
    if not enabled:
        return
    draft.put("checkpoint.save_steps", None if every is None else int(every))
    if kept is not None:
        draft.put("checkpoint.max_ckpt_num", int(kept), "the newest and the best; there the best")
    verifier = draft.get("rewards.0.type")
    if metric in ("val:accuracy", "val_accuracy") and draft.get("eval.every") and verifier:
        draft.put("checkpoint.best_metric", f"eval/{verifier}/accuracy", str(metric))
        draft.put("checkpoint.best_mode", None if higher else "min")
    elif metric is not None:
        draft.miss(
            "checkpointing.metric_name",
            metric,
            "checkpoint.best_metric names a metric of evaluation",
        )
