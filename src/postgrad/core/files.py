"""Files of ours: written atomically, so that they are complete or absent; synced to the disk; found
in the user's folders. And the versions of packages, which such files record.
"""

import errno
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

from postgrad._version import __version__
from postgrad.core.untrusted import open_file

COPIED_BYTES = 2**20  # at once
OF_THE_SYSTEM = {".DS_Store"}  # macOS's Finder writes it into each folder that it shows


def is_file(path: Path) -> bool:
    """Whether a file is there. A name that is too long for the disk is of none, and no OSError."""
    return os.path.isfile(path)  # noqa: PTH113  # Path.is_file raises


def names_in(folder: Path) -> set[str]:
    """The names of what people and programs put into a folder; without what the system writes."""
    return {path.name for path in folder.iterdir()} - OF_THE_SYSTEM


def beside(path: Path) -> Path:
    """The temporary name, in the same folder, under which `path` is written first."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def left_behind(folder: Path, names: Collection[str]) -> list[Path]:
    """The temporary files (see `beside`) that killed processes left in a folder. names: those of
    the files and directories that were being written.
    """
    alternatives = "|".join(map(re.escape, names))
    temporary = re.compile(rf"\.({alternatives})\.\d+\.tmp", re.ASCII)
    return [path for path in sorted(folder.iterdir()) if temporary.fullmatch(path.name)]


def remove(path: Path) -> None:
    """Removes a file or a directory; of a link the link alone, not what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically: writes a temporary file, syncs, renames, syncs the folder."""
    written = beside(path)
    try:
        with _named(path):
            with written.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                sync(file.fileno())
            written.replace(path)
    finally:
        written.unlink(missing_ok=True)  # still there only where writing failed
    sync_directory(path.parent)


@contextmanager
def _named(path: Path) -> Generator[None]:
    """Adds `path` to the error of a full disk, in which a write names no file, and names `path`, or
    a file in it, in place of the temporary one, of which nobody knows.
    """
    written = beside(path)
    try:
        yield
    except OSError as error:
        if is_full(error) and error.filename is None:
            error.filename = str(path)
        elif (named := Path(str(error.filename))).is_relative_to(written):
            error.filename = str(path / named.relative_to(written))
            if str(error.filename2) == error.filename:  # where it was to be renamed to
                del error.filename2
        raise


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """Gives a temporary path to write to; when the block ends well, the file is synced and renamed
    to `path`, which it replaces. If several processes write the same path, the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written = beside(path)
    try:
        with _named(path):
            yield written
            sync_file(written)
            written.replace(path)
    finally:
        written.unlink(missing_ok=True)  # still there only where writing failed
    sync_directory(path.parent)


@contextmanager
def whole_directory(path: Path, *, replace: bool) -> Generator[Path]:
    """Gives a temporary directory to write to; when the block ends well, it is synced and renamed
    to `path`. Where `path` exists already, it is removed just before with `replace`, else an
    OSError, unless it is a directory without any `names_in`. Where the block or the disk fails,
    nothing is left. Whoever may read new files of this process may read these, but for hard links:
    their modes are those of other directories too.
    """
    written = beside(path)
    try:
        with _named(path):
            written.mkdir(parents=True)
            yield written
            _sync_tree(written)
            if replace and path.exists():
                remove(path)
            elif path.is_dir() and not names_in(path):  # no rename replaces what is not empty
                for name in OF_THE_SYSTEM:
                    (path / name).unlink(missing_ok=True)
            written.rename(path)
    finally:
        shutil.rmtree(written, ignore_errors=True)  # gone already where it was renamed
    sync_directory(path.parent)


def _sync_tree(folder: Path) -> None:
    """Syncs a new directory, after giving its files the modes that the umask leaves."""
    allowed = folder.stat().st_mode & 0o666  # safetensors writes 0600
    for file in folder.rglob("*"):
        if file.is_dir():
            sync_directory(file)
            continue
        if (status := file.stat()).st_nlink == 1:
            file.chmod(status.st_mode | allowed)
        sync_file(file)
    sync_directory(folder)


def link_or_copy(source: Path, to: Path) -> None:
    """Gives a regular file a second name `to`, which nobody has: a hard link where the file belongs
    to this user and the disk takes one, else a copy. Symbolic links are not followed.

    Raises NotAFile where `source` is none, OSError where it cannot be read or copied.
    """
    with open_file(source, links=False) as file:
        status = os.fstat(file.fileno())
        # the owner of a linked file can change what is in it
        if status.st_uid == os.geteuid() and _linked(source, to, status):
            return
        if status.st_size > shutil.disk_usage(to.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))
        with _named(to), to.open("xb") as copy:
            shutil.copyfileobj(file, copy, COPIED_BYTES)


def _linked(source: Path, to: Path, status: os.stat_result) -> bool:
    """Tries a hard link. False where there can be none, or `source` is no longer that file."""
    try:
        os.link(source, to, follow_symlinks=False)
    except OSError:  # another disk, a file system without them, too many
        return False
    if os.path.samestat(to.lstat(), status):
        return True
    to.unlink()
    return False


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON. NaN, which JSON lacks, is a ValueError. Half a surrogate pair,
    which UTF-8 lacks, is written as an escape (\\ud800).
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text.encode(errors="backslashreplace").decode() + "\n")


def existing(path: Path) -> Path:
    """`path`, absolute, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def is_full(error: OSError) -> bool:
    """True where a write failed because the disk, or the user's quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def sync(handle: int) -> None:
    """Flushes an open file or folder to the disk, so that it survives a power cut.

    On macOS fsync leaves it in the drive's own memory; F_FULLFSYNC empties that too, where the
    file system knows the call.
    """
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        try:
            fcntl.fcntl(handle, full)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOTTY, errno.EINVAL):
                raise
    os.fsync(handle)


def sync_file(path: Path) -> None:
    """Flushes a file to the disk, so that its content survives a power cut."""
    with path.open("rb") as file:
        sync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flushes a folder to the disk, so that renames in it survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)


def finite(value: Any) -> Any:
    """The JSON value with None in place of every NaN and infinity."""
    if isinstance(value, Mapping):
        table = cast(Mapping[str, Any], value)
        return {key: finite(inner) for key, inner in table.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in cast(list[Any], value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


version = cache(importlib.metadata.version)  # a file is read for each; none changes under a process


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of postgrad, Python and `packages`: {"postgrad": ..., "python": "3.11.7", ...}.

    Raises PackageNotFoundError for a package that is not installed.
    """
    runtime = {"postgrad": __version__, "python": platform.python_version()}
    return runtime | {name: version(name) for name in packages}


def user_file(name: str, variable: str, environment: Mapping[str, str]) -> Path | None:
    """The file that the environment variable `variable` names, else postgrad/`name` in
    $XDG_CONFIG_HOME or ~/.config. None where there is no home directory.
    """
    if named := environment.get(variable):
        return Path(named).expanduser()
    if shared := environment.get("XDG_CONFIG_HOME"):
        return Path(shared) / "postgrad" / name
    try:
        return Path.home() / ".config" / "postgrad" / name
    except RuntimeError:
        return None


def cache_folder(content: str) -> Path | None:
    """$POSTGRAD_CACHE/`content`, else postgrad/`content` in the user's cache folder
    ($XDG_CACHE_HOME or ~/.cache); None where there is no home.
    """
    if stated := os.environ.get("POSTGRAD_CACHE"):
        return Path(stated) / content
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "postgrad" / content
    try:
        return Path.home() / ".cache" / "postgrad" / content
    except RuntimeError:  # a user without an entry and without $HOME, as in some containers
        return None


def computed_once(content: str, made_by: str, compute: Callable[[], str]) -> str:
    """The text that `compute` returns: from the user's cache, where later commands find it, or
    computed and put there.

    content: the name of its folder in the cache. made_by: all that the text depends on; its SHA-256
    names the file. A file is a SHA-256 and, behind it, a line of JSON that has it, so it is read
    with the bits that were written, or computed again. A file that cannot be read or written costs
    time alone. Nothing is kept where `compute` raises.
    """
    folder = cache_folder(content)
    path = folder and folder / f"{_sha256(made_by)}.json"
    if path is not None:
        try:
            digest, _, kept = path.read_text("utf-8").partition("\n")
            if digest == _sha256(kept):
                return kept
        except (OSError, UnicodeDecodeError):
            pass
    text = compute()
    if path is not None:
        try:
            with whole_file(path) as written:
                written.write_text(f"{_sha256(text)}\n{text}", "utf-8")
        except OSError:
            pass
    return text


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
