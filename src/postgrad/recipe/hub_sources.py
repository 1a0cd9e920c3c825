"""The models and datasets that a recipe names, and their revisions on the hub."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from postgrad.core.hub import RepoKind, at_revision
from postgrad.data.rows import on_hub
from postgrad.data.settings import RowSettings
from postgrad.models.settings import looks_local
from postgrad.recipe.lines import KeyPath, RecipeProblem
from postgrad.recipe.settings import Sections

_SectionsT = TypeVar("_SectionsT", bound=Sections)


@dataclass(frozen=True, slots=True)
class RecipeSource:
    """One model or dataset that a recipe names."""

    place: KeyPath  # of its table in the resolved recipe: ("data", "sets", 0)
    kind: RepoKind
    path: str  # a hub id, a file or a directory
    revision: str | None  # branch, tag or commit on the hub
    hub: bool  # whether `path` is a hub id
    subset: str | None = None  # a dataset's configuration: "main" of openai/gsm8k
    split: str | None = None  # of a dataset
    chat_template: str = ""  # of a dataset: a file, the template's text, or ""

    @property
    def key(self) -> str:
        """The place as the start of a dotted key: "model", "reference.model", "data.sets.0"."""
        return ".".join(map(str, self.place))

    @property
    def name(self) -> str:
        """The path, at its revision."""
        return at_revision(self.path, self.revision)


def sources(recipe: Sections) -> list[RecipeSource]:
    """Every model that the recipe's job loads and every dataset that it reads. A model that several
    roles start from is listed once.
    """
    return [*_models(recipe), *_datasets(recipe)]


def revision_problems(recipe: Sections) -> Iterator[RecipeProblem]:
    """A `revision` beside a path that is no hub id."""
    for place, model in recipe.model_tables.items():
        if model.revision is not None and not _on_hub(model.path):
            yield _needless_revision(place, model.path or "")
    datasets: dict[KeyPath, RowSettings] = {("data",): recipe.data}
    for section, sets in (("data", recipe.data.sets), ("eval", recipe.eval.sets)):
        datasets |= {(section, "sets", number): dataset for number, dataset in enumerate(sets)}
    for place, dataset in datasets.items():
        shared = not dataset.path and recipe.data.sets  # [data] says it for its sets
        if dataset.revision is not None and not on_hub(dataset.path) and not shared:
            yield _needless_revision(place, dataset.path)


def _needless_revision(place: KeyPath, path: str) -> RecipeProblem:
    source = repr(path) if path else "a fresh model"
    return (*place, "revision"), f"is of an id on the hub, which {source} is not: leave it out"


def pinned(recipe: _SectionsT, commits: Mapping[KeyPath, str]) -> _SectionsT:
    """The recipe with its revisions replaced by commits. commits: by the place of a source; every
    other table with the same path and revision takes the commit too.
    """
    if not commits:
        return recipe
    tables = recipe.dump()
    of_source = {
        (source.kind, source.name): commits[source.place]
        for source in sources(recipe)
        if source.place in commits
    }
    for kind, table in _tables(tables):
        if table.get("path"):
            name = at_revision(table["path"], table.get("revision"))
            if (commit := of_source.get((kind, name))) is not None:
                table["revision"] = commit
    return type(recipe).model_validate_json(json.dumps(tables), strict=True)


def _tables(recipe: dict[str, Any]) -> Iterator[tuple[RepoKind, dict[str, Any]]]:
    """The tables of a resolved recipe that name a model or a dataset."""
    yield "model", recipe["model"]
    for role in ("reference", "critic", "reward_model", "teacher"):
        if role in recipe:
            yield "model", recipe[role]["model"]
            for other in recipe[role].get("sets", ()):
                yield "model", other["model"]
    yield "dataset", recipe["data"]
    for section in ("data", "eval"):
        for dataset in recipe[section]["sets"]:
            yield "dataset", dataset


def _on_hub(path: str | None) -> bool:
    return path is not None and not path.startswith("@") and not looks_local(path)


def _models(recipe: Sections) -> Iterator[RecipeSource]:
    seen: set[str] = set()
    for place, model in recipe.loaded_models.items():
        if model.path is None or model.path.startswith("@") or model.source in seen:
            continue
        assert model.source is not None
        seen.add(model.source)
        yield RecipeSource(place, "model", model.path, model.revision, _on_hub(model.path))


def _datasets(recipe: Sections) -> Iterator[RecipeSource]:
    data = recipe.data
    if data.sets:
        for number, dataset in enumerate(data.sets):
            yield _dataset(("data", "sets", number), dataset, dataset.name)
    else:
        yield _dataset(("data",), data, data.name)
    for number, eval_set in enumerate(recipe.eval.sets):
        yield _dataset(("eval", "sets", number), eval_set, eval_set.subset)


def _dataset(place: KeyPath, rows: RowSettings, subset: str | None) -> RecipeSource:
    hub = on_hub(rows.path)
    template = rows.chat_template
    return RecipeSource(
        place, "dataset", rows.path, rows.revision, hub, subset, rows.split, template
    )
