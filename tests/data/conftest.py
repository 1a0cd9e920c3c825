"""A tokenizer of characters with a ChatML-type template, and files of rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from postgrad.models.fresh import END, PAD, START, TEMPLATE, _characters
from postgrad.models.settings import TokenizerInit


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """make_tokenizer(template, more special tokens)."""

    def make(template: str | None = TEMPLATE, special: tuple[str, ...] = ()) -> Any:
        backend = _characters(TokenizerInit(kind="characters"), [])
        backend.add_special_tokens([PAD, START, END, *special])
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=special[0] if special else END,
            pad_token=PAD,
            additional_special_tokens=[START, *special[1:]],
            chat_template=template,
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """write_rows([row, ...]): the path of a .jsonl file."""

    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
        return str(path)

    return write
