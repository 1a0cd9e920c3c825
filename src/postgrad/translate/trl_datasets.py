"""Datasets of Python programs as entries of [[data.sets]]: where rows come from, and what the
program does with them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from postgrad.translate.python_values import Built, Defined, Imported, is_literal
from postgrad.translate.trl_objects import Reading

_FILES = ("json", "csv", "parquet", "arrow", "text")  # loaders of files, with `data_files`
_FROM_FILE = ("from_json", "from_csv", "from_parquet", "from_file", "load_from_disk")
_ROWS = (
    "from_list", "from_dict", "from_pandas", "from_generator", "from_polars", "from_sql",
)  # fmt: skip
_SAME = (  # rows are the same here without it
    "with_format", "set_format", "flatten_indices", "cast_column", "cast", "remove_columns",
    "select_columns", "copy", "to_iterable_dataset", "class_encode_column",
)  # fmt: skip
_MADE = (
    "rows that the program makes: write them into a JSONL file, a row a line, and name it in "
    "data.path"
)
_RETURNS = "returns the whole row here; there the columns that it adds"


@dataclass(slots=True)
class ProgramRows:
    """A dataset of a program: an entry of [[data.sets]], comments on its keys, what is lost."""

    entry: dict[str, Any]
    comments: dict[str, str] = field(default_factory=dict[str, str])
    lost: list[tuple[str, Any, str]] = field(default_factory=list[tuple[str, Any, str]])
    part: str = ""  # "train" or "test" of a train_test_split that follows

    def comment(self, key: str, text: str) -> None:
        """Adds to the comment on a key."""
        before = self.comments.get(key)
        self.comments[key] = f"{before}; {text}" if before else text


def put_rows(reading: Reading, option: str, name: str, value: Any) -> None:
    """The rows of a trainer's argument as an option. name: of the argument."""
    listed = _rows(value)
    for rows in listed:
        if "files" in rows.entry:
            _choose(rows, "test" if name == "eval_dataset" else "train")
        rows.entry.pop("share", None)
        for key, lost, why in rows.lost:
            reading.lose(key, lost, why)
    sets = [rows for rows in listed if rows.entry.get("path")]
    if all(rows.part == "test" for rows in sets) and sets:
        return  # the other half is data.eval_fraction
    if not sets:
        unknown = "where its rows are is not known: name them in data.path"
        reading.lose(name, value, _MADE if _is_made(value) else unknown)
        return
    reading.options[option] = [
        {**rows.entry, **({"comments": rows.comments} if rows.comments else {})} for rows in sets
    ]


def _is_made(value: Any) -> bool:
    while isinstance(value, Built):
        if value.short in _ROWS:
            return True
        value = value.base
    return False


def _rows(value: Any) -> list[ProgramRows]:
    """The datasets that a value is made of; [] where that is not known."""
    if isinstance(value, dict):  # several to evaluate on
        return [rows for inner in cast(dict[str, Any], value).values() for rows in _rows(inner)]
    if not isinstance(value, Built):
        return []
    if value.short == "load_dataset":
        return _loaded(value)
    if value.short in _FROM_FILE and value.args and isinstance(value.args[0], str):
        return [ProgramRows({"path": value.args[0]})]
    if value.short in ("concatenate_datasets", "interleave_datasets") and value.args:
        parts = cast(list[Any], value.args[0]) if isinstance(value.args[0], list) else []
        sets = [rows for part in parts for rows in _rows(part)]
        if sets and (odds := value.kwargs.get("probabilities")) is not None:
            why = "weights set a dataset's share of an epoch: data.sets.weight"
            sets[0].lost.append(("probabilities", odds, why))
        return sets
    if value.name == "[]":
        sets = _rows(value.base)
        for rows in sets:
            _choose(rows, value.args[0])
        return sets
    if value.name.startswith("."):
        sets = _rows(value.base)
        for rows in sets:
            _STEPS.get(value.short, _other)(rows, value)
        return sets
    sets = _rows(value.args[0]) if value.args else []  # a function of another package
    for rows in sets:
        _mapped(rows, value)
    return sets


def _loaded(call: Built) -> list[ProgramRows]:
    """What load_dataset of `datasets` reads."""
    named = {**dict(zip(("path", "name", "data_dir", "data_files"), call.args, strict=False)),
             **call.kwargs}  # fmt: skip
    path, files = named.get("path"), named.get("data_files")
    split = named.get("split")
    rows = ProgramRows({})
    for key in ("name", "revision", "split"):
        value = named.get(key)
        if isinstance(value, str) or (key == "split" and isinstance(value, list)):
            rows.entry[key] = value
        elif value is not None:
            rows.lost.append((key, value, "not a text of the program: say it in [data]"))
    if named.get("streaming"):
        why = "a dataset is read completely before the run"
        rows.lost.append(("streaming", named["streaming"], why))
    if isinstance(files, dict):
        table = cast(dict[str, Any], files)
        files = table.get(str(split)) if split else table
    if path in _FILES or (files is not None and not isinstance(path, str)):
        return _of_files(rows, files)
    if not isinstance(path, str):
        return []
    rows.entry = {"path": path, **rows.entry}
    if files is not None:
        rows.lost.append(("data_files", files, "name a file in data.path to read it alone"))
    if (folder := named.get("data_dir")) is not None:
        rows.lost.append(
            ("data_dir", folder, "data.name names a configuration, data.path a folder")
        )
    return [rows]


def _of_files(rows: ProgramRows, files: Any) -> list[ProgramRows]:
    """The rows of local files, which are all of one split."""
    rows.entry.pop("name", None)
    if isinstance(files, dict) and is_literal(files):  # by split, chosen later
        return [ProgramRows({"files": files}, lost=rows.lost)]
    split = str(rows.entry.pop("split", "train"))
    sliced = {"split": f"train[{split.partition('[')[2]}"} if "[" in split else {}
    names = cast(list[Any], files) if isinstance(files, list) else [files]
    return [
        ProgramRows({"path": name, **sliced}, lost=rows.lost)
        for name in names
        if isinstance(name, str)
    ]


def _choose(rows: ProgramRows, key: Any) -> None:
    """Follows dataset["train"]: a split, or a half of a train_test_split."""
    splits = rows.entry.get("split")
    if isinstance(splits, list) and isinstance(key, int) and key < len(cast(list[Any], splits)):
        rows.entry["split"] = splits[key]
    elif not isinstance(key, str):
        rows.lost.append(("split", key, "not a text of the program: say it in data.split"))
    elif "share" in rows.entry:
        share = rows.entry.pop("share")
        if key == "test":
            rows.part = "test"
        elif share is not None:
            rows.entry["eval_fraction"] = share
            rows.comment("eval_fraction", "of the questions, by their hash; there of the rows")
    elif "files" in rows.entry:
        name = rows.entry.pop("files").get(key)
        rows.entry["path"] = name[0] if isinstance(name, list) and name else name
    else:
        rows.entry["split"] = key


def _mapped(rows: ProgramRows, call: Built) -> None:
    """Follows .map(function), and functions of other packages that change rows."""
    function = _function(call)
    _named(rows, "map", function, call, "row")
    if _RETURNS not in rows.comments.get("map", ""):
        rows.comment("map", _RETURNS)


def _filtered(rows: ProgramRows, call: Built) -> None:
    _named(rows, "filter", _function(call), call, "keep")


def _function(call: Built) -> Any:
    if call.name.startswith("."):
        return call.args[0] if call.args else call.kwargs.get("function")
    return Imported(call.name, call.line)


def _named(rows: ProgramRows, key: str, function: Any, call: Built, name: str) -> None:
    """Names the function of data.map or data.filter, which is written from the program's."""
    if isinstance(function, Imported) and "." in function.name and not call.name.startswith("."):
        written = f"my_rows:{name}"
    elif isinstance(function, Imported) and "." in function.name:
        module, _, word = function.name.rpartition(".")
        written = f"{module}:{word}"
    elif isinstance(function, Defined) and function.name != "lambda":
        written = f"my_rows:{function.name}"
    else:
        written = f"my_rows:{name}"
    rows.entry[key] = written if key not in rows.entry else f"my_rows:{name}"
    rows.comment(key, f"write it from line {call.line}, {_short(call.text)}")


def _short(text: str) -> str:
    return text if len(text) <= 50 else f"{text[:47]}..."


def _renamed(rows: ProgramRows, call: Built) -> None:
    """Follows .rename_column and .rename_columns, which a map says here."""
    _named(rows, "map", None, call, "row")


def _limited(rows: ProgramRows, call: Built) -> None:
    """Follows .select(range(n)) and .take(n)."""
    bound = call.args[0] if call.args else call.kwargs.get("indices", call.kwargs.get("n"))
    first = 0
    if isinstance(bound, Built) and bound.short == "range" and len(bound.args) in (1, 2):
        first, bound = (0, *bound.args)[-2:]
    if isinstance(bound, Built) and bound.short == "min":  # min(1000, len(dataset))
        bound = next((arg for arg in bound.args if isinstance(arg, int)), None)
    if isinstance(bound, int) and not isinstance(bound, bool) and bound > 0 and first == 0:
        rows.entry["limit"] = min(bound, rows.entry.get("limit", bound))
        behind = "; there behind the filter" if "filter" in rows.entry else ""
        rows.comment("limit", f"line {call.line}: the first rows{behind}")
    else:
        rows.lost.append((call.text, call, "data.split can be a slice, data.limit the first rows"))


def _shuffled(rows: ProgramRows, call: Built) -> None:
    """Follows .shuffle(seed): the order of an epoch is the run's own."""
    rows.comments.setdefault("path", "")
    if not rows.comments["path"]:
        rows.comments["path"] = f"line {call.line} shuffles its rows: a run does so from its seed"


def _halved(rows: ProgramRows, call: Built) -> None:
    """Follows .train_test_split(test_size), of which a half is chosen."""
    share = call.kwargs.get("test_size", call.args[0] if call.args else None)
    if isinstance(share, float) and 0 < share < 1:
        rows.entry["share"] = share
    else:
        rows.entry["share"] = None
        rows.lost.append((call.text, call, "data.eval_fraction is a share of the questions"))


def _other(rows: ProgramRows, call: Built) -> None:
    if call.short not in _SAME:
        rows.lost.append((call.text, call, "what it does to the rows is not in the recipe"))


_STEPS: dict[str, Callable[[ProgramRows, Built], None]] = {
    "map": _mapped, "filter": _filtered, "select": _limited, "take": _limited,
    "shuffle": _shuffled, "train_test_split": _halved, "rename_column": _renamed,
    "rename_columns": _renamed, "skip": _other,
}  # fmt: skip
