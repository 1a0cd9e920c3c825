"""Checkpoints in MXFP4, as the hub has gpt_oss, against transformers' own dequantisation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from helpers.model_types import make_model
from helpers.tiny_runs import MODEL
from postgrad.core.errors import UsageError
from postgrad.models.export import export_hf
from postgrad.models.fresh import make_fresh
from postgrad.models.load import load_model
from postgrad.models.mxfp4 import unpacked_mxfp4
from postgrad.models.settings import ModelInit
from postgrad.models.stored import StoredTensor, stored_tensors
from postgrad.models.tokenizer import load_tokenizer
from postgrad.ops.quantization import dequantize_mxfp4
from postgrad.rollout.vllm.start import read_model

CPU = torch.device("cpu")
EXPERTS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt_oss whose experts are random bytes and scales, as the hub's files have them."""
    folder = tmp_path_factory.mktemp("mxfp4")
    init = {**MODEL["init"], "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    make_fresh(ModelInit.model_validate(init), [], 0, folder / "tokenizer")
    size = len(load_tokenizer(str(folder / "tokenizer")))
    to = make_model("gpt_oss", folder / "tokenizer", size, folder / "model")
    config = json.loads((to / "config.json").read_text())
    config |= {"intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    (to / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    weights = load_file(to / "model.safetensors")
    for name in [name for name in weights if name.endswith("gate_up_proj")]:
        prefix, bias = name.removesuffix("gate_up_proj"), f"{name}_bias"
        weights[bias] = torch.randn(4, 128, generator=generator)
        for matrix, (outputs, groups) in zip(EXPERTS, ((128, 1), (32, 2)), strict=True):
            del weights[f"{prefix}{matrix}"]
            weights[f"{prefix}{matrix}_blocks"] = drawn(0, 256, 4, outputs, groups, 16)
            weights[f"{prefix}{matrix}_scales"] = drawn(120, 125, 4, outputs, groups)
    save_file(weights, to / "model.safetensors")
    return to


def theirs(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    how: Any = Mxfp4Config(dequantize=True)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how)
    return {name: p.detach() for name, p in lm.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_files", [False, True])
def test_weights_are_the_numbers_of_transformers_own_dequantisation(
    packed: Path, dtype: torch.dtype, in_files: bool
) -> None:
    loaded = load_model(str(packed), dtype=dtype, in_files=in_files)
    expected = theirs(packed, dtype)
    weights = dict(loaded.lm.named_parameters())
    assert weights.keys() == expected.keys()
    assert any(isinstance(weight, StoredTensor) for weight in weights.values()) == in_files
    for name, weight in weights.items():
        held = weight.real() if isinstance(weight, StoredTensor) else weight
        assert held.dtype == dtype
        assert torch.equal(held, expected[name]), name
    assert getattr(loaded.config, "quantization_config", None) is None


def test_any_part_of_a_weight_is_read_from_its_own_bytes(packed: Path) -> None:
    stored = unpacked_mxfp4(stored_tensors([packed / "model.safetensors"], CPU))
    (name,) = [name for name in stored if name.endswith("0.mlp.experts.down_proj")]
    dense = stored[name].real()
    assert dense.shape == (4, 64, 32)
    for box in (((0, 4), (0, 64), (0, 32)), ((1, 2), (31, 3), (5, 7)), ((3, 1), (63, 1), (0, 32))):
        places = tuple(slice(first, first + count) for first, count in box)
        assert torch.equal(stored[name].block(box), dense[places])


def test_a_byte_is_two_numbers_times_a_power_of_two_by_hand() -> None:
    blocks = torch.tensor([[0x21, 0x7F]], dtype=torch.uint8)  # codes 1, 2, 15, 7
    scales = torch.tensor([126], dtype=torch.uint8)  # 2 ** -1
    numbers = dequantize_mxfp4(blocks, scales, torch.float32)
    assert numbers.tolist() == [0.25, 0.5, -3.0, 3.0]


def test_an_export_holds_plain_weights(packed: Path, tmp_path: Path) -> None:
    weights = dict(load_model(str(packed), dtype=torch.float32).lm.named_parameters())
    export_hf(weights, str(packed), tmp_path / "plain", dtype=torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    again = dict(load_model(str(tmp_path / "plain"), dtype=torch.float32).lm.named_parameters())
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_experts_in_mxfp4_are_not_held_in_four_bits(packed: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.quantize: .* has experts in MXFP4"):
        load_model(str(packed), dtype=torch.float32, quantize="4bit")


def test_vllm_is_refused_by_name(packed: Path) -> None:
    with pytest.raises(
        UsageError, match=r'rollout\.type = "vllm": .* has weights in MXFP4 \(such as'
    ):
        read_model(str(packed), torch.float32, 64)
