"""`postgrad fork`: a new run directory that holds a run as it was at one of its checkpoints.

The source is only read and no lock is taken, so it may be running. Its files are untrusted
(docs/run-directory.md), and no symbolic link in it is followed. The fork is written beside its
place and gets its name by one rename: it is complete or absent.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from postgrad.checkpoint.files import STATE, steps_in
from postgrad.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    entry_of,
    read_manifest,
)
from postgrad.checkpoint.state import RunState
from postgrad.checkpoint.store import BEST, LATEST, Checkpoint, CheckpointStore, parse_which
from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import (
    is_full,
    left_behind,
    link_or_copy,
    names_in,
    remove,
    whole_directory,
    write_json,
)
from postgrad.core.media import IMAGES
from postgrad.core.untrusted import NotAFile, read_bytes, read_json, shown
from postgrad.observe.console import Console
from postgrad.observe.follow import Followed, parse
from postgrad.observe.run_dir import (
    CHECKPOINTS,
    INIT,
    PLAN,
    RECIPE,
    TOKENIZER,
    RunDirectory,
    claimed,
)
from postgrad.observe.sinks import FILES, Logs, copy_logs
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.sweep import is_sweep
from postgrad.training.saving import store_of

EVENTS = "events.jsonl"
KEPT_RECIPE = re.compile(r"recipe-\d+\.json", re.ASCII)
IMAGE = re.compile(r"[0-9a-f]{64}")  # the name of a whole one


def fork(run_dir: Path, which: str, to: Path, console: Console) -> dict[str, Any]:
    """Makes the run directory `to` of the run in `run_dir` at a checkpoint: "latest", "best" or a
    step. Returns its path, the source, the step, the step of its best checkpoint or None, and the
    SHA-256 of the source's manifest.

    Raises UsageError where `run_dir` holds no run, or `to` is not empty; RunError where there is no
    such checkpoint, a file of the source is missing or damaged, or the disk refuses.
    """
    source = _source(run_dir)
    place = Path(os.path.abspath(to))  # noqa: PTH100  # a link is not what is written
    _require_free(place, run_dir)
    try:
        with whole_directory(place, replace=False) as folder, claimed(folder):
            result = _ForkWriter(source, RunDirectory(folder), to, console).write(which)
    except OSError as error:
        why = "the disk is full" if is_full(error) else str(error)
        raise RunError(f"{run_dir} was not forked, and {to} holds nothing of it: {why}") from error
    console.note(
        f"{to} is {run_dir} as it was at step {result['step']}; "
        f"{RunDirectory(to).resume_command} continues it"
    )
    return result


def _source(run_dir: Path) -> RunDirectory:
    """The source, in which no entry that is read is a link."""
    if is_sweep(run_dir):
        raise UsageError(
            f"{run_dir} is a sweep, and one run is forked: name the directory of a run in it"
        )
    if not RunDirectory.holds_run(run_dir) and any(run_dir.glob(f"*/{RECIPE}")):
        stages = ", ".join(sorted(str(path.parent) for path in run_dir.glob(f"*/{RECIPE}")))
        raise UsageError(
            f"{run_dir} holds several runs, such as the stages of a pipeline, and one is forked: "
            f"name its directory: {stages}"
        )
    directory = RunDirectory.open(run_dir)
    for name in (RECIPE, PLAN, TOKENIZER, INIT, IMAGES, CHECKPOINTS, *FILES):
        _require_no_link(run_dir / name)
    return directory


def _require_no_link(path: Path) -> None:
    if path.is_symlink():
        raise UsageError(
            f"{path} is a link, and a fork follows none: put what it leads to in its place (a run "
            "names a folder for its checkpoints with checkpoint.ckpt_path)"
        )


def _require_free(place: Path, run_dir: Path) -> None:
    """Raises UsageError where `place` is not absent or an empty directory. Removes what a killed
    fork left beside it.
    """
    if place.resolve().is_relative_to(run_dir.resolve()):
        raise UsageError(f"{place} is in the run that is forked: choose a directory outside")
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise UsageError(f"{place} is a file or a link: choose another directory")
    if place.is_dir() and names_in(place):
        raise UsageError(f"{place} is not empty: choose another directory")
    for left in left_behind(place.parent, [place.name]) if place.parent.is_dir() else ():
        with claimed(left):  # nobody is writing it
            remove(left)


class _ForkWriter:
    """Writes a fork of `source` into `target`, which will be called `to`."""

    def __init__(
        self, source: RunDirectory, target: RunDirectory, to: Path, console: Console
    ) -> None:
        self._source = source
        self._target = target
        self._to = to
        self._console = console
        recipe = recipe_from_json(source.recipe())
        self._from = store_of(recipe, source)  # the source's checkpoints
        self._store = CheckpointStore(target.checkpoints, recipe.checkpoint)

    def write(self, which: str) -> dict[str, Any]:
        """Writes all files; returns what the command prints."""
        checkpoint, digest = self._checkpoint(which)
        state = checkpoint.state
        best = self._best(state)
        self._store.tidy(state)
        copy_logs(self._source.path, self._target.path, state.log_offsets)
        recipe, earlier = self._recipes(state.log_offsets.get(EVENTS, 0))
        self._write_recipe(recipe)
        self._copy_files(earlier)
        plans = [plan for plan in self._source.plans() if plan["after_step"] < state.step]
        if plans:
            self._target.write_plans(plans)
        source = str(self._source.path.resolve())
        facts = {"source": source, "step": state.step, "manifest_sha256": digest}
        logs = Logs(self._target.path)
        logs.event("forked", f"from {source} at step {state.step}", **facts)
        logs.sync()
        logs.close()
        return {"run_dir": str(self._to), **facts, "best": best}

    def _checkpoint(self, which: str) -> tuple[Checkpoint, str]:
        """Takes the checkpoint over; of "latest" the newest good one, as a resume does. Returns it
        and the SHA-256 of its manifest in the source.
        """
        wanted = parse_which(which)
        steps = self._from.steps()
        if wanted == BEST:
            steps = [self._from.load(BEST).step]
        elif wanted != LATEST:
            steps = [step for step in steps if step == wanted]
        problems: list[str] = []
        for step in reversed(steps):
            try:
                taken = self._take(step)
            except Damaged as error:
                problems.append(str(error))
                continue
            for problem in problems:
                self._console.warn(f"a newer checkpoint is passed over: {problem}")
            return taken
        if not problems:
            self._from.load(wanted)  # raises: it says which checkpoints there are
        raise RunError("; ".join(problems) or f"{self._from.root} changes too fast: try again")

    def _best(self, state: RunState) -> int | None:
        """Takes over the best checkpoint so far, so that the fork has one too. Returns its step,
        None without one.
        """
        if state.best is None or state.best.step in (0, state.step):
            return state.step if state.best and state.best.step else None
        step, why = state.best.step, "gone"
        if step in self._from.steps():
            try:
                self._take(step)
            except (Damaged, RunError) as error:
                why = f"not whole ({error})"
            else:
                return step
        self._console.warn(f"the best checkpoint so far, of step {step}, is {why}: none is taken")
        return None

    def _take(self, step: int) -> tuple[Checkpoint, str]:
        """Links or copies a checkpoint, then checks every hash of what was taken. Raises Damaged,
        and RunError where the source's run removes it meanwhile.
        """
        folder = self._store.root / f"step-{step:06d}"
        path = steps_in(self._from.root).get(step, self._from.root / folder.name)
        _require_no_link(path)
        folder.mkdir(parents=True)
        try:
            manifest = read_manifest(path)
            for name in (*manifest.files, MANIFEST):
                link_or_copy(path / name, folder / name)
            digest = hashlib.sha256(read_bytes(folder / MANIFEST)).hexdigest()
            checkpoint = self._store.load(step)
        except (FileNotFoundError, NotAFile, Damaged, RunError) as error:
            shutil.rmtree(folder)
            if not path.exists():
                raise RunError(
                    f"{path} was removed while it was read: its run has gone on and keeps "
                    "checkpoint.max_ckpt_num of them; take a newer checkpoint"
                ) from error
            raise Damaged(str(error).replace(str(folder), str(path))) from error
        return _without_loggers(checkpoint, manifest), digest

    def _recipes(self, offset: int) -> tuple[Path, list[str]]:
        """The file with the recipe that was in force when events.jsonl had `offset` bytes, and the
        names of those with earlier ones.
        """
        earlier: list[str] = []
        for start, line in Followed(self._source.path / EVENTS).lines():
            event = parse(line) or {}
            if event.get("event") != "recipe_changed":
                continue
            kept = event.get("kept")
            if not isinstance(kept, str) or not KEPT_RECIPE.fullmatch(kept):
                raise UsageError(
                    f"{self._source.path / EVENTS}: the event at byte {start} keeps a recipe as "
                    f"{shown(kept)}, where recipe-N.json is expected; copy the file again from the "
                    "original run"
                )
            if start >= offset:
                return self._source.path / kept, earlier
            earlier.append(kept)
        return self._source.path / RECIPE, earlier

    def _write_recipe(self, path: Path) -> None:
        """Writes recipe.json with what the file `path` says, but for where the run writes."""
        _require_no_link(path)
        try:
            contents = read_json(path)
        except ValueError as error:
            raise UsageError(f"{path} is not a recipe that a run wrote: {error}") from error
        raw = cast(dict[str, Any], contents).get("recipe") if isinstance(contents, dict) else None
        if not isinstance(raw, dict):
            raise UsageError(f"{path} is not a recipe that a run wrote: it has no table 'recipe'")
        recipe = recipe_from_json(cast(dict[str, Any], raw))
        raw["run_dir"] = str(self._to)
        if recipe.checkpoint.ckpt_path is not None:  # there the source writes
            raw["checkpoint"]["ckpt_path"] = None
            self._console.note("checkpoint.ckpt_path is left out: the fork has its checkpoints")
        if recipe.checkpoint.mirror:
            raw["checkpoint"]["mirror"] = ""
            self._console.note(
                "checkpoint.mirror is left out: it has the source; a resume of the fork may name "
                "another folder"
            )
        if recipe.checkpoint.push_to_hub:
            self._console.warn(
                f"at its end the fork pushes its model to {recipe.checkpoint.push_to_hub}, as the "
                'source does: resume it with --checkpoint.push_to_hub "" to push none'
            )
        write_json(self._target.path / RECIPE, contents)

    def _copy_files(self, earlier: Iterable[str]) -> None:
        """Links or copies what does not change: tokenizer, fresh model, images, and the recipes
        `earlier`.
        """
        source, target = self._source, self._target
        for name in (TOKENIZER, *earlier):
            if name != TOKENIZER or (source.path / name).exists():
                link_or_copy(source.path / name, target.path / name)
        for folder, to in ((source.init, target.init), (source.images, target.images)):
            for path in _files_below(folder):
                if folder == source.images and not IMAGE.fullmatch(path.name):
                    continue  # one that is being written
                copy = to / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path, copy)


def _without_loggers(checkpoint: Checkpoint, manifest: Manifest) -> Checkpoint:
    """The checkpoint without the id of the run at its loggers: under it the source's curves would
    be written on. state.json and manifest.json are replaced, where there is one.
    """
    if not checkpoint.state.loggers:
        return checkpoint
    state, path = replace(checkpoint.state, loggers={}), checkpoint.path / STATE
    write_json(path, state.to_json())  # another file takes the name: the source's is not touched
    files = {**manifest.files, STATE: entry_of(path)}
    write_json(checkpoint.path / MANIFEST, replace(manifest, files=files).to_json())
    return replace(checkpoint, state=state)


def _files_below(folder: Path) -> Iterator[Path]:
    """The files in a folder and in folders of it, none where it does not exist."""
    for above, folders, names in os.walk(folder):
        for name in folders:
            _require_no_link(Path(above) / name)
        yield from (Path(above) / name for name in sorted(names))
