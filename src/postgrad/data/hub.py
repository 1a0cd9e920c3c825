"""Rows of datasets on the hub, read from its cache at the commit that a run has recorded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.hub import COMMIT, commit_of
from postgrad.data.files import RowValues, holds_bytes, plain


def read_hub(
    path: str, name: str | None, split: str, revision: str | None = None, *, images: str = ""
) -> Iterator[tuple[str, RowValues]]:
    """(place, values) of each row of one split; columns of images and sounds are left out, but the
    column `images`, whose bytes become data URLs.

    revision: a branch, tag or commit; None: main. Raises UsageError when the hub has no such
    dataset, revision, configuration or split, or cannot be reached and the cache has other rows.
    """
    # these imports take a second and only hub datasets need them
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        table: Any = datasets.load_dataset(path, name, split=split, revision=revision)
        if (commit := _commit_of(table)) is not None and _is_another(commit, revision):
            # `datasets` takes the newest of its cache, whatever revision, where it gets no answer
            table = _cached(path, name, split, str(revision), commit)
    except (OSError, ValueError, DatasetsError) as error:
        at = "" if revision is None else f", data.revision {revision!r}"
        raise UsageError(
            f"dataset {path!r} (data.name {name!r}, data.split {split!r}{at}): {error}; "
            "a file or folder on this machine works too: --data.path FILE"
        ) from error
    fields = [field for field in table.features.arrow_schema if holds_bytes(field.type)]
    media = [field.name for field in fields if field.name != images]
    kept = table.remove_columns(media)
    for row, values in enumerate(_undecoded(kept) if len(media) < len(fields) else kept):
        yield f"{path} {split} row {row}", {key: plain(value) for key, value in values.items()}


def _undecoded(table: Any) -> Iterator[dict[str, Any]]:
    """Rows as Arrow has them: images as bytes and path, where `datasets` would decode them."""
    for batch in table.with_format("arrow").iter(batch_size=256):
        yield from batch.to_pylist()


def cached_datasets(path: str) -> list[str]:
    """The commits of a hub dataset whose rows are in the cache of `datasets`."""
    return sorted(
        {folder.name for folder in _folder(path).glob("*/*/*") if COMMIT.fullmatch(folder.name)}
    )


def dataset_commit(path: str, revision: str | None) -> str:
    """The commit that `revision` names. Where neither the hub nor its cache knows main, it is the
    commit whose rows `datasets` prepared last. Raises UsageError where there is none.
    """
    if revision in cached_datasets(path):
        return str(revision)
    try:
        return commit_of("dataset", path, revision)
    except UsageError:
        prepared = [
            folder for folder in _folder(path).glob("*/*/*") if COMMIT.fullmatch(folder.name)
        ]
        if revision is not None or not prepared:
            raise
        return max(prepared, key=lambda folder: folder.stat().st_mtime).name


def _folder(path: str) -> Path:
    """Where `datasets` keeps a dataset's configurations: CONFIGURATION/VERSION/COMMIT."""
    import datasets.config
    from datasets.naming import camelcase_to_snakecase

    *owner, name = path.split("/")
    return Path(datasets.config.HF_DATASETS_CACHE) / "___".join(
        [*owner, camelcase_to_snakecase(name)]
    )


def _commit_of(table: Any) -> str | None:
    """The commit of a table's rows: the name of its cache folder, None if that is no commit."""
    files = table.cache_files
    name = Path(files[0]["filename"]).parent.name if files else ""
    return name if COMMIT.fullmatch(name) else None


def _is_another(commit: str, revision: str | None) -> bool:
    return revision is not None and COMMIT.fullmatch(revision) is not None and commit != revision


def _cached(path: str, name: str | None, split: str, commit: str, newest: str) -> Any:
    """The rows of a cached commit that is not the newest in the cache.

    Raises ValueError where the cache does not have it exactly once.
    """
    from datasets.packaged_modules.cache.cache import Cache

    folders = sorted(_folder(path).glob(f"{name or '*'}/*/{commit}"))
    if len(folders) != 1:
        raise ValueError(
            f"the hub cannot be reached, and the cache has commit {newest} of it, not {commit}"
        )
    subset, version, _ = folders[0].parts[-3:]
    builder: Any = Cache(
        dataset_name=path.rpartition("/")[2],
        repo_id=path,
        config_name=subset,
        version=version,
        hash=commit,
    )
    return builder.as_dataset(split=split)
