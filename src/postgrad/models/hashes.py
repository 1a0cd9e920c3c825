"""A frozen model is named by what is in its files, not copied into checkpoints."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from postgrad.models.files import is_adapter, weights_source

WEIGHTS = ".safetensors"
SUFFIXES = (WEIGHTS, ".json", ".jinja", ".model", ".txt")


def directory_hash(path: Path, *, weights: bool = True) -> str:
    """SHA-256 (hex) over names and contents of a model's weights, configs and tokenizer. weights:
    False leaves those out, and the index of their files.
    """
    files = [one for one in sorted(path.iterdir()) if one.is_file() and one.suffix in SUFFIXES]
    if not weights:
        files = [one for one in files if WEIGHTS not in one.suffixes]
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
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        whole.update(f"{digest}  {file.name}\n".encode())
    return whole.hexdigest()
