"""The engines that the contract is run on, each over the same small model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

import postgrad.models.attention  # noqa: F401  registers our attention
from postgrad.rollout.engine import Engine
from postgrad.rollout.local.engine import LocalEngine

LETTERS = "abcdefghijklmnop"


def small_model(seed: int = 0) -> Any:
    """Two layers over 18 tokens, with weights wide enough to have opinions."""
    config = Qwen3Config(
        vocab_size=2 + len(LETTERS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=1,
        pad_token_id=0,
    )
    config._attn_implementation = "postgrad"
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(config)
    for name, parameter in lm.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.15)
    return lm


def small_tokenizer() -> Any:
    """<pad>, <eos>, then one token a letter."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<eos>", *LETTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def _local(slots: int, cache_tokens: int) -> Engine:
    return LocalEngine(small_model(), small_tokenizer(), slots=slots, cache_tokens=cache_tokens)


MAKERS: dict[str, Callable[[int, int], Engine]] = {"local": _local}


@pytest.fixture(params=MAKERS)
def make_engine(request: pytest.FixtureRequest) -> Callable[[int, int], Engine]:
    """make_engine(slots, cache_tokens)."""
    return MAKERS[request.param]


@pytest.fixture
def other_weights() -> Any:
    """Another model's (name, tensor) pairs, for a publish."""
    return list(small_model(seed=1).named_parameters())
