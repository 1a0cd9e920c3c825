"""What a recipe says about one set of weights. Free of torch, so that plans read it quickly."""

from typing import Literal

from pydantic import Field

from postgrad.core.settings import Settings

ModelType = Literal["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3"]


class TokenizerInit(Settings):
    """A fresh tokenizer, made from the texts of the recipe's data.

    "bpe": byte-level BPE with single digits, trained to `vocab_size`. "characters": printable ASCII
    and the `phrases`, each one token.
    """

    kind: Literal["bpe", "characters"] = "bpe"
    vocab_size: int = Field(default=4096, ge=300)
    phrases: tuple[str, ...] = ()


class ModelInit(Settings):
    """A fresh small model, its weights drawn from the recipe's seed. Names are Hugging Face's."""

    type: ModelType = "qwen3"
    hidden_size: int = Field(default=256, ge=8)
    intermediate_size: int = Field(default=768, ge=8)
    num_hidden_layers: int = Field(default=6, ge=1)
    num_attention_heads: int = Field(default=4, ge=1)
    num_key_value_heads: int = Field(default=2, ge=1)
    max_position_embeddings: int = Field(default=2048, ge=16)
    tie_word_embeddings: bool = True
    rope_theta: float = Field(default=10_000.0, gt=1.0)  # smaller for short sequences
    initializer_range: float = Field(default=0.02, gt=0.0)  # standard deviation of fresh weights
    tokenizer: TokenizerInit = TokenizerInit()


class ModelSettings(Settings):
    """Where weights come from and how they compute. `init` is used only where no `path` is given.

    dtype: "float32"; "bfloat16" computes in bfloat16 over float32 master weights; "auto" is
    bfloat16 on CUDA and float32 elsewhere.
    """

    path: str | None = None
    init: ModelInit | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    gradient_checkpointing: bool = False
