"""Which models and data a run reads: commits of the hub, contents of this machine's files.

A hub id is loaded at the commit that it meant when the run began, also after `main` has moved;
files have to be the same at a resume. What names them is part of the run's choices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.hub import at_revision, commit_of, split_revision
from postgrad.data.hub import dataset_commit
from postgrad.data.rows import local_files
from postgrad.models.files import adapter_base, is_adapter
from postgrad.models.hashes import files_hash, model_hash
from postgrad.models.settings import looks_local
from postgrad.recipe.compare import covers
from postgrad.recipe.recipe import Recipe
from postgrad.recipe.sources import Source, pinned, sources


@dataclass(frozen=True, slots=True)
class HubSource:
    """A hub id of a recipe, and its commit. revision: as the recipe asked for it; None: main."""

    key: str
    kind: str
    path: str
    revision: str | None
    commit: str

    def to_json(self) -> dict[str, Any]:
        """For recipe.json and reports."""
        return {name: getattr(self, name) for name in self.__slots__}


def pin(
    recipe: Recipe,
    before: Sequence[Mapping[str, Any]] = (),
    allowed: Sequence[str] = (),
    *,
    sections: Iterable[str] | None = None,
) -> tuple[Recipe, list[HubSource]]:
    """The recipe with a commit in place of each revision, and what was asked for.

    before: the entries of recipe.json: what asks for the same is given the same commit again,
    unless `allowed` has its key. sections: of the recipe, such as "eval", that are looked at; None:
    all. Raises UsageError where a commit is not to be had.
    """
    known = {one.get("key"): one for one in before}
    looked_at = [
        one for one in sources(recipe) if sections is None or str(one.place[0]) in sections
    ]
    found = [_resolved(one, known.get(one.key), allowed) for one in looked_at if one.hub]
    commits = {source.place: one.commit for source, one in found}
    return pinned(recipe, commits), [one for _, one in found]


def pin_model(source: str) -> str:
    """A directory as it is, a hub id at the commit that it means now. Raises UsageError where that
    is not to be had.
    """
    path, revision = split_revision(source)
    return source if looks_local(path) else at_revision(path, commit_of("model", path, revision))


def _resolved(
    source: Source, before: Mapping[str, Any] | None, allowed: Sequence[str]
) -> tuple[Source, HubSource]:
    """The same commit as before where the same was asked for, or where a resume states it."""
    asked, commit = source.revision, None
    if before is not None and before.get("path") == source.path and not _may(source, allowed):
        if asked == before.get("revision"):
            commit = before.get("commit")
        elif asked == before.get("commit"):
            asked, commit = before.get("revision"), asked
    if commit is None:
        commit = _commit_of(source, source.revision)
    else:
        _require_there(source, commit)
    return source, HubSource(source.key, source.kind, source.path, asked, commit)


def _require_there(source: Source, commit: str) -> None:
    """Raises UsageError where a recorded commit is neither in the local cache nor on the hub."""
    try:
        _commit_of(source, commit)
    except UsageError as error:
        raise UsageError(
            f"the run was started with {at_revision(source.path, commit)} ({source.key}), which is "
            f"not to be had any more: {error}. Bring it back into the cache, or go on with what "
            f"the id means now: --{source.key}.revision main --allow-change {source.key}.revision"
        ) from error


def _commit_of(source: Source, revision: str | None) -> str:
    if source.kind == "dataset":
        return dataset_commit(source.path, revision)
    return commit_of("model", source.path, revision)


def hold_to(
    recipe: Recipe, recorded: Mapping[str, str], allowed: Sequence[str] = ()
) -> dict[str, str]:
    """What names each model and dataset that the recipe (pinned) reads, by its key.

    recorded: what the newest checkpoint says, {} for a new run. Raises UsageError for what has
    changed since, unless `allowed` has its key.
    """
    found: dict[str, str] = {}
    changed: list[str] = []
    for part in chain.from_iterable(map(_parts, sources(recipe))):
        before = recorded.get(part.name, part.identity)
        found[part.name] = part.identity
        if before != part.identity and not any(covers(a, k) for a in allowed for k in part.keys):
            key = part.keys[0]
            changed.append(
                f"{key}: {part.path} is not what the run was started with: {before} there, "
                f"{part.identity} here; put it back, start a new run, or go on with "
                f"--allow-change {key}"
            )
    if changed:
        raise UsageError("\n".join(changed))
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Something that is read. name: in the choices; keys: of the recipe that may allow a change."""

    name: str
    keys: tuple[str, ...]
    path: str
    identity: str


def _parts(source: Source) -> Iterator[_Part]:
    """The source itself and its chat template, where they are named by something."""
    key, keys = source.key, ("revision", "path") if source.hub else ("path", "revision")
    if (identity := _identity(source)) is not None:
        yield _Part(key, tuple(f"{key}.{end}" for end in keys), _shown(source), identity)
    if (identity := _template(source)) is not None:
        yield _Part(
            f"{key}.chat_template", (f"{key}.chat_template",), source.chat_template, identity
        )


def _shown(source: Source) -> str:
    """The path for messages: what changed may be the base of an adapter."""
    if source.kind == "model" and not source.hub and is_adapter(source.path):
        return f"{source.path} (an adapter on {adapter_base(source.path)})"
    return source.path


def _identity(source: Source) -> str | None:
    """None of what is made by code: tasks, functions of rows, and what is not there."""
    if source.hub:
        return source.name
    path = Path(source.path).expanduser()
    try:
        if source.kind == "model":
            # the weights are in checkpoints; those that are frozen have hashes of their own; of an
            # adapter the base's files count too, or its commit on the hub
            return f"sha256:{model_hash(path, weights=False)}" if path.is_dir() else None
        files = local_files(source.path, source.subset, source.split or "train")
        return f"sha256:{files_hash(files)}" if files else None
    except OSError as error:
        raise UsageError(f"{source.path} cannot be read: {error} ({source.key}.path)") from error


def _template(source: Source) -> str | None:
    """Of a file with a chat template; its text is in the recipe."""
    if not source.chat_template or "{" in source.chat_template:
        return None
    path = Path(source.chat_template).expanduser()
    try:
        return f"sha256:{files_hash([path])}" if path.is_file() else None
    except OSError as error:
        key = f"{source.key}.chat_template"
        raise UsageError(f"{path} cannot be read: {error} ({key})") from error


def _may(source: Source, allowed: Sequence[str]) -> bool:
    return any(
        covers(one, f"{source.key}.{key}") for one in allowed for key in ("path", "revision")
    )
