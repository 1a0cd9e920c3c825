"""Fresh small models of every type, made once for the session's process."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit, ModelType, TokenizerInit

TYPES = get_args(ModelType)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """fresh("qwen2"): the directory of a model of that type; do not change it."""
    paths: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in paths:
            paths[kind] = tmp_path_factory.mktemp("models") / kind
            init = ModelInit(
                type=kind,  # pyright: ignore[reportArgumentType]
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=128,
                initializer_range=0.2,  # logits well apart
                # transformers reads characters of this type as another tokenizer
                tokenizer=TokenizerInit(kind="bpe" if kind == "qwen2" else "characters"),
            )
            make_fresh(init, [], 0, paths[kind])
        return paths[kind]

    return make
