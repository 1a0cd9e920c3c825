"""Pipelines: recipes that run in order, each from the model, or on the rows, of an earlier one
(`@NAME`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from postgrad.core.errors import UsageError
from postgrad.core.settings import Settings
from postgrad.core.text import nearest
from postgrad.observe.run_dir import RECIPE
from postgrad.recipe.lines import key_lines
from postgrad.recipe.load import (
    data_tables,
    load_with,
    names_used,
    read_text,
    read_toml,
    recipe_from_json,
    require_values,
    rows_used,
    stage_named,
)
from postgrad.recipe.messages import Origin, explain
from postgrad.recipe.overrides import Override, apply_overrides, parse_overrides
from postgrad.recipe.recipe import Answering, Recipe

FILE = "pipeline.toml"


SelectedRows = Literal["all", "best", "above", "pairs", "difficulty"]
PairKind = Literal["best_worst", "random", "all"]


class GenerateSettings(Settings):
    """A stage that samples and selects rows instead of training: the flags of `postgrad generate`.
    What is left out is as there.
    """

    samples: int | None = Field(default=None, ge=1)  # of each prompt
    rows: int | None = Field(default=None, ge=1)  # the first prompts only
    shard: int | None = Field(default=None, ge=1)  # prompts of one file of samples
    select: SelectedRows = "all"  # which samples become rows
    top: int = Field(default=1, ge=1)  # of "best": answers of a prompt
    threshold: float | None = None  # of "best" and "above": the lowest reward
    pairs: PairKind = "best_worst"  # of "pairs"
    margin: float = Field(default=0.0, ge=0.0)  # of "pairs": rewards differ by more
    pass_rate: tuple[float, float] = (0.0, 1.0)  # of "difficulty": lowest and highest share
    keep_truncated: bool = False  # answers that were cut may be chosen
    format: Literal["jsonl", "parquet"] = "jsonl"  # of the rows

    @model_validator(mode="after")
    def _selects_something(self) -> Self:
        low, high = self.pass_rate
        if not 0 <= low <= high <= 1:
            raise ValueError("pass_rate: two shares from 0 to 1, the lower one first")
        if self.select == "above" and self.threshold is None:
            raise ValueError('select = "above" needs threshold: the lowest reward of a row')
        return self


class PipelineSettings(Settings):
    """The keys of a pipeline.toml."""

    recipes: tuple[str, ...] = Field(min_length=1)  # files beside it, in the order of the run
    run_dir: str = Field(min_length=1)  # each recipe runs in run_dir/NAME
    # Held-out questions that plain transformers answers at the end with the last recipe's model.
    ask: int = Field(default=0, ge=0)
    generate: dict[str, GenerateSettings] = {}  # the recipes, by name, that sample and do not train


@dataclass(frozen=True, slots=True)
class Stage:
    """One recipe of a pipeline, called by its file's name without .toml."""

    name: str
    path: Path
    recipe: Recipe
    generate: GenerateSettings | None = None  # None: it trains

    @property
    def rows(self) -> Path:
        """The file of the rows that a generating stage selects."""
        assert self.generate is not None
        return Path(self.recipe.run_dir) / f"{self.generate.select}.{self.generate.format}"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Recipes in the order in which they run."""

    name: str  # of the folder
    run_dir: Path  # each stage runs in run_dir/NAME
    stages: tuple[Stage, ...]
    ask: int  # questions that the last stage's model answers at the end; 0: none


def load_pipeline(directory: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """The pipeline of directory/pipeline.toml, every recipe parsed before the first one runs.

    `--NAME.section.key value` is for one stage, `--run_dir` and `--ask` for the pipeline, and every
    other override for all stages. Raises UsageError with the file and line of what is wrong.
    """
    path = directory / FILE
    _require(path)
    text = read_text(path)
    raw = read_toml(path, text)
    flags = parse_overrides(overrides)
    fields = [(name,) for name in PipelineSettings.model_fields]
    of_pipeline = [flag for flag in flags if flag.place[:1] in fields]
    raw = apply_overrides(raw, of_pipeline)
    origin = Origin(str(path), raw, key_lines(text), of_pipeline)
    require_values(raw, origin)
    try:
        settings = PipelineSettings.model_validate(raw)
    except ValidationError as error:
        raise explain(error, PipelineSettings, origin) from error
    names = _names(settings, path)
    of_stages = [flag for flag in flags if flag not in of_pipeline]
    stages: list[Stage] = []
    for name, file in zip(names, settings.recipes, strict=True):
        run_dir = str(Path(settings.run_dir) / name)
        stage_overrides = [
            Override(("run_dir",), run_dir, "run_dir of the pipeline"),
            *_for_stage(name, names, of_stages),
        ]
        recipe = load_with(directory / file, stage_overrides)
        stage = Stage(name, directory / file, recipe, settings.generate.get(name))
        _check_stage(stage, stages)
        stages.append(stage)
    return Pipeline(directory.name, Path(settings.run_dir), tuple(stages), settings.ask)


def _names(settings: PipelineSettings, path: Path) -> list[str]:
    """The names of the stages. Raises UsageError where they cannot be told apart, and for tables of
    [generate] without a stage.
    """
    names = [Path(recipe).stem for recipe in settings.recipes]
    if len(set(names)) < len(names):
        raise UsageError(f"{path}: two recipes have the same name: {', '.join(names)}")
    for name in settings.generate:
        if name not in names:
            close = nearest(name, names)
            hint = f"did you mean {close!r}?" if close else f"recipes: {', '.join(names)}"
            raise UsageError(f"{path}: [generate.{name}] names no recipe; {hint}")
    if taken := PipelineSettings.model_fields.keys() & set(names):
        raise UsageError(
            f"{path}: a recipe cannot be called {min(taken)}, which is a key of {FILE}: name its "
            "file otherwise"
        )
    if names[-1] in settings.generate:
        raise UsageError(
            f"{path}: the last recipe, {names[-1]}, only generates: put the recipe that trains on "
            "its rows behind it, or run `postgrad generate`"
        )
    return names


def _check_stage(stage: Stage, earlier: Sequence[Stage]) -> None:
    """Raises UsageError where `@NAME` names no earlier stage of the right kind, and where a recipe
    that is to generate samples nothing, and for two runs with one mirror.
    """
    trained = [other.name for other in earlier if other.generate is None]
    generated = [other.name for other in earlier if other.generate is not None]
    mirrors = {other.recipe.checkpoint.mirror.rstrip("/"): other.name for other in earlier}
    if (mirror := stage.recipe.checkpoint.mirror.rstrip("/")) and mirror in mirrors:
        raise UsageError(
            f"{stage.path}: checkpoint.mirror = {mirror!r} is the mirror of {mirrors[mirror]} too, "
            f"and each run has a folder of its own: --{stage.name}.checkpoint.mirror names one"
        )
    for key, name in names_used(stage.recipe):
        _check_earlier(key, name, trained, stage.path, "recipe that trains a model")
    for key, name in rows_used(stage.recipe):
        _check_earlier(key, name, generated, stage.path, "recipe that generates rows")
    if stage.generate is not None and not isinstance(stage.recipe, Answering):
        raise UsageError(
            f'{stage.path}: job = "{stage.recipe.job}" reads pairs: [generate.{stage.name}] takes '
            'a recipe of job = "rl" or "sft"'
        )


def _require(path: Path) -> None:
    """Raises UsageError where a folder has no pipeline.toml. It lists the recipes in it, and says
    what goes on with a run.
    """
    if path.is_file() or not (folder := path.parent).is_dir():
        return
    if (folder / RECIPE).is_file():
        raise UsageError(f"{folder} is a run, not a recipe: postgrad resume {folder} continues it")
    entries = sorted(folder.iterdir())
    paths = [entry for entry in entries if entry.suffix == ".toml" or (entry / FILE).is_file()]
    hint = f": give a recipe, such as {' or '.join(map(str, paths))}" if paths else ""
    raise UsageError(f"{folder} is a folder without {FILE}{hint}")


def with_models(recipe: Recipe, models: Mapping[str, str]) -> Recipe:
    """The recipe with every `@NAME` of a model replaced by that stage's exported model."""
    data: dict[str, Any] = recipe.dump()
    for place, settings in recipe.model_tables.items():
        if (name := stage_named(settings.path)) is not None:
            table: Any = data
            for key in place:
                table = table[key]
            table["path"] = models[name]
    return recipe_from_json(data)


def with_rows(recipe: Recipe, rows: Mapping[str, str]) -> Recipe:
    """The recipe with `@NAME` of data replaced by the file of that stage's rows; a name that `rows`
    lacks stays.
    """
    data: dict[str, Any] = recipe.dump()
    for _, table in data_tables(data):
        name = stage_named(table.get("path"))
        if name is not None and name in rows:
            table["path"] = rows[name]
    return recipe_from_json(data)


def _for_stage(name: str, names: Sequence[str], overrides: Sequence[Override]) -> list[Override]:
    """The overrides of one stage: those with its name, which is taken off, and those of all stages.

    names: of all stages.
    """
    selected: list[Override] = []
    for override in overrides:
        prefix = override.place[:1]
        if prefix == (name,) and len(override.place) > 1:
            selected.append(Override(override.place[1:], override.value, override.flag))
        elif prefix not in [(stage,) for stage in names]:
            selected.append(override)
    return selected


def _check_earlier(key: str, name: str, earlier: Sequence[str], path: Path, kind: str) -> None:
    if name not in earlier:
        close = nearest(name, earlier)
        hint = (
            f"did you mean '@{close}'?"
            if close
            else f"earlier ones: {', '.join(earlier) or 'none'}"
        )
        raise UsageError(f"{path}: {key} = '@{name}' names no earlier {kind}; {hint}")
