"""Tokenizers: what is broken or could never end an answer is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.models.tokenizer import load_tokenizer


@pytest.mark.parametrize("text", ["{", "{}", None])
def test_a_broken_or_missing_tokenizer_is_named(
    text: str | None, fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    model = shutil.copytree(fresh("qwen3"), tmp_path / "model")
    path = model / "tokenizer.json"
    if text is None:
        path.unlink()
    else:
        path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match="no tokenizer at"):
        load_tokenizer(str(model))


def test_a_tokenizer_without_an_end_is_refused(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    other = shutil.copytree(fresh("qwen3"), tmp_path / "other")
    path = other / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    del config["eos_token"]
    path.write_text(json.dumps(config), "utf-8")
    with pytest.raises(UsageError, match="no end-of-sequence token"):
        load_tokenizer(str(other))
