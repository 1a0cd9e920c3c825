"""What a recipe reads from outside: the models and datasets that it names, with their places."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from postgrad.core.hub import Kind, at_revision
from postgrad.data.rows import on_hub
from postgrad.models.settings import ModelSettings, looks_local
from postgrad.recipe.lines import Place

if TYPE_CHECKING:
    from postgrad.data.settings import RowSettings
    from postgrad.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Source:
    """One model or dataset. place: of its table in the resolved recipe, ("data", "sets", 0) say.
    hub: whether its path is a hub id. subset: a dataset's configuration. chat_template: a file, its
    text, or "".
    """

    place: Place
    kind: Kind
    path: str
    revision: str | None
    hub: bool
    subset: str | None = None
    split: str | None = None
    chat_template: str = ""

    @property
    def key(self) -> str:
        """ "model", "reference.model", "data.sets.0": what its keys begin with."""
        return ".".join(map(str, self.place))

    @property
    def name(self) -> str:
        """The path, at its revision."""
        return at_revision(self.path, self.revision)


def sources(recipe: Recipe) -> list[Source]:
    """Every model that the recipe's job loads and every dataset that it reads. What a role takes
    from the policy is the policy's, and not repeated.
    """
    return [*_models(recipe), *_datasets(recipe)]


def problems(recipe: Recipe) -> Iterator[tuple[Place, str]]:
    """Revisions of what has none."""
    tables: dict[Place, Any] = {("model",): recipe.model, ("data",): recipe.data}
    for role in ("reference", "critic", "reward_model"):
        if (owner := getattr(recipe, role, None)) is not None:
            tables[(role, "model")] = owner.model
    for section in ("data", "eval"):
        sets = getattr(recipe, section).sets
        tables |= {(section, "sets", number): one for number, one in enumerate(sets)}
    for place, table in tables.items():
        if table.revision is None:
            continue
        model = isinstance(table, ModelSettings)
        hub = _on_hub(table.path) if model else on_hub(table.path)
        if not hub and (model or table.path or not recipe.data.sets):
            told = repr(table.path) if table.path else "a fresh model"
            yield (*place, "revision"), f"is of an id on the hub, which {told} is not: leave it out"


def pinned(recipe: Recipe, commits: Mapping[Place, str]) -> Recipe:
    """The recipe with the revision of each place; roles that take their model from another table
    take its commit too.
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


def _tables(recipe: dict[str, Any]) -> Iterator[tuple[Kind, dict[str, Any]]]:
    """The tables of a resolved recipe that name a model or a dataset."""
    yield "model", recipe["model"]
    for role in ("reference", "critic", "reward_model"):
        if role in recipe:
            yield "model", recipe[role]["model"]
    yield "dataset", recipe["data"]
    for section in ("data", "eval"):
        for one in recipe[section]["sets"]:
            yield "dataset", one


def _on_hub(path: str | None) -> bool:
    return path is not None and not path.startswith("@") and not looks_local(path)


def _models(recipe: Recipe) -> Iterator[Source]:
    needs: Any = recipe.algorithm.needs() if recipe.job in ("rl", "preference") else None
    used = {
        "reference": needs is not None and needs.reference,
        "critic": needs is not None and getattr(needs, "critic", False),
        "reward_model": any(one.type == "reward_model" for one in getattr(recipe, "rewards", ())),
    }
    tables: dict[Place, ModelSettings] = {("model",): recipe.model}
    for role, is_used in used.items():
        owner = getattr(recipe, role, None)
        if is_used and owner is not None:
            tables[(role, "model")] = owner.model
    seen: set[str] = set()
    for place, model in tables.items():
        if model.path is None or model.path.startswith("@") or model.source in seen:
            continue
        assert model.source is not None
        seen.add(model.source)
        yield Source(place, "model", model.path, model.revision, _on_hub(model.path))


def _datasets(recipe: Recipe) -> Iterator[Source]:
    data = recipe.data
    if data.sets:
        for number, one in enumerate(data.sets):
            yield _dataset(("data", "sets", number), one, one.name)
    else:
        yield _dataset(("data",), data, data.name)
    for number, one in enumerate(recipe.eval.sets):
        yield _dataset(("eval", "sets", number), one, one.subset)


def _dataset(place: Place, rows: RowSettings, subset: str | None) -> Source:
    hub = on_hub(rows.path)
    template = rows.chat_template
    return Source(place, "dataset", rows.path, rows.revision, hub, subset, rows.split, template)
