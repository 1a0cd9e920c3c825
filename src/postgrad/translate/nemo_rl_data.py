"""The rows of NeMo RL's configs: datasets by name, prompts around their questions, validation."""

import math
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.files import prompt_text
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.nemo_rl import DATASETS, SPLITS, UNSPLIT

_VALIDATION = (  # options that say when and how to validate
    "grpo.val_period",
    "grpo.max_val_samples",
    "grpo.val_num_generations_per_prompt",
    "grpo.num_val_generations_per_prompt",
    "grpo.val_at_start",
    "grpo.val_at_end",
    *(f"policy.generation.val_{name}" for name in ("temperature", "top_p", "top_k")),
)
_CHANGES = "takes the answer out of its tags, or a mark of the image out of the question"
_FILES = {"prompt_file": "data.template", "system_prompt_file": "data.system"}


def _dataset(draft: Draft, options: Options, prefix: str, folder: Path) -> dict[str, Any]:
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
    elif path is not None and str(name) == "NemoGymDataset":
        column = "responses_create_params.input"
        entry = {"path": str(path), "messages": column, "answer": ""}
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
    if (str(name), split) in SPLITS:  # a dataset of its own
        entry, split = {**entry, "path": SPLITS[str(name), split]}, None
    entry |= {key: value for key, value in (("split", split), ("name", subset)) if value}
    return _prompted(draft, options, prefix, entry, folder)


def _prompted(
    draft: Draft, options: Options, prefix: str, entry: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """A dataset with the prompts that its files put around and before each question."""
    for key, counterpart in _FILES.items():
        names = (f"{prefix}.{key}", f"data.default.{key}", f"data.{key}")
        stated = [name for name in names if options.take(name) is not None]
        if not stated:
            continue
        value = str(options.take(stated[0]))
        text = prompt_text(value, folder)
        why = f"put the text of this file into {counterpart}"
        if text is not None and key == "prompt_file":
            text = _template(text, entry)
            why = "data.template says the text around one column, which stands there at {}"
        if text is None:
            _miss_once(draft, stated[0], value, why)
        elif key == "system_prompt_file":
            entry = {**entry, "system": text}
        else:
            entry = {key: kept for key, kept in entry.items() if key != "prompt"}
            entry["template"] = text
    return entry


def _template(text: str, entry: dict[str, Any]) -> str | None:
    """data.template of a prompt's file in which the question stands once, at {}; None for others
    and for conversations. Both systems write a brace twice.
    """
    try:
        parts = [(before, *field) for before, *field in Formatter().parse(text)]
    except ValueError:
        return None
    fields = [field for _, *field in parts if field[0] is not None]
    if fields != [["", "", None]] or "messages" in entry:
        return None
    column = f"{{{entry.get('prompt', 'question')}}}"
    return "".join(
        before.replace("{", "{{").replace("}", "}}") + (column if field[0] is not None else "")
        for before, *field in parts
    )


def _miss_once(draft: Draft, name: str, value: Any, why: str) -> None:
    if name not in [option.name for option in draft.missing]:
        draft.miss(name, value, why)


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


def rows(draft: Draft, options: Options, folder: Path) -> list[dict[str, Any]]:
    """[data], and [eval] where it is a part of the same dataset. Returns the datasets of [data].
    folder: of the config.
    """
    prefixes = _numbered(options, "data.train")
    if options.states("data.dataset_name"):  # as configs had it before data.train
        prefixes = ["data"]
    of_prefix = [(prefix, _dataset(draft, options, prefix, folder)) for prefix in prefixes]
    entries = [entry for _, entry in of_prefix if entry]
    common.sources(draft, entries)
    if changed := [entry["path"] for entry in entries if "map" in entry]:
        draft.notes.append(f"NeMo RL changes each row of {', '.join(changed)}: write data.map, "
                           f"which {_CHANGES}")  # fmt: skip
    validated = any(name.startswith("data.validation.") for name in options.stated)
    for prefix in _numbered(options, "data.train"):
        share, seed = (options.take(f"{prefix}.{key}") for key in ("split_validation_size", "seed"))
        if share and str(options.take(f"{prefix}.dataset_name")) in UNSPLIT:
            why = "the reader of this dataset there makes no such split"
            draft.skip(f"{prefix}.split_validation_size", share, why)
        elif share and decimal(share) < 1 and len(entries) == 1 and not validated:
            _part(draft, entries[0], decimal(share))
        elif share:
            why = "data.eval_fraction is a share of a single dataset, where [eval] names no other"
            draft.miss(f"{prefix}.split_validation_size", share, why)
        if share is None and seed is not None:
            draft.skip(f"{prefix}.seed", seed, "of a split that is not made")
    if not entries:
        for name in [f"data.{table}{key}" for key in _FILES for table in ("default.", "")]:
            draft.miss(name, options.take(name), "the config names no dataset that is here")
    if options.take("data.default.processor") is not None:
        draft.skip("data.default.processor", options.take("data.default.processor"), common.SO_HERE)
    return entries


def _part(draft: Draft, entry: dict[str, Any], share: float) -> None:
    """A part of the training rows is only evaluated: the last ones, of which [eval] reads
    max_val_samples. A share that is no whole percent is data.eval_fraction, without a limit.
    """
    split, percent = str(entry.get("split", "train")), round(share * 100, 9)
    if "[" in split or not percent.is_integer():
        draft.put("data.eval_fraction", share, "rows that are only evaluated")
        return
    kept = f"{100 - int(percent)}%"
    draft.put("data.split", f"{split}[:{kept}]", "split_validation_size, of rows in their order")
    common.sources(draft, [_apart({**entry, "split": f"{split}[{kept}:]"}, [entry])], "eval")


def _apart(entry: dict[str, Any], trained: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A dataset for [eval]: without what it takes over from the only one of [data], where that has
    long texts.
    """
    if len(trained) != 1 or not {"template", "system"} & entry.keys():
        return entry
    differing = {
        key: value
        for key, value in entry.items()
        if key in ("path", "split", "name", "images") or value != trained[0].get(key)
    }
    return entry if differing.keys() & {"prompt", "answer", "messages", "template"} else differing


def _repeats(draft: Draft, options: Options, prefixes: Sequence[str], sets: int) -> int:
    """How often each row of the only set of data.validation stands there."""
    repeats = [(name, options.take(name)) for name in (f"{prefix}.repeat" for prefix in prefixes)]
    if sets == len(repeats) == 1:
        return int(repeats[0][1] or 1)
    for name, repeat in repeats:
        if repeat is not None:
            draft.miss(name, repeat, "eval.n_samples samples the questions of all sets as often")
    return 1


def held_out(
    draft: Draft, options: Options, folder: Path, trained: Sequence[dict[str, Any]]
) -> None:
    """[eval]: the datasets of data.validation, or the part of [data] that `rows` kept for it.
    trained: the datasets of [data].
    """
    prefixes = _numbered(options, "data.validation")
    stated = any(name.startswith("data.validation.") for name in options.stated)
    named = [_dataset(draft, options, prefix, folder) for prefix in prefixes if stated]
    sets = [entry for entry in named if entry]
    times = _repeats(draft, options, prefixes, len(sets))
    if sets:
        common.held_out(draft, [_apart(entry, trained) for entry in sets])
    every, most = options.number("grpo.val_period"), options.take("grpo.max_val_samples")
    samples = options.take(
        "grpo.val_num_generations_per_prompt", options.take("grpo.num_val_generations_per_prompt")
    )
    first, last = options.take("grpo.val_at_start"), options.take("grpo.val_at_end")
    warmth, top_p, top_k = (
        options.take(f"policy.generation.val_{name}") for name in ("temperature", "top_p", "top_k")
    )
    of_data = draft.get("eval.path") is not None and not sets
    if not sets and not of_data and draft.get("data.eval_fraction") is None:
        for name in _VALIDATION:
            if options.states(name):
                draft.miss(name, options.take(name), "there is no [eval]")
        return
    draft.put("eval.every", max(every, 0))
    draft.put("eval.at_start", flag(first) if first is not None else None)
    draft.put("eval.at_end", flag(last) if last is not None else None)
    often = None if samples is None and times == 1 else int(samples or 1) * times
    draft.put("eval.n_samples", often, f"each row stands {times} times there" if times > 1 else "")
    draft.put("eval.temperature", None if warmth is None else decimal(warmth))
    draft.put("eval.top_p", None if top_p is None else decimal(top_p))
    limited = options.states("policy.generation.top_k")
    if top_k is not None or (limited and "policy.generation.val_top_k" in options.stated):
        draft.put("eval.top_k", max(0, int(top_k or 0)))  # null: off, whatever training does
    if len(sets) == 1 or of_data:
        draft.put("eval.limit", None if most is None else math.ceil(int(most) / times),
                  "max_val_samples: questions")  # fmt: skip
    elif most is not None and options.states("grpo.max_val_samples"):
        why = (
            "each of eval.sets has a limit of its own"
            if sets
            else "all rows that data.eval_fraction holds out are evaluated"
        )
        draft.miss("grpo.max_val_samples", most, why)
