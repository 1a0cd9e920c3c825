"""Tokenizers: what is broken or could never end an answer is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.utils import logging

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
    with pytest.raises(UsageError, match="no tokenizer at") as error:
        load_tokenizer(str(model))
    remedy = f"{model}: it has no tokenizer.json; copy it there from the model that this one began"
    assert (remedy in str(error.value)) == (text is None)


def test_a_config_alone_makes_no_tokenizer_of_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}', "utf-8")
    with pytest.raises(UsageError, match=r"it has no tokenizer\.json; copy it there"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"no SentencePiece model")
    with pytest.raises(UsageError, match=r"or a hub id$"):  # its library says why
        load_tokenizer(str(tmp_path))


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


def test_a_text_over_the_models_length_is_cut_into_tokens_without_a_warning(
    fresh: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(fresh("qwen3")))
    tokenizer.model_max_length = 4
    warnings: list[str] = []
    library = logging.get_logger("transformers.tokenization_utils_base")
    monkeypatch.setattr(library, "warning", warnings.append)
    assert len(tokenizer("abc " * 9)["input_ids"]) > 4
    assert warnings == []


def test_a_tilde_is_no_folder_of_a_model() -> None:
    with pytest.raises(UsageError, match="no such directory; ~ is no folder here: write the whole"):
        load_tokenizer("~/models/qwen")


def test_a_file_in_place_of_a_models_directory_is_told_as_one(fresh: Callable[[str], Path]) -> None:
    path = fresh("qwen3") / "model.safetensors"
    with pytest.raises(UsageError, match=r"safetensors: it is a file: name its directory"):
        load_tokenizer(str(path))
