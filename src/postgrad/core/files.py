"""Files that are whole or not there at all."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast


def beside(path: Path) -> Path:
    """Where what is to be called `path` is written first; see `left_behind`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def left_behind(folder: Path, names: Collection[str]) -> list[Path]:
    """What a killed process was writing `beside` the files and directories of these names."""
    either = "|".join(map(re.escape, names))
    ours = re.compile(rf"\.({either})\.\d+\.tmp", re.ASCII)
    return [path for path in sorted(folder.iterdir()) if ours.fullmatch(path.name)]


def remove(path: Path) -> None:
    """Removes a file or a directory. Behind a link lies what is not ours: only the link goes."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` at once: written beside it, synced, renamed, the folder synced."""
    written = beside(path)
    try:
        with written.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)  # still there only where writing failed
    sync_directory(path.parent)


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """A new file that is called `path`, and on the disk, when the block ends well; it replaces what
    had that name. Another process may be writing the same one: the last name wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written = beside(path)
    try:
        yield written
        sync_file(written)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)  # still there only where writing failed
    sync_directory(path.parent)


@contextmanager
def whole_directory(path: Path, *, replace: bool) -> Generator[Path]:
    """A new directory that is called `path`, and on the disk, when the block ends well. replace:
    what had that name is removed just before; else OSError. Where the block or the disk fails
    nothing is left.
    """
    written = beside(path)
    try:
        written.mkdir(parents=True)
        yield written
        for file in written.rglob("*"):
            sync_directory(file) if file.is_dir() else sync_file(file)
        sync_directory(written)
        if replace and path.exists():
            remove(path)
        written.rename(path)
    finally:
        shutil.rmtree(written, ignore_errors=True)  # gone already where it was renamed
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON; NaN is not JSON and a ValueError. Half a surrogate pair is no
    UTF-8; as \\ud800 it is JSON.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text.encode(errors="backslashreplace").decode() + "\n")


def is_full(error: OSError) -> bool:
    """True where a disk, or somebody's share of it, has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def sync_file(path: Path) -> None:
    """Makes what was written to a file survive a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Makes renames in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def finite(value: Any) -> Any:
    """The JSON value with null where a number is not finite: no evaluation gave one, say."""
    if isinstance(value, Mapping):
        table = cast(Mapping[str, Any], value)
        return {key: finite(inner) for key, inner in table.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in cast(list[Any], value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
