"""Pushes an exported model to the hub. A failure names the command that pushes it later."""

import shlex
from pathlib import Path
from typing import Any

from postgrad.core.errors import RunError, UsageError
from postgrad.core.hub import HUB_ID


def require_repository(name: str, flag: str) -> None:
    """Raises UsageError where `name` is no id of a repository, before anything is done."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"{flag} {name}: {error}; wanted is ORG/NAME") from error
    if not HUB_ID.fullmatch(name):
        raise UsageError(f"{flag} {name}: wanted is ORG/NAME")


def push(folder: Path, repository: str, *, private: bool, message: str) -> dict[str, Any]:
    """Creates the repository where there is none, and uploads the files of a folder as one commit.

    Returns repository, commit and url. Raises RunError, with the command that pushes later, where
    the hub cannot be reached or refuses the upload.
    """
    from huggingface_hub import HfApi

    api: Any = HfApi()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True, repo_type="model")
        done = api.upload_folder(
            repo_id=repository, folder_path=str(folder), commit_message=message, repo_type="model"
        )
    except Exception as error:  # each network client has its own
        why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        words = ["hf", "upload", repository, str(folder), *(["--private"] if private else [])]
        raise RunError(
            f"{repository} was not pushed: {why}. The model is whole in {folder}; log in with "
            f"`hf auth login` (or HF_TOKEN) and push it with: {shlex.join(words)}"
        ) from error
    return {"repository": repository, "commit": str(done.oid), "url": str(done.commit_url)}
