"""Hashes of a model's files: checkpoints name a frozen model by its hash and do not copy it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

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


def files_hash(files: Sequence[Path]) -> str:
    """SHA-256 (hex) over names and contents of files, in their order. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            file_digest = hashlib.file_digest(content, "sha256").hexdigest()
        digest.update(f"{file_digest}  {file.name}\n".encode())
    return digest.hexdigest()
