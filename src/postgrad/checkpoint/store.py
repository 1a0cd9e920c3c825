"""The checkpoints of a run: committed by one rename, verified when read, never pickled.

    step-000010/policy.weights.safetensors, policy.optimizer.safetensors, state.json, manifest.json
    latest, best      text files that name a step directory

What is written: a temporary directory, its files, their sync, the manifest, the rename, the
parent's sync; only then `latest` and `best` move, and only after that old ones go. So at every
instant the newest whole checkpoint is found (docs/checkpoint-format.md).
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from postgrad.checkpoint import manifest as contents
from postgrad.checkpoint.manifest import Damaged
from postgrad.checkpoint.retention import surplus
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.state import RunState
from postgrad.core.errors import RunError
from postgrad.core.files import sync_directory, write_json, write_text

STATE = "state.json"
LATEST, BEST = "latest", "best"
TEMPORARY = ".saving-"
SPARE_BYTES = 2**20  # for state, manifest and the folder itself
REPLACED = ".replaced-"  # a step's directory set aside until another has its name
_STEP = re.compile(rf"(?:{re.escape(REPLACED)})?step-(\d{{6,}})")


class SaveFailed(RunError):
    """A checkpoint could not be written. Older ones stand, and so does the run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint. skipped: what was wrong with newer ones."""

    path: Path
    step: int
    state: RunState
    skipped: tuple[str, ...] = ()

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """The tensors of STEM.safetensors, on the CPU. RunError where there are none."""
        path = self.path / f"{stem}.safetensors"
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint as a table shows it. bytes: of all its files; problem: None where whole."""

    step: int
    path: Path
    bytes: int
    files: tuple[str, ...]
    latest: bool
    best: bool
    problem: str | None

    @property
    def complete(self) -> bool:
        """True where every file is what the manifest says."""
        return self.problem is None


class CheckpointStore:
    """Saves into `root` and reads from it. Files that are not ours are never touched."""

    def __init__(self, root: Path, settings: CheckpointSettings) -> None:
        self.root = root
        self._settings = settings

    def save(
        self, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]], *, best: bool = False
    ) -> Path:
        """Commits a checkpoint; `tensors` by file stem and name. Replaces one of the same step.

        Raises RunError where the disk is full or cannot be written: older checkpoints stand.
        """
        self.require_space(size_of(tensors))
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._clean_up()
            temporary = self.root / f"{TEMPORARY}{state.step}-{os.getpid()}"
            try:
                self._write(temporary, state, tensors)
                final = self._commit(temporary, state.step)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)  # gone already where it was renamed
            write_text(self.root / LATEST, f"{final.name}\n")
            if best:
                write_text(self.root / BEST, f"{final.name}\n")
            self._remove_surplus()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            what = "the disk is full" if full else str(error)
            raise SaveFailed(
                f"no checkpoint of step {state.step} could be saved in {self.root}: {what}; "
                "older checkpoints stand, make room and resume"
            ) from error
        return final

    def load(self, which: str | int = LATEST) -> Checkpoint:
        """The latest, the best, or the one of a step, after every hash was checked.

        A damaged latest one is passed over for the newest good one, which says so in `skipped`;
        the best one or a step that is damaged is a RunError, and so is having none.
        """
        if which == LATEST:
            return self._newest_good()
        if which == BEST:
            step = self._named(BEST)
            if step is None:
                raise RunError(
                    f"{self.root} has no best checkpoint: set checkpoint.best_metric in the recipe"
                )
        else:
            step = int(which)
        paths = self._paths()
        if step not in paths:
            known = ", ".join(str(one) for one in paths) or "none"
            raise RunError(f"{self.root} has no checkpoint of step {step}; there are: {known}")
        try:
            return _read(paths[step], step, ())
        except Damaged as error:
            raise RunError(f"the checkpoint of step {step} is damaged: {error}") from error

    def infos(self) -> list[CheckpointInfo]:
        """Every checkpoint, damaged ones too, by step."""
        latest, best = self._named(LATEST), self._named(BEST)
        found: list[CheckpointInfo] = []
        for step, path in self._paths().items():
            files = [file for file in sorted(path.iterdir()) if file.is_file()]
            problem = None
            try:
                contents.verify(path, contents.read_manifest(path))
            except Damaged as error:
                problem = str(error)
            size = sum(file.stat().st_size for file in files)
            names = tuple(file.name for file in files)
            found.append(
                CheckpointInfo(step, path, size, names, step == latest, step == best, problem)
            )
        return found

    def has_any(self) -> bool:
        """True where a checkpoint was committed, damaged or not."""
        return bool(self._paths())

    def require_space(self, size: int) -> None:
        """Raises RunError where a checkpoint of `size` bytes does not fit on the disk."""
        folder = self.root
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < size + SPARE_BYTES:
            raise SaveFailed(
                f"the disk of {self.root} is full: a checkpoint takes {size + SPARE_BYTES} bytes "
                f"and {free} are free; make room, or set checkpoint.ckpt_path to another disk"
            )

    def _newest_good(self) -> Checkpoint:
        skipped: list[str] = []
        for step, path in reversed(self._paths().items()):
            try:
                return _read(path, step, tuple(skipped))
            except Damaged as error:
                skipped.append(f"the checkpoint of step {step} is damaged and passed over: {error}")
        told = "; ".join(skipped) or "none was ever saved"
        raise RunError(f"{self.root} has no checkpoint to go on from: {told}")

    def _write(
        self, folder: Path, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        folder.mkdir()
        for stem, named in tensors.items():
            path = folder / f"{stem}.safetensors"
            try:
                save_file({name: t.detach().contiguous() for name, t in named.items()}, path)
            except SafetensorError as error:
                raise OSError(_errno(error), str(error)) from error
            _sync(path)
        write_json(folder / STATE, state.to_json())
        write_json(folder / contents.FILE, contents.manifest_of(folder, state.step).to_json())

    def _commit(self, temporary: Path, step: int) -> Path:
        final = self.root / f"step-{step:06d}"
        replaced = final.with_name(f"{REPLACED}{final.name}")
        if final.exists():  # of a run that went on from an older one; what it holds is the past
            final.rename(replaced)
        temporary.rename(final)
        sync_directory(self.root)
        if replaced.exists():
            _remove(replaced)
        return final

    def _remove_surplus(self) -> None:
        always = {step for step in (self._named(LATEST), self._named(BEST)) if step is not None}
        ours = {step: path for step, path in self._paths().items() if _is_ours(path, step)}
        for step in surplus(ours, self._settings.max_ckpt_num, always):
            gone = self.root / f"{TEMPORARY}{step}.gone"  # half removed it would look damaged
            ours[step].rename(gone)
            _remove(gone)

    def _clean_up(self) -> None:
        """What a save that was killed left behind."""
        for path in self.root.glob(f"{TEMPORARY}*"):
            _remove(path)
        for path in self.root.glob(f"{REPLACED}*"):
            final = path.with_name(path.name.removeprefix(REPLACED))
            if final.exists():
                _remove(path)
            else:
                path.rename(final)
        for name in (LATEST, BEST):
            for path in self.root.glob(f".{name}.*.tmp"):
                path.unlink()

    def _paths(self) -> dict[int, Path]:
        """Every checkpoint by step. One that was set aside counts until another has its name."""
        if not self.root.is_dir():
            return {}
        found: dict[int, Path] = {}
        for path in sorted(self.root.iterdir()):  # set aside come first
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir():
                found[int(match[1])] = path
        return dict(sorted(found.items()))

    def _named(self, file: str) -> int | None:
        path = self.root / file
        match = _STEP.fullmatch(path.read_text("utf-8").strip()) if path.is_file() else None
        return int(match[1]) if match else None


def size_of(tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for named in tensors.values() for t in named.values())


def _read(path: Path, step: int, skipped: tuple[str, ...]) -> Checkpoint:
    manifest = contents.read_manifest(path)
    contents.verify(path, manifest)
    if manifest.step != step or STATE not in manifest.files:
        raise Damaged(f"{path / contents.FILE} is of step {manifest.step}, or has no {STATE}")
    try:
        state = RunState.from_json(json.loads((path / STATE).read_text("utf-8")))
    except (ValueError, RunError) as error:
        raise Damaged(f"{path / STATE}: {error}") from error
    return Checkpoint(path, step, state, skipped)


def _is_ours(path: Path, step: int) -> bool:
    try:
        return contents.read_manifest(path).step == step
    except Damaged:
        return False


def _remove(path: Path) -> None:
    if path.is_symlink():  # to another disk: what lies there is not ours to remove
        path.unlink()
    else:
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _errno(error: Any) -> int:
    return errno.ENOSPC if "No space left" in str(error) else errno.EIO
