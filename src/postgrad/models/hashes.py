"""Hashes of a model's files: checkpoints name a frozen model by its hash and do not copy it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from postgrad.models.files import is_adapter, weights_source

WEIGHTS = ".safetensors"
SUFFIXES = (WEIGHTS, ".json", ".jinja", ".model", ".txt")


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
