"""Pipelines: recipes that run in order, each from the model of an earlier one (`@NAME`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from postgrad.core.errors import UsageError
from postgrad.core.settings import Settings
from postgrad.core.text import nearest
from postgrad.recipe.lines import key_lines
from postgrad.recipe.load import (
    load_with,
    names_used,
    read_text,
    read_toml,
    recipe_from_json,
    require_values,
    stage_named,
)
from postgrad.recipe.messages import Origin, explain
from postgrad.recipe.overrides import Override, apply_overrides, parse_overrides
from postgrad.recipe.recipe import Recipe

FILE = "pipeline.toml"


class PipelineSettings(Settings):
    """The keys of a pipeline.toml."""

    recipes: tuple[str, ...] = Field(min_length=1)  # files beside it, in the order of the run
    run_dir: str = Field(min_length=1)  # each recipe runs in run_dir/NAME
    # Held-out questions that plain transformers answers at the end with the last recipe's model.
    ask: int = Field(default=0, ge=0)


@dataclass(frozen=True, slots=True)
class Stage:
    """One recipe of a pipeline, called by its file's name without .toml."""

    name: str
    path: Path
    recipe: Recipe


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
    names = [Path(recipe).stem for recipe in settings.recipes]
    if len(set(names)) < len(names):
        raise UsageError(f"{path}: two recipes have the same name: {', '.join(names)}")
    of_stages = [flag for flag in flags if flag not in of_pipeline]
    stages: list[Stage] = []
    for name, file in zip(names, settings.recipes, strict=True):
        run_dir = str(Path(settings.run_dir) / name)
        stage_overrides = [
            Override(("run_dir",), run_dir, "run_dir of the pipeline"),
            *_for_stage(name, names, of_stages),
        ]
        recipe = load_with(directory / file, stage_overrides)
        for key, named in names_used(recipe):
            _check_earlier(key, named, [stage.name for stage in stages], directory / file)
        stages.append(Stage(name, directory / file, recipe))
    return Pipeline(directory.name, Path(settings.run_dir), tuple(stages), settings.ask)


def _require(path: Path) -> None:
    """Raises UsageError, which lists the recipes in it, where a folder has no pipeline.toml."""
    if path.is_file() or not path.parent.is_dir():
        return
    entries = sorted(path.parent.iterdir())
    names = [entry.name for entry in entries if entry.suffix == ".toml" or (entry / FILE).is_file()]
    hint = f": name one of {', '.join(names)}" if names else ""
    raise UsageError(f"{path.parent} is a folder without {FILE}{hint}")


def with_models(recipe: Recipe, models: Mapping[str, str]) -> Recipe:
    """The recipe with every `@NAME` replaced by that stage's exported model."""
    data: dict[str, Any] = recipe.dump()
    for place, settings in recipe.model_tables.items():
        if (name := stage_named(settings.path)) is not None:
            table: Any = data
            for key in place:
                table = table[key]
            table["path"] = models[name]
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


def _check_earlier(key: str, name: str, earlier: Sequence[str], path: Path) -> None:
    if name not in earlier:
        close = nearest(name, earlier)
        hint = (
            f"did you mean '@{close}'?"
            if close
            else f"earlier ones: {', '.join(earlier) or 'none'}"
        )
        raise UsageError(f"{path}: {key} = '@{name}' names no earlier recipe; {hint}")
