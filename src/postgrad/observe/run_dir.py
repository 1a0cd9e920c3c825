"""The directory that a run writes its files into."""

import errno
import fcntl
import os
import re
import shlex
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import (
    finite,
    is_full,
    left_behind,
    names_in,
    remove,
    versions,
    whole_file,
    write_json,
)
from postgrad.core.hub import COMMIT
from postgrad.core.media import IMAGES
from postgrad.core.members import SUFFIX
from postgrad.core.text import nearest
from postgrad.core.untrusted import read_json, readable, reason, shown

RECIPE, PLAN, SUMMARY = "recipe.json", "plan.json", "summary.json"
SOURCES = "sources"  # a key of RECIPE
TOKENIZER = "tokenizer.json"  # a copy, so that token ids of samples.jsonl can always be decoded
INIT, MODEL, COPIES, CHECKPOINTS = "init", "model", "hf", "checkpoints"
MIRROR = "mirror.json"  # whose mirror checkpoint.mirror is, and what it has
SAMPLES = ("samples.jsonl", "eval_samples.jsonl")  # observe.compress packs them
OURS = (  # what a run writes, and --overwrite true removes
    RECIPE,
    PLAN,
    SUMMARY,
    TOKENIZER,
    INIT,
    MODEL,
    COPIES,
    CHECKPOINTS,
    IMAGES,
    MIRROR,
    "metrics.jsonl",
    "eval.jsonl",
    *(f"{name}{packed}" for name in SAMPLES for packed in ("", SUFFIX)),
    "events.jsonl",
    "schedule.jsonl",
    "stacks.txt",
    "tensorboard",
    "wandb",
    "profile.json",
    "trace.json.gz",
    "report.html",
)
NUMBERED = re.compile(  # of OURS: one for each engine, one for each changed recipe
    r"(vllm-\d+\.log|rollout-\d+|recipe-\d+\.json)", re.ASCII
)
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "reasoning-gym")
SPARE_BYTES = 2**20
_COPY = "copy it again from the original run"

Container = TypeVar("Container", dict[str, Any], list[Any])


@contextmanager
def claimed(folder: Path) -> Generator[None]:
    """Locks `folder` until the block or the process ends, however it ends.

    Raises UsageError where another process holds the lock: two that write the same log files would
    destroy both runs. On a file system without locks it does nothing.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"another process is running in {folder}: wait until it has ended, or stop it "
                "(SIGTERM saves first)"
            ) from error
        except OSError:  # no locks here
            pass
        yield
    finally:
        os.close(handle)


def require_unclaimed(folder: Path) -> None:
    """Raises UsageError where another process holds the lock. Changes nothing in `folder`."""
    if folder.is_dir():
        with claimed(folder):
            pass


class RunDirectory:
    """The directory of one run; docs/run-directory.md describes every file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.init = path / INIT  # the fresh model, where the recipe asks for one
        self.model = path / MODEL  # the exported model
        self.copies = path / COPIES  # one export of each checkpoint, where the recipe asks for them
        self.checkpoints = path / CHECKPOINTS
        self.images = path / IMAGES  # those of rows, by the SHA-256 of their files
        self.plan = path / PLAN  # estimates of memory and time

    @property
    def resume_command(self) -> str:
        """The command that continues the run, as a shell reads it."""
        return f"postgrad resume {shlex.quote(str(self.path))}"

    @property
    def fork_command(self) -> str:
        """The command that makes a new run of an earlier checkpoint, without step and place."""
        return f"postgrad fork {shlex.quote(str(self.path))} --checkpoint STEP --to DIR"

    @classmethod
    def create(
        cls,
        path: Path,
        recipe: Mapping[str, Any],
        *,
        overwrite: bool,
        sources: Sequence[Mapping[str, Any]] = (),
    ) -> "RunDirectory":
        """Creates the directory of a new run with its recipe.json (`write_recipe`).

        overwrite: removes the files of an earlier run there. Raises UsageError where the directory
        holds other files, or a run and not `overwrite`; RunError where it cannot be written.
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
        """The directory of an existing run. Raises UsageError where `path` holds none."""
        if not cls.holds_run(path):
            fault = "has no recipe.json" if path.is_dir() else "is no directory"
            raise UsageError(f"{path} {fault}: it is not a run directory{cls._meant(path)}")
        return cls(path)

    @classmethod
    def _meant(cls, path: Path) -> str:
        """A hint for a message: the runs in a folder, the run with the nearest name, or where that
        of a recipe is.
        """
        if path.suffix == ".toml" and path.is_file():
            return "; it is a recipe: name the directory that its run_dir says"
        folder = path if path.is_dir() else path.parent
        runs = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        runs = [name for name in runs if cls.holds_runs(folder / name)]
        if folder == path:
            return f"; runs in it: {', '.join(runs)}" if runs else ""
        close = nearest(path.name, runs)
        return f"; did you mean {folder / close}?" if close else ""

    @classmethod
    def holds_runs(cls, path: Path) -> bool:
        """Whether `path` is a run, or a pipeline's folder of runs."""
        return cls.holds_run(path) or any(path.glob(f"*/{RECIPE}"))

    @staticmethod
    def holds_run(path: Path) -> bool:
        """Whether `path` has a recipe.json, which a run writes first."""
        return readable(path / RECIPE)

    @staticmethod
    def holds_results(path: Path) -> bool:
        """Whether a run in `path` got as far as a step, an evaluation or a checkpoint.

        A run that failed earlier, for example for wrong data, may be overwritten without asking.
        """
        logs = (path / name for name in ("metrics.jsonl", "eval.jsonl"))
        written = any(log.is_file() and log.stat().st_size for log in logs)
        return written or (path / CHECKPOINTS).is_dir()

    def require_present(self) -> None:
        """Raises RunError where the directory of a run under way was moved or removed: a save would
        make another one of its name, without recipe and logs.
        """
        try:
            (self.path / RECIPE).stat()
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(
                f"run_dir {self.path} was moved or removed while the run wrote there: the run "
                "stops, and steps after its newest checkpoint are lost; postgrad resume with the "
                "directory's new path continues"
            ) from None
        except OSError:  # a network's disk that does not answer now: what is written next says so
            pass

    def _clear(self, overwrite: bool) -> None:
        if not self.path.is_dir():
            raise UsageError(f"run_dir {self.path} is a file: choose another")
        leftovers = left_behind(self.path, OURS)
        names = sorted(names_in(self.path) - {entry.name for entry in leftovers})
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
        leftovers += [entry for entry in self.path.iterdir() if NUMBERED.fullmatch(entry.name)]
        # The recipe goes last: it shows that the other files are a run's.
        for entry in (*leftovers, *(self.path / name for name in reversed(OURS))):
            if entry.is_symlink() or entry.exists():
                remove(entry)

    def _begun(self) -> bool:
        """Whether recipe.json has the keys that `write_recipe` writes."""
        try:
            written = read_json(self.path / RECIPE)
        except (OSError, ValueError):
            return False
        return isinstance(written, dict) and written.keys() - {SOURCES} == {"recipe", "versions"}

    def write_recipe(
        self, recipe: Mapping[str, Any], sources: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Writes recipe.json: the resolved recipe, versions of packages, and `sources`, the commits
        of hub ids. Removes half-written files of a killed process.
        """
        contents = {"recipe": recipe, "versions": versions(PACKAGES), SOURCES: list(sources)}
        try:
            for leftover in left_behind(self.path, OURS):
                remove(leftover)
            write_json(self.path / RECIPE, contents)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def keep_recipe(self) -> Path:
        """Copies recipe.json to recipe-N.json (N from 1), before another recipe replaces it."""
        numbers = (
            int(path.stem[7:])
            for path in self.path.glob("recipe-*.json")
            if NUMBERED.fullmatch(path.name)
        )
        kept = self.path / f"recipe-{max(numbers, default=0) + 1}.json"
        try:
            with whole_file(kept) as written:
                shutil.copyfile(self.path / RECIPE, written)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return kept

    def recipe(self) -> dict[str, Any]:
        """The resolved recipe. Raises UsageError where recipe.json is not one that a run wrote."""
        path = self.path / RECIPE
        return _inside(path, "recipe", dict, "a recipe that a run wrote")

    def sources(self) -> list[dict[str, Any]]:
        """The commits of hub ids: {"key", "path", "revision", "commit"} each; may be empty.

        Raises UsageError where recipe.json is not one that a run wrote.
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
        """The entries of plan.json; empty where the file does not exist.

        Raises UsageError where plan.json is not one that a run wrote.
        """
        if not (self.plan.exists() or self.plan.is_symlink()):
            return []
        plans = _inside(self.plan, "plans", list, "a plan that a run wrote")
        for number, plan in enumerate(plans):
            after = plan.get("after_step") if isinstance(plan, dict) else None
            if type(after) is not int:
                raise UsageError(
                    f"{self.plan} is not a plan that a run wrote: plans.{number}.after_step is "
                    f"{shown(after)}, where a step is expected; remove the file: a run writes it "
                    "again"
                )
        return plans

    def write_plans(self, plans: Sequence[Mapping[str, Any]]) -> None:
        """Replaces plan.json; numbers that are not finite become null."""
        try:
            write_json(self.plan, finite({"plans": list(plans)}))
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def keep_tokenizer(self, source: Path) -> None:
        """Copies a tokenizer.json into the run directory, unless it has one."""
        path = self.path / TOKENIZER
        try:
            if not path.exists():
                with whole_file(path) as written:
                    shutil.copyfile(source, written)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces summary.json; numbers that are not finite become null."""
        try:
            write_json(self.path / SUMMARY, finite(summary))
        except OSError as error:
            raise _unwritable(self.path, error) from error


def _names_a_commit(entry: Any) -> bool:
    """Whether `entry` has the fields of an entry of `sources`."""
    if not isinstance(entry, dict):
        return False
    values = cast(dict[str, Any], entry)
    revision, commit = values.get("revision"), values.get("commit")
    return (
        all(isinstance(values.get(key), str) for key in ("key", "path"))
        and (revision is None or isinstance(revision, str))
        and isinstance(commit, str)
        and COMMIT.fullmatch(commit) is not None
    )


def _inside(
    path: Path, key: str, kind: type[Container], description: str, default: Container | None = None
) -> Container:
    """The value of type `kind` under `key` in a JSON file of a run; `default` without the key.

    Raises UsageError where the file cannot be read, the value has another type, or it is missing
    and there is no default. description: what the file should be, for the message.
    """
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} is not {description}: {why}; {_COPY}") from error
    value = cast(dict[str, Any], data).get(key, default) if isinstance(data, dict) else None
    if not isinstance(value, kind):
        wanted = "table" if kind is dict else "list"
        raise UsageError(f"{path} is not {description}: it has no {wanted} {key!r}; {_COPY}")
    return value


def _unwritable(path: Path, error: OSError) -> RunError:
    try:
        begun = RunDirectory.holds_results(path)  # a resume goes on where its run is
    except OSError:
        begun = True
    other = "" if begun else ", or choose another --run_dir"
    if is_full(error):
        return RunError(f"run_dir {path}: the disk is full; make room{other}")
    return RunError(f"run_dir {path} cannot be written: {error}; make it writable{other}")
