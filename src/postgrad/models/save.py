"""Writes a Hugging Face directory atomically: it is complete or absent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from postgrad.core.errors import RunError
from postgrad.core.files import whole_directory

CARD = "README.md"  # where the hub looks for a model card


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
            lm.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            if card is not None:
                (folder / CARD).write_text(card, "utf-8")
            check(folder)
    except Exception as error:
        if isinstance(error, RunError) or not _is_disk_error(error):
            raise
        raise RunError(f"{to} cannot be written: {error}; make room, or choose another") from error


def _is_disk_error(error: Exception) -> bool:
    """Whether a write failed; the tokenizers library raises plain Exceptions with "os error"."""
    return isinstance(error, OSError | SafetensorError) or "os error" in str(error)
