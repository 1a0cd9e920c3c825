"""Writes a model as a Hugging Face directory, which is complete or absent; and hashes of such
directories.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from postgrad.core.errors import RunError
from postgrad.core.files import whole_directory
from postgrad.models.config import without_bars
from postgrad.models.files import is_adapter, weights_source

CARD = "README.md"  # where the hub looks for a model card

WEIGHTS = ".safetensors"
SUFFIXES = (WEIGHTS, ".json", ".jinja", ".model", ".txt")


def save_model(
    lm: Any,
    tokenizer: Any,
    to: Path,
    *,
    check: Callable[[Path], None] = lambda folder: None,
    replace: bool = False,
    card: str | None = None,
) -> None:
    """Writes config, weights (safetensors), generation config, tokenizer and chat template.

    check(folder) is called on the written files before they are renamed to `to`, and may raise.
    replace: `to` may exist already. card: the text of its README.md. Raises RunError where the
    disk fails; nothing is left then.
    """
    try:
        with whole_directory(to, replace=replace) as folder:
            with without_bars():
                lm.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            if card is not None:
                (folder / CARD).write_text(card, "utf-8")
            check(folder)
    except Exception as error:
        if isinstance(error, RunError) or not _is_disk_error(error):
            raise
        reason: Exception = error
        if isinstance(error, OSError) and error.strerror:
            reason = OSError(error.errno, error.strerror)  # without the file: `to` is named
        raise RunError(f"{to} cannot be written: {reason}; make room, or choose another") from error


def _is_disk_error(error: Exception) -> bool:
    """Whether a write failed; the tokenizers library raises plain Exceptions with "os error"."""
    return isinstance(error, OSError | SafetensorError) or "os error" in str(error)


def directory_hash(path: Path, *, weights: bool = True) -> str:
    """SHA-256 (hex) over names and contents of a model's weights, configs and tokenizer.

    weights: False leaves out the weights and the index of their files.
    """
    files = [file for file in sorted(path.iterdir()) if file.is_file() and file.suffix in SUFFIXES]
    if not weights:
        files = [file for file in files if WEIGHTS not in file.suffixes]
    return files_hash(files)


def model_hash(path: Path, *, weights: bool = True) -> str:
    """`directory_hash`; of an adapter over its own files and its base: a directory's files, or the
    hub id with its commit.
    """
    digest = directory_hash(path, weights=weights)
    if not is_adapter(path):
        return digest
    base = weights_source(str(path))
    if Path(base).is_dir():
        base = directory_hash(Path(base), weights=weights)
    return hashlib.sha256(f"{digest}\n{base}\n".encode()).hexdigest()


def files_hash(files: Sequence[Path]) -> str:
    """SHA-256 (hex) over names and contents of files, in their order. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            file_digest = hashlib.file_digest(content, "sha256").hexdigest()
        digest.update(f"{file_digest}  {file.name}\n".encode())
    return digest.hexdigest()
