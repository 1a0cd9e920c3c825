"""Ids of the Hugging Face hub with a revision, and the commits that they stand for.

A source is "org/name", or "org/name@REVISION" with a branch, a tag or a commit.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from postgrad.core.errors import UsageError

RepoKind = Literal["model", "dataset"]
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
REVISION = r"^[\w.-]+(/[\w.-]+)*$"  # a branch, a tag or a commit
COMMIT = re.compile(r"[0-9a-f]{40}")
SECONDS = 5.0  # timeout of a request to the hub
SLOW_SECONDS = 1.0  # a failure that takes longer is remembered
AGAIN_SECONDS = 60.0  # a hub that did not answer is not asked again before

_silent_at: float | None = None  # time.monotonic() when the hub did not answer


def at_revision(path: str, revision: str | None) -> str:
    """ "org/name@REVISION"; the path itself where revision is None."""
    return path if revision is None else f"{path}@{revision}"


def split_revision(source: str) -> tuple[str, str | None]:
    """("org/name", "v1") of "org/name@v1"; (source, None) for an existing path with an @ in it, and
    for "@NAME", a pipeline's stage.
    """
    repo, at, revision = source.partition("@")
    if not at or not revision or not HUB_ID.fullmatch(repo) or os.path.lexists(source):
        return source, None
    return repo, revision


def local_file(source: str, name: str) -> Path | None:
    """A file of a directory, or of a hub id from the local cache; None where there is none."""
    if Path(source).is_dir():
        file = Path(source) / name
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    path, revision = split_revision(source)
    try:
        cached = try_to_load_from_cache(path, name, revision=revision)
    except ValueError:  # no hub id
        return None
    return Path(cached) if isinstance(cached, str) else None


def pretrained(source: str) -> tuple[str, dict[str, Any]]:
    """The arguments of transformers' from_pretrained for a source: path, {"revision": ...}."""
    path, revision = split_revision(source)
    return path, {} if revision is None else {"revision": revision}


def commit_of(kind: RepoKind, path: str, revision: str | None = None) -> str:
    """The commit that a revision of a hub id stands for now: a branch, tag, commit or None (main).
    Where the hub cannot be reached, the local cache answers; the hub is then left alone for
    AGAIN_SECONDS, so that a recipe with many ids waits for it once.

    Raises UsageError where neither knows it.
    """
    if revision in cached_commits(kind, path):
        return str(revision)
    try:
        _require_no_silence()
        return _ask(kind, path, revision)
    except Exception as error:  # each network client has its own
        remembered = _remembered(kind, path, revision or "main")
        if remembered is not None and not _denied(error):
            return remembered
        name = at_revision(path, revision)
        option = "model.path and model.revision" if kind == "model" else "data.path, data.revision"
        raise UsageError(
            f"no {kind} {name}: {_reason(error)}; the cache of the hub ({_cache()}) has no commit "
            f"of it either. A {'directory' if kind == 'model' else 'file or folder'} on this "
            f"machine works too ({option})"
        ) from error


def cached_commits(kind: RepoKind, path: str) -> list[str]:
    """The commits of a hub id of which the local cache has files, sorted."""
    folder = _folder(kind, path) / "snapshots"
    return sorted(snapshot.name for snapshot in folder.iterdir()) if folder.is_dir() else []


def _require_no_silence() -> None:
    if _silent_at is not None and time.monotonic() - _silent_at < AGAIN_SECONDS:
        raise ConnectionError("the hub did not answer a moment ago")


def _ask(kind: RepoKind, path: str, revision: str | None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    global _silent_at
    api: Any = HfApi()
    began = time.monotonic()
    info: Callable[..., Any] = api.model_info if kind == "model" else api.dataset_info
    try:
        sha = info(path, revision=revision, timeout=SECONDS).sha
    except (HfHubHTTPError, HFValidationError):
        raise  # it answered
    except Exception as error:
        if time.monotonic() - began >= min(SECONDS, SLOW_SECONDS):
            _silent_at = time.monotonic()
        raise ConnectionError(f"the hub did not answer ({_reason(error)})") from error
    if not isinstance(sha, str) or not COMMIT.fullmatch(sha):
        raise ValueError(f"the hub names no commit of {path}")
    return sha


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _denied(error: Exception) -> bool:
    """Whether the hub answered that it has no such repository or revision."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    missing = (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError)
    return isinstance(error, missing) and not isinstance(error, GatedRepoError)


def _remembered(kind: RepoKind, path: str, name: str) -> str | None:
    """The commit that the local cache has recorded for a branch or tag; None without one."""
    file = _folder(kind, path) / "refs" / name
    try:
        commit = file.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def _folder(kind: RepoKind, path: str) -> Path:
    return _cache() / "--".join([f"{kind}s", *path.split("/")])


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
