"""Adapters on experts and routers: the base's bits, products and gradients of merged weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.adapters import moved
from helpers.model_types import config_of
from postgrad.core.errors import UsageError
from postgrad.models.adapter_mixtures import ChangedWeight
from postgrad.models.adapters import add_adapter
from postgrad.models.recompute import recompute_activations
from postgrad.models.settings import LoraSettings

KINDS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")  # gpt_oss: inputs before outputs
IDS = torch.tensor([[5, 17, 33, 8, 26, 23, 9, 31], [1, 2, 3, 30, 31, 32, 7, 7]])
BOTH = LoraSettings(rank=3, alpha=6, targets=("experts", "router"))
FILE = "base_model.model.model.layers.0.mlp."


def mixture(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind, 37))


def merged(weight: Tensor, a: Tensor, b: Tensor, *, swapped: bool) -> Tensor:
    """PEFT's ParamWrapper.get_delta_weight on a weight, with scale 2: a second derivation."""
    if weight.ndim == 2:
        return weight + 2.0 * b @ a
    experts = weight.shape[0]
    each_a = a.reshape(experts, -1, a.shape[-1])
    each_b = b.reshape(b.shape[0], -1, experts)
    order = "o r e, e r i -> e i o" if swapped else "o r e, e r i -> e o i"
    return weight + 2.0 * torch.einsum(order, each_b, each_a)


def places(kind: str) -> dict[str, str]:
    """Weights of a layer's mixture by the beginning of the names of their A and B."""
    router = "router" if kind == "gpt_oss" else "gate"
    return {
        "experts.base_layer": "experts.gate_up_proj",
        "experts": "experts.down_proj",
        router: f"{router}.weight",
    }


@pytest.mark.parametrize("products", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_adapter_on_a_mixture_starts_as_the_base_and_disabled_is_the_base(
    kind: str, products: str
) -> None:
    lm = mixture(kind)
    lm.set_experts_implementation(products)
    base = lm(IDS).logits
    adapter = add_adapter(lm, BOTH, seed=0)
    assert torch.equal(lm(IDS).logits, base)
    moved(adapter)
    assert (lm(IDS).logits - base).abs().max() > 0.1
    with adapter.disabled():
        assert torch.equal(lm(IDS).logits, base)


@pytest.mark.parametrize("products", ["batched_mm", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_merged_weights_in_float64(
    kind: str, products: str
) -> None:
    plain = mixture(kind).double()
    plain.set_experts_implementation(products)
    lm = mixture(kind)
    lm.set_experts_implementation(products)
    adapter = moved(add_adapter(lm, BOTH, seed=0))
    lm.double()
    factors = {n: p.detach().clone().requires_grad_() for n, p in adapter.parameters().items()}
    replaced: dict[str, Tensor] = {}
    for layer in range(plain.config.num_hidden_layers):
        for start, weight in places(kind).items():
            name = f"model.layers.{layer}.mlp.{weight}"
            a, b = (
                factors[f"base_model.model.model.layers.{layer}.mlp.{start}.lora_{letter}.weight"]
                for letter in "AB"
            )
            replaced[name] = merged(plain.get_parameter(name), a, b, swapped=kind == "gpt_oss")
    logits = torch.func.functional_call(plain, replaced, (IDS,)).logits
    ours = lm(IDS).logits
    torch.testing.assert_close(ours, logits, rtol=1e-11, atol=1e-11)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).double()
    expected = torch.autograd.grad((logits * weights).sum(), list(factors.values()))
    (ours * weights).sum().backward()
    for (name, parameter), gradient in zip(adapter.parameters().items(), expected, strict=True):
        assert gradient.abs().max() > 1e-6
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-11, msg=name)
    assert all(p.grad is None for n, p in lm.named_parameters() if ".lora_" not in n)


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_grouped_products_have_the_gradients_of_the_loop_at_any_rank(kind: str, rank: int) -> None:
    """The loop's are float64: grouped products have no such sums. A gradient's rounding is bounded
    by the terms of all sums between it and the loss, in units of the largest of its tensor.
    """
    gradients: list[dict[str, Tensor]] = []
    for products, dtype in (("grouped_mm", torch.float32), ("eager", torch.float64)):
        lm = mixture(kind)
        lm.set_experts_implementation(products)
        adapter = moved(add_adapter(lm, LoraSettings(rank=rank, targets=("experts",)), seed=0))
        lm.to(dtype)
        lm(IDS).logits.square().mean().backward()
        gradients.append({n: p.grad for n, p in adapter.parameters().items() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == adapter.parameters().keys()
    units = terms_of(lm.config, rank) * 2.0**-24
    for name, gradient in gradients[0].items():
        exact = gradients[1][name]
        assert gradient.dtype == torch.float32
        assert (gradient.double() - exact).abs().max() <= units * exact.abs().max(), name


def terms_of(config: Any, rank: int) -> int:
    """The terms of the sums along the longest way through the model, there and back."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = config.hidden_size + dim + IDS.size(1) + heads * dim
    mixture = (
        2 * config.hidden_size + config.intermediate_size + 2 * rank + config.num_local_experts
    )
    norms = 2 * config.hidden_size
    return 2 * (config.num_hidden_layers * (attention + mixture + norms) + config.hidden_size)


def test_checkpointed_activations_give_the_same_gradients() -> None:
    gradients: list[list[Tensor | None]] = []
    for checkpointing in (False, True):
        lm = mixture("qwen3_moe").train()
        if checkpointing:
            recompute_activations(lm, True)
        adapter = moved(add_adapter(lm, BOTH, seed=0))
        lm(IDS).logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in adapter.parameters().values()])
    for plain, again in zip(*gradients, strict=True):
        assert plain is not None
        assert again is not None
        assert torch.equal(plain, again)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_merged_weights_in_a_plain_model_give_the_same_logits(kind: str) -> None:
    lm = mixture(kind)
    settings = LoraSettings(rank=4, targets=("q_proj", "experts.down_proj", "router"))
    adapter = moved(add_adapter(lm, settings, seed=0))
    weights = dict(adapter.hub_weights())
    plain = mixture(kind)
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights)
    torch.testing.assert_close(plain(IDS).logits, lm(IDS).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_two_adapters_of_a_mixture_act_in_turn_on_different_weights() -> None:
    lm = mixture("qwen3_moe")
    base = lm(IDS).logits
    policy = moved(add_adapter(lm, BOTH, seed=0))
    first = lm(IDS).logits
    other = moved(add_adapter(lm, LoraSettings(rank=2, targets=("experts.down_proj",)), seed=0,
                              name="other"))  # fmt: skip
    assert torch.equal(lm(IDS).logits, first)
    with other.active():
        assert not torch.equal(lm(IDS).logits, first)
    with other.disabled():
        assert torch.equal(lm(IDS).logits, base)
    assert f"{FILE}experts.lora_A.weight" in other.parameters()  # of down_proj: there is no other
    assert f"{FILE}experts.base_layer.lora_A.weight" in policy.parameters()
    assert f"{FILE}experts.base_layer.lora_A.weight" not in other.parameters()


def test_a_failed_forward_leaves_the_weights_where_they_were() -> None:
    lm = mixture("qwen3_moe")
    add_adapter(lm, BOTH, seed=0)
    experts = lm.model.layers[0].mlp.experts
    with pytest.raises(RuntimeError, match=r"mat|size|shape"):
        experts(torch.zeros(3, 5), torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2))
    assert isinstance(experts.down_proj, torch.nn.Parameter)


def test_an_adapter_in_bfloat16_computes_its_part_in_float32() -> None:
    lm = mixture("qwen3_moe").bfloat16()
    adapter = add_adapter(lm, BOTH, seed=0)
    lm(IDS).logits.float().square().mean().backward()
    assert {p.dtype for p in adapter.parameters().values()} == {torch.float32}
    grown = [p.grad for n, p in adapter.parameters().items() if n.endswith("lora_B.weight")]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in grown)


def test_a_use_of_a_weight_that_is_no_product_is_refused_by_name() -> None:
    weight = ChangedWeight(torch.ones(2, 4, 3), torch.ones(2, 4, 1), torch.ones(2, 1, 3), 1.0, "x")
    for use, name in (
        (lambda: torch.einsum("eij,j->ei", weight, torch.ones(3)), "einsum"),  # pyright: ignore[reportArgumentType]
        (lambda: weight.view(8, 3), "view"),
        (lambda: weight[:1], "an index"),
        (lambda: weight.transpose(0, 1), r"transpose\(0, 1\)"),
    ):
        with pytest.raises(UsageError, match=rf"experts or routers of a x model .*\({name}\)"):
            use()
