"""A run directory: where a run writes, and nothing else does."""

import errno
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import finite, is_full, left_behind, remove, whole_file, write_json
from postgrad.core.hub import COMMIT
from postgrad.core.names import nearest
from postgrad.core.untrusted import read_json, readable, reason, shown
from postgrad.core.versions import versions

RECIPE, PLAN, SUMMARY = "recipe.json", "plan.json", "summary.json"
SOURCES = "sources"  # a key of RECIPE
TOKENIZER = "tokenizer.json"  # what the ids of samples.jsonl stand for, wherever the run is moved
INIT, MODEL, COPIES, CHECKPOINTS = "init", "model", "hf", "checkpoints"
OURS = (  # what a run writes, and --overwrite true removes
    RECIPE,
    PLAN,
    SUMMARY,
    TOKENIZER,
    INIT,
    MODEL,
    COPIES,
    CHECKPOINTS,
    "metrics.jsonl",
    "eval.jsonl",
    "samples.jsonl",
    "events.jsonl",
    "stacks.txt",
    "tensorboard",
    "wandb",
    "profile.json",
    "trace.json.gz",
    "report.html",
)
NUMBERED = re.compile(r"(vllm-\d+\.log|rollout-\d+)", re.ASCII)  # of OURS, one for each engine
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "reasoning-gym")
SPARE_BYTES = 2**20
_COPY = "copy it again from where the run was"

Kind = TypeVar("Kind", dict[str, Any], list[Any])


class RunDirectory:
    """The directory of one run, see docs/run-directory.md."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.init = path / INIT  # the fresh model, where the recipe asks for one
        self.model = path / MODEL  # the exported model
        self.copies = path / COPIES  # one of each checkpoint, where the recipe asks for them
        self.checkpoints = path / CHECKPOINTS
        self.plan = path / PLAN  # what was foreseen

    @classmethod
    def create(
        cls,
        path: Path,
        recipe: Mapping[str, Any],
        *,
        overwrite: bool,
        sources: Sequence[Mapping[str, Any]] = (),
    ) -> "RunDirectory":
        """A new run's directory with its recipe.json, see write_recipe. overwrite: removes what a
        run wrote there.

        Raises UsageError where something else lies there, RunError where nothing can be written.
        """
        directory = cls(path)
        try:
            if path.exists():
                directory._clear(overwrite)
            path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(path).free
            if free < SPARE_BYTES:
                raise OSError(errno.ENOSPC, f"{free} bytes are free")
            directory.write_recipe(recipe, sources)
        except OSError as error:
            raise _unwritable(path, error) from error
        return directory

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """A run that was begun. Raises UsageError where there is none."""
        if not cls.holds_run(path):
            what = "has no recipe.json" if path.is_dir() else "is no directory"
            raise UsageError(f"{path} {what}: it is not a run directory{cls._meant(path)}")
        return cls(path)

    @classmethod
    def _meant(cls, path: Path) -> str:
        """The runs in a folder, or the one whose name is nearest to what was typed."""
        folder = path if path.is_dir() else path.parent
        runs = sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
        runs = [name for name in runs if cls.holds_runs(folder / name)]
        if folder == path:
            return f"; runs in it: {', '.join(runs)}" if runs else ""
        close = nearest(path.name, runs)
        return f"; did you mean {folder / close}?" if close else ""

    @classmethod
    def holds_runs(cls, path: Path) -> bool:
        """A run, or a pipeline's folder of runs."""
        return cls.holds_run(path) or any(path.glob(f"*/{RECIPE}"))

    @staticmethod
    def holds_run(path: Path) -> bool:
        """True where a run was set up in `path`."""
        return readable(path / RECIPE)

    @staticmethod
    def holds_results(path: Path) -> bool:
        """True where a run in `path` got as far as a step, an evaluation or a checkpoint.

        Wrong data are found after the directory is made: what failed before has nothing to lose.
        """
        logs = (path / name for name in ("metrics.jsonl", "eval.jsonl"))
        written = any(log.is_file() and log.stat().st_size for log in logs)
        return written or (path / CHECKPOINTS).is_dir()

    def _clear(self, overwrite: bool) -> None:
        if not self.path.is_dir():
            raise UsageError(f"run_dir {self.path} is a file: choose another")
        left = left_behind(self.path, OURS)
        names = sorted({one.name for one in self.path.iterdir()} - {one.name for one in left})
        if names and not self._begun():  # a model/ or recipe.json of somebody else's too
            raise UsageError(
                f"run_dir {self.path} holds other files ({', '.join(names[:3])}): choose a "
                "directory of its own for a run"
            )
        if self.holds_results(self.path) and not overwrite:
            raise UsageError(
                f"{self.path} already holds a run: choose another --run_dir, or replace it "
                "with --overwrite true"
            )
        left += [one for one in self.path.iterdir() if NUMBERED.fullmatch(one.name)]
        for one in (*left, *(self.path / name for name in reversed(OURS))):
            if (
                one.is_symlink() or one.exists()
            ):  # the recipe last: it says that the others are ours
                remove(one)

    def _begun(self) -> bool:
        """True where recipe.json is one that `write_recipe` wrote."""
        try:
            written = read_json(self.path / RECIPE)
        except (OSError, ValueError):
            return False
        return isinstance(written, dict) and written.keys() - {SOURCES} == {"recipe", "versions"}

    def write_recipe(
        self, recipe: Mapping[str, Any], sources: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Writes recipe.json: the resolved recipe, the versions that run it, and which commits the
        revisions of hub ids meant (`sources`). Removes what a killed process was writing here.
        """
        told = {"recipe": recipe, "versions": versions(PACKAGES), SOURCES: list(sources)}
        try:
            for one in left_behind(self.path, OURS):
                remove(one)
            write_json(self.path / RECIPE, told)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def recipe(self) -> dict[str, Any]:
        """The resolved recipe. Raises UsageError where the file is not ours."""
        path = self.path / RECIPE
        return _inside(path, "recipe", dict, "a recipe that a run wrote")

    def sources(self) -> list[dict[str, Any]]:
        """What write_recipe was told of hub ids; none where it was told nothing. Raises UsageError
        where the file is not ours.
        """
        path = self.path / RECIPE
        wanted = "a recipe that a run wrote"
        entries = _inside(path, SOURCES, list, wanted, [])  # older runs have none
        if not all(map(_names_a_commit, entries)):
            raise UsageError(
                f"{path} is not {wanted}: an entry of {SOURCES!r} lacks key, path or commit; "
                f"{_COPY}"
            )
        return entries

    def plans(self) -> list[dict[str, Any]]:
        """The entries of plan.json; none where it is not there. Raises UsageError where the file is
        not ours.
        """
        if not (self.plan.exists() or self.plan.is_symlink()):
            return []
        plans = _inside(self.plan, "plans", list, "a plan that a run wrote")
        for number, one in enumerate(plans):
            after = one.get("after_step") if isinstance(one, dict) else None
            if type(after) is not int:
                raise UsageError(
                    f"{self.plan} is not a plan that a run wrote: plans.{number}.after_step is "
                    f"{shown(after)}, where a step is wanted; remove the file, it is written again"
                )
        return plans

    def write_plans(self, plans: Sequence[Mapping[str, Any]]) -> None:
        """Writes plan.json."""
        try:
            write_json(self.plan, finite({"plans": list(plans)}))
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def keep_tokenizer(self, source: Path) -> None:
        """Copies a tokenizer.json, once."""
        path = self.path / TOKENIZER
        try:
            if not path.exists():
                with whole_file(path) as written:
                    shutil.copyfile(source, written)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json."""
        try:
            write_json(self.path / SUMMARY, finite(summary))
        except OSError as error:
            raise _unwritable(self.path, error) from error


def _names_a_commit(entry: Any) -> bool:
    """Whether it is an entry of `sources` that a run wrote."""
    if not isinstance(entry, dict):
        return False
    values = cast(dict[str, Any], entry)
    asked, commit = values.get("revision"), values.get("commit")
    return (
        all(isinstance(values.get(key), str) for key in ("key", "path"))
        and (asked is None or isinstance(asked, str))
        and isinstance(commit, str)
        and COMMIT.fullmatch(commit) is not None
    )


def _inside(path: Path, key: str, kind: type[Kind], what: str, default: Kind | None = None) -> Kind:
    """What a JSON file of a run says under a key; `default` where it says nothing. Raises
    UsageError where it says something else, or nothing and there is no default.
    """
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} is not {what}: {why}; {_COPY}") from error
    value = cast(dict[str, Any], data).get(key, default) if isinstance(data, dict) else None
    if not isinstance(value, kind):
        wanted = "table" if kind is dict else "list"
        raise UsageError(f"{path} is not {what}: it has no {wanted} {key!r}; {_COPY}")
    return value


def _unwritable(path: Path, error: OSError) -> RunError:
    if is_full(error):
        return RunError(f"run_dir {path}: the disk is full; make room, or choose another --run_dir")
    return RunError(f"run_dir {path} cannot be written: {error}; choose another --run_dir")
