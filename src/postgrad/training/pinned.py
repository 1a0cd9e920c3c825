"""The identity of models and data that a run reads: commits on the hub, hashes of local files.

A hub id is loaded at the commit that it meant when the run began, also after `main` has moved;
local files have to be the same at a resume. Commits and hashes are part of the run's choices.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.hub import at_revision, commit_of, split_revision
from postgrad.data.hub import dataset_commit
from postgrad.data.rows import local_files
from postgrad.models.files import adapter_base, is_adapter
from postgrad.models.save import files_hash, model_hash
from postgrad.models.settings import looks_local
from postgrad.recipe.compare import covers
from postgrad.recipe.hub_sources import RecipeSource, pinned, sources
from postgrad.recipe.load import require_models
from postgrad.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class HubSource:
    """A hub id of a recipe, resolved to a commit."""

    key: str  # of the recipe's section: "model", "data.sets.0"
    kind: str  # "model" or "dataset"
    path: str  # the hub id
    revision: str | None  # that the recipe asks for; None: main
    commit: str

    def to_json(self) -> dict[str, Any]:
        """Its entry in recipe.json and reports."""
        return {name: getattr(self, name) for name in self.__slots__}


def pin(
    recipe: Recipe,
    before: Sequence[Mapping[str, Any]] = (),
    allowed: Sequence[str] = (),
    *,
    sections: Collection[str] | None = None,
) -> tuple[Recipe, list[HubSource]]:
    """The recipe with a commit in place of each revision of a hub id, and these hub ids.

    before: the entries of recipe.json. A source that asks for the same revision as before keeps its
    commit, unless `allowed` has its key. sections: the recipe sections to resolve, such as "eval";
    None: all. Raises UsageError where a commit cannot be found, and for the model or the rows of a
    pipeline's stage.
    """
    require_models(recipe, sections)
    recorded = {entry.get("key"): entry for entry in before}
    looked_at = [
        source for source in sources(recipe) if sections is None or str(source.place[0]) in sections
    ]
    resolved = [
        _resolved(source, recorded.get(source.key), allowed) for source in looked_at if source.hub
    ]
    commits = {source.place: hub_source.commit for source, hub_source in resolved}
    return pinned(recipe, commits), [hub_source for _, hub_source in resolved]


def pin_model(source: str) -> str:
    """A local path unchanged, a hub id with the commit that it means now. Raises UsageError where
    the commit cannot be found.
    """
    path, revision = split_revision(source)
    return source if looks_local(path) else at_revision(path, commit_of("model", path, revision))


def _resolved(
    source: RecipeSource, before: Mapping[str, Any] | None, allowed: Sequence[str]
) -> tuple[RecipeSource, HubSource]:
    """The source with its commit: that of `before` where the same revision is asked for, or where
    the recipe of a resume states that commit.
    """
    asked, commit = source.revision, None
    if (
        before is not None
        and before.get("path") == source.path
        and not _change_allowed(source, allowed)
    ):
        if asked == before.get("revision"):
            commit = before.get("commit")
        elif asked == before.get("commit"):
            asked, commit = before.get("revision"), asked
    if commit is None:
        commit = _commit_of(source, source.revision)
    else:
        _require_there(source, commit)
    return source, HubSource(source.key, source.kind, source.path, asked, commit)


def _require_there(source: RecipeSource, commit: str) -> None:
    """Raises UsageError where a recorded commit is neither in the local cache nor on the hub."""
    try:
        _commit_of(source, commit)
    except UsageError as error:
        raise UsageError(
            f"the run was started with {at_revision(source.path, commit)} ({source.key}), which "
            f"cannot be found any more: {error}. Restore it in the cache, or continue with what "
            f"the id means now: --{source.key}.revision main --allow-change {source.key}.revision"
        ) from error


def _commit_of(source: RecipeSource, revision: str | None) -> str:
    if source.kind == "dataset":
        return dataset_commit(source.path, revision)
    return commit_of("model", source.path, revision)


def require_same_sources(
    recipe: Recipe,
    recorded: Mapping[str, str],
    allowed: Sequence[str] = (),
    *,
    since: str = "the run started",
    remedy: str = "start a new run, or accept it with --allow-change {key}",
) -> dict[str, str]:
    """The identity (commit or hash) of each model and dataset that a pinned recipe reads, by key.

    recorded: the identities in the newest checkpoint, {} for a new run. since, remedy: for the
    message. Raises UsageError for a source that has changed since, unless `allowed` has its key.
    """
    identities: dict[str, str] = {}
    changed: list[str] = []
    for part in chain.from_iterable(map(_parts, sources(recipe))):
        before = recorded.get(part.name, part.identity)
        identities[part.name] = part.identity
        if before != part.identity and not any(covers(a, k) for a in allowed for k in part.keys):
            key = part.keys[0]
            changed.append(
                f"{key}: {part.path} has changed since {since}: it was {before}, "
                f"now {part.identity}; restore it, {remedy.format(key=key)}"
            )
    if changed:
        raise UsageError("\n".join(changed))
    return identities


@dataclass(frozen=True, slots=True)
class _Part:
    """A model, dataset or chat template that is read."""

    name: str  # in the choices: "data", "data.chat_template"
    keys: tuple[str, ...]  # recipe keys of which --allow-change permits another identity
    path: str
    identity: str  # "ORG/NAME@COMMIT" or "sha256:..."


def _parts(source: RecipeSource) -> Iterator[_Part]:
    """The source itself and its chat template, where they have an identity."""
    key, keys = source.key, ("revision", "path") if source.hub else ("path", "revision")
    if (identity := _identity(source)) is not None:
        yield _Part(key, tuple(f"{key}.{end}" for end in keys), _shown(source), identity)
    if (identity := _template(source)) is not None:
        yield _Part(
            f"{key}.chat_template", (f"{key}.chat_template",), source.chat_template, identity
        )


def _shown(source: RecipeSource) -> str:
    """The path for messages: what changed may be the base of an adapter."""
    if source.kind == "model" and not source.hub and is_adapter(source.path):
        return f"{source.path} (an adapter on {adapter_base(source.path)})"
    return source.path


def _identity(source: RecipeSource) -> str | None:
    """The hub id with its commit, or the hash of local files. None for data made by code (tasks,
    functions of rows) and for missing files. Raises UsageError where a file cannot be read.
    """
    if source.hub:
        return source.name
    path = Path(source.path).expanduser()
    try:
        if source.kind == "model":
            # the weights are in checkpoints; those that are frozen have hashes of their own; of an
            # adapter the base's files count too, or its commit on the hub
            return f"sha256:{model_hash(path, weights=False)}" if path.is_dir() else None
        with suppress(UsageError):  # no such file of a folder: whoever reads its rows says so
            files = local_files(source.path, source.subset, source.split or "train")
            return f"sha256:{files_hash(files)}" if files else None
        return None
    except OSError as error:
        raise UsageError(f"{source.path} cannot be read: {error} ({source.key}.path)") from error


def _template(source: RecipeSource) -> str | None:
    """The hash of a chat template's file; None where the recipe holds its text, or no file exists.
    Raises UsageError where the file cannot be read.
    """
    if not source.chat_template or "{" in source.chat_template:
        return None
    path = Path(source.chat_template).expanduser()
    try:
        return f"sha256:{files_hash([path])}" if path.is_file() else None
    except OSError as error:
        key = f"{source.key}.chat_template"
        raise UsageError(f"{path} cannot be read: {error} ({key})") from error


def _change_allowed(source: RecipeSource, allowed: Sequence[str]) -> bool:
    return any(
        covers(allowed_key, f"{source.key}.{key}")
        for allowed_key in allowed
        for key in ("path", "revision")
    )
