"""A checkpoint's table of contents: written last, read first."""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from postgrad.checkpoint.schema import ManifestSchema, require
from postgrad.core.files import versions
from postgrad.core.untrusted import open_file, read_json, shown

MANIFEST = "manifest.json"
FORMAT = 1
WRITER = "postgrad"
PACKAGES = ("torch", "transformers", "numpy", "safetensors")


class Damaged(Exception):
    """A checkpoint that is not what its manifest says; the message names the file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file's size in bytes and SHA-256 (hex)."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    files: Mapping[str, Entry]  # by name in the checkpoint's directory: "state.json"
    versions: Mapping[str, str]  # of the packages that wrote it: {"torch": "2.11.0"}

    def to_json(self) -> dict[str, Any]:
        """The content of manifest.json: `read_manifest` reads it."""
        return {
            "written_by": WRITER,
            "format": FORMAT,
            "step": self.step,
            "versions": dict(self.versions),
            "files": {
                name: {"size": entry.size, "sha256": entry.sha256}
                for name, entry in self.files.items()
            },
        }


def manifest_of(directory: Path, step: int, names: Iterable[str]) -> Manifest:
    """The manifest of the named files of a directory. OSError where one cannot be read.

    The directory is not listed: where another machine has just written a file into it, a network
    file system may show an older list.
    """
    files = {name: entry_of(directory / name) for name in sorted(names)}
    return Manifest(step, files, versions(PACKAGES))


def entry_of(path: Path) -> Entry:
    """Size and hash of a file."""
    with open_file(path) as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return Entry(path.stat().st_size, digest)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint. Raises Damaged where there is none, or it is not one of ours.

    File names are untrusted: whatever could lead out of the directory is refused.
    """
    path = directory / MANIFEST
    try:
        data = read_json(path, pairs=_unique)
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing: the checkpoint was never finished") from error
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise Damaged(f"{path} is not a manifest of ours: no JSON object")
    data = cast(dict[str, Any], data)
    if (data.get("written_by"), data.get("format")) != (WRITER, FORMAT):
        raise Damaged(
            f"{path} is format {shown(data.get('format'))} of {shown(data.get('written_by'))}, "
            f"this version reads format {FORMAT} of {WRITER!r}"
        )
    try:
        checked = require(ManifestSchema, data)
    except ValueError as error:
        raise Damaged(f"{path} is not a manifest of ours: {error}") from error
    files = {
        _plain(name, path): Entry(entry.size, entry.sha256) for name, entry in checked.files.items()
    }
    return Manifest(checked.step, files, checked.versions)


def verify(directory: Path, manifest: Manifest) -> None:
    """Raises Damaged with the first file that is missing, of another size, or changed."""
    for name, entry in manifest.files.items():
        path = directory / name
        try:
            _verify_file(path, entry)
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error}") from error


def _verify_file(path: Path, entry: Entry) -> None:
    if path.is_symlink() or not path.is_file():
        raise Damaged(f"{path} is missing")
    size = path.stat().st_size
    if size != entry.size:
        raise Damaged(f"{path} has {size} bytes, its manifest says {entry.size}")
    capacity = shutil.disk_usage(path.parent).total
    if size > capacity:  # a sparse file: its hash would be computed for days
        raise Damaged(f"{path} has {size} bytes, its whole disk has {capacity}")
    if entry_of(path) != entry:
        raise Damaged(f"{path} has changed since it was written (its SHA-256 is another)")


def _plain(name: str, path: Path) -> str:
    """`name` where it is the name of a file beside the manifest `path`; raises Damaged."""
    if (
        not name
        or name in (".", "..", MANIFEST)
        or "/" in name
        or "\\" in name
        or "\0" in name
        or len(name) > 255
    ):
        raise Damaged(f"{path} names a file {name!r} outside the checkpoint")
    return name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key is there twice")
    return table
