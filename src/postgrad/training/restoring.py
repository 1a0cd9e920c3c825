"""A run and its mirror (`checkpoint.mirror`): which run has it, who may write there, and how the
run comes back on a machine that has nothing of it, or less.
"""

import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.checkpoint import files
from postgrad.checkpoint.manifest import Damaged
from postgrad.checkpoint.mirror import FileTable, Mirror, Owner
from postgrad.checkpoint.schema import RecordSchema, require
from postgrad.checkpoint.state import RunState
from postgrad.checkpoint.store import SPARE_BYTES, CheckpointStore, read_checkpoint
from postgrad.core.errors import DiskFull, RunError, UsageError
from postgrad.core.files import beside, existing, remove, write_json
from postgrad.core.media import IMAGES
from postgrad.core.text import size_text
from postgrad.core.untrusted import read_json
from postgrad.observe.console import Console
from postgrad.observe.run_dir import INIT, MIRROR, PLAN, RECIPE, TOKENIZER, RunDirectory, claimed
from postgrad.observe.sinks import FILES, Logs
from postgrad.recipe.compare import compare
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Recipe
from postgrad.training.pinned import pin

# What a resume and a report read beside checkpoint and logs.
BESIDE = re.compile(
    rf"{RECIPE}|recipe-\d+\.json|{PLAN}|{TOKENIZER}|{INIT}/.+|{IMAGES}/[0-9a-f]{{64}}", re.ASCII
)


@dataclass(frozen=True, slots=True)
class MirrorRecord:
    """mirror.json of a run directory."""

    url: str
    run: str  # a random id, also in the mirror
    writer: str  # the name under which the newest process of this run writes there
    steps: tuple[int, ...]  # the checkpoints that the mirror had when this was written

    def write(self, directory: RunDirectory) -> None:
        """Replaces the file. Raises OSError where the disk refuses."""
        steps = list(self.steps)
        values = {"url": self.url, "run": self.run, "writer": self.writer, "steps": steps}
        write_json(directory.path / MIRROR, values)


def record_of(directory: RunDirectory) -> MirrorRecord | None:
    """What a run directory says of its mirror; None without a mirror. Raises UsageError where the
    file is not one that a run wrote.
    """
    path = directory.path / MIRROR
    if not path.exists():
        return None
    try:
        checked = require(RecordSchema, read_json(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not one that a run wrote: {error}; remove it") from error
    return MirrorRecord(checked.url, checked.run, checked.writer, tuple(checked.steps))


def claim(recipe: Recipe, directory: RunDirectory) -> None:
    """Makes this process the one that writes to the mirror, before the run's first step.

    Raises UsageError where another run has the mirror, MirrorFailed where nobody can write there.
    """
    if not recipe.checkpoint.mirror:
        return
    mirror = Mirror(recipe.checkpoint.mirror)
    owner, record = mirror.owner(), record_of(directory)
    run = record.run if record else owner.run if owner else secrets.token_hex(16)
    _require_own(mirror, owner, run)
    # On the disk first: a process that is killed now finds its own id in the mirror.
    MirrorRecord(mirror.url, run, "", ()).write(directory)
    writer = mirror.claim(Owner(run, read_json(directory.path / RECIPE)))
    MirrorRecord(mirror.url, run, writer, tuple(mirror.steps())).write(directory)


def restore(
    recipe: Recipe,
    store: CheckpointStore,
    console: Console,
    allow_change: Sequence[str] = (),
    *,
    overwrite: bool = False,
) -> None:
    """Brings the run back from its mirror where the mirror has a newer checkpoint than run_dir.

    overwrite: empties the mirror instead, if its run is the one in run_dir. Raises UsageError where
    the mirror has another run, RunError where none of its checkpoints is intact and run_dir has
    none either.
    """
    if not recipe.checkpoint.mirror:
        return
    directory, mirror = RunDirectory(Path(recipe.run_dir)), Mirror(recipe.checkpoint.mirror)
    if (owner := mirror.owner()) is None:
        return
    record = record_of(directory) if directory.path.is_dir() else None
    if overwrite:
        # A start that was killed while it downloaded left the mirror's id, and no checkpoint.
        is_here = record is not None and record.run == owner.run
        if not is_here or (mirror.steps() and not store.steps()):
            raise UsageError(
                f"{mirror.url} holds a run that {directory.path} does not hold, and --overwrite "
                "true empties no mirror of another run: leave it out to continue that run, name "
                "another folder with --checkpoint.mirror, or remove this one yourself"
            )
        mirror.clear()
        return
    if RunDirectory.holds_results(directory.path):
        _require_own(mirror, owner, record and record.run)
    elif not recipe.checkpoint.load_checkpoint:
        raise UsageError(
            f"{mirror.url} already holds a run and checkpoint.load_checkpoint is false: name "
            "another folder with --checkpoint.mirror"
        )
    _Restorer(recipe, mirror, owner, directory, store, console).restore(allow_change)


def _require_own(mirror: Mirror, owner: Owner | None, run: str | None) -> None:
    if owner is not None and owner.run != run:
        raise UsageError(
            f"checkpoint.mirror = {mirror.url!r} holds another run than run_dir: name a folder of "
            "its own for this one, or choose another --run_dir to continue the other"
        )


@dataclass(frozen=True, slots=True)
class _Restorer:
    recipe: Recipe
    mirror: Mirror
    owner: Owner
    directory: RunDirectory
    store: CheckpointStore
    console: Console

    def restore(self, allow_change: Sequence[str]) -> None:
        """Takes over the newest intact checkpoint that is newer than those of the run directory."""
        is_new = not RunDirectory.holds_results(self.directory.path)
        steps, problems = self.mirror.steps(), list[str]()
        if is_new and not steps:  # its run was killed before its first upload ended
            self._require_same(self.owner.recipe, allow_change)
        for step in reversed(steps):
            if not is_new and step <= max(self.store.steps(), default=0) and step <= self._here():
                break
            try:
                table = self.mirror.table(step)
                self._require_same(self._recipe_of(table), allow_change)
                self._take(step, table)
            except Damaged as error:
                problems.append(f"the checkpoint of step {step} is damaged and skipped: {error}")
                continue
            self._tell(step, problems)
            return
        if problems and not self.store.steps():
            raise RunError(f"{self.mirror.url} has no checkpoint to read: {'; '.join(problems)}")
        for problem in problems:
            self.console.warn(problem)

    def _here(self) -> int:
        """The step of the newest intact checkpoint on the disk, 0 without one."""
        try:
            return self.store.load().step
        except RunError:
            return 0

    def _recipe_of(self, table: FileTable) -> dict[str, Any]:
        """The content of recipe.json at a checkpoint."""
        if RECIPE not in table.files:
            raise Damaged(f"the table of step {table.step} in {self.mirror.url} lacks {RECIPE}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / RECIPE
            self.mirror.download_file(table, RECIPE, path, Path(folder) / "none")
            try:
                return read_json(path)
            except (OSError, ValueError) as error:
                raise Damaged(f"{RECIPE} in {self.mirror.url}: {error}") from error

    def _require_same(self, contents: dict[str, Any], allow_change: Sequence[str]) -> None:
        """Raises UsageError where the mirror's run has another recipe."""
        with tempfile.TemporaryDirectory() as folder:
            write_json(Path(folder) / RECIPE, contents)
            mirrored = RunDirectory(Path(folder))
            before = recipe_from_json(mirrored.recipe())
            recipe, _ = pin(self.recipe, mirrored.sources(), allow_change)
        ways_out = "name another folder with --checkpoint.mirror, or "
        compare(before, recipe, allow_change, self.mirror.url, ways_out)

    def _take(self, step: int, table: FileTable) -> None:
        """Downloads a checkpoint and its files, checks them, and puts them into the run directory,
        the checkpoint last: who is killed meanwhile takes all of it again. The best one comes too,
        which exports and forks read.
        """
        wrong = [name for name in table.files if name not in FILES and not BESIDE.fullmatch(name)]
        if wrong:
            raise Damaged(f"its table names {wrong[0]!r}, which is no file of a run")
        directory, path = self.directory, self.directory.path
        if not RunDirectory.holds_results(path):
            RunDirectory.create(path, self.recipe.dump(), overwrite=False)
            MirrorRecord(self.mirror.url, self.owner.run, "", ()).write(directory)
        written, beside_it = files.temporary(self.store.root, step), beside(path / MIRROR)
        written_best: Path | None = None
        try:
            with claimed(path):
                sizes = {self.store.root: self.mirror.size(step), path: table.size}
                self._require_room(sizes)
                self.store.root.mkdir(parents=True, exist_ok=True)
                files.clean_up(self.store.root)
                self.mirror.download(step, written)
                state = read_checkpoint(written, step).state
                _require_logs(table, state)
                for name in table.files:
                    self.mirror.download_file(table, name, beside_it / name, path / name)
                best = self._missing_best(state)
                if best is not None:
                    written_best = self._download_best(best)
                for name in table.files:
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    (beside_it / name).replace(path / name)
                if best is not None and written_best is not None:
                    files.commit(written_best, best)
                files.commit(written, step)
        finally:
            lefts = (written, beside_it, written_best)
            for left in (each for each in lefts if each is not None and each.exists()):
                remove(left)

    def _missing_best(self, newest: RunState) -> int | None:
        """The step of the best checkpoint where the mirror has it, and the disk has not."""
        best = newest.best.step if newest.best else newest.step
        there = best != newest.step and best in self.mirror.steps()
        return best if there and best not in self.store.steps() else None

    def _download_best(self, step: int) -> Path | None:
        """The folder with the best checkpoint; None where it is damaged, which is told: the run can
        go on without it.
        """
        self._require_room({self.store.root: self.mirror.size(step)})
        written = files.temporary(self.store.root, step)
        try:
            self.mirror.download(step, written)
            read_checkpoint(written, step)
        except BaseException as error:
            if written.exists():
                remove(written)
            if not isinstance(error, Damaged):
                raise
            self.console.warn(f"the best checkpoint, of step {step}, is damaged: {error}")
            return None
        return written

    def _require_room(self, sizes: Mapping[Path, int]) -> None:
        """Raises DiskFull before anything is downloaded that has no room. sizes: by folder."""
        wanted: dict[Path, int] = {}
        for folder, size in sizes.items():
            place = existing(folder)
            wanted[place] = wanted.get(place, SPARE_BYTES) + size
        for place, size in wanted.items():
            if size > (free := shutil.disk_usage(place).free):
                raise DiskFull(
                    f"{place} has {size_text(free)} free, and what comes from {self.mirror.url} "
                    f"takes {size_text(size)}: make room, or choose another --run_dir"
                )

    def _tell(self, step: int, problems: Sequence[str]) -> None:
        logs = Logs(self.directory.path, self.console.warn)
        for problem in problems:
            self.console.warn(problem)
            logs.event("damaged_checkpoint", problem)
        text = f"the checkpoint of step {step} and the run's logs come from {self.mirror.url}"
        logs.event("restored", text, step=step)
        logs.close()
        self.console.note(text)


def _require_logs(table: FileTable, state: RunState) -> None:
    """Raises Damaged where a log is not as long as the state says."""
    for name, offset in state.log_offsets.items():
        size, _ = table.files.get(name, (0, ()))
        if size != offset:
            raise Damaged(f"its {name} has {size} bytes, and its state counts on {offset}")
