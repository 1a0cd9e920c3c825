"""LoRA on a frozen model: the base's bits, exact gradients, merged weights, several by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.adapters import moved
from postgrad.core.errors import RunError, UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import lay_out
from postgrad.models.adapters import add_adapter
from postgrad.models.attention import ATTENTION_NAME, hidden_states
from postgrad.models.head import full_logits
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model
from postgrad.models.settings import LoraSettings, ModelType
from postgrad.models.tree import TreeAttention

SMALL = LoraSettings(rank=4, alpha=8)
IDS = torch.tensor([[5, 17, 40, 8, 66, 23, 9, 31]])
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def model(fresh: Callable[[str], Path]) -> Callable[..., Any]:
    def read(kind: str = "qwen3", dtype: torch.dtype = torch.float32, score: bool = False) -> Any:
        load = load_score_model if score else load_model
        lm: Any = load(str(fresh(kind)), dtype=dtype).lm
        lm.set_attn_implementation("eager")
        return lm

    return read


@pytest.mark.parametrize("kind", ModelType.__args__)
@torch.no_grad()
def test_an_adapter_starts_as_the_base_and_disabled_is_the_base(
    kind: str, model: Callable[..., Any]
) -> None:
    lm = model(kind)
    base = lm(IDS).logits
    adapter = add_adapter(lm, SMALL, seed=0)
    assert torch.equal(lm(IDS).logits, base)
    moved(adapter)
    assert (lm(IDS).logits - base).abs().max() > 0.01
    with adapter.disabled():
        assert torch.equal(lm(IDS).logits, base)
    assert (lm(IDS).logits - base).abs().max() > 0.01


@pytest.mark.parametrize("kind", ModelType.__args__)
@torch.no_grad()
def test_the_merged_weights_are_a_plain_model_with_the_same_logits(
    kind: str, model: Callable[..., Any], fresh: Callable[[str], Path]
) -> None:
    lm = model(kind)
    adapter = moved(add_adapter(lm, SMALL, seed=0))
    plain: Any = AutoModelForCausalLM.from_pretrained(fresh(kind), dtype=torch.float32)
    plain_parameters = dict(plain.named_parameters())
    weights = dict(adapter.hub_weights())
    assert weights.keys() == plain_parameters.keys()
    merged = dict(adapter.merged())
    assert len(merged) == 14  # 7 linear layers in each of 2
    assert all(tensor.dtype == torch.float32 for tensor in merged.values())
    for name, tensor in weights.items():
        assert torch.equal(tensor, plain_parameters[name]) == (name not in merged)
        plain_parameters[name].copy_(tensor)
    torch.testing.assert_close(plain(IDS).logits, lm(IDS).logits, atol=3e-5, rtol=1e-5)


@torch.no_grad()
def test_a_merged_weight_is_w_and_alpha_over_rank_times_b_a(model: Callable[..., Any]) -> None:
    lm = model()
    before = lm.model.layers[0].self_attn.q_proj.weight.double().numpy()
    adapter = moved(add_adapter(lm, LoraSettings(rank=4, alpha=6), seed=0))
    a = adapter.parameters()[f"{Q_PROJ}.lora_A.weight"].double().numpy()
    b = adapter.parameters()[f"{Q_PROJ}.lora_B.weight"].double().numpy()
    merged = dict(adapter.merged())["model.layers.0.self_attn.q_proj.weight"].double().numpy()
    np.testing.assert_allclose(merged, before + 1.5 * b @ a, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ModelType.__args__)
@torch.no_grad()
def test_our_attention_over_packed_tokens_goes_through_the_adapter(
    kind: str, model: Callable[..., Any]
) -> None:
    lm = model(kind)
    head = lm.get_output_embeddings()
    moved(add_adapter(lm, SMALL, seed=0))
    assert lm.get_output_embeddings() is head
    rows = [[5, 17, 40, 8, 66, 23, 9, 31], [5, 17, 40, 8, 11, 12], [70, 71, 72]]
    expected = torch.cat([lm(torch.tensor([row])).logits[0] for row in rows])
    lm.set_attn_implementation(ATTENTION_NAME)
    tokens = Ragged.of(rows, np.int32)
    masks = Ragged.of([[False] + [True] * (len(row) - 1) for row in rows], np.bool_)
    layout = lay_out(Sequences(tokens, masks, np.array([0, 0, 1])), np.arange(3), min_shared=1)
    hidden = hidden_states(
        lm,
        torch.from_numpy(layout.token_ids),
        torch.from_numpy(layout.positions),
        TreeAttention(plan_blocks(layout), torch.device("cpu")),
    )
    assert layout.n_tokens == 13  # four tokens stand once for two sequences
    logits = full_logits(lm, hidden[layout.hidden_row])
    torch.testing.assert_close(logits, expected[layout.column - 1], atol=3e-5, rtol=1e-5)


def test_gradients_are_those_of_float64_differences(model: Callable[..., Any]) -> None:
    lm = model()
    adapter = moved(add_adapter(lm, SMALL, seed=0))
    lm.set_attn_implementation("sdpa")
    for name, norm in list(lm.named_modules()):  # transformers' own compute in float32
        if type(norm).__name__.endswith("RMSNorm"):
            exact = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
            exact.weight = norm.weight
            lm.set_submodule(name, exact)
    lm.double()

    def loss() -> Tensor:
        return torch.log_softmax(lm(IDS).logits, -1)[0, :, 3].square().sum()

    loss().backward()
    assert {n for n, p in lm.named_parameters() if p.grad is not None} == {
        n for n, p in lm.named_parameters() if p.requires_grad
    }
    assert sum(p.requires_grad for p in lm.parameters()) == len(adapter.parameters()) == 28
    rng = np.random.default_rng(0)
    for name, parameter in list(adapter.parameters().items())[::3]:
        place = tuple(rng.integers(0, size) for size in parameter.shape)
        values: list[float] = []
        with torch.no_grad():
            for step in (1e-5, -2e-5):
                parameter[place] += step
                values.append(float(loss()))
            parameter[place] += 1e-5
        difference = (values[0] - values[1]) / 2e-5
        assert float(parameter.grad[place]) == pytest.approx(difference, rel=1e-6, abs=1e-8), name


def test_an_adapter_of_a_base_in_bfloat16_is_float32_and_rounded_for_each_product(
    model: Callable[..., Any],
) -> None:
    lm = model(dtype=torch.bfloat16)
    adapter = moved(add_adapter(lm, SMALL, seed=0))
    assert {p.dtype for p in adapter.parameters().values()} == {torch.float32}
    layer = lm.model.layers[0].self_attn.q_proj
    generator = torch.Generator().manual_seed(0)

    def multiples(*shape: int) -> Tensor:
        """Odd ones of 2^-6, below a half: float32 sums of their products have no rounding."""
        return (2 * torch.randint(-16, 16, shape, generator=generator) + 1) / 64

    x, w = multiples(5, 32).bfloat16(), layer.base_layer.weight
    a = adapter.parameters()[f"{Q_PROJ}.lora_A.weight"]
    b = adapter.parameters()[f"{Q_PROJ}.lora_B.weight"]
    with torch.no_grad():
        w.copy_(multiples(*w.shape))
        for factor in (a, b):
            factor.copy_(multiples(*factor.shape) + 2.0**-20)  # which is rounded away
            assert not torch.equal(factor, factor.bfloat16().float())

    def product(x: Tensor, weight: Tensor) -> Tensor:
        exact = x.double() @ weight.bfloat16().double().T
        assert torch.equal(exact, exact.float().double())
        return exact.bfloat16()

    expected = product(x, w).double() + 2.0 * product(product(x, a), b).double()
    out = layer(x)
    assert torch.equal(out, expected.bfloat16())
    lm(IDS).logits.float().square().sum().backward()
    gradients = [p.grad for p in adapter.parameters().values()]
    assert all(g is not None and g.dtype == torch.float32 for g in gradients)
    assert all(bool(g.isfinite().all()) and float(g.abs().max()) > 0 for g in gradients)


def test_the_same_arguments_give_the_same_bits_and_no_generator_is_touched(
    model: Callable[..., Any],
) -> None:
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    adapters = [
        add_adapter(model(), SMALL, seed=seed, name=name).parameters()
        for seed, name in [(0, "policy"), (0, "policy"), (1, "policy"), (0, "critic")]
    ]
    assert torch.rand(1) == drawn
    for name, first in adapters[0].items():
        assert torch.equal(first, adapters[1][name])
        if "lora_A" in name:
            assert not torch.equal(first, adapters[2][name])
            assert not torch.equal(first, adapters[3][name])
        else:
            assert not first.any()
    layers = [p.flatten()[:128] for n, p in adapters[0].items() if "lora_A" in n]
    assert len({tuple(layer.tolist()) for layer in layers}) == len(layers)


def test_a_is_drawn_as_peft_draws_it(model: Callable[..., Any]) -> None:
    """Kaiming-uniform with a = sqrt(5): within +-1 / sqrt(inputs)."""
    adapter = add_adapter(model(), LoraSettings(rank=512), seed=0)
    for name, parameter in adapter.parameters().items():
        if "lora_A" in name:
            a = parameter.detach()
            bound = a.shape[1] ** -0.5
            assert 0.999 * bound < float(a.max()) <= bound
            assert -0.999 * bound > float(a.min()) >= -bound
            assert float(a.mean()) == pytest.approx(0, abs=0.03 * bound)
            assert float(a.std()) == pytest.approx(bound * 3**-0.5, rel=0.03)


def test_several_adapters_share_one_base_and_one_acts_at_a_time(model: Callable[..., Any]) -> None:
    lm = model()
    base = {p.data_ptr(): p.nbytes for p in lm.parameters()}
    policy = moved(add_adapter(lm, SMALL, seed=0), seed=1)
    alone = lm(IDS).logits.detach()
    other = moved(add_adapter(lm, LoraSettings(rank=2, targets=("q_proj",)), seed=0, name="other"))
    assert torch.equal(lm(IDS).logits, alone)  # the first goes on to act
    after = {p.data_ptr(): p.nbytes for p in lm.parameters()}
    assert {address: after[address] for address in base} == base
    assert sum(after.values()) == sum(base.values()) + policy.nbytes + other.nbytes
    assert len(other.parameters()) == 4

    def fail() -> None:
        with policy.active():
            assert torch.equal(lm(IDS).logits, alone)
            raise KeyError

    with other.active():
        lm(IDS).logits.square().sum().backward()
        with policy.disabled(), torch.no_grad():
            nothing = lm(IDS).logits
        assert not torch.equal(lm(IDS).logits, nothing)
        with pytest.raises(KeyError):
            fail()
        assert not torch.equal(lm(IDS).logits, alone)
    assert torch.equal(lm(IDS).logits, alone)
    assert not torch.equal(nothing, alone)
    assert all(p.grad is not None for p in other.parameters().values())
    assert all(p.grad is None for p in policy.parameters().values())
    assert all(p.requires_grad for a in (policy, other) for p in a.parameters().values())
    trained = len(policy.parameters()) + len(other.parameters())
    assert sum(p.requires_grad for p in lm.parameters()) == trained


def test_who_trains_is_not_changed_by_who_acts(model: Callable[..., Any]) -> None:
    lm = model()
    policy = add_adapter(lm, SMALL, seed=0)
    for parameter in policy.parameters().values():
        parameter.requires_grad_(False)
    other = add_adapter(lm, SMALL, seed=0, name="other")
    with policy.active(), policy.disabled(), other.active():
        pass
    assert not any(p.requires_grad for p in policy.parameters().values())
    assert all(p.requires_grad for p in other.parameters().values())


@torch.no_grad()
def test_an_adapter_may_be_added_while_none_acts(model: Callable[..., Any]) -> None:
    lm = model()
    base = lm(IDS).logits
    first = moved(add_adapter(lm, LoraSettings(rank=2, targets=("q_proj",)), seed=0))
    acting = lm(IDS).logits
    with first.disabled():
        second = moved(add_adapter(lm, SMALL, seed=0, name="second"))
        assert torch.equal(lm(IDS).logits, base)
    assert torch.equal(lm(IDS).logits, acting)
    with second.active():
        assert not torch.equal(lm(IDS).logits, acting)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_head_is_trained_whole_by_each_adapter(
    dtype: torch.dtype, model: Callable[..., Any]
) -> None:
    lm = model(score=True, dtype=dtype)
    head, base = lm.score.weight.detach().clone(), lm(IDS).logits.detach()
    critic = add_adapter(lm, SMALL, seed=0, name="critic")
    reward = add_adapter(lm, SMALL, seed=0, name="reward_model")
    name = "base_model.model.score.weight"
    for adapter in (critic, reward):
        assert torch.equal(adapter.parameters()[name], head.float())
        assert adapter.parameters()[name].dtype == torch.float32
    moved(reward)
    with reward.active():
        score = lm(IDS).logits
        score.sum().backward()
    torch.testing.assert_close(lm(IDS).logits, base, rtol=2**-7, atol=0)
    assert float((score.detach() - base).abs()) > 0.01
    assert reward.parameters()[name].grad is not None
    assert critic.parameters()[name].grad is None
    with critic.disabled():
        assert torch.equal(lm(IDS).logits, base)
    merged = dict(reward.merged())
    assert torch.equal(merged["score.weight"], reward.parameters()[name])
    assert "score.weight" not in dict(reward.frozen())
    assert set(dict(reward.hub_weights())) == set(dict(reward.frozen())) | {"score.weight"}


def test_only_the_named_layers_are_adapted(model: Callable[..., Any]) -> None:
    settings = LoraSettings(rank=2, targets=("v_proj", "mlp.down_proj"))
    adapter = add_adapter(model(), settings, seed=0)
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in adapter.parameters()} == {
        "v_proj",
        "down_proj",
    }
    assert len(dict(adapter.merged())) == 4


@pytest.mark.parametrize("target", ["proj", "lm_head", "embed_tokens", "query"])
def test_a_target_that_is_no_linear_layer_is_refused(
    target: str, model: Callable[..., Any]
) -> None:
    with pytest.raises(
        UsageError,
        match=rf"model.lora.targets: '{target}' is no linear layer of this qwen3 decoder, which "
        "has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
    ):
        add_adapter(model(), LoraSettings(targets=("q_proj", target)), seed=0)


@pytest.mark.parametrize("name", ["policy", "score", "a.b", ""])
def test_a_name_that_is_taken_or_none_is_refused(name: str, model: Callable[..., Any]) -> None:
    lm = model()
    add_adapter(lm, SMALL, seed=0)
    with pytest.raises(ValueError, match="cannot name another adapter"):
        add_adapter(lm, SMALL, seed=0, name=name)


def test_an_adapter_may_be_called_as_a_part_of_the_model(model: Callable[..., Any]) -> None:
    adapter = add_adapter(model(), SMALL, seed=0, name="mlp")
    assert adapter.parameters().keys() == add_adapter(model(), SMALL, seed=0).parameters().keys()


def test_weights_of_another_adapter_are_refused_and_change_nothing(
    model: Callable[..., Any],
) -> None:
    adapter = moved(add_adapter(model(), SMALL, seed=0))
    before = {name: p.detach().clone() for name, p in adapter.parameters().items()}
    zeros = {name: torch.zeros_like(p) for name, p in before.items()}
    name = f"{Q_PROJ}.lora_A.weight"
    with pytest.raises(RunError, match=r"another adapter.*missing \['.*q_proj.lora_A.weight'\]"):
        adapter.load({n: p for n, p in zeros.items() if n != name})
    with pytest.raises(RunError, match=r"unknown \['more'\]"):
        adapter.load({**zeros, "more": zeros[name]})
    with pytest.raises(RunError, match=r"shape \(1, 32\), adapter 'policy' has \(4, 32\)"):
        adapter.load({**zeros, name: torch.zeros(1, 32)})
    assert all(torch.equal(p, before[n]) for n, p in adapter.parameters().items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "greater than or equal to 1"),
        ({"alpha": 0}, "greater than or equal to 1"),
        ({"dropout": 1.0}, "less than 1"),
        ({"targets": ("q_proj", "")}, "'' is not the end of a layer"),
        ({"targets": (".*_proj",)}, "is not the end of a layer"),
        ({"targets": ("q_proj", "q_proj")}, "q_proj: named twice"),
        ({"ranks": 8}, "unknown key"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj = 0: .*greater than or equal to 1"),
        ({"alpha_pattern": {".*": 1}}, r"'\.\*' is not the end of a layer"),
        ({"layers_to_transform": (-1,)}, "greater than or equal to 0"),
        ({"layers_to_transform": (1, 1)}, "1: named twice"),
        ({"exclude_modules": ("q_proj", "q_proj")}, "q_proj: named twice"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LoraSettings(**values)
