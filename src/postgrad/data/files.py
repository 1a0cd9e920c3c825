"""Rows of JSON, CSV, Parquet and Arrow files. Each row has the place that messages name."""

import base64
import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.core.untrusted import GZIP, PARQUET, other_content
from postgrad.data.json_text import parsed_json

RowValues = Mapping[str, Any]  # column -> JSON value
IN_FOLDERS = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".arrow")
SAVED = "state.json"  # lists the Arrow files of a folder that `datasets` has saved
SUFFIXES = (*IN_FOLDERS, ".json")  # in folders, .json files describe the others

SPLITS = {  # what the hub takes for the name of a split in that of a file
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# names under which a .json file may have lists of rows
WITH_ROWS = ("train", "test", "validation", "valid", "dev", "data", "rows", "examples")
ARROW_FILE = b"ARROW1"  # the first bytes of one with an index
LONGEST_LINE = 2**28  # bytes; a gzip file of a megabyte may hold a line of a gigabyte


def read_file(path: Path, *, images: str = "") -> Iterator[tuple[str, RowValues]]:
    """(place, values) of each row; the place is "file:line" or "file row n" (from 0). images: a
    column of a Parquet or Arrow file whose bytes are kept, as data URLs.

    Raises UsageError that names the place of what cannot be read.
    """
    _require_kind(path)
    if path.name.endswith(".parquet"):
        return _columns(path, "a Parquet file", _parquet_batches(path, images))
    if path.name.endswith(".arrow"):
        return _columns(path, "an Arrow file", _arrow_batches(path, images))
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _json_lines(path)
    if path.name.endswith(".json"):
        return _json(path)
    if path.name.endswith(".csv"):
        return _csv(path)
    raise UsageError(
        f"{path}: not a data file; known: {', '.join(SUFFIXES)}. Anything else is read by a "
        'function of yours that yields rows: data.path = "my_module:my_rows"'
    )


def _require_kind(path: Path) -> None:
    """Raises UsageError where a data file's first bytes are of another kind than its name."""
    if not path.name.endswith(SUFFIXES):
        return
    try:
        content = other_content(path, {".gz": GZIP, ".parquet": PARQUET}.get(path.suffix, b""))
    except OSError:  # whoever reads the rows says why
        return
    if content:
        raise UsageError(f"{path}: {content}")


def files_of(directory: Path, name: str | None, split: str) -> list[Path]:
    """The files of a split in a directory laid out as on the hub, in the order of their names.

    Looked for in directory/name (or the directory itself), also in its folders `data` and `split`:
    files called `split` or starting with `split` and one of "-._", else those with a word for it in
    their names, as in "my_train.csv". Files of which none names a known split are all "train".
    `Dataset.save_to_disk` writes such folders, and `DatasetDict.save_to_disk` one for each split.
    Raises UsageError when there are none.
    """
    base = directory / name if name is not None else directory
    if not base.is_dir():
        folders = sorted(p.name for p in directory.iterdir() if p.is_dir())
        raise UsageError(f"{directory}: no folder {name!r} (data.name); there are: {folders}")
    data = [*_data_files(base), *_data_files(base / "data")]
    files = [p for p in data if re.match(rf"{re.escape(split)}[-._]", p.name)]
    files += _data_files(base / split)
    splits = {path: _split_of(path.name) for path in data}
    files = files or [path for path in data if splits[path] == SPLITS.get(split, split)]
    if not files and split == "train" and not any(splits.values()):
        files = data
    if not files:
        present = [str(p.relative_to(directory)) for p in data] or sorted(
            p.name for p in _visible(base)
        )
        described = not data and any(name.endswith(".json") for name in present)
        hint = "; in a folder .json files describe the others: name the file" * described
        raise UsageError(
            f"{base}: no data file of split {split!r} (data.split); there are: {present}{hint}"
        )
    return files


def _split_of(name: str) -> str | None:
    """The split that a file's name has a word for: its first word, or else the last of such."""
    words = re.split(r"[-._ \d]+", name.lower())
    named = [SPLITS[word] for word in words if word in SPLITS]
    return SPLITS.get(words[0], named[-1]) if named else None


def _data_files(folder: Path) -> list[Path]:
    """The data files of a folder, in the order of their names. In one that `datasets` has saved
    they are those that it lists: it also keeps there what `map` and `shuffle` made of them.
    """
    files = sorted(path for path in _visible(folder) if path.name.endswith(IN_FOLDERS))
    state = folder / SAVED
    if not state.is_file() or not any(path.suffix == ".arrow" for path in files):
        return files
    try:
        listed = [file["filename"] for file in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{state}: does not list the data files as Dataset.save_to_disk writes it: {error!r}; "
            "save the dataset again"
        ) from error
    if missing := [name for name in listed if folder / str(name) not in files]:
        raise UsageError(f"{state} lists {missing[0]!r}, which is not in the folder")
    return [folder / name for name in listed]


def _visible(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _json_lines(path: Path) -> Iterator[tuple[str, RowValues]]:
    number = 0
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as lines:
            while line := lines.readline(LONGEST_LINE + 1):
                number += 1
                if not line.isspace():
                    place = f"{path}:{number}"
                    yield place, _object(line, place, first=number == 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if not number and isinstance(error, gzip.BadGzipFile):
            raise UsageError(
                f"{path}: {error}; a file of plain JSON lines ends in .jsonl"
            ) from error
        raise UsageError(
            f"{path}: the gzip file is broken after line {number}: {error}; fetch it again"
        ) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read after line {number}: {error}") from error


def _json(path: Path) -> Iterator[tuple[str, RowValues]]:
    """Rows of a .json file: a list of objects, or lines as in a .jsonl file."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        _refuse_one_object(path)
        yield from _json_lines(path)
        return
    for number, value in enumerate(_parsed(path.read_bytes(), str(path), first=True)):
        place = f"{path} row {number}"
        yield place, _row(value, place)


def _refuse_one_object(path: Path) -> None:
    """Raises UsageError where a file is a single object that is no row: written over several lines,
    or with the rows of each split in a list. A file with a row on each line passes.
    """
    with path.open("rb") as lines:
        first, more = lines.readline(LONGEST_LINE), lines.readline(LONGEST_LINE)
    try:
        json.loads(first.decode("utf-8-sig"))
        text = b"" if more else first
    except (ValueError, RecursionError):
        text = path.read_bytes()
    try:
        value = json.loads(text.decode("utf-8-sig") or "0")
    except (ValueError, RecursionError):  # whoever reads the lines says where
        return
    lists = isinstance(value, dict) and all(
        name in WITH_ROWS and isinstance(rows, list) for name, rows in value.items()
    )
    if isinstance(value, dict) and (lists or more):
        keys = ", ".join(list(value)[:20])[:1000]
        raise UsageError(
            f"{path} is a single JSON object ({keys}), but a .json file is a list of objects, or "
            "has a row on each line; write each list of rows to a file of its own"
        )


def _csv(path: Path) -> Iterator[tuple[str, RowValues]]:
    """Rows of a .csv file, whose first line names the columns. Every value is text. Cells are
    divided by what divides the names: commas, or the semicolons or tabs of a spreadsheet's export.
    """
    csv.field_size_limit(LONGEST_LINE)
    end = 0  # the last line that was read: a cell may hold line breaks
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            head = lines.readline()
            lines.seek(0)
            cells = csv.reader(lines, delimiter=max(",;\t", key=head.count), strict=True)
            columns = next(cells, [])
            if twice := [name for name in columns if columns.count(name) > 1]:
                raise UsageError(f"{path}: two columns are called {twice[0]!r}: rename one of them")
            end = cells.line_num
            for values in cells:
                place, end = f"{path}:{end + 1}", cells.line_num
                if not values:  # an empty line
                    continue
                if len(values) != len(columns):
                    raise UsageError(
                        f"{place}: the row has {len(values)} cells, the first line names "
                        f"{len(columns)} columns; a text with a comma or a line break stands "
                        "between quotes"
                    )
                yield place, dict(zip(columns, values, strict=True))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error}; save it as CSV in UTF-8") from error
    except (csv.Error, OSError) as error:
        raise UsageError(f"{path}:{end + 1}: not CSV that can be read: {error}") from error


_REPAIR = "repair or remove the line"


def _object(line: bytes, place: str, *, first: bool) -> RowValues:
    if len(line) > LONGEST_LINE:
        raise UsageError(
            f"{place}: the line has more than {LONGEST_LINE >> 20} MiB, the most that a row may "
            "have; is this a complete file of JSON lines?"
        )
    return _row(_parsed(line, place, first=first), place)


def _parsed(line: bytes, place: str, *, first: bool) -> Any:
    """The JSON value of a line or a file."""
    try:
        return parsed_json(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: not UTF-8: {error}; convert the file") from error
    except json.JSONDecodeError as error:
        if "\n" in error.doc.strip():
            raise UsageError(f"{place}: not JSON: {error}; repair the file") from error
        is_list = error.doc.lstrip().startswith("[")  # its first line, over several
        way_out = "a file that is a list of rows ends in .json" if is_list else _REPAIR
        raise UsageError(
            f"{place}: not JSON: {error.msg} (character {error.pos + 1}); {way_out}"
        ) from error
    except ValueError as error:
        raise UsageError(f"{place}: not JSON: {error}; {_REPAIR}") from error


def _row(value: Any, place: str) -> RowValues:
    if not isinstance(value, dict):
        hint = "; a file that is a list of rows ends in .json" * isinstance(value, list)
        raise UsageError(f"{place}: a row is a JSON object, this is {type(value).__name__}{hint}")
    return cast(RowValues, value)


def _columns(path: Path, kind: str, batches: Iterator[Any]) -> Iterator[tuple[str, RowValues]]:
    """The rows of record batches from a file of that kind."""
    import pyarrow as pa

    row = 0
    try:
        for batch in batches:
            for values in batch.to_pylist():
                yield f"{path} row {row}", {k: plain(v) for k, v in values.items()}
                row += 1
    except UsageError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise UsageError(
            f"{path}: not {kind} that can be read: {error}; fetch it again, or write it anew"
        ) from error
    except Exception as error:  # dates or text that Python cannot hold raise errors of any type
        raise UsageError(
            f"{path}: rows from {row} on hold a value that cannot be read: {error!r}; leave the "
            "column out of the file, or write it as text"
        ) from error


def _parquet_batches(path: Path, images: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as table:
        names = _read_columns(path, table.schema_arrow, images)
        yield from table.iter_batches(batch_size=1024, columns=names)


def _arrow_batches(path: Path, images: str) -> Iterator[Any]:
    """Of a stream, which `datasets` writes, or of a file with an index at its end. The file is
    mapped into memory: a batch takes memory while it is read.
    """
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        indexed = source.read(len(ARROW_FILE)) == ARROW_FILE
        source.seek(0)
        stream: Any = pa.ipc.open_file(source) if indexed else pa.ipc.open_stream(source)
        names = _read_columns(path, stream.schema, images)
        batches = map(stream.get_batch, range(stream.num_record_batches)) if indexed else stream
        for batch in batches:
            chosen = batch.select(names)
            chosen.validate(full=True)  # offsets of a damaged file may point out of its buffers
            yield chosen


def _read_columns(path: Path, schema: Any, images: str) -> list[str]:
    """The names of the columns that are read."""
    names = [f.name for f in schema if f.name == images or not holds_bytes(f.type)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{path}: two columns are called {twice[0]!r}: rename one of them")
    return names


def holds_bytes(kind: Any) -> bool:
    """Whether an Arrow type holds bytes (images, sounds): they are not JSON and no verifier reads
    them, so such columns are left out, but that of data.images.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return True
    if types.is_fixed_size_binary(kind):
        return True
    return any(holds_bytes(kind.field(i).type) for i in range(kind.num_fields))


def plain(value: Any) -> Any:
    """The JSON value nearest to what Arrow gives: times and decimals become text, maps pairs, bytes
    data URLs.
    """
    if isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(value).decode()}"
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None  # NaN is how pandas writes a missing value; JSON has no NaN
    return str(value) if isinstance(value, Decimal | timedelta) else value
