"""The folder of a run's checkpoints: names, commits by rename, and what a killed save left behind.

    step-000010            a checkpoint          .saving-10-PID           one being written
    latest, best           name a checkpoint     .saving-10.gone          one being removed
    step-000010.aside-1    had the name of a     .replaced-step-000010    one set aside until
                           step, was not ours                             another has its name

Only complete checkpoints, and what has exactly one of the names with a leading dot, are removed.
"""

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import save
from safetensors.torch import save_file
from torch import Tensor

from postgrad.checkpoint.manifest import MANIFEST, Damaged, manifest_of, read_manifest
from postgrad.checkpoint.parts import Divided
from postgrad.checkpoint.state import RunState
from postgrad.core.array_files import disk_error
from postgrad.core.errors import RunError
from postgrad.core.files import remove, sync_directory, sync_file, write_json
from postgrad.core.untrusted import read_bytes

STATE = "state.json"
PENDING = "pending.safetensors"  # where samples are under way
REPLACED = ".replaced-"
MOST_NAME_BYTES = 2**12  # of `latest` and `best`
_STEP = re.compile(rf"(?:{re.escape(REPLACED)})?step-(\d{{6,16}})", re.ASCII)
_LEFT = re.compile(r"\.saving-\d+(-\d+|\.gone)|\.(latest|best)\.\d+\.tmp", re.ASCII)


def temporary(root: Path, step: int) -> Path:
    """Where a checkpoint of `step` is written."""
    return root / f".saving-{step}-{os.getpid()}"


def write(folder: Path, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Makes `folder` and puts a whole checkpoint into it, on the disk when this returns.

    Raises OSError where the disk does not take it, RunError for a state that is not JSON.
    """
    folder.mkdir()
    names = [STATE]
    for stem, named in tensors.items():
        path = folder / f"{stem}.safetensors"
        try:
            if isinstance(named, Divided):
                names += named.write(folder, stem)
                continue
            save_file({name: t.detach().contiguous() for name, t in named.items()}, path)
        except SafetensorError as error:
            raise disk_error(error) from error
        sync_file(path)
        names.append(path.name)
    if state.pending:
        (folder / PENDING).write_bytes(save(dict(state.pending)))
        sync_file(folder / PENDING)
        names.append(PENDING)
    try:
        write_json(folder / STATE, state.to_json())
    except (TypeError, ValueError) as error:
        raise RunError(f"the state of step {state.step} cannot be saved: {error}") from error
    write_json(folder / MANIFEST, manifest_of(folder, state.step, names).to_json())


def commit(written: Path, step: int) -> Path:
    """Gives a written checkpoint the name of its step; returns its path. A checkpoint of ours that
    had the name is replaced. Anything else that had it is kept under another name.
    """
    final = written.with_name(f"step-{step:06d}")
    replaced = written.with_name(f"{REPLACED}{final.name}")
    if final.exists():  # the run went on from an older checkpoint: this one is obsolete
        final.rename(replaced if is_ours(final, step) else _aside(final))
    written.rename(final)
    sync_directory(final.parent)
    if replaced.exists():
        remove(replaced)
    return final


def discard(path: Path, step: int) -> None:
    """Removes a checkpoint. Renamed first: half removed it would look damaged."""
    gone = path.with_name(f".saving-{step}.gone")
    path.rename(gone)
    remove(gone)


def clean_up(root: Path) -> None:
    """Finishes what a killed save began: removes what it left, and gives a checkpoint that was set
    aside and never replaced its name again.
    """
    for path in left_behind(root):
        final = path.with_name(path.name.removeprefix(REPLACED))
        if final == path or final.exists():
            remove(path)
        else:
            path.rename(final)


def left_behind(root: Path) -> list[Path]:
    """Paths that a killed save left in `root`."""
    if not root.is_dir():
        return []
    return [
        path
        for path in sorted(root.iterdir())
        if _LEFT.fullmatch(path.name)
        or (path.name.startswith(REPLACED) and _STEP.fullmatch(path.name))
    ]


def size_left_behind(root: Path) -> int:
    """Bytes that the next save frees before it writes."""
    passing = (path for path in left_behind(root) if _LEFT.fullmatch(path.name))
    files = itertools.chain.from_iterable([path, *path.rglob("*")] for path in passing)
    return sum(file.lstat().st_size for file in files if not file.is_symlink() and file.is_file())


def steps_in(root: Path) -> dict[int, Path]:
    """Every checkpoint's path by step, in order. One that was set aside counts until another takes
    its name.
    """
    if not root.is_dir():
        return {}
    paths: dict[int, Path] = {}
    for path in sorted(root.iterdir()):  # those set aside come first
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            paths[int(match[1])] = path
    return dict(sorted(paths.items()))


def named(path: Path) -> int | None:
    """The step that `latest` or `best` names; None where there is no such file, or no such name."""
    text = read_bytes(path, MOST_NAME_BYTES).decode(errors="replace") if path.is_file() else ""
    match = _STEP.fullmatch(text.strip())
    return int(match[1]) if match else None


def is_ours(path: Path, step: int) -> bool:
    """True where a manifest of ours says that this is the checkpoint of `step`."""
    try:
        return read_manifest(path).step == step
    except Damaged:
        return False


def _aside(final: Path) -> Path:
    names = (final.with_name(f"{final.name}.aside-{n}") for n in itertools.count(1))
    return next(path for path in names if not path.exists())
