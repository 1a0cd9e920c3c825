"""Fresh small models of every supported type, and a tokenizer of letters.

The weights are drawn wider than usual, so that the two best logits lie apart and greedy decoding
can be compared token by token.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

import postgrad.models.attention  # noqa: F401  registers our attention

LETTERS = "abcdefghijklmnopqrstuvwxyz .,!"
VOCABULARY = 2 + len(LETTERS)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=6),
    "gemma": lambda: GemmaConfig(**SHAPE),
    "gemma2": lambda: Gemma2Config(
        **SHAPE, sliding_window=5, attn_logit_softcapping=3.0, final_logit_softcapping=4.0
    ),
    "gemma3_text": lambda: Gemma3TextConfig(**SHAPE, sliding_window=5, sliding_window_pattern=2),
}


def fresh_model(kind: str, attention: str = "postgrad", seed: int = 0) -> Any:
    """A small model; the same (kind, seed) has the same weights under any attention."""
    config = CONFIGS[kind]()
    config._attn_implementation = attention
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in lm.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.25)
    lm.generation_config.eos_token_id = 1
    return lm


def letters_tokenizer() -> Any:
    """Two special tokens, then one token a letter."""
    names = ["<pad>", "<eos>", *LETTERS]
    vocabulary = {name: i for i, name in enumerate(names)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def prompt_tokens(seed: int, length: int) -> NDArray[np.int32]:
    """A prompt of random letters."""
    return np.random.default_rng(seed).integers(2, VOCABULARY, length).astype(np.int32)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return letters_tokenizer()


@pytest.fixture(scope="session")
def model() -> Callable[..., Any]:
    """model(kind, attention="postgrad", seed=0)."""
    return fresh_model


@pytest.fixture(scope="session")
def prompt() -> Callable[[int, int], NDArray[np.int32]]:
    """prompt(seed, length)."""
    return prompt_tokens
