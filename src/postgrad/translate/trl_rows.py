"""[data] and [eval] of TRL's trainers, which tell what a row is by its columns: of rows in files at
hand the first one is read, for others a comment says what depends on it.
"""

from collections.abc import Sequence
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.data.files import RowValues, read_file
from postgrad.data.rows import local_files
from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, flag
from postgrad.translate.tables.trl import OWN_ROWS, UNZIPPED

_OF_PROGRAMS = ("revision", "limit", "filter", "map", "eval_fraction")  # keys that programs say
_BEFORE_TEXT = {"prompt", "messages", "conversations"}  # columns that TRL reads before a text's
_PLAIN = "texts as they are, as there"
_BEGUN = '; {{ bos_token }}{% include "plain" %} for a tokenizer that begins a text with that token'
_UNKNOWN = 'where a prompt is a text and no list of messages, add chat_template = "plain", as there'


def rows(draft: Draft, options: Options, *, bounded: bool = True) -> None:
    """[data]: where rows are, what their columns mean, and how long one may be."""
    mixed, path = options.tables("datasets"), options.take("dataset_name")
    if mixed:
        common.sources(draft, [_entry(dataset) for dataset in mixed])
        _comment(draft, "data", mixed)
    else:
        draft.put("data.path", path)
    row, text = _first_row(draft), options.take("dataset_text_field")
    if draft.job == "sft" and text and (row is None or _is_column_of_text(row, text)):
        draft.put("data.text", text, "the column of dataset_text_field, where rows are plain text")
    if draft.get("algorithm.type") == "sft":
        _loss_turns(draft, options, row)
    _as_text(draft, row)
    if draft.job == "rl":
        column = "prompt" if _is_text(row, "prompt") else "messages"
        comment = "TRL finds the columns itself: say here which they are"
        draft.put(f"data.{column}", "prompt", comment)
        if row is None or "solution" in row:
            draft.put("data.answer", "solution")
        else:
            draft.put("data.answer", "", "no column of the rows is a solution; functions of reward "
                      "find the others in metadata")  # fmt: skip
    if draft.has_images:
        draft.put("data.images", "images", 'TRL reads a column "images", or "image"')
    if bounded:
        _longest(draft, options)
    else:
        _unbounded(draft, options)


def _longest(draft: Draft, options: Options) -> None:
    """data.max_len, and what happens to longer rows."""
    length, older = options.take("max_length"), options.take("max_seq_length")
    if older is not None and not options.states("max_length"):
        length = options.stated["max_length"] = older  # its name before
    if draft.job == "rl":
        return
    comment = "; where the cut is within an image they are dropped" if draft.has_images else ""
    if options.stated.get("max_length", length) is None:
        draft.put("data.max_len", 4096, "there no row is cut; longer ones are dropped")
    elif draft.get("algorithm.type") == "bradley_terry":
        draft.put("data.max_len", int(length), "pairs with a longer answer are dropped, as there")
    else:
        draft.put("data.max_len", int(length or 1024), f"longer rows are cut, as there{comment}")
        draft.put("data.on_too_long", "truncate")
    if (room := options.take("max_prompt_length")) is not None:
        draft.miss("max_prompt_length", room, "data.max_len bounds prompt and answer together")


def _first_row(draft: Draft) -> RowValues | None:
    """The first row of the training rows, where they are in files at hand as the run reads them,
    and those of several sets have the same columns; else None.
    """
    first: RowValues | None = None
    for place, path in draft.values.items():
        if place[0] != "data" or place[-1] != "path":
            continue
        entry = {key: draft.values.get((*place[:-1], key)) for key in ("name", "split", "map")}
        row = None if entry["map"] else _row(str(path), entry["name"], entry["split"] or "train")
        if row is None or (first is not None and row.keys() != first.keys()):
            return None
        first = first or row
    return first


def _row(path: str, name: str | None, split: str) -> RowValues | None:
    try:
        files = local_files(path, name, split)
        return next((values for file in files for _, values in read_file(file)), None)
    except (UsageError, OSError):
        return None  # the recipe's own reading tells what is wrong with them


def _is_text(row: RowValues | None, column: str) -> bool:
    return row is not None and isinstance(row.get(column), str)


def _is_column_of_text(row: RowValues, column: str) -> bool:
    """Whether SFT there trains on this column as plain text."""
    return _is_text(row, column) and _BEFORE_TEXT.isdisjoint(row)


def _as_text(draft: Draft, row: RowValues | None) -> None:
    """The chat template of rows whose prompt is a text: TRL has none for them."""
    if draft.get("data.text") is not None or draft.get("algorithm.type") == "process_reward":
        return
    if _is_text(row, "prompt"):
        draft.put("data.chat_template", "plain", _PLAIN + _BEGUN)
    elif row is None or ("prompt" not in row and "chosen" in row):
        for place in draft.values:
            if place[0] == "data" and place[-1] == "path":
                before = draft.comments.get(place)
                draft.comments[place] = f"{before}; {_UNKNOWN}" if before else _UNKNOWN
                return


def _loss_turns(draft: Draft, options: Options, row: RowValues | None) -> None:
    """What bears loss: there all of a conversation, unless an option says otherwise, and of rows of
    prompt and completion the completion alone.
    """
    answers = flag(options.take("assistant_only_loss", False))
    completions = options.take("completion_only_loss")
    if draft.get("data.text") is not None:
        return
    if row is not None and _is_column_of_text(row, "text"):
        draft.put("data.text", "text")
    elif answers:
        return
    elif row is not None and ("messages" in row or "conversations" in row):
        draft.put("data.loss_turns", "everything", "TRL's default for messages")
    elif completions is not None and not flag(completions):
        draft.put("data.loss_turns", "everything", "completion_only_loss is false")
    elif row is None:
        why = "of messages the assistant's turns are trained on; there all tokens, as with"
        draft.put("algorithm.type", "sft", f'{why} data.loss_turns = "everything"')


def own_rows(draft: Draft, options: Options) -> None:
    """The rows of grpo_vlm, rloo_vlm and online_dpo_vlm, which the scripts name and change."""
    for name in ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"):
        if options.states(name):
            draft.skip(name, options.take(name), "the script has rows of its own")
    draft.put("data.path", OWN_ROWS, "the script's own rows")
    draft.put("data.prompt", "problem")
    draft.put("data.answer", "solution")
    draft.put("data.images", "image")
    draft.put("data.on_unreadable", "drop", "solutions that math-verify cannot read, as there")
    if str(options.take("eval_strategy", "no")) != "no":
        draft.put("data.eval_fraction", 0.0125, "100 of about 8 000 rows there")
    draft.notes.append(
        "The script puts its SYSTEM_PROMPT before each question, and drops rows with images of 512 "
        "pixels or more: say them in data.system and data.filter."
    )


def _unbounded(draft: Draft, options: Options) -> None:
    """data.max_len of sft_vlm, which cuts no row, and the rows that it unzips."""
    if options.states("max_length"):
        draft.skip("max_length", options.take("max_length"), "the script takes none instead")
    draft.put("data.max_len", 4096, "the script cuts no row; longer ones are dropped, and counted")
    if draft.get("data.path") == UNZIPPED:
        messages = "messages of the columns context, question, input_image_path and output"
        comment = f"write it: the script unzips images, and makes {messages}"
        draft.put("data.map", "my_rows:row", comment)
        draft.put("data.messages", "messages")


def _entry(dataset: dict[str, Any]) -> dict[str, Any]:
    """The entry of [[data.sets]] for one of TRL's `datasets`."""
    files = dataset.get("data_files")
    entry = {
        "path": files if isinstance(files, str) else dataset.get("path"),
        "name": dataset.get("name"),
        "split": dataset.get("split"),
    }
    share = dataset.get("fraction")
    if isinstance(share, float) and share < 1:
        entry["split"] = f"{entry['split'] or 'train'}[:{share * 100:g}%]"
    entry |= {key: dataset[key] for key in _OF_PROGRAMS if key in dataset}
    return {key: value for key, value in entry.items() if value is not None}


def _comment(draft: Draft, section: str, datasets: Sequence[dict[str, Any]]) -> None:
    """Comments on what a Python program does with its rows."""
    for number, dataset in enumerate(datasets):
        place = (section, "sets", number) if len(datasets) > 1 else (section,)
        for key, text in dataset.get("comments", {}).items():
            if (*place, key) in draft.values:
                draft.comments[*place, key] = text


def held_out(draft: Draft, options: Options, split: Any) -> None:
    """The rows that are evaluated on: a split of those that train, or others."""
    comment = "its loss, as there" if draft.job == "sft" else ""
    tables = options.tables("eval_dataset")
    rows = {key: draft.get(f"data.{key}") for key in ("path", "name", "map")}
    sets = [
        {key: value for key, value in _entry(table).items()
         if len(tables) > 1 or value != rows.get(key) or key == "filter"}
        for table in tables
    ]  # fmt: skip
    if len(sets) > 1:
        common.held_out(draft, sets)
    elif sets:
        common.sources(draft, [{"split": "train", **sets[0]}], "eval")
        _comment(draft, "eval", tables)
    elif draft.get("data.eval_fraction") is None:
        draft.put("eval.split", split, comment)
