"""A frozen model is named by what is in its files, not copied into checkpoints."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

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


def files_hash(files: Sequence[Path]) -> str:
    """SHA-256 (hex) over names and contents of files, in their order. Raises OSError."""
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        whole.update(f"{digest}  {file.name}\n".encode())
    return whole.hexdigest()
