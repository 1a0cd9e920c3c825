"""A frozen model is named by what is in its files, not copied into checkpoints."""

import hashlib
from pathlib import Path

SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")


def directory_hash(path: Path) -> str:
    """SHA-256 (hex) over names and contents of a model's weights, configs and tokenizer."""
    whole = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.is_file() and file.suffix in SUFFIXES:
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            whole.update(f"{digest}  {file.name}\n".encode())
    return whole.hexdigest()
