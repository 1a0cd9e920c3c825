"""Routers that compute in float32 in a narrow model: their logits are those of float64."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.adapters import moved
from helpers.model_types import MIXTURES, config_of
from postgrad.core.errors import UsageError
from postgrad.models.adapters import add_adapter
from postgrad.models.attention import layers_of
from postgrad.models.compiled import compile_layers
from postgrad.models.four_bits import twin
from postgrad.models.router_dtype import widen
from postgrad.models.routers import (
    Routers,
    _routers,
    give_dtype,
    router_weights,
    routers_in_float32,
)
from postgrad.models.settings import LoraSettings
from postgrad.models.supported import refused_types

EXACT, ROUNDED = 1e-6, 5e-4  # of a float32 product, and of one that bfloat16 has rounded
# Of these transformers' own code computes routers in float32, from weights in it or not.
IN_FLOAT32 = (
    "axk1", "bailing_hybrid", "beam", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe",
    "exaone_moe", "flint", "glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe", "hy_v3", "kimi_linear",
    "kolibri1", "lara_mini", "mimo_v2_flash", "nemotron_h", "sarvam_mla", "sarvam_moe",
    "solar_open",
)  # fmt: skip
# Types whose experts have to be asked for in a config, or are in later layers.
ASKED: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "jetmoe": {},
    "lfm2_moe": {"num_dense_layers": 1},
}
FAST = ("qwen3_moe", "gpt_oss", "deepseek_v3", "afmoe", "gemma4_text")
EVERY = [
    pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow)
    for kind in (*MIXTURES, *ASKED)
]


def mixture(kind: str, folder: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A fresh model in a dtype; with a folder as transformers reads one, which keeps some of its
    weights in float32.
    """
    torch.manual_seed(0)
    config = config_of(kind, 37)
    for key, value in ASKED.get(kind, {}).items():
        setattr(config, key, value)
    lm: Any = AutoModelForCausalLM.from_config(config)
    for name in router_weights(lm):
        weight = lm.get_parameter(name)
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.2)
    if folder is None:
        return lm.to(dtype).eval()
    lm.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def in_float64(router: Any, hidden: Tensor) -> Tensor:
    """[T, E] the logits by their formula. hidden: as the router got it."""
    x = hidden.detach().flatten(0, -2).double()
    if hasattr(router, "norm"):  # Gemma 4
        x = x * (x.square().mean(-1, keepdim=True) + router.eps).rsqrt()
        x = x * router.scale.detach().double() * router.hidden_size**-0.5
    logits = x @ next(p for p in router.parameters() if p.ndim == 2).detach().double().T
    if isinstance(bias := getattr(router, "bias", None), Tensor):
        logits = logits + bias.detach().double()
    if cap := getattr(router, "router_logit_softcapping", 0.0):
        logits = cap * torch.tanh(logits / cap)
    return logits.softmax(-1) if hasattr(router, "norm") else logits


def errors(lm: Any) -> list[float]:
    """Of the logits of each router, over the largest, in a forward and backward pass."""
    seen: list[float] = []

    def compare(place: int, router: Any, inputs: Any, outputs: Any) -> None:
        logits = outputs[place] if isinstance(outputs, tuple) else outputs
        exact = in_float64(router, inputs[0])
        apart = (logits.detach().flatten(0, -2).double() - exact).abs().max()
        seen.append(float(apart / exact.abs().max()))

    hooks = [m.register_forward_hook(partial(compare, place)) for m, place in _routers(lm)]
    ids = torch.randint(3, 36, (1, 24), generator=torch.Generator().manual_seed(1))
    lm(input_ids=ids, use_cache=False).logits.float().square().sum().backward()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("kind", EVERY)
def test_the_logits_of_every_type_are_those_of_float64(kind: str, tmp_path: Path) -> None:
    lm = mixture(kind, tmp_path)
    before = max(errors(lm))
    assert before < EXACT if kind in IN_FLOAT32 else before > ROUNDED
    give_dtype(lm, "float32")
    lm.zero_grad()
    assert max(errors(lm)) < EXACT
    weights = [lm.get_parameter(name) for name in router_weights(lm) if name.endswith("weight")]
    assert weights
    assert all(p.grad.norm() > 0 and p.grad.dtype == p.dtype for p in weights)


def test_the_page_lists_the_types_whose_own_code_routes_in_float32() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    listed = page.partition("so that both values are the same to the bit:")[2].partition(".")[0]
    assert tuple(listed.replace(",", " ").split()) == IN_FLOAT32


def test_a_float32_model_is_left_as_it_is() -> None:
    lm = mixture("qwen3_moe", dtype=torch.float32)
    give_dtype(lm, "float32")
    assert not [router for router, _ in _routers(lm) if "forward" in vars(router)]


def test_dense_models_and_experts_that_another_module_chooses_are_refused() -> None:
    for kind in ("qwen3", *refused_types()["without"]["router_dtype"]["types"]):
        lm = AutoModelForCausalLM.from_config(config_of(kind, 37))
        give_dtype(lm, "auto")
        with pytest.raises(UsageError, match=rf'critic.router_dtype = "float32": a {kind} model'):
            give_dtype(lm, "float32", "critic.router_dtype")


@pytest.mark.parametrize("kind", refused_types()["without"]["router_dtype"]["types"])
def test_experts_that_another_module_chooses_would_not_take_wide_logits(kind: str) -> None:
    lm = mixture(kind)
    lm(input_ids=torch.arange(3, 9)[None], use_cache=False)
    widen([router for router, _ in _routers(lm)])
    with pytest.raises(RuntimeError, match="same scalar type"):
        lm(input_ids=torch.arange(3, 9)[None], use_cache=False)


def test_gradients_are_those_of_float64_up_to_one_rounding() -> None:
    """Of hidden states, weight and bias, of which the backward pass keeps nothing in float32."""
    lm = mixture("gpt_oss")
    give_dtype(lm, "float32")
    router: Any = _routers(lm)[0][0]
    torch.nn.init.normal_(router.bias)
    x = torch.randn(50, 32).bfloat16().requires_grad_()
    cotangent = torch.randn(50, 4)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        logits = router(x)[0]
    assert [t.dtype for t in kept if t.shape == x.shape] == [torch.bfloat16]
    assert not [t for t in kept if t.dtype == torch.float32 and t.shape[-1] == x.shape[-1]]
    logits.backward(cotangent)
    exact = [t.detach().double().requires_grad_() for t in (x, router.weight, router.bias)]
    torch.nn.functional.linear(*exact).backward(cotangent.double())
    for narrow, wide in zip((x, router.weight, router.bias), exact, strict=True):
        assert narrow.grad is not None
        assert wide.grad is not None
        apart = (narrow.grad.double() - wide.grad).abs()
        assert bool((apart <= 2.0**-8 * wide.grad.abs() + 1e-6).all())


def test_frozen_routers_and_a_pass_without_gradients_compute_alike() -> None:
    lm = mixture("qwen3_moe")
    give_dtype(lm, "float32")
    router: Any = _routers(lm)[0][0]
    x = torch.randn(9, 32).bfloat16()
    learning = router(x.clone().requires_grad_())[0].detach()
    router.requires_grad_(False)
    for hidden in (x, x.clone().requires_grad_()):
        assert torch.equal(router(hidden)[0].detach(), learning)
    with torch.inference_mode():
        assert torch.equal(router(x)[0], learning)


def test_what_watches_routers_sees_float32_logits_and_replays_in_them() -> None:
    lm = mixture("qwen3_moe")
    give_dtype(lm, "float32")
    routers = Routers(lm)
    ids = torch.arange(3, 20)[None]
    with routers.recording() as recorded:
        lm(input_ids=ids, use_cache=False)
    assert {routed.logits.dtype for routed in recorded} == {torch.float32}
    again = torch.stack([routed.logits.argsort(-1)[:, :2] for routed in recorded], 1)  # the worst
    with routers.recording() as replayed, routers.replaying(again):
        lm(input_ids=ids, use_cache=False)
    assert {routed.logits.dtype for routed in replayed} == {torch.float32}
    assert torch.equal(torch.stack([routed.chosen for routed in replayed], 1), again)


def test_a_twin_has_wide_routers_of_its_own() -> None:
    """The engine's, of a model whose weights it shares."""
    lm = mixture("qwen3_moe")
    give_dtype(lm, "float32")
    other: Any = twin(lm)
    for (router, _), (copied, _) in zip(_routers(lm), _routers(other), strict=True):
        assert copied is not router
        assert vars(copied)["forward"].args[0] is copied
        assert copied.weight is router.weight
    assert max(errors(other)) < EXACT


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "hunyuan_v1_moe", "afmoe"])
def test_a_router_under_an_adapter_is_wide_too(kind: str) -> None:
    """On a weight A and B are rounded as elsewhere, on a linear layer they are float32 here."""
    targets = ("wg",) if kind == "hunyuan_v1_moe" else ("gate",) if kind == "afmoe" else ("router",)
    lm = mixture(kind)
    give_dtype(lm, "float32")
    lm.requires_grad_(False)
    adapter = add_adapter(lm, LoraSettings(rank=4, alpha=8, targets=targets), seed=0, name="policy")
    moved(adapter)
    seen: list[float] = []

    def compare(router: Any, inputs: Any, outputs: Any) -> None:
        layer: Any = next(m for m in router.modules() if hasattr(m, "lora_A"))
        a, b = (layer.get_submodule(f"lora_{letter}.policy").weight for letter in "AB")
        linear = hasattr(layer, "get_base_layer")
        if not linear:
            a, b = a.bfloat16(), b.bfloat16()
        base = layer.get_base_layer().weight if linear else router._parameters["weight"]
        weight = base.double() + layer.scaling["policy"] * (b.double() @ a.double())
        bias = getattr(router, "bias", None)
        exact = inputs[0].flatten(0, -2).double() @ weight.T + (0.0 if bias is None else bias)
        apart = (outputs[0].flatten(0, -2).double() - exact).abs().max() / exact.abs().max()
        seen.append(float(apart.detach()))

    for router, _ in _routers(lm):
        router.register_forward_hook(compare)
    ids = torch.arange(3, 33)[None]
    lm(input_ids=ids, use_cache=False).logits.float().square().sum().backward()
    assert max(seen) < EXACT
    gradients = [p.grad for name, p in lm.named_parameters() if "lora_" in name]
    assert all(g is not None and g.dtype == torch.float32 and g.norm() > 0 for g in gradients)


@pytest.mark.slow
def test_compiled_layers_have_the_wide_routers_of_plain_ones() -> None:
    lm, narrow = mixture("qwen3_moe"), mixture("qwen3_moe")
    give_dtype(lm, "float32")
    ids = torch.arange(3, 20)[None]
    plain = copy.deepcopy(lm)
    compile_layers(lm, "aot_eager")
    outputs = [model(input_ids=ids, use_cache=False).logits for model in (plain, lm)]
    assert torch.equal(*outputs)
    assert not torch.equal(narrow(input_ids=ids, use_cache=False).logits, outputs[0])
    for logits in outputs:
        logits.float().square().sum().backward()
    for layer, compiled in zip(layers_of(plain), layers_of(lm), strict=True):
        plain_gradient, other = (each.mlp.gate.weight.grad for each in (layer, compiled))
        assert torch.allclose(plain_gradient, other, rtol=2e-2, atol=1e-3)
    torch._dynamo.reset()


def test_routers_whose_weights_transformers_keeps_in_float32_are_known(tmp_path: Path) -> None:
    for kind, count in (("deepseek_v3", 1), ("qwen3_moe", 0)):
        lm = mixture(kind, tmp_path / kind)
        assert len(routers_in_float32(lm)) == count
        lm.requires_grad_(False)
        assert routers_in_float32(lm) == []
    assert routers_in_float32(mixture("qwen3_moe", dtype=torch.float32)) == []
