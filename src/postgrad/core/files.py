"""Files that are whole or not there at all."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast


def write_text(path: Path, text: str) -> None:
    """Replaces `path` at once: written beside it, synced, renamed, the folder synced."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)  # still there only where writing failed
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON; NaN is not JSON and a ValueError."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


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
