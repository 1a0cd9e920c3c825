"""Sweeps: one recipe, or one pipeline, with several values of some keys; every combination of them
is a run.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import tomlkit
from pydantic import Field

from postgrad.core.errors import UsageError
from postgrad.core.files import write_json, write_text
from postgrad.core.settings import Settings
from postgrad.core.untrusted import read_json, reason, shown
from postgrad.recipe.compare import differences
from postgrad.recipe.load import as_toml, load_recipe, require_runnable, with_overrides
from postgrad.recipe.overrides import ALTERNATIVES, parse_overrides
from postgrad.recipe.pipeline import FILE, Pipeline, load_pipeline
from postgrad.recipe.recipe import Recipe

SWEEP = "sweep.json"
RECIPES = "recipes"  # the folder of the runs' recipes in the directory of a sweep
MOST_RUNS = 256
MOST_NAME = 120  # characters of a run's name, which is a folder's
UNSAFE = re.compile(r"[^A-Za-z0-9._+=,-]+")
NAME = re.compile(r"[A-Za-z0-9_+=,-][A-Za-z0-9._+=,-]*")
OF_THE_SWEEP = (
    "run_dir",
    "checkpoint.ckpt_path",
    "checkpoint.mirror",
    "checkpoint.push_to_hub",
)


@dataclass(frozen=True, slots=True)
class SweptKey:
    """A key of `--sweep` with its values."""

    key: str  # "learner.lr", of a pipeline's stage "rl.learner.lr"
    values: tuple[str, ...]  # as they were typed, which is TOML or a bare text


@dataclass(frozen=True, slots=True)
class SweptRun:
    """A run of a sweep."""

    name: str  # of its directory in that of the sweep: "lr=1e-4"
    values: Mapping[str, str]  # by swept key, as they were typed
    source: Recipe | Pipeline

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Its recipe, or those of the pipeline's stages in their order."""
        if isinstance(self.source, Pipeline):
            return tuple(stage.recipe for stage in self.source.stages)
        return (self.source,)

    @property
    def path(self) -> Path:
        """The run directory, of a pipeline that above its stages."""
        source = self.source
        return source.run_dir if isinstance(source, Pipeline) else Path(source.run_dir)

    @property
    def judged(self) -> Path:
        """The run directory whose results count: of a pipeline that of the last stage."""
        return Path(self.recipes[-1].run_dir)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep and the directory that holds theirs."""

    path: Path
    keys: tuple[str, ...]
    trials: tuple[SweptRun, ...]

    def recipe_of(self, trial: SweptRun) -> Path:
        """The file, or the folder with pipeline.toml, that a trial is run from."""
        folder = self.path / RECIPES
        pipeline = isinstance(trial.source, Pipeline)
        return folder / (trial.name if pipeline else f"{trial.name}.toml")

    def write(self) -> None:
        """Writes sweep.json, and every trial's recipe with all of its keys."""
        for trial in self.trials:
            target = self.recipe_of(trial)
            (target if isinstance(trial.source, Pipeline) else target.parent).mkdir(
                parents=True, exist_ok=True
            )
            if isinstance(trial.source, Recipe):
                write_text(target, as_toml(trial.source.dump()))
                _require_same(target, trial.source)
                continue
            stages = trial.source.stages
            for stage in stages:
                write_text(target / f"{stage.name}.toml", as_toml(stage.recipe.dump()))
            settings = {
                "recipes": [f"{stage.name}.toml" for stage in stages],
                "run_dir": str(trial.source.run_dir),
                "ask": trial.source.ask,
                "generate": {
                    stage.name: stage.generate.model_dump(mode="json", exclude_none=True)
                    for stage in stages
                    if stage.generate is not None
                },
            }
            write_text(target / FILE, tomlkit.dumps(settings))
        runs = [{"name": trial.name, "values": dict(trial.values)} for trial in self.trials]
        write_json(self.path / SWEEP, {"keys": list(self.keys), "runs": runs})

    def with_earlier(self) -> "Sweep":
        """This sweep with the runs of an earlier command in the same directory. Raises UsageError
        where that swept other keys.
        """
        if not is_sweep(self.path):
            return self
        earlier = read_sweep(self.path)
        if earlier.keys != self.keys:
            raise UsageError(
                f"{self.path} holds a sweep over {', '.join(earlier.keys)}: choose another "
                "--run_dir, or replace it with --overwrite true"
            )
        names = {trial.name for trial in self.trials}
        kept = tuple(trial for trial in earlier.trials if trial.name not in names)
        return Sweep(self.path, self.keys, (*kept, *self.trials))


def _require_same(path: Path, recipe: Recipe) -> None:
    """Raises UsageError where the file says something else than the recipe, because one of its keys
    is None and TOML has no null.
    """
    lost = next(differences(recipe.dump(), load_recipe(path).dump()), None)
    if lost is not None:
        raise UsageError(f"{lost} has no value that a recipe file can state: give it one")


def is_sweep(path: Path) -> bool:
    """Whether a directory is that of a sweep."""
    return (path / SWEEP).is_file()


class _Run(Settings):
    """A run as sweep.json names it."""

    name: str = Field(pattern=rf"^{NAME.pattern}$", max_length=MOST_NAME)
    values: dict[str, str]


class _SweepFile(Settings):
    """The content of sweep.json."""

    keys: tuple[str, ...] = Field(min_length=1)
    runs: tuple[_Run, ...] = Field(min_length=1, max_length=MOST_RUNS)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises UsageError where the file is not one that a sweep wrote."""
        try:
            return cls.model_validate(read_json(path))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {reason(error)}") from error
        except ValueError as error:  # no JSON, or another content
            raise UsageError(f"{path} is not one that a sweep wrote: {error}") from error


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """The sweep in a directory, its recipes changed by `overrides`. Raises UsageError where there
    is none, or a recipe of it cannot be read.
    """
    file = _SweepFile.read(path / SWEEP)
    trials: list[SweptRun] = []
    for run in file.runs:
        pipeline = path / RECIPES / run.name
        source: Recipe | Pipeline
        if pipeline.is_dir():
            if overrides:
                raise UsageError(
                    f"{path} is a sweep of a pipeline, which resumes unchanged: to change a key, "
                    "give the command of the sweep again with it"
                )
            source = load_pipeline(pipeline, ["--run_dir", str(path / run.name)])
        else:
            recipe = load_recipe(pipeline.with_name(f"{run.name}.toml"))
            source = with_overrides(recipe, [*overrides, "--run_dir", str(path / run.name)])
        trials.append(SweptRun(run.name, run.values, source))
    return Sweep(path, file.keys, tuple(trials))


def sweep_of(source: Path | Recipe, overrides: Sequence[str], swept: Sequence[SweptKey]) -> Sweep:
    """Every combination of the swept values, the first key's changing most slowly.

    source: a recipe, its file, or a folder with pipeline.toml. Raises UsageError with a line for
    everything that is wrong: keys, values that the recipe refuses, runs that would be the same.
    """
    _require_keys(swept, overrides)
    count = 1
    for key in swept:
        count *= len(key.values)
    if count > MOST_RUNS:
        raise UsageError(f"--sweep makes {count} runs, and {MOST_RUNS} is the most")
    combinations = [
        dict(zip((key.key for key in swept), values, strict=True))
        for values in itertools.product(*(key.values for key in swept))
    ]
    short = short_names([key.key for key in swept])
    problems: dict[str, None] = {}
    trials: list[SweptRun] = []
    names: list[str] = []
    folder: Path | None = None
    for values in combinations:
        words = [*overrides, *(f"--{key}={text}" for key, text in values.items())]
        name = _name({short[key]: text for key, text in values.items()}, names)
        names.append(name)
        try:
            folder = folder or _run_dir(source, words)
            trial = SweptRun(name, values, _load(source, [*words, f"--run_dir={folder / name}"]))
            for recipe in trial.recipes if isinstance(trial.source, Recipe) else ():
                require_runnable(recipe)
            trials.append(trial)
        except UsageError as error:
            problems |= dict.fromkeys(str(error).splitlines())
    if problems:
        raise UsageError("\n".join(_without_repeats(problems)))
    assert folder is not None  # there is at least one run
    _require_apart(trials)
    return Sweep(folder, tuple(key.key for key in swept), tuple(trials))


def parse_swept(words: Sequence[str]) -> list[SweptKey]:
    """Reads "learner.lr=1e-4,3e-4": a key, then its values between commas. A comma in quotes or
    brackets is a part of a value. Raises UsageError where a word is not of that form.
    """
    swept: list[SweptKey] = []
    for word in words:
        key, equals, text = word.partition("=")
        values = tuple(_values(text))
        if not equals or not key or not all(values):
            raise UsageError(
                f"--sweep {shown(word)}: a key and its values are wanted, such as "
                "learner.lr=1e-4,3e-4"
            )
        swept.append(SweptKey(key.removeprefix("--"), values))
    return swept


def swept_in_python(values: Mapping[str, Sequence[Any]]) -> list[SweptKey]:
    """{"learner.lr": [1e-4, 3e-4]} as swept keys. Raises UsageError for a value that TOML lacks,
    and where there are none.
    """
    if not values:
        raise UsageError('a sweep needs values of at least one key: {"learner.lr": [1e-4, 3e-4]}')
    swept: list[SweptKey] = []
    for key, several in values.items():
        try:
            items: list[Any] = [tomlkit.item(value) for value in several]
            texts = tuple(str(item.as_string()) for item in items)
        except (TypeError, ValueError) as error:
            raise UsageError(f"sweep over {key}: {error}") from error
        if not texts:
            raise UsageError(f"sweep over {key}: it has no values")
        swept.append(SweptKey(key, texts))
    return swept


def _values(text: str) -> Iterator[str]:
    """The parts of `text` between commas outside quotes and brackets."""
    part, depth, quote = "", 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            yield part.strip()
            part = ""
            continue
        part += letter
    yield part.strip()


def _require_keys(swept: Sequence[SweptKey], overrides: Sequence[str]) -> None:
    """Raises UsageError where a key is swept twice, stated beside, or every run needs its own."""
    names = [key.key for key in swept]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--sweep {name} is given twice: list all of its values in one")
        if name in OF_THE_SWEEP:
            raise UsageError(f"--sweep {name}: the sweep chooses it, a value for each run")
    stated = {
        ".".join(map(str, override.place)): override for override in parse_overrides(overrides)
    }
    for name in names:
        for key, override in stated.items():
            if name == key or name.startswith(f"{key}.") or key.startswith(f"{name}."):
                raise UsageError(f"{override.flag}: --sweep {name} gives its values: leave one out")
    for alternatives in ALTERNATIVES:
        both = [name for name in names if tuple(name.split(".")) in alternatives]
        if len(both) > 1:
            raise UsageError(f"--sweep {' and '.join(both)} state one quantity: sweep one of them")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """By key its last part, where no other swept key ends so; else the whole key."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if last.count(name) == 1 and not name.isdecimal() else key
        for key, name in zip(keys, last, strict=True)
    }


def _name(values: Mapping[str, str], taken: Sequence[str]) -> str:
    """The folder of a run: "lr=1e-4,seed=1"."""
    texts = [f"{key}={text.strip(chr(34))}" for key, text in values.items()]
    name = UNSAFE.sub("-", ",".join(texts))[:MOST_NAME].lstrip(".")
    if name in taken:  # "a/b" and "a b", or two long texts that begin alike
        name = f"{name[: MOST_NAME - 4]}+{1 + len(taken)}"
    return name


def _run_dir(source: Path | Recipe, words: Sequence[str]) -> Path:
    loaded = _load(source, words)
    return Path(loaded.run_dir)


def _load(source: Path | Recipe, words: Sequence[str]) -> Recipe | Pipeline:
    if not isinstance(source, Path):
        return with_overrides(source, words)
    return load_pipeline(source, words) if source.is_dir() else load_recipe(source, words)


def _without_repeats(problems: Mapping[str, None]) -> list[str]:
    """The lines of messages; of several that differ only in the value of a flag, the first."""
    lines: dict[str, str] = {}
    for line in problems:
        flag, _, rest = line.partition(": ")
        lines.setdefault(f"{flag.partition(' ')[0]}: {rest}" if rest else line, line)
    return list(lines.values())


def _require_apart(trials: Sequence[SweptRun]) -> None:
    """Raises UsageError where two runs are the same, or would write to one place."""
    for recipe in trials[0].recipes:
        for key, value in (
            ("checkpoint.ckpt_path", recipe.checkpoint.ckpt_path),
            ("checkpoint.mirror", recipe.checkpoint.mirror),
            ("checkpoint.push_to_hub", recipe.checkpoint.push_to_hub),
        ):
            if value and len(trials) > 1:
                raise UsageError(
                    f"{key} = {shown(value)}: all runs of the sweep would write there; leave it out"
                )
    names: dict[str, str] = {}
    for trial in trials:
        dumps = [{**recipe.dump(), "run_dir": None} for recipe in trial.recipes]
        first = names.setdefault(repr(dumps), trial.name)
        if first != trial.name:
            raise UsageError(f"--sweep: {first} and {trial.name} are the same run: leave one out")
