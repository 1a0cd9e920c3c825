"""RL in verl's configs: batches, sampling, samples ahead of the policy, rows and rewards."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.files import CONFIGS, config_table, in_checkout
from postgrad.translate.nested import flattened
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.verl import (
    ACTOR,
    ROLLOUT,
    SOURCES,
)

SAMPLES = f"{ROLLOUT}n"
_HOME = re.compile(r"^(?:\$HOME|\$\{HOME\})(?=/|$)")
_REWARD = "reward."
_TURNS = f"{ROLLOUT}multi_turn."
_TOOLS = (f"{_TURNS}tool_config_path", "data.tool_config_path")
_SCHEMA_NAME = re.compile(r"tools\.\d+\.tool_schema\.function\.name")
_FORMATS = {"hermes": "hermes", "gpt-oss": "harmony", "qwen3_coder": "qwen_xml"}  # of calls


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
    metric = str(options.stated.get("algorithm.filter_groups.metric"))
    if flag(options.take("algorithm.filter_groups.enable", False)):
        of_total = metric in ("seq_reward", "seq_final_reward")
        comment = "" if of_total else "by the first reward's score"
        draft.put("rollout.dynamic_sampling", True, comment)
        draft.put("rollout.filter_on", "total" if of_total else None, metric)
        draft.put("rollout.max_rounds", rounds if rounds > 0 else None)


def rows(draft: Draft, options: Options) -> list[str]:
    """[data]. Returns its files."""
    files = [home(name) for name in options.texts("data.train_files")]
    common.sources(draft, [{"path": name} for name in files])
    draft.put("data.messages", str(options.take("data.prompt_key", "prompt")))
    draft.put("data.answer", "reward_model.ground_truth", "within the column reward_model")
    limit = options.number("data.train_max_samples", -1)
    draft.put("data.limit", limit if limit > 0 else None)
    _too_long(draft, options)
    kwargs(draft, options)
    if not files:
        draft.miss("data.train_files", "verl's default", "give data.path")
    return files


def _too_long(draft: Draft, options: Options) -> None:
    """What is done with a prompt that has no room: data.on_too_long."""
    cut = str(options.take("data.truncation", "error"))
    filtered = flag(options.take("data.filter_overlong_prompts", False))
    if not filtered and cut == "error":
        draft.put("data.on_too_long", "error")
    elif not filtered and cut == "left":
        draft.put("data.on_too_long", "truncate", "a prompt keeps its end, as there")
    elif not filtered:
        draft.miss("data.truncation", cut, 'a prompt keeps its end (data.on_too_long = "truncate")')


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
    top_p = decimal(options.take(f"{ROLLOUT}val_kwargs.top_p", 1.0))
    top_k = options.number(f"{ROLLOUT}val_kwargs.top_k", -1)
    if not files or (every <= 0 and not first):
        return False
    common.held_out(draft, [{"path": name} for name in files])
    draft.put("eval.at_start", first or None)
    draft.put("eval.n_samples", samples if samples > 1 else None)
    if warmth > 0:
        draft.put("eval.temperature", warmth if warmth != 1.0 else None)
        draft.put("eval.top_p", top_p if top_p < 1.0 else None)
        draft.put("eval.top_k", top_k if top_k > 0 else None)
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


def tools(draft: Draft, options: Options, folder: Path) -> None:
    """[environment] for the tools of a config, which says their names; their code is the user's."""
    option = next((name for name in _TOOLS if options.states(name)), "")
    path = in_checkout(str(options.stated.get(option)), folder, CONFIGS)
    names = [] if path is None else _tool_names(config_table(path))
    if not names:
        return
    options.take(option)
    options.take(f"{_TURNS}enable")
    draft.put("environment.type", "tools")
    draft.put("environment.tools", [f"my_tools:{name}" for name in names],
              f"write {', '.join(names)}: what is called gets its arguments alone")  # fmt: skip
    answers = options.number(f"{_TURNS}max_assistant_turns", 0)
    replies = options.number(f"{_TURNS}max_user_turns", 0)
    limits = [turns for turns in (answers, replies + 1 if replies > 0 else 0) if turns > 0]
    draft.put("environment.max_turns", min(limits) if limits else None)
    longest = options.number(f"{_TURNS}max_tool_response_length", 256)
    draft.put("environment.longest_result", longest, "characters; there cut in the middle")
    parser = str(options.take(f"{_TURNS}format", "hermes"))
    draft.put("environment.tool_format", _FORMATS.get(parser))
    if parser not in _FORMATS:
        draft.miss(f"{_TURNS}format", parser, "environment.tool_format has no such format")


def _tool_names(table: Mapping[str, Any]) -> list[str]:
    """The functions of a config of tools; [] where an entry has none, as one of a server."""
    entries = cast("list[Any]", table.get("tools") or [])
    values = flattened({"tools": entries}) if isinstance(entries, list) else {}
    names = [str(value) for name, value in values.items() if _SCHEMA_NAME.fullmatch(name)]
    is_whole = len(names) == len(entries) and all(name.isidentifier() for name in names)
    return names if is_whole else []


def _by_source(draft: Draft, files: list[str]) -> None:
    """verl's own scores, which the column data_source chooses."""
    kinds = {
        source: entries
        for name in files
        for pattern, source, entries in SOURCES
        if re.search(pattern, name, re.I)
        and pattern == next(p for p, _, _ in SOURCES if re.search(p, name, re.I))
    }
    others = [name for name in files if not any(re.search(p, name, re.I) for p, _, _ in SOURCES)]
    if kinds and others:
        unknown = f"verl's score of the rows of {', '.join(others)} is not known"
        draft.notes.append(f"{unknown}: write one of [[rewards]] for them")
    for source, entries in kinds.items():
        for kind, settings, comment in entries:
            chosen = {"when": {"data_source": source}} if len(kinds) > 1 or others else {}
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
    common.overlong(draft, int(decimal(length)), decimal(factor or 1.0), most)
