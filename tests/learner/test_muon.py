"""Newton-Schulz against singular values in float64, steps against Jordan's by hand."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from postgrad.algorithms.grpo import GRPO
from postgrad.core.errors import UsageError
from postgrad.learner.backbone import MicroBatch
from postgrad.learner.optimizer import MasterOptimizer, Muon, orthogonalised
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.settings import ModelType

MATRICES = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


def quintic(matrix: np.ndarray, steps: int = 5) -> np.ndarray:
    """Float64: an odd polynomial of a matrix acts on its singular values alone."""
    u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


def muon_settings(**more: object) -> LearnerSettings:
    return LearnerSettings(**{"optimizer": "muon", "lr": 0.1, "max_grad_norm": 0.0, **more})


def in_a_layer(*weights: torch.Tensor) -> dict[str, torch.nn.Parameter]:
    return {
        f"model.layers.{number}.weight": torch.nn.Parameter(weight.clone())
        for number, weight in enumerate(weights)
    }


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("shape", [(8, 8), (24, 6), (6, 24), (1, 9), (5, 1)])
def test_newton_schulz_is_the_quintic_on_the_singular_values(shape, steps):
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    orthogonal = orthogonalised(torch.from_numpy(matrix), steps)
    assert orthogonal.dtype == torch.float32
    np.testing.assert_allclose(orthogonal.numpy(), quintic(matrix, steps), atol=2e-5)


def test_five_steps_bring_singular_values_near_one():
    rng = np.random.default_rng(1)
    q, _ = np.linalg.qr(rng.normal(size=(16, 16)))
    p, _ = np.linalg.qr(rng.normal(size=(16, 16)))
    spread = np.geomspace(1.0, 0.02, 16)
    orthogonal = orthogonalised(torch.from_numpy((q * spread) @ p).float(), 5)
    values = torch.linalg.svdvals(orthogonal)
    assert values.max() < 1.25
    assert values.min() > 0.6
    assert torch.linalg.svdvals(torch.from_numpy((q * spread) @ p)).min() < 0.03


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31), st.sampled_from([2**-12, 8, 2**20])
)
def test_neither_scale_nor_transposition_matters(rows, columns, seed, scale):
    drawn = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=drawn)
    once = orthogonalised(matrix, 5)
    torch.testing.assert_close(orthogonalised(matrix * scale, 5), once, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(orthogonalised(matrix.T, 5).T, once, atol=1e-5, rtol=1e-4)


def test_zeros_stay_zeros():
    assert torch.equal(orthogonalised(torch.zeros(4, 3), 5), torch.zeros(4, 3))


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_muon_as_published(nesterov):
    """Jordan's momentum (a sum, not a mean: the scale goes), Moonlight's decay and step size."""
    rng = np.random.default_rng(2)
    want = rng.normal(size=(6, 10)).astype(np.float32).astype(np.float64)
    weights = in_a_layer(torch.from_numpy(want).float())
    (weight,) = weights.values()
    optimizer = Muon(
        weights, muon_settings(weight_decay=0.5, muon_momentum=0.8, muon_nesterov=nesterov)
    )
    buffer = np.zeros_like(want)
    for rate in (0.1, 0.05, 0.2):
        gradient = rng.normal(size=want.shape) * rng.choice([1e-3, 1.0])
        weight.grad = torch.from_numpy(gradient).float()
        optimizer.step(rate)
        buffer = 0.8 * buffer + gradient
        ahead = gradient + 0.8 * buffer if nesterov else buffer
        want = want * (1 - rate * 0.5) - rate * 0.2 * math.sqrt(10) * quintic(ahead)
    np.testing.assert_allclose(weight.detach().numpy(), want, atol=2e-5)


def test_torch_does_the_same_to_the_precision_of_bfloat16():
    drawn = torch.Generator().manual_seed(3)
    ours = in_a_layer(torch.randn(12, 20, generator=drawn), torch.randn(20, 8, generator=drawn))
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours.values()]
    optimizer = Muon(ours, muon_settings(weight_decay=0.1))
    reference = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )  # its other defaults are ours
    for _ in range(3):
        for our_parameter, other in zip(ours.values(), theirs, strict=True):
            our_parameter.grad = torch.randn(our_parameter.shape, generator=drawn)
            other.grad = our_parameter.grad.clone()
        optimizer.step(0.1)
        reference.step()
    for (name, our_parameter), other in zip(ours.items(), theirs, strict=True):
        momentum = reference.state[other]["momentum_buffer"]
        torch.testing.assert_close(optimizer.momentum[name], momentum, atol=1e-6, rtol=1e-5)
        moved = 3 * 0.1 * 0.2 * math.sqrt(20)
        assert (our_parameter - other).abs().max() < 0.02 * moved


@pytest.mark.parametrize("shape", [(32, 32), (48, 32), (16, 96)])
def test_a_step_is_about_as_far_as_adamws(shape):
    """Root mean square 0.2 of the rate, less what singular values are below one."""
    drawn = torch.Generator().manual_seed(4)
    weights = in_a_layer(torch.randn(shape, generator=drawn))
    (weight,) = weights.values()
    before = weight.detach().clone()
    weight.grad = torch.randn(shape, generator=drawn)
    Muon(weights, muon_settings()).step(0.01)
    rms = float((weight.detach() - before).square().mean().sqrt())
    assert 0.14 * 0.01 < rms < 0.23 * 0.01


@pytest.mark.parametrize("kind", get_args(ModelType))
@pytest.mark.parametrize("scoring", [False, True])
def test_muon_gets_the_matrices_of_the_layers_and_adamw_all_else(kind, scoring):
    config = AutoConfig.for_model(
        "gemma3_text" if kind == "gemma3" else kind,
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
        pad_token_id=0,
        num_labels=1,
    )
    auto = AutoModelForSequenceClassification if scoring else AutoModelForCausalLM
    model = auto.from_config(config)
    optimizer = MasterOptimizer(model, muon_settings())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(0.1)
    state = optimizer.state()
    matrices = {f"model.layers.{layer}.{name}" for layer in range(2) for name in MATRICES}
    rest = {name for name, _ in model.named_parameters()} - matrices
    assert {name for name in state if name.endswith(".momentum_buffer")} == {
        f"{name}.momentum_buffer" for name in matrices
    }
    assert {name for name in state if "exp_avg" in name} == {
        f"{name}.{moment}" for name in rest for moment in ("exp_avg", "exp_avg_sq")
    }
    assert "model.embed_tokens.weight" in rest
    assert ("score.weight" if scoring else "lm_head.weight") in rest


def test_the_matrices_of_an_adapter_are_muons_each_by_itself():
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {
        f"{place}.lora_A.weight": torch.nn.Parameter(torch.randn(4, 16)),
        f"{place}.lora_B.weight": torch.nn.Parameter(torch.zeros(16, 4)),
    }
    first = adapter[f"{place}.lora_A.weight"].detach().clone()
    optimizer = MasterOptimizer(adapter, muon_settings())
    adapter[f"{place}.lora_A.weight"].grad = torch.zeros(4, 16)  # B is zero: nothing reaches A
    adapter[f"{place}.lora_B.weight"].grad = torch.randn(16, 4)
    optimizer.step(0.1)
    assert set(optimizer.state()) == {"updates", *(f"{name}.momentum_buffer" for name in adapter)}
    assert torch.equal(optimizer.weights()[f"{place}.lora_A.weight"], first)
    b = optimizer.weights()[f"{place}.lora_B.weight"]
    assert 0.05 < float(b.square().mean().sqrt()) / (0.1 * 0.2 * math.sqrt(16)) < 1.2


def test_muon_without_a_matrix_to_train_is_an_error():
    with pytest.raises(UsageError, match=r"no matrix in a decoder layer.*'weight'.*\"adamw\""):
        MasterOptimizer(torch.nn.Linear(3, 2), muon_settings())


@pytest.mark.parametrize("key", [{"muon_lr": 1e-3}, {"muon_momentum": 0.9}, {"muon_ns_steps": 4}])
def test_knobs_of_muon_without_muon_are_refused(key):
    with pytest.raises(UsageError, match=f"{next(iter(key))} is read by Muon only"):
        LearnerSettings(**key)
    assert LearnerSettings(optimizer="muon", **key).optimizer == "muon"


def test_a_spike_that_is_clipped_does_not_rule_the_steps_after_it():
    """What clipping is for under Muon: unclipped, one spike fills the momentum."""
    drawn = torch.Generator().manual_seed(5)
    start, spike, plain = (torch.randn(12, 12, generator=drawn) for _ in range(3))

    def cosine_after(limit: float) -> float:
        weights = in_a_layer(start)
        (weight,) = weights.values()
        optimizer = MasterOptimizer(weights, muon_settings(max_grad_norm=limit))
        for gradient in (1e4 * spike, plain, plain, plain):
            before = weight.detach().clone()
            weight.grad = gradient.clone()
            optimizer.step(0.1)
        step = (before - weight).detach()
        alone = orthogonalised(plain, 5)
        return float(torch.nn.functional.cosine_similarity(step.flatten(), alone.flatten(), 0))

    assert cosine_after(1.0) > 0.9
    assert cosine_after(0.0) < 0.3


def test_the_length_of_a_step_does_not_depend_on_clipping():
    weights = [in_a_layer(torch.eye(6)) for _ in range(2)]
    gradient = torch.randn(6, 6, generator=torch.Generator().manual_seed(6))
    for named, limit in zip(weights, (0.0, 1e-2), strict=True):
        optimizer = MasterOptimizer(named, muon_settings(max_grad_norm=limit))
        (weight,) = named.values()
        weight.grad = gradient.clone()
        assert optimizer.step(0.1) == pytest.approx(float(gradient.norm()), rel=1e-6)
    (free,), (clipped,) = (list(named.values()) for named in weights)
    torch.testing.assert_close(clipped, free, atol=1e-6, rtol=1e-5)


def test_an_update_without_gradient_decays_and_does_not_step():
    weights = in_a_layer(torch.eye(4))
    (weight,) = weights.values()
    optimizer = MasterOptimizer(weights, muon_settings(weight_decay=0.5))
    weight.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(7))
    optimizer.step(0.1)
    before = weight.detach().clone()
    momentum = optimizer.state()["model.layers.0.weight.momentum_buffer"].clone()
    assert optimizer.step(0.1) == 0.0  # no gradient at all
    torch.testing.assert_close(weight.detach(), before * 0.95)
    buffer = optimizer.state()["model.layers.0.weight.momentum_buffer"]
    torch.testing.assert_close(buffer, momentum * 0.95)
    assert optimizer.updates == 2


def test_muon_lr_follows_the_same_schedule():
    weights = {
        **in_a_layer(torch.zeros(4, 4)),
        "norm.weight": torch.nn.Parameter(torch.zeros(4)),
    }
    optimizer = MasterOptimizer(weights, muon_settings(lr=0.1, muon_lr=0.3))
    gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(8))
    weights["model.layers.0.weight"].grad = gradient
    weights["norm.weight"].grad = torch.ones(4)
    optimizer.step(0.05)  # half of lr
    want = -0.15 * 0.2 * 2.0 * quintic(gradient.numpy())
    stepped = weights["model.layers.0.weight"].detach().numpy()
    np.testing.assert_allclose(stepped, want, atol=1e-6)
    torch.testing.assert_close(weights["norm.weight"].detach(), torch.full((4,), -0.05))


def test_the_cut_into_micro_batches_changes_an_update_by_rounding_alone(make_learner, experience):
    """Bfloat16 iterations would make a hundredth of the step of it."""
    moved = []
    for micro in (None, MicroBatch(max_sequences=1)):
        learner = make_learner(micro, optimizer="muon")
        before = {name: weight.clone() for name, weight in learner.weights().items()}
        learner.update(Update(experience, np.arange(9)), GRPO()).result()
        moved.append({name: w - before[name] for name, w in learner.weights().items()})
    undivided, cut = moved
    matrices = [name for name in undivided if name.endswith("_proj.weight")]
    assert len(matrices) == 14
    for name in matrices:
        assert (cut[name] - undivided[name]).norm() < 1e-3 * undivided[name].norm(), name
