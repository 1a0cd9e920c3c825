"""The checkpoints of a run: committed by one rename, verified when read, never pickled.

    step-000010/policy.weights.safetensors, policy.optimizer.safetensors, state.json, manifest.json
    latest, best      text files that name a step directory

A save writes files into a temporary directory, syncs them, writes the manifest, renames the
directory and syncs the parent. Only then does it update `latest` and `best`, and only after that
does it remove old checkpoints. So the newest complete checkpoint can be found at every instant
(docs/checkpoint-format.md).
"""

import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load
from torch import Tensor

from postgrad.checkpoint import files
from postgrad.checkpoint.files import PENDING, STATE
from postgrad.checkpoint.manifest import MANIFEST, Damaged, read_manifest, verify
from postgrad.checkpoint.parts import WITH_RANK, Divided, Reader
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.state import RunState
from postgrad.core.errors import DiskFull, RunError, UsageError
from postgrad.core.files import existing, is_full, write_text
from postgrad.core.text import size_text
from postgrad.core.untrusted import read_json

_NONE_INTACT = "put their files back from a copy of the run, or start it over with --overwrite true"
LATEST, BEST = "latest", "best"
MOST_STATE_BYTES = 2**30  # a curriculum remembers some 50 bytes a row
SPARE_BYTES = 2**20  # for state, manifest and the folder itself


class SaveFailed(RunError):
    """A checkpoint could not be written. Older ones are untouched, and the run can go on."""


class NoRoom(SaveFailed, DiskFull):
    """A checkpoint could not be written because its disk, or the user's quota, is full."""


class Untidy(RunError):
    """A checkpoint was saved, but `latest`, `best` or old checkpoints could not be updated."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose hashes were all checked."""

    path: Path  # of its folder
    step: int
    state: RunState
    files: frozenset[str]  # names of the files that were checked, as in its manifest
    skipped: tuple[str, ...] = ()  # messages: why newer checkpoints were passed over

    @property
    def stems(self) -> list[str]:
        """Stems of the tensor files, such as "policy.weights"; one in parts stands there once."""
        stems = (name.removesuffix(".safetensors") for name in self.files - {STATE, PENDING})
        return sorted({WITH_RANK.sub("", stem) for stem in stems})

    @property
    def tensors(self) -> Reader:
        """Reads tensors by stem, from STEM.safetensors or from the parts that ranks wrote."""
        return Reader(self.path, self.files)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint as a table shows it."""

    step: int
    path: Path  # of its folder
    bytes: int  # of all its files
    files: tuple[str, ...]  # their names
    latest: bool  # whether a resume would go on from it
    best: bool
    kept: bool  # whether it is never removed, by keep_steps
    problem: str | None  # what is damaged; None where nothing is

    @property
    def complete(self) -> bool:
        """Whether every file is as the manifest says."""
        return self.problem is None


class CheckpointStore:
    """Saves checkpoints into a folder and loads them. Files of others there are never touched."""

    def __init__(self, root: Path, settings: CheckpointSettings) -> None:
        self.root = root
        self._settings = settings
        self.held: set[int] = set()  # steps that are not removed now: they are being uploaded

    def save(
        self, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]], *, best: bool = False
    ) -> Path:
        """Commits a checkpoint and returns its folder. Replaces one of the same step.

        tensors: by file stem ("policy.weights") and tensor name. best: it is the best one so far.
        Raises NoRoom where the disk is full, SaveFailed where it cannot be written: older
        checkpoints stand.
        Raises Untidy where the checkpoint was saved, but `latest`, `best` or old checkpoints could
        not be updated.
        """
        self.require_space(size_of(tensors) + sum(a.nbytes for a in state.pending.values()))
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            files.clean_up(self.root)
            temporary = files.temporary(self.root, state.step)
            try:
                files.write(temporary, state, tensors)
                final = files.commit(temporary, state.step)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)  # gone already where it was renamed
        except OSError as error:
            failure, remedy = (NoRoom, "; make room") if is_full(error) else (SaveFailed, "")
            raise failure(
                f"no checkpoint of step {state.step} could be saved in {self.root}: "
                f"{_reason(error)}; older checkpoints are kept{remedy}"
            ) from error
        self.tidy(state, best=best)
        return final

    def tidy(self, newest: RunState, *, best: bool = False) -> None:
        """Makes `latest` and `best` name the right checkpoints, then removes surplus ones.

        newest: the state of the newest checkpoint. best: that one is the best, whatever was before.
        Every save ends with this; a run that goes on after a killed save begins with it. Raises
        Untidy where the disk refuses.
        """
        try:
            self._tidy(newest.step, newest.step if best else self._best(newest))
        except OSError as error:
            raise Untidy(
                f"the checkpoint of step {newest.step} is saved in {self.root}, but "
                f"older ones could not be removed, or latest and best not updated: "
                f"{_reason(error)}; the next save tries again"
            ) from error

    def load(self, which: str | int = LATEST) -> Checkpoint:
        """A checkpoint, after every hash was checked. which: "latest", "best" or a step, also as
        the text that --checkpoint takes.

        Where the latest one is damaged, the newest good one is loaded, and its `skipped` says so.
        Raises UsageError for any other text; RunError where there is no such checkpoint, or the
        best one or that of the step is damaged.
        """
        which = parse_which(which) if isinstance(which, str) else which
        if which == LATEST:
            newest, skipped = self._newest()
            if newest is None:
                reasons = "; ".join(skipped) or "no checkpoint was saved"
                remedy = f"; {_NONE_INTACT}" if skipped else ""
                raise RunError(f"{self.root} has no checkpoint to read: {reasons}{remedy}")
            return newest
        paths = files.steps_in(self.root)
        if which == BEST:
            newest, _ = self._newest()
            step = self._best(newest and newest.state)
            if step is None:
                raise RunError(self._why_no_best(newest and newest.state))
        else:
            step = int(which)
        if step not in paths:
            steps = ", ".join(map(str, paths)) or "none"
            raise RunError(f"{self.root} has no checkpoint of step {step}; there are: {steps}")
        try:
            return read_checkpoint(paths[step], step)
        except Damaged as error:
            raise RunError(f"the checkpoint of step {step} is damaged: {error}") from error

    def infos(self) -> list[CheckpointInfo]:
        """Every checkpoint, damaged ones too, by step."""
        good: dict[int, RunState] = {}
        problems: dict[int, str] = {}
        paths = files.steps_in(self.root)
        for step, path in paths.items():
            try:
                good[step] = read_checkpoint(path, step).state
            except Damaged as error:
                problems[step] = str(error)
        latest = max(good, default=None)
        best = self._best(None if latest is None else good[latest])
        return [
            CheckpointInfo(
                step,
                path,
                *_files(path),
                latest=step == latest,
                best=step == best,
                kept=self._keeps(step),
                problem=problems.get(step),
            )
            for step, path in paths.items()
        ]

    def place(self, step: int) -> tuple[Path, RunState]:
        """The folder of a checkpoint and its state, without samples under way; hashes are not
        checked. Raises Damaged where there is none, or the state cannot be read.
        """
        paths = files.steps_in(self.root)
        if step not in paths:
            raise Damaged(f"{self.root} has no checkpoint of step {step} any more")
        return paths[step], _read_state(paths[step])

    @property
    def best_metric(self) -> str | None:
        """The metric that decides which checkpoint is the best; None: none is."""
        return self._settings.best_metric

    def steps(self) -> list[int]:
        """The steps whose checkpoints were committed, damaged ones too."""
        return list(files.steps_in(self.root))

    def free_bytes(self) -> int:
        """How many bytes a save finds free: what a killed save left is removed first."""
        return shutil.disk_usage(existing(self.root)).free + files.size_left_behind(self.root)

    def require_space(self, size: int) -> int:
        """How many bytes are free. Raises NoRoom where there is no room for `size` bytes."""
        free = self.free_bytes()
        if free < size + SPARE_BYTES:
            raise NoRoom(
                f"the disk of {self.root} is full: a checkpoint takes {size_text(size)}, "
                f"{size_text(SPARE_BYTES)} have to stay, and {size_text(free)} are free; make "
                "room, or move the checkpoints to another disk and set checkpoint.ckpt_path"
            )
        return free

    def _newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is not damaged, and messages about newer ones that are."""
        skipped: list[str] = []
        for step, path in reversed(files.steps_in(self.root).items()):
            try:
                return replace(read_checkpoint(path, step), skipped=tuple(skipped)), skipped
            except Damaged as error:
                skipped.append(f"the checkpoint of step {step} is damaged and skipped: {error}")
        return None, skipped

    def _best(self, newest: RunState | None) -> int | None:
        """The step of the best checkpoint: the one that the newest state names, where it is here;
        else the newest that was the best when it was saved; else the one that the file `best`
        names.

        The file alone is not enough: a save that was killed after its commit has not updated it,
        and the save of the best checkpoint may itself have failed.
        """
        paths = files.steps_in(self.root)
        if newest and newest.best and newest.best.step in paths:
            return newest.best.step
        once = [step for step, path in paths.items() if _was_best(path, step)]
        return max(once, default=files.named(self.root / BEST))

    def _why_no_best(self, newest: RunState | None) -> str:
        """The message for a run without a best checkpoint: why there is none, and what to do."""
        metric, mode = self._settings.best_metric, self._settings.best_mode
        start = f"{self.root} has no best checkpoint"
        if metric is None:
            return f"{start}: set checkpoint.best_metric in the recipe"
        if newest is None:
            return f"{start}: there is no intact one; postgrad verify says what is damaged"
        if (best := newest.best) is None:
            return (
                f"{start}: no evaluation has measured checkpoint.best_metric = {metric!r} yet; "
                "take the latest, or continue with postgrad resume"
            )
        better = "higher" if mode == "max" else "lower"
        if best.step == 0:
            return (
                f"{start}: the best is the start, before the first step: {best.metric} was "
                f"{best.value:.6g} there, and none of the {best.waited} evaluations since was "
                f"{better} (checkpoint.best_mode = {mode!r}); take the model that the run started "
                "from, or the latest checkpoint"
            )
        return (
            f"{start}: {best.metric} was best after step {best.step} ({best.value:.6g}), and that "
            "checkpoint could not be saved or is gone; take the latest, or a step of "
            "postgrad checkpoints"
        )

    def _tidy(self, latest: int, best: int | None) -> None:
        paths = files.steps_in(self.root)
        for name, step in ((LATEST, latest), (BEST, best)):
            if step is not None and step != files.named(self.root / name):
                write_text(self.root / name, f"{paths[step].name}\n")
        ours = {step: path for step, path in paths.items() if files.is_ours(path, step)}
        for step in self._surplus(ours, {latest, best} | self.held):
            files.discard(ours[step], step)

    def kept_in_mirror(self, newest: RunState, steps: Iterable[int]) -> set[int]:
        """Which of the `steps` that a mirror has stay there. newest: the state of the newest."""
        steps = set(steps)
        best = newest.best.step if newest.best else None
        return steps - set(self._surplus(steps, {newest.step, best}))

    def never_removed(self, newest: RunState) -> list[int]:
        """Steps here that are kept however old they are: the best one, and those of keep_steps."""
        best = newest.best.step if newest.best else None
        return [step for step in self.steps() if step == best or self._keeps(step)]

    def _surplus(self, steps: Collection[int], always: Collection[int | None]) -> list[int]:
        keep = {step for step in steps if step in always or self._keeps(step)}
        return surplus(steps, self._settings.max_ckpt_num, keep)

    def _keeps(self, step: int) -> bool:
        """Whether a step's checkpoint is never removed."""
        every = self._settings.keep_steps
        return every > 0 and step % every == 0


def parse_which(text: str) -> str | int:
    """Which checkpoint a text names: "latest", "best" or a step. Raises UsageError."""
    if text in (LATEST, BEST):
        return text
    if text.isdecimal():
        return int(text)
    raise UsageError(f"checkpoint {text!r}: latest, best, or the number of a step is expected")


def size_of(tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Bytes of all tensors, by stem and name."""
    return sum(
        named.size if isinstance(named, Divided) else sum(t.nbytes for t in named.values())
        for named in tensors.values()
    )


def _reason(error: OSError) -> str:
    return "the disk is full" if is_full(error) else str(error)


def _files(path: Path) -> tuple[int, tuple[str, ...]]:
    """The bytes of all files of a checkpoint, and their names."""
    inside = [file for file in sorted(path.iterdir()) if file.is_file()]
    return sum(file.stat().st_size for file in inside), tuple(file.name for file in inside)


def _was_best(path: Path, step: int) -> bool:
    try:
        best = _read_state(path).best
    except Damaged:
        return False
    return best is not None and best.step == step


def _read_state(path: Path) -> RunState:
    try:
        return RunState.from_json(read_json(path / STATE, MOST_STATE_BYTES))
    except (OSError, ValueError, RunError) as error:
        raise Damaged(f"{path / STATE}: {error}") from error


def read_checkpoint(path: Path, step: int) -> Checkpoint:
    """The checkpoint of `step` in the folder `path`. Raises Damaged after a hash that is wrong."""
    manifest = read_manifest(path)
    verify(path, manifest)
    if manifest.step != step or STATE not in manifest.files:
        raise Damaged(f"{path / MANIFEST} is of step {manifest.step}, or has no {STATE}")
    state = _read_state(path)
    if state.step != step:
        raise Damaged(f"{path / STATE} is of step {state.step}")
    if PENDING in manifest.files:
        state = replace(state, pending=_pending(path / PENDING))
    return Checkpoint(path, step, state, frozenset(manifest.files))


def _pending(path: Path) -> dict[str, NDArray[Any]]:
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path}: {error}") from error


def surplus(steps: Iterable[int], keep: int, always: Collection[int]) -> list[int]:
    """The steps to delete: all but the `keep` newest and those in `always` (best, latest, and those
    of keep_steps).

    A best checkpoint is never pushed out by newer ones (OpenRLHF#506), and does not take the place
    of one of the newest.
    """
    ordered = sorted(set(steps))
    newest = set(ordered[-keep:])
    return [step for step in ordered if step not in newest and step not in always]
