"""verl (verl.trainer.main_ppo, sft_trainer and their relatives): Hydra's overrides as recipes.

Its batch numbers of RL count prompts: a step has `data.train_batch_size` of them, an update
`ppo_mini_batch_size`, each with `rollout.n` samples.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.translate import common, mixtures, verl_loss, verl_policy, verl_rl
from postgrad.translate.draft import Draft
from postgrad.translate.files import CONFIGS, config_table, in_checkout
from postgrad.translate.nested import flattened, overlaid, overrides, resolved
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.verl import (
    DEFAULTS,
    JOBS,
    RULES,
    SFT_DEFAULTS,
    SHORT,
    canonical,
)
from postgrad.translate.tables.verl import (
    OTHERS as OTHERS,
)

_PROGRAM = re.compile(
    r"(?:^|[./])(?:verl[./](?:trainer|model_merger|experimental[./]\w+)|recipe[./]\w+)[./](\w+?)"
    r"(?:\.py)?$"
)
_GROUP = re.compile(r"^(engine|optim)=")
_FOR_EVER = 1_000_000  # steps: what stands there for "no limit"


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Hydra's overrides by name. The choice of a whole section, `engine=megatron`, is called as
    Hydra writes it out, `engine@engine`: options of the section do not replace it.
    """
    return overrides([_GROUP.sub(r"\1@\1=", word) for word in words])


def program_of(word: str, after: str | None) -> str | None:
    """ "main_ppo" of verl.trainer.main_ppo or a path to it, and of "ppo" where it is the first
    word.
    """
    if after is None:
        is_program = word in SHORT or word in JOBS
        return SHORT.get(word, word) if is_program else None
    match = _PROGRAM.search(word)
    if match is None or "=" in word:
        return None
    return "one_step_off" if "one_step_off" in word else match[1]


def config_of(path: Path) -> dict[str, Any]:
    """The options of a YAML config by dotted names; the configs of verl's that it begins with, in
    `defaults`, are its own.
    """
    table = config_table(path)
    return flattened({key: value for key, value in table.items() if key != "defaults"})


def names_of(source: SourceCommand) -> list[str]:
    """The options that a source states, by the names that its draft has."""
    return list(canonical(_configured(source)[0]))


def _configured(source: SourceCommand) -> tuple[Mapping[str, Any], str]:
    """(the options of a command over those of the config that it names, a note where that is not
    here). A config without a folder beside it is verl's own, of which the defaults are known.
    """
    folder, name = (
        source.options.get(f"config-{key}", source.options.get(f"config_{key}"))
        for key in ("path", "name")
    )
    if not folder or not name:
        return source.options, ""
    file = Path(str(folder)) / f"{str(name).removesuffix('.yaml')}.yaml"
    path = in_checkout(str(file), source.folder, CONFIGS)
    if path is None:
        return source.options, f"{file} is not here, so what it says is missing"
    return overlaid(config_of(path), source.options), ""


def draft_recipe(source: SourceCommand) -> Draft:
    """The recipe of one of verl's commands."""
    configured, unread = _configured(source)
    stated = canonical(configured)
    program = source.program or _guessed(stated)
    if program not in JOBS:
        raise UsageError(f"{program or 'no program'}: say which of {', '.join(SHORT)} it is")
    job, _ = JOBS[program]
    defaults = DEFAULTS if job == "rl" else SFT_DEFAULTS
    values = resolved({**defaults, **stated})
    options = Options({name: values[name] for name in stated}, defaults)
    draft = Draft(job, "verl", source.images)
    draft.notes += [unread] if unread else []
    if job == "rl":
        _rl(draft, options, source, program)
    else:
        _sft(draft, options, source)
    _checkpoints(draft, options)
    apply({**RULES, **verl_policy.rules(options, job)}, options, draft)
    if not verl_policy.balances(options, job):
        mixtures.balanced(draft)
    return draft


def _guessed(options: dict[str, Any]) -> str:
    """The program that reads such options; "" for others."""
    if "actor_rollout_ref.model.path" in options or "algorithm.adv_estimator" in options:
        return "main_ppo"
    return "sft_trainer" if "model.path" in options and "optim.lr" in options else ""


def _rl(draft: Draft, options: Options, source: SourceCommand, program: str) -> None:
    ahead = verl_rl.ahead(options, program)
    _length(draft, options)
    verl_policy.policy(draft, options, source, ahead)
    verl_rl.batch(draft, options, ahead)
    verl_rl.sampling(draft, options)
    verl_loss.algorithm(draft, options, ahead)
    verl_policy.critic(draft, options)
    verl_policy.counted(draft, options, ahead)
    files = verl_rl.rows(draft, options)
    verl_rl.rewards(draft, options, files)
    verl_rl.tools(draft, options, source.folder)
    verl_policy.frozen(draft, options)
    if verl_rl.held_out(draft, options):
        _evaluated(draft, options, options.take("trainer.test_freq", -1))


def _length(draft: Draft, options: Options) -> None:
    """A run ends at its steps or epochs there, whichever is first."""
    steps, epochs = (options.take(f"trainer.total_{key}") for key in ("training_steps", "epochs"))
    prompts = options.take("rollout.total_rollout_steps")
    samples = options.number(verl_rl.SAMPLES, 1)
    if prompts is not None:
        draft.put("total_episodes", int(decimal(prompts)) * samples,
                  f"total_rollout_steps, of {samples} samples")  # fmt: skip
    elif steps is not None and 0 < decimal(steps) < _FOR_EVER:
        draft.put("steps", int(decimal(steps)), "or the end of total_epochs, there")
    else:
        draft.put("epochs", int(decimal(epochs)),
                  "" if options.states("trainer.total_epochs") else "verl's default")  # fmt: skip
        return
    if options.states("trainer.total_epochs"):
        draft.skip("trainer.total_epochs", epochs, "steps say how long the run is")


def _sft(draft: Draft, options: Options, source: SourceCommand) -> None:
    """All of an SFT job: conversations, the loss on every turn of the assistant."""
    _length(draft, options)
    draft.put("algorithm.type", "sft")
    verl_policy.trained(draft, options, source)
    files = [verl_rl.home(name) for name in options.texts("data.train_files")]
    prompt, answer = options.take("data.prompt_key"), options.take("data.response_key")
    if prompt is not None and answer is not None:
        options.take("data.messages_key")
        within = {"prompt": [str(prompt)], "answer": [str(answer)]}
        within["prompt"] += options.texts("data.prompt_dict_keys")
        within["answer"] += options.texts("data.response_dict_keys")
        columns = {key: ".".join(names) for key, names in within.items()}
    else:
        columns = {"messages": str(options.take("data.messages_key"))}
    common.sources(draft, [{"path": name} for name in files])
    for key, value in columns.items():
        draft.put(f"data.{key}", value)
    draft.put("data.max_len", options.number("data.max_length"))
    cut = str(options.take("data.truncation"))
    if cut == "error":
        draft.put("data.on_too_long", "error")
    else:
        same = "as there" if cut == "right" else f"{cut} there"
        draft.put("data.on_too_long", "truncate", f"{same}: rows keep their beginning here")
    verl_rl.kwargs(draft, options)
    limit = options.number("data.train_max_samples", -1)
    draft.put("data.limit", limit if limit > 0 else None)
    held_out = [verl_rl.home(name) for name in options.texts("data.val_files")]
    every = options.take("trainer.test_freq")
    if held_out:
        common.held_out(draft, [{"path": name} for name in held_out])
        draft.put("eval.loss", True)
        _evaluated(draft, options, every)
    elif every is not None:
        draft.miss("trainer.test_freq", every, "there is no [eval]")
    draft.put("batch.train_batch_size", options.number("data.train_batch_size"), "conversations")
    if flag(options.take("data.use_dynamic_bsz", True)):
        options.take("data.micro_batch_size_per_gpu")
        common.micro_tokens(draft, options.number("data.max_token_len_per_gpu"), "a GPU")
    else:
        options.take("data.max_token_len_per_gpu")
        common.micro_batch(draft, options.number("data.micro_batch_size_per_gpu"), "a GPU")


def _evaluated(draft: Draft, options: Options, every: Any) -> None:
    """eval.every, of a number of steps or "after_each_epoch"; -1 for never."""
    counts = re.fullmatch(r"-?\d+", str(every))
    if every is not None and not counts:
        draft.miss("trainer.test_freq", every, "eval.every counts steps")
    draft.put("eval.every", max(0, int(counts[0])) if counts else 0)
    most = options.number("data.val_max_samples", -1)
    if most > 0 and draft.get("eval.path") is not None:
        draft.put("eval.limit", most, "rows")
    elif most > 0:
        draft.miss("data.val_max_samples", most, "each of eval.sets has a limit of its own")


def _checkpoints(draft: Draft, options: Options) -> None:
    project, name = (options.take(f"trainer.{key}_name") for key in ("project", "experiment"))
    folder = options.take("trainer.default_local_dir") or f"checkpoints/{project}/{name}"
    common.run_dir(draft, verl_rl.home(str(folder)))
    draft.put("checkpoint.save_hf", True)
    every = options.take("trainer.save_freq")
    if str(every) == "after_each_epoch":
        draft.put("checkpoint.save_epochs", 1)
    elif every is not None and decimal(every) > 0:
        draft.put("checkpoint.save_steps", int(decimal(every)))
    most = options.take("trainer.max_actor_ckpt_to_keep", options.take("trainer.max_ckpt_to_keep"))
    draft.put("checkpoint.max_ckpt_num", None if most is None else int(decimal(most)))
    mode = str(options.take("trainer.resume_mode", "auto"))
    draft.put("checkpoint.load_checkpoint", False if mode == "disable" else None)
    if mode not in ("auto", "disable"):
        draft.miss("trainer.resume_mode", mode, "a run goes on from its own checkpoints")
