"""Shapes of types without formulas: counted on the meta device, as published models have them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.test_shapes import SMALL
from postgrad.core.errors import UsageError
from postgrad.models import counted
from postgrad.models.counted import counted_shape
from postgrad.models.known_shapes import any_shape, find_shape
from postgrad.models.shapes import TYPES, shape_of

EXPERTS = {
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
DENSE = ("olmo2", "olmo3", "phi3", "glm4", "granite")
SPARSE = ("qwen3_moe", "mixtral", "deepseek_v3", "olmoe")


def small(kind: str) -> dict[str, Any]:
    more = EXPERTS if kind in SPARSE else {}
    return AutoConfig.for_model(kind, **{**SMALL, **more}).to_dict()


def published(kind: str) -> dict[str, Any]:
    """The config that transformers documents the type with."""
    return AutoConfig.for_model(kind).to_dict()


@pytest.mark.parametrize("kind", [*DENSE, *SPARSE])
def test_every_weight_is_counted_once(kind: str) -> None:
    config = small(kind)
    shape = any_shape(config, kind)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    layers = list(lm.model.layers.parameters())
    assert shape.parameters() == sum(weight.numel() for weight in lm.parameters())
    assert shape.counted is not None
    assert shape.counted.layers == sum(weight.numel() for weight in layers)
    assert shape.counted.matrices == sum(w.numel() for w in layers if w.dim() > 1)
    assert shape.counted.largest == max(weight.numel() for weight in lm.parameters())
    assert shape.layers == 3
    assert (shape.counted.active < shape.counted.matrices) == (kind in SPARSE)


@pytest.mark.parametrize("kind", TYPES)
def test_types_with_formulas_are_counted_to_the_same_numbers(kind: str) -> None:
    config = small(kind)
    formulas, counts = shape_of(config), counted_shape(config, kind)
    assert counts.parameters() == formulas.parameters()
    for name in (
        "layer_parameters", "layer_matrix_parameters", "active_matrix_parameters", "query_size",
        "key_size", "intermediate_size", "head_parameters", "tied", "vocab_size",
    ):  # fmt: skip
        assert getattr(counts, name) == getattr(formulas, name), name
    assert counts.flops(100, 1000) == formulas.flops(100, 1000)
    assert counts.cache_bytes_per_token(2) == formulas.cache_bytes_per_token(2)


@pytest.mark.parametrize(
    ("kind", "billions", "active"),
    [
        ("mixtral", 46.7, 12.9),  # 8x7B: arXiv:2401.04088, table 1
        ("deepseek_v3", 671.0, 37.0),  # arXiv:2412.19437, section 1
        ("phi3", 3.8, 3.8),  # mini: arXiv:2404.14219
        ("olmo2", 6.9, 6.9),
    ],
)
def test_published_models_have_their_published_sizes(
    kind: str, billions: float, active: float
) -> None:
    shape = any_shape(published(kind), kind)
    assert shape.parameters() / 1e9 == pytest.approx(billions, rel=0.01)
    used = shape.parameters() - shape.unused_parameters
    assert used / 1e9 == pytest.approx(active, rel=0.03)


# The hub's config.json of gpt-oss-20b, where transformers' default is that of gpt-oss-120b.
GPT_OSS_20B = {"num_hidden_layers": 24, "num_local_experts": 32}
GPT_OSS_120B = {"num_hidden_layers": 36, "num_local_experts": 128}


@pytest.mark.parametrize(
    ("sizes", "billions", "active"), [(GPT_OSS_20B, 20.91, 3.61), (GPT_OSS_120B, 116.83, 5.13)]
)
def test_gpt_oss_has_the_sizes_of_its_model_card(
    sizes: dict[str, int], billions: float, active: float
) -> None:
    """arXiv:2508.10925, table 1, which counts the embedding as not active. Layers alternate between
    a window and none; the cache keeps keys and values of all tokens in both.
    """
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    config = published("gpt_oss") | sizes | {"layer_types": None} | packed
    shape = any_shape(config, "gpt_oss")
    assert shape.counted is not None
    assert shape.parameters() / 1e9 == pytest.approx(billions, abs=0.01)
    assert (shape.counted.active + shape.embedding_parameters) / 1e9 == pytest.approx(
        active, abs=0.01
    )
    assert shape.cache_bytes_per_token(2) == sizes["num_hidden_layers"] * 2 * 8 * 64 * 2


# The sizes in the hub's config.json of Qwen/Qwen3-30B-A3B, and in one of a tiny mixture.
QWEN3_30B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151_936,
}  # fmt: skip
TINY_MIXTURE = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "moe_intermediate_size": 6, "num_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "attention", "expert", "router", "norms", "layers", "unused", "outside"),
    [
        # q and o of 8 x 8, k and v of 8 x 4; 3 matrices of 8 x 6; 4 x 8; two of 8 and two of 4.
        (TINY_MIXTURE, 192, 144, 32, 24, 2, 2, 80),
        (QWEN3_30B, 18_874_368, 4_718_592, 262_144, 4352, 48, 120, 151_936 * 2048),
    ],
    ids=["tiny", "30B-A3B"],
)
def test_a_token_of_qwen3_moe_passes_some_of_the_experts(
    sizes: dict[str, Any],
    attention: int,
    expert: int,
    router: int,
    norms: int,
    layers: int,
    unused: int,
    outside: int,
) -> None:
    shape = any_shape({"model_type": "qwen3_moe", **sizes}, "qwen3_moe")
    width, experts = sizes["hidden_size"], sizes["num_experts"]
    total = layers * (attention + router + norms + experts * expert) + 2 * outside + width
    assert shape.parameters() == total
    assert shape.unused_parameters == layers * unused * expert
    used = attention + router + (experts - unused) * expert
    assert shape.active_matrix_parameters == used
    flops = shape.flops(3.0, 0.0)
    assert flops.body + flops.head == 2 * 3 * (layers * used + outside)
    if sizes is QWEN3_30B:  # https://huggingface.co/Qwen/Qwen3-30B-A3B: 30.5B, 3.3B activated
        assert total == 30_532_122_624
        assert total - shape.unused_parameters == 3_353_032_704


def test_a_token_of_mixtral_passes_two_of_eight_experts() -> None:
    """By hand: attention 2 x 4096 x (4096 + 1024), a router, and two of 3 x 4096 x 14336."""
    shape = any_shape(published("mixtral"), "mixtral")
    attention, expert, router = 2 * 4096 * (4096 + 1024), 3 * 4096 * 14_336, 8 * 4096
    assert shape.layer_matrix_parameters == attention + router + 8 * expert
    assert shape.active_matrix_parameters == attention + router + 2 * expert
    assert shape.unused_parameters == 32 * 6 * expert
    assert shape.intermediate_size == pytest.approx(2 * 14_336, rel=1e-3)
    assert shape.cache_bytes_per_token(2) == 32 * 2 * 8 * 128 * 2


def test_latent_attention_is_cached_as_it_attends() -> None:
    """DeepSeek V3: a latent of 512 numbers and 64 rotated ones of the key, in 61 layers."""
    shape = any_shape(published("deepseek_v3"), "deepseek")
    assert shape.cache_bytes_per_token(2) == 61 * (512 + 64) * 2
    assert shape.cache_heads == 1


def test_adapters_stand_on_the_linear_modules_of_a_layer() -> None:
    shape = any_shape(published("phi3"), "phi3")
    assert shape.counted is not None
    (layers,) = shape.counted.adaptable
    assert layers.numbers == tuple(range(32))
    assert {name: (m, n) for name, m, n in layers.linears} == {
        "self_attn.o_proj": (3072, 3072),
        "self_attn.qkv_proj": (3072, 9216),
        "mlp.gate_up_proj": (3072, 16_384),
        "mlp.down_proj": (8192, 3072),
    }


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "rwkv"}, "carry a state along the sequence"),
        ({"model_type": "gpt_new"}, "which transformers does not have"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder with a decoder"),
        ({}, "names no model_type"),
        ({"model_type": "olmo2", "hidden_size": "x"}, "olmo2|no shape of"),
    ],
)
def test_what_is_not_trained_here_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        any_shape(config, "model")


@pytest.mark.slow
def test_a_process_without_torch_asks_a_child_and_stays_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small("qwen3_moe")), "utf-8")
    code = (
        "import sys; from postgrad.models.known_shapes import find_shape; "
        f"shape = find_shape({str(folder)!r}); "
        "print(shape.parameters(), shape.counted.active, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = find_shape(str(folder))
    assert here.counted is not None
    assert done.stdout.split() == [str(here.parameters()), str(here.counted.active), "False"]


@pytest.fixture
def nothing_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache in a process that has counted nothing; the folder of the cache's shapes."""
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(counted, "_shapes", {})
    return tmp_path / "cache" / "shapes"


def test_a_child_that_fails_is_told_in_one_line(
    nothing_counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(counted.sys, "executable", "/bin/false")
    with pytest.raises(UsageError, match=r"model could not be counted: no answer"):
        counted_shape(small("olmo2"), "model")

    assert not list(nothing_counted.glob("*"))


def test_a_config_that_is_asked_for_again_is_not_counted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run asks for its lengths, its plan and its automatic sizes."""
    config = small("olmo2")
    first = counted_shape(config, "asked for twice")
    monkeypatch.setattr(counted, "_shape_of", None)
    assert counted_shape(dict(config), "another directory") is first


@pytest.mark.parametrize("kind", ["qwen3_next", "gpt_oss"])
def test_later_commands_read_the_shape_that_was_counted(
    kind: str, nothing_counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = counted_shape(small(kind), "model")
    monkeypatch.setattr(counted, "_shapes", {})
    with monkeypatch.context() as patch:
        patch.setattr(counted, "_count", None)
        assert counted_shape(small(kind), "model") == first
    monkeypatch.setattr(counted, "_shapes", {})
    monkeypatch.setattr(counted, "version", lambda name: "another")
    counted_shape(small(kind), "model")
    assert len(list(nothing_counted.iterdir())) == 2
