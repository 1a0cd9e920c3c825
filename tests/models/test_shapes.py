"""Shapes from configs alone: their counts are those of the real models."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.core.errors import UsageError
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit, ModelType, TokenizerInit
from postgrad.models.shapes import ModelShape, shape_of, shape_of_init

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
TYPES = ["gemma3_text" if kind == "gemma3" else kind for kind in ModelType.__args__]


def real(kind: str, **more: Any) -> Any:
    """A model of transformers without memory for its weights."""
    config = AutoConfig.for_model(kind, **{**SMALL, **more})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def count(lm: Any, part: str = "") -> int:
    return sum(weight.numel() for name, weight in lm.named_parameters() if part in name)


def assert_counts_match(shape: ModelShape, lm: Any) -> None:
    assert shape.parameters() == count(lm)
    assert shape.layer_parameters == count(lm, "layers.0.")
    assert (
        shape.attention_parameters == count(lm, "0.self_attn.") - count(lm, "0.self_attn.q_n") * 2
    )
    assert shape.mlp_parameters == count(lm, "0.mlp.")
    assert shape.norm_parameters == count(lm, "layers.0.") - count(lm, "0.mlp.") - (
        shape.attention_parameters
    )
    assert shape.embedding_parameters == count(lm, "embed_tokens")
    assert shape.head_parameters == count(lm, "lm_head")
    in_products = sum(w.numel() for w in lm.model.layers.parameters() if w.dim() == 2)
    assert shape.layers * shape.layer_matrix_parameters == in_products


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", TYPES)
def test_the_weights_of_every_type_are_counted_exactly(kind: str, tied: bool) -> None:
    lm = real(kind, tie_word_embeddings=tied)
    assert_counts_match(shape_of(lm.config.to_dict()), lm)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3", {"attention_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("gemma", {"attention_bias": True}),
        ("gemma2", {"attention_bias": True}),
        ("gemma3_text", {"attention_bias": True}),
        ("mistral", {"attention_bias": True}),  # it has none, whatever the config says
        ("qwen2", {"attention_bias": False}),  # it always has them
        ("llama", {"mlp_bias": True, "num_key_value_heads": 4, "head_dim": 24}),
    ],
)
def test_biases_are_counted_where_a_type_has_them(kind: str, more: dict[str, Any]) -> None:
    lm = real(kind, **more)
    assert_counts_match(shape_of(lm.config.to_dict()), lm)


@pytest.mark.parametrize("kind", TYPES)
def test_what_a_config_leaves_out_is_filled_in_as_transformers_does(kind: str) -> None:
    stated = {key: SMALL[key] for key in SMALL if key not in ("num_key_value_heads", "head_dim")}
    full_config = AutoConfig.for_model(kind, **stated).to_dict()
    assert "tie_word_embeddings" in full_config
    assert "num_key_value_heads" in full_config
    assert shape_of({**stated, "model_type": kind, "max_position_embeddings": 1}) == shape_of(
        {**full_config, "max_position_embeddings": 1}
    )


@pytest.mark.parametrize("kind", TYPES)
def test_the_flops_of_a_forward_are_those_that_torch_counts(kind: str) -> None:
    """Eager attention computes the masked half too: twice what a causal kernel needs."""
    lm = real(kind)
    shape = shape_of(lm.config.to_dict())
    batch, length = 3, 20
    with FlopCounterMode(display=False) as counter:
        lm(torch.zeros(batch, length, dtype=torch.long, device="meta"))
    flops = shape.flops(batch * length, batch * length**2)
    wanted = flops.body + 2 * flops.attention + flops.head
    # rotary angles are a product too: one of a position with each frequency
    assert 0 <= counter.get_total_flops() - wanted <= 4 * batch * length * shape.head_dim


def test_only_tokens_that_reach_the_head_cost_there() -> None:
    shape = shape_of({**SMALL, "model_type": "llama"})
    every, some = shape.flops(100, 1000), shape.flops(100, 1000, 10)
    assert (some.body, some.attention, some.head) == (every.body, every.attention, every.head / 10)
    assert every.body + every.head == 2 * 100 * shape.matrix_parameters


def test_the_cache_holds_keys_and_values_of_every_layer() -> None:
    shape = shape_of({**SMALL, "model_type": "qwen3"})
    assert shape.cache_bytes_per_token(2) == 2 * 3 * 2 * 16 * 2  # two, layers, heads, width, bytes


@pytest.mark.parametrize("kind", ModelType.__args__)
def test_a_fresh_model_has_the_shape_that_its_table_says(kind: str, tmp_path: Path) -> None:
    phrases = ("Answer: ", "x", "The")  # one of them is a character
    tokenizer = TokenizerInit(kind="characters", phrases=phrases)
    texts = list[str]()
    if kind == "qwen2":  # has none of characters
        tokenizer = TokenizerInit(kind="bpe", vocab_size=300, phrases=("Answer: ", "The"))
        texts = ["several words that repeat themselves, so that merges of bytes are found"] * 3
    init = ModelInit(
        type=kind,  # pyright: ignore[reportArgumentType]
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tokenizer=tokenizer,
    )
    make_fresh(init, texts, 0, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))
    assert shape_of_init(init) == shape_of(config)


def test_a_vocabulary_is_planned_as_large_as_it_may_become() -> None:
    init = ModelInit(tokenizer=TokenizerInit(vocab_size=5000, phrases=("Answer",)))
    assert shape_of_init(init).vocab_size == 5000


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba"}, "is a mamba model, whose sizes cannot be computed"),
        ({"model_type": "gemma3", "text_config": {}}, "reads more than text"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder with a decoder"),
        ({}, "names no model_type"),
        ({"model_type": "llama"}, "num_attention_heads is None; it has"),
        ({**SMALL, "model_type": "llama", "hidden_size": "wide"}, "hidden_size is 'wide'; it has"),
        ({**SMALL, "model_type": "llama", "vocab_size": 0}, "vocab_size is 0; it has"),
    ],
)
def test_a_config_that_no_plan_can_be_made_of_is_refused(
    config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        shape_of(config, "some/model")
    assert "some/model" in str(refused.value)


def test_neither_torch_nor_transformers_is_imported(fresh: Callable[[str], Path]) -> None:
    code = (
        "import sys; from postgrad.models.known_shapes import find_shape; "
        f"find_shape({str(fresh('qwen3'))!r}); find_shape('Qwen/Qwen3-8B'); "
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
