"""NeMo RL (examples/run_grpo.py): its YAML configs, and Hydra's overrides after them, as recipes.

A config inherits from those that it names in `defaults`. Values refer to others, `${grpo.seed}`;
they are resolved when a command's overrides are known.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.translate import common, learning, nemo_rl_data, nemo_rl_loss, nemo_rl_policy
from postgrad.translate.draft import Draft
from postgrad.translate.files import config_table
from postgrad.translate.nested import flattened, overrides, resolved
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.nemo_rl import (
    DEFAULTS,
    JOBS,
    RULES,
    SWITCHED,
)
from postgrad.translate.tables.nemo_rl import (
    OTHERS as OTHERS,
)

_MOST_PARENTS = 20
_FOR_EVER = 1_000_000  # steps: what stands there for "no limit"


flags_of = overrides


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
    draft = Draft(job, "NeMo RL", source.images)
    options = Options(stated, DEFAULTS)
    _length(draft, options)
    nemo_rl_policy.policy(draft, options, source)
    _batch(draft, options)
    learning.counted_in_steps(draft, common.per_step(draft)[1])
    _sampling(draft, options)
    nemo_rl_loss.algorithm(draft, options)
    nemo_rl_loss.ahead(draft, options)
    trained = nemo_rl_data.rows(draft, options, source.folder)
    nemo_rl_loss.rewards(draft, options)
    nemo_rl_data.held_out(draft, options, source.folder, trained)
    _checkpoints(draft, options)
    for section in SWITCHED:
        if not flag(options.stated.get(f"{section}.enabled", False)):
            for name in [name for name in options.stated if name.startswith(f"{section}.")]:
                draft.skip(name, options.take(name), "of a section that is off")
    apply({**nemo_rl_policy.rules(options), **RULES}, options, draft)
    nemo_rl_policy.balanced(draft, options)
    common.sampled_as_trained(draft)
    return draft


def _guessed(options: Mapping[str, Any]) -> str:
    """The program that reads such a config; "" where it has no section grpo."""
    if flag(options.get("env.should_use_nemo_gym", False)):
        return "grpo_nemo_gym"
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


def _longest_answer(draft: Draft, options: Options) -> None:
    """rollout.max_new_tokens. There an answer may use what its prompt leaves of the whole: behind
    the longest prompt that is the same, and without a limit of prompts half of the whole.
    """
    prompts = "data.max_input_seq_length"
    new, longest = options.take("policy.generation.max_new_tokens"), int(draft.get("data.max_len"))
    most = options.stated.get(prompts)
    if isinstance(new, int) and new < longest:
        draft.put("rollout.max_new_tokens", new)
    elif isinstance(most, int) and 0 < most < longest:
        comment = f"behind prompts of {options.take(prompts)}; there what a prompt leaves"
        draft.put("rollout.max_new_tokens", longest - most, comment)
    else:
        comment = "half of data.max_len; there what the prompt leaves of it"
        draft.put("rollout.max_new_tokens", longest // 2, comment)


def _sampling(draft: Draft, options: Options) -> None:
    _longest_answer(draft, options)
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


def _kept(draft: Draft, every: Any, best: Any, oftener: Any, newest: Any) -> None:
    """When checkpoints are saved and which are kept. every, best: save_period and keep_top_k;
    oftener, newest: ft_save_period and ft_keep_latest_k, against failures.
    """
    period = None if every is None else int(every)
    saved = period
    if oftener is not None and period is not None:
        saved = math.gcd(period, int(oftener))
        only = f"there every {period} and every {oftener}" if saved != int(oftener) else ""
        draft.put("checkpoint.save_steps", saved, only)
    else:
        draft.put("checkpoint.save_steps", int(oftener) if period is None and oftener else period)
    if newest is not None:
        among = f"the newest and the best; there the {best} best of every {period} steps too"
        draft.put("checkpoint.max_ckpt_num", int(newest), "" if best is None else among)
        if best is None:
            draft.put("checkpoint.keep_steps", period, "no keep_top_k there: all of save_period")
    elif best is not None:
        draft.put("checkpoint.max_ckpt_num", int(best), "the newest and the best; there the best")


def _checkpoints(draft: Draft, options: Options) -> None:
    enabled = flag(options.take("checkpointing.enabled", True))
    common.run_dir(draft, options.take("checkpointing.checkpoint_dir", "results/grpo"))
    every, kept = (
        options.take("checkpointing.save_period"),
        options.take("checkpointing.keep_top_k"),
    )
    oftener, newest = (
        options.take(f"checkpointing.ft_{key}") for key in ("save_period", "keep_latest_k")
    )
    metric = options.take("checkpointing.metric_name")
    higher = flag(options.take("checkpointing.higher_is_better", True))
    draft.put("checkpoint.save_hf", True)
    if not enabled:
        return
    _kept(draft, every, kept, oftener, newest)
    first = draft.get("eval.sets.0.name")  # a single set has no name
    scored = draft.get("rewards.0.type") or draft.get("environment.type")
    measured = bool(draft.get("eval.every") and scored)
    if metric in ("val:accuracy", "val_accuracy") and measured:
        comment = f"{metric}{', there over all sets' if first else ''}"
        place = f"eval/{first}/accuracy" if first else "eval/accuracy"
        draft.put("checkpoint.best_metric", place, comment)
        draft.put("checkpoint.best_mode", None if higher else "min")
    elif metric is not None:
        draft.miss(
            "checkpointing.metric_name",
            metric,
            "checkpoint.best_metric names a metric of evaluation",
        )
