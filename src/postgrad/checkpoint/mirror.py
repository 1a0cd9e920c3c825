"""The mirror of a run: its checkpoints in an object store, and what a resume needs beside them.

    mirror.json                    whose mirror it is: written once
    writers/000002-9f3c...         who writes: the process with the highest number
    pieces/SHA256                  pieces of the run's other files and logs, named by their content
    tables/step-000010.json        which pieces are which file, at that checkpoint
    checkpoints/step-000010/...    the checkpoint as it is on the disk, manifest.json last

A checkpoint counts where its manifest is there. It is written after all else that the checkpoint
needs and removed first, so that a checkpoint is complete or absent (docs/how-to/spot-machines.md).
Everything in a mirror is untrusted: names are checked before they are used, and sizes before
anything is read.
"""

import hashlib
import io
import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.checkpoint.manifest import MANIFEST, Damaged, Entry, read_manifest
from postgrad.checkpoint.object_store import Altered, MirrorFailed, ObjectStore
from postgrad.checkpoint.schema import ManifestSchema, MirrorSchema, TableSchema, require
from postgrad.core.errors import RunError, UsageError
from postgrad.core.untrusted import MOST_BYTES, open_file, parse_json, readable

OWNER = "mirror.json"
WRITER, FORMAT = "postgrad", 1
PIECE_BYTES = 2**24  # of a log all pieces but the last are never uploaded again
MOST_TABLE_BYTES = 2**28  # a run's images have some 200 bytes each
_WRITERS, _PIECES, _TABLES, _CHECKPOINTS = "writers", "pieces", "tables", "checkpoints"
_FOLDERS = _PIECES, _TABLES, _CHECKPOINTS
_WRITER = re.compile(r"(\d{6,16})-[0-9a-f]{16}", re.ASCII)
_PIECE = re.compile(r"[0-9a-f]{64}", re.ASCII)
_STEP = re.compile(r"step-(\d{6,16})", re.ASCII)
_TABLE = re.compile(r"step-(\d{6,16})\.json", re.ASCII)


class TakenOver(MirrorFailed):
    """Another process writes to the mirror now; this one may not any more."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose mirror it is."""

    run: str  # a random id
    recipe: dict[str, Any]  # recipe.json of the run when it began to be mirrored


@dataclass(frozen=True, slots=True)
class FileTable:
    """The files beside a checkpoint: size in bytes and the hashes of all pieces, by name."""

    step: int
    files: Mapping[str, tuple[int, tuple[str, ...]]]

    @property
    def pieces(self) -> set[str]:
        """The names of all pieces."""
        return {name for _, pieces in self.files.values() for name in pieces}

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())


class Mirror:
    """A folder that fsspec opens. One process writes to it at a time; any may read.

    Raises UsageError where the URL names no file system, or one whose package is not installed.
    Every method raises MirrorFailed where the store cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._store = ObjectStore(url)
        self.url = self._store.url
        self._hashes: dict[tuple[str, int, int, int], str] = {}  # of pieces
        self._writer = ""  # the name of this process there

    def owner(self) -> Owner | None:
        """Whose mirror it is; None where the folder is empty or absent. Raises UsageError where it
        holds other files.
        """
        there = self._store.names("")
        if OWNER not in there:
            others = sorted(there.keys() - {*_FOLDERS, _WRITERS})
            if others := others or [name for name in _FOLDERS if self._store.names(name)]:
                raise UsageError(
                    f"checkpoint.mirror = {self.url!r} holds other files ({', '.join(others[:3])}) "
                    "and is no mirror of a run: name a folder of its own"
                )
            return None
        try:
            data = parse_json(self._store.read(OWNER, MOST_BYTES))
            checked = require(MirrorSchema, data)
        except (Damaged, ValueError) as error:
            if there.keys() <= {OWNER, *_FOLDERS, _WRITERS}:  # killed while it was written
                return None
            raise UsageError(f"{self.url}/{OWNER} is not one that a run wrote: {error}") from error
        return Owner(checked.run, checked.recipe)

    def claim(self, owner: Owner, writer: str = "") -> str:
        """Makes this process the one that writes, or goes on as `writer`; returns its name. Who
        wrote before stops before its next checkpoint.
        """
        if writer:
            self._writer = writer
            return writer
        if self.owner() is None:
            contents = {"run": owner.run, "recipe": owner.recipe}
            self._store.write(OWNER, _json({"written_by": WRITER, "format": FORMAT, **contents}))
        before = sorted(self._writers())
        number = before[-1][0] + 1 if before else 1
        self._writer = f"{number:06d}-{secrets.token_hex(8)}"
        self._store.write(f"{_WRITERS}/{self._writer}", self._writer.encode())
        for _, name in before:
            self._store.remove(f"{_WRITERS}/{name}")
        return self._writer

    def steps(self) -> list[int]:
        """The steps of all checkpoints that have a manifest, in order."""
        steps = self._steps()
        return [step for step in steps if MANIFEST in self._store.names(_folder(step))]

    def upload(self, step: int, folder: Path, files: Mapping[str, tuple[Path, int]]) -> int:
        """Uploads the checkpoint in `folder`, after the run's other files: path and size by name.
        Returns the number of bytes sent; 0 where just this checkpoint is there.

        Raises Damaged where the checkpoint is not what its manifest says, TakenOver where another
        process writes now, OSError where a file cannot be read.
        """
        manifest = read_manifest(folder)
        contents = (folder / MANIFEST).read_bytes()
        self._require_writer()
        if MANIFEST in self._store.names(_folder(step)):
            with suppress(Damaged):
                if self._store.read(f"{_folder(step)}/{MANIFEST}", MOST_BYTES) == contents:
                    return 0
            self._store.remove(f"{_folder(step)}/{MANIFEST}")
        table, sent = self._send_files(step, files)
        self._store.write(_table(step), _json(table))
        for name, entry in manifest.files.items():
            self._store.send(folder / name, f"{_folder(step)}/{name}", entry)
            sent += entry.size
        self._require_writer()
        self._store.write(f"{_folder(step)}/{MANIFEST}", contents)
        return sent

    def prune(self, keep: Collection[int]) -> None:
        """Removes the checkpoints of all other steps, and what an upload left that did not end. A
        folder without a manifest or table of ours is never touched.
        """
        self._require_writer()
        kept, unreadable = set[str](), False
        for step in self._ours():
            if step not in keep:
                self._discard(step)
                continue
            try:
                kept |= self.table(step).pieces
            except Damaged:
                unreadable = True  # nobody knows what it needs
        if not unreadable:
            for name in self._store.names(_PIECES):
                if _PIECE.fullmatch(name) and name not in kept:
                    self._store.remove(f"{_PIECES}/{name}")

    def clear(self) -> None:
        """Removes all that a run wrote; what else there is stays."""
        for step in reversed(self._ours()):
            self._discard(step)
        for folder, ours in ((_PIECES, _PIECE), (_WRITERS, _WRITER)):
            for name in filter(ours.fullmatch, self._store.names(folder)):
                self._store.remove(f"{folder}/{name}")
        self._store.remove(OWNER)

    def table(self, step: int) -> FileTable:
        """The files beside a checkpoint. Raises Damaged where the table is missing or wrong."""
        place = f"{self.url}/{_table(step)}"
        content = self._store.read(_table(step), MOST_TABLE_BYTES)
        try:
            checked = require(TableSchema, parse_json(content))
        except ValueError as error:
            raise Damaged(f"{place} is no table of ours: {error}") from error
        if (checked.step, checked.piece_bytes) != (step, PIECE_BYTES):
            raise Damaged(f"{place} is of step {checked.step}, or has pieces of another size")
        files: dict[str, tuple[int, tuple[str, ...]]] = {}
        for name, file in checked.files.items():
            if len(file.pieces) != -(-file.size // PIECE_BYTES):
                raise Damaged(f"{place}: {name} has {len(file.pieces)} pieces of {file.size} bytes")
            files[name] = (file.size, tuple(file.pieces))
        return FileTable(step, files)

    def download(self, step: int, to: Path) -> int:
        """Makes the folder `to` and downloads a checkpoint into it. Returns its size in bytes.

        Raises Damaged where a file is missing or has another size or hash than the manifest says.
        """
        to.mkdir(parents=True)
        contents = self._store.read(f"{_folder(step)}/{MANIFEST}", MOST_BYTES)
        (to / MANIFEST).write_bytes(contents)
        try:
            manifest = read_manifest(to)
        except Damaged as error:
            raise Damaged(str(error).replace(str(to), f"{self.url}/{_folder(step)}")) from error
        for name, entry in manifest.files.items():
            with (to / name).open("xb") as file:
                self._store.receive(f"{_folder(step)}/{name}", entry, file)
        return sum(entry.size for entry in manifest.files.values())

    def size(self, step: int) -> int:
        """Bytes of a checkpoint's files, as the store tells them."""
        return sum(self._store.names(_folder(step)).values())

    def download_file(self, table: FileTable, name: str, to: Path, here: Path) -> None:
        """Writes one file of a table to `to`. Pieces that `here` has, the file of another time, are
        taken from there. Raises Damaged where a piece is missing or has another content: such a
        piece is removed, and the next upload of a run that has it sends it again.
        """
        size, pieces = table.files[name]
        to.parent.mkdir(parents=True, exist_ok=True)
        old = open_file(here) if readable(here) else io.BytesIO()
        with old, to.open("xb") as file:
            for digest, wanted in zip(pieces, _sizes(size), strict=True):
                content = old.read(wanted)
                if len(content) == wanted and hashlib.sha256(content).hexdigest() == digest:
                    file.write(content)
                else:
                    file.write(self._receive_piece(Entry(wanted, digest)))

    def _receive_piece(self, entry: Entry) -> bytes:
        """A piece. One of another content than its name says helps nobody, and while it is there no
        upload would replace it: it is removed, if a second reading gives no other content.
        """
        place, content = f"{_PIECES}/{entry.sha256}", io.BytesIO()
        with suppress(Altered):
            self._store.receive(place, entry, content)
            return content.getvalue()
        content = io.BytesIO()
        try:
            self._store.receive(place, entry, content)
        except Altered as error:
            self._store.remove(place)
            raise Altered(f"{error}; removed, so that the next upload replaces it") from error
        return content.getvalue()

    def _send_files(
        self, step: int, files: Mapping[str, tuple[Path, int]]
    ) -> tuple[dict[str, Any], int]:
        """Uploads the pieces that are missing; returns the table and the number of bytes sent."""
        there, sent = self._store.names(_PIECES), 0
        table: dict[str, Any] = {}
        for name, (path, size) in files.items():
            pieces: list[str] = []
            for begin, wanted in zip(itertools.count(0, PIECE_BYTES), _sizes(size), strict=False):
                digest, content = self._piece(name, path, begin, wanted)
                pieces.append(digest)
                if there.get(digest) != wanted:
                    content = content or _read_part(path, begin, wanted)
                    self._store.write(f"{_PIECES}/{digest}", content)
                    there[digest] = wanted
                    sent += wanted
            table[name] = {"size": size, "pieces": pieces}
        head = {"written_by": WRITER, "format": FORMAT, "step": step, "piece_bytes": PIECE_BYTES}
        return {**head, "files": table}, sent

    def _piece(self, name: str, path: Path, begin: int, size: int) -> tuple[str, bytes | None]:
        """The hash of a piece, and its content where it was read. One that is full never changes:
        logs are appended to, and other files are small or written once.
        """
        changed = 0 if size == PIECE_BYTES else path.stat().st_mtime_ns
        key = (name, begin, size, changed)
        if key in self._hashes:
            return self._hashes[key], None
        content = _read_part(path, begin, size)
        self._hashes[key] = hashlib.sha256(content).hexdigest()
        return self._hashes[key], content

    def _discard(self, step: int) -> None:
        """Removes a checkpoint of ours, its manifest first: half removed it does not count."""
        self._store.remove(f"{_folder(step)}/{MANIFEST}")
        self._store.remove(_folder(step), folder=True)
        self._store.remove(_table(step))

    def _is_ours(self, step: int) -> bool:
        """Whether a manifest says that this is the checkpoint of `step`."""
        try:
            data = parse_json(self._store.read(f"{_folder(step)}/{MANIFEST}", MOST_BYTES))
            manifest = require(ManifestSchema, data)
        except (Damaged, ValueError):
            return False
        return data.get("written_by") == WRITER and manifest.step == step

    def _require_writer(self) -> None:
        """Raises TakenOver where another process has claimed the mirror since."""
        newest = max(self._writers(), default=(0, ""))[1]
        if newest != self._writer:
            raise TakenOver(
                f"another process has continued the run from {self.url} and writes there now: "
                "this one uploads no more; stop it, or start it again to take the mirror back"
            )

    def _writers(self) -> Iterator[tuple[int, str]]:
        for name in self._store.names(_WRITERS):
            if match := _WRITER.fullmatch(name):
                yield int(match[1]), name

    def _steps(self) -> list[int]:
        matches = map(_STEP.fullmatch, self._store.names(_CHECKPOINTS))
        return sorted(int(match[1]) for match in matches if match)

    def _ours(self) -> list[int]:
        """The steps with a table or a manifest of ours, in order: complete or not."""
        matches = map(_TABLE.fullmatch, self._store.names(_TABLES))
        tables = {int(match[1]) for match in matches if match}
        others = {step for step in self._steps() if step not in tables and self._is_ours(step)}
        return sorted(tables | others)


def _sizes(size: int) -> Iterator[int]:
    """The size of each piece of a file of `size` bytes."""
    yield from (min(PIECE_BYTES, size - begin) for begin in range(0, size, PIECE_BYTES))


def _read_part(path: Path, begin: int, size: int) -> bytes:
    """Bytes of a file. Raises RunError where it has fewer."""
    with open_file(path) as file:
        file.seek(begin)
        content = file.read(size)
    if len(content) != size:
        raise RunError(f"{path} has fewer than the {begin + size} bytes that are to be uploaded")
    return content


def _folder(step: int) -> str:
    return f"{_CHECKPOINTS}/step-{step:06d}"


def _table(step: int) -> str:
    return f"{_TABLES}/step-{step:06d}.json"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
