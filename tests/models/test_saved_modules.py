"""Embeddings and output head that train whole beside an adapter: gradients in float64, master
weights, files that PEFT reads, and what is refused.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from postgrad.core.errors import UsageError
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings
from postgrad.models.adapter_files import merged_state, write_adapter
from postgrad.models.adapter_reader import read_adapter
from postgrad.models.adapters import Adapter, add_adapter
from postgrad.models.export import export_hf
from postgrad.models.four_bits import Quantize, twin
from postgrad.models.fresh import make_fresh
from postgrad.models.head import target_logprobs
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model
from postgrad.models.settings import LoraSettings, ModelInit, TokenizerInit

BOTH = LoraSettings(rank=4, alpha=8, modules_to_save=("embed_tokens", "lm_head"))
IDS = torch.tensor([[5, 17, 40, 8, 66, 23, 9, 31]])
EMBEDDINGS, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose output head is a matrix of its own."""
    path = tmp_path_factory.mktemp("untied") / "model"
    init = ModelInit(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, initializer_range=0.2,
        max_position_embeddings=128, tie_word_embeddings=False,
        tokenizer=TokenizerInit(kind="characters"),
    )  # fmt: skip
    make_fresh(init, [], 0, path)
    return path


def model(
    path: Path, dtype: torch.dtype = torch.float32, score: bool = False, quantize: Quantize = "none"
) -> Any:
    load = load_score_model if score else load_model
    lm: Any = load(str(path), dtype=dtype, quantize=quantize).lm
    lm.set_attn_implementation("eager")
    return lm


def moved(adapter: Adapter) -> dict[str, Tensor]:
    """The adapter's weights, off their start."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: p.detach().float() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in adapter.parameters().items()
    }
    adapter.load(weights)
    return weights


def loss(lm: Any) -> Tensor:
    """The negative logprobs of the next tokens, by the project's head."""
    hidden = lm.get_decoder()(IDS).last_hidden_state[0, :-1]
    logprobs, _ = target_logprobs(lm, hidden, IDS[0, 1:])
    return -logprobs.sum()


def test_it_starts_as_the_base_and_its_gradients_are_those_of_the_whole_model_in_float64(
    untied: Path,
) -> None:
    lm = model(untied)
    with torch.no_grad():
        base = lm(IDS).logits
    adapter = add_adapter(lm, BOTH, seed=0)
    with torch.no_grad():
        assert torch.equal(lm(IDS).logits, base)
    loss(lm).backward()
    reference: Any = AutoModelForCausalLM.from_pretrained(
        untied, dtype=torch.float64, attn_implementation="eager"
    )
    logprobs = reference(IDS).logits[0, :-1].log_softmax(-1)
    (-logprobs.gather(-1, IDS[0, 1:, None]).sum()).backward()
    parameters = adapter.parameters()
    wanted = {EMBEDDINGS: reference.model.embed_tokens, HEAD: reference.lm_head}
    for name, module in wanted.items():
        gradient = parameters[name].grad
        assert gradient is not None
        torch.testing.assert_close(gradient.double(), module.weight.grad, atol=2e-5, rtol=1e-4)
    frozen = [p for n, p in lm.named_parameters() if "original_module" in n]
    assert len(frozen) == 2
    assert all(p.grad is None and not p.requires_grad for p in frozen)
    moved(adapter)
    with torch.no_grad():
        assert not torch.equal(lm(IDS).logits, base)
        with adapter.disabled():
            assert torch.equal(lm(IDS).logits, base)
            assert float(loss(lm)) == pytest.approx(-float(logprobs.gather(
                -1, IDS[0, 1:, None]).sum()), rel=1e-5)  # fmt: skip


def test_of_a_model_in_bfloat16_small_steps_add_up_in_float32(untied: Path) -> None:
    """Ten steps of AdamW on one gradient move a weight by ten learning rates, a part of what
    bfloat16 could tell apart; A and B stay float32.
    """
    lm = model(untied, torch.bfloat16)
    adapter = add_adapter(lm, BOTH, seed=0)
    types = {n.rpartition(".")[0]: p.dtype for n, p in adapter.parameters().items()}
    assert types.pop("base_model.model.lm_head") == torch.bfloat16
    assert types.pop("base_model.model.model.embed_tokens") == torch.bfloat16
    assert set(types.values()) == {torch.float32}
    settings = LearnerSettings(lr=1e-5, eps=1e-12, weight_decay=0.0, max_grad_norm=0.0)
    optimizer = MasterOptimizer(adapter.parameters(), settings)
    before = optimizer.weights()[HEAD].double().numpy().copy()
    for _ in range(10):
        loss(lm).backward()
        optimizer.step(1e-5)
    after = optimizer.weights()[HEAD]
    assert after.dtype == torch.float32
    steps = np.abs(after.double().numpy() - before)
    assert np.median(steps) == pytest.approx(1e-4, rel=0.1)
    assert torch.equal(adapter.parameters()[HEAD], after.to(torch.bfloat16))


@pytest.mark.parametrize(
    "saved", [("embed_tokens", "lm_head"), ("model.embed_tokens",), ("lm_head",)]
)
@torch.no_grad()
def test_plain_peft_reads_it_with_the_same_logits_and_so_does_a_merged_export(
    saved: tuple[str, ...], untied: Path, tmp_path: Path
) -> None:
    settings = BOTH.model_copy(update={"modules_to_save": saved})
    adapter = add_adapter(model(untied), settings, seed=0)
    weights = moved(adapter)
    names = {name for name in weights if ".lora_" not in name}
    assert len(names) == len(saved)
    write_adapter(weights, settings, str(untied), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text("utf-8"))
    assert config["modules_to_save"] == sorted(saved)
    base: Any = AutoModelForCausalLM.from_pretrained(
        untied, dtype=torch.float64, attn_implementation="eager"
    )
    read = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).double().eval()
    wanted = read(IDS).logits
    torch.testing.assert_close(adapter.lm(IDS).logits.double(), wanted, atol=1e-4, rtol=1e-4)
    file = read_adapter(tmp_path / "adapter")
    assert {f"base_model.model.{name}" for name in file.saved} == names
    merged = dict(merged_state(str(untied), weights, settings))
    export_hf(merged, str(untied), tmp_path / "merged", dtype=torch.float32)
    for path in ("adapter", "merged"):
        logits = model(tmp_path / path)(IDS).logits.double()
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    for name in names:
        assert torch.equal(stored[name.removeprefix("base_model.model.")], weights[name])
    published = dict(adapter.hub_weights())
    assert published.keys() == stored.keys()
    for name, tensor in published.items():
        torch.testing.assert_close(tensor, stored[name], atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_a_twin_of_a_base_in_four_bits_reads_the_trained_copies(untied: Path) -> None:
    lm = model(untied, quantize="4bit")
    adapter, second = add_adapter(lm, BOTH, seed=0), twin(lm)
    moved(adapter)
    assert torch.equal(lm(IDS).logits, second(IDS).logits)  # pyright: ignore[reportCallIssue]


def test_beside_a_score_head_the_embeddings_train_too(untied: Path) -> None:
    settings = LoraSettings(rank=4, alpha=8, modules_to_save=("embed_tokens", "score"))
    adapter = add_adapter(model(untied, torch.bfloat16, score=True), settings, seed=0)
    adapter.lm(IDS).logits.sum().backward()
    types = {n: p.dtype for n, p in adapter.parameters().items() if ".lora_" not in n}
    assert types == {EMBEDDINGS: torch.bfloat16, "base_model.model.score.weight": torch.float32}
    assert all(adapter.parameters()[name].grad is not None for name in types)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("q_proj", "'q_proj' is none of the modules of this qwen3 model that can train whole, "
         "which are embed_tokens and lm_head"),
        ("tokens", "'tokens' is none of"),
        ("score", "'score' is none of"),
    ],
)  # fmt: skip
def test_another_module_is_refused(name: str, message: str, untied: Path) -> None:
    with pytest.raises(UsageError, match=message):
        add_adapter(model(untied), LoraSettings(modules_to_save=(name,)), seed=0)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_tied_matrix_is_refused(name: str, fresh: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"output head is its embedding matrix"):
        add_adapter(model(fresh("qwen3")), LoraSettings(modules_to_save=(name,)), seed=0)


def test_adapters_of_one_model_train_the_same_modules(untied: Path) -> None:
    lm = model(untied)
    first = add_adapter(lm, BOTH, seed=0)
    with pytest.raises(ValueError, match="train the same modules"):
        add_adapter(lm, LoraSettings(), seed=0, name="other")
    other = add_adapter(lm, BOTH, seed=0, name="other")
    moved(other)
    with torch.no_grad():
        before = lm(IDS).logits
        with other.active():
            assert not torch.equal(lm(IDS).logits, before)
    assert first.parameters().keys() == other.parameters().keys()
