"""A small real reward model on disk."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit, TokenizerInit


@pytest.fixture(scope="session")
def reward_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a fresh reward model; do not change it."""
    base = tmp_path_factory.mktemp("base") / "lm"
    init = ModelInit(
        type="qwen3", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2, tokenizer=TokenizerInit(kind="characters"),
    )  # fmt: skip
    make_fresh(init, [], 0, base)
    config = AutoConfig.from_pretrained(base, num_labels=1)
    config.reward_mean, config.reward_std = 0.5, 2.0
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    to = tmp_path_factory.mktemp("rewards") / "my-reward"
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(base).save_pretrained(to)
    return to
