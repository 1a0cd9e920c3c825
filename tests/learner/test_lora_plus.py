"""LoRA+: B of an adapter learns at a rate of its own, by hand in float64 and as PEFT groups it."""

import copy

import numpy as np
import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.core.errors import UsageError
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings

LAYER = "base_model.model.model.layers.0"
A, B = f"{LAYER}.self_attn.q_proj.lora_A.weight", f"{LAYER}.self_attn.q_proj.lora_B.weight"
OF_EXPERTS = f"{LAYER}.mlp.experts.base_layer.lora_B.weight"
LENGTHS = f"{LAYER}.self_attn.q_proj.lora_magnitude_vector.weight"  # of DoRA
SHAPES = {A: (4, 6), B: (5, 4), OF_EXPERTS: (6, 8), LENGTHS: (5,), "score.weight": (1, 6)}
FASTER = {B, OF_EXPERTS}
Named = dict[str, torch.nn.Parameter]


def weights(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Named:
    drawn = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=drawn))
        for name, shape in shapes.items()
    }


def take(optimizer: MasterOptimizer, named: Named, step: int, rate: float) -> None:
    """One update on gradients that depend on the step alone."""
    drawn = torch.Generator().manual_seed(step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=drawn)
    optimizer.step(rate)


def test_b_steps_and_decays_at_its_own_rate_as_adamw_by_hand() -> None:
    settings = LearnerSettings(
        lr=0.01, weight_decay=0.5, betas=(0.8, 0.9), max_grad_norm=1.0, loraplus_lr_ratio=16.0
    )
    named = weights()
    want = {name: p.detach().double().numpy() for name, p in named.items()}
    m, v = ({name: np.zeros_like(w) for name, w in want.items()} for _ in range(2))
    optimizer = MasterOptimizer(named, settings)
    rng = np.random.default_rng(0)
    for step, rate in ((1, 0.01), (2, 0.005)):
        gradient = {name: rng.normal(size=w.shape) for name, w in want.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        for name, parameter in named.items():
            parameter.grad = torch.from_numpy(gradient[name]).float()
        optimizer.step(rate)
        for name in want:
            g = gradient[name] / max(1.0, norm)
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g**2
            hat = (m[name] / (1 - 0.8**step)) / (np.sqrt(v[name] / (1 - 0.9**step)) + 1e-8)
            own_rate = rate * (16.0 if name in FASTER else 1.0)
            decay = 0.0 if name == LENGTHS else 0.5
            want[name] = want[name] * (1 - own_rate * decay) - own_rate * hat
    for name, parameter in named.items():
        np.testing.assert_allclose(parameter.detach().numpy(), want[name], rtol=2e-5, atol=1e-6)


def test_rates_and_updates_are_those_of_peft() -> None:
    config = AutoConfig.for_model(
        "qwen2", vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    ours = copy.deepcopy(theirs)
    loraplus = create_loraplus_optimizer(
        model=theirs, optimizer_cls=torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=8.0,
        loraplus_weight_decay=0.1,
    )  # fmt: skip
    named = {
        name.replace(".default", ""): parameter
        for name, parameter in ours.named_parameters()
        if parameter.requires_grad
    }
    settings = LearnerSettings(lr=0.01, weight_decay=0.1, max_grad_norm=0.0, loraplus_lr_ratio=8.0)
    optimizer = MasterOptimizer(named, settings)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    for step in range(3):
        drawn = torch.Generator().manual_seed(step)
        for our_parameter, their_parameter in zip(named.values(), trained, strict=True):
            our_parameter.grad = torch.randn(our_parameter.shape, generator=drawn)
            their_parameter.grad = our_parameter.grad.clone()
        optimizer.step(0.01)
        loraplus.step()
    rates = {p: group["lr"] for group in loraplus.param_groups for p in group["params"]}
    assert set(rates.values()) == {0.01, 0.08}
    for (name, our_parameter), their_parameter in zip(named.items(), trained, strict=True):
        assert rates[their_parameter] == pytest.approx(0.08 if ".lora_B." in name else 0.01)
        torch.testing.assert_close(our_parameter, their_parameter, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ratio", [1.0, 4.0])
def test_muon_moves_and_decays_b_so_many_times_as_far(ratio: float) -> None:
    settings = LearnerSettings(
        optimizer="muon", lr=0.01, weight_decay=0.1, loraplus_lr_ratio=ratio, max_grad_norm=0.0
    )
    quick, slow = weights(), weights()
    plain = settings.model_copy(update={"loraplus_lr_ratio": 1.0})
    take(MasterOptimizer(quick, settings), quick, 1, 0.01)
    take(MasterOptimizer(slow, plain), slow, 1, 0.01)
    start = weights()
    for name in SHAPES:
        far, near = (named[name].detach() - start[name].detach() for named in (quick, slow))
        torch.testing.assert_close(
            far, near * (ratio if name in FASTER else 1.0), rtol=1e-3, atol=1e-6
        )


def test_moments_in_eight_bits_take_the_rate_of_b() -> None:
    shapes = {A: (16, 256), B: (256, 16)}
    settings = LearnerSettings(
        optimizer_state="8bit", lr=0.01, weight_decay=0.1, loraplus_lr_ratio=4.0
    )
    quick, slow = weights(shapes), weights(shapes)
    plain = settings.model_copy(update={"loraplus_lr_ratio": 1.0})
    take(MasterOptimizer(quick, settings), quick, 1, 0.01)
    at_four_times = MasterOptimizer(slow, plain)
    take(at_four_times, slow, 1, 0.04)
    assert torch.equal(quick[B], slow[B])
    assert not torch.equal(quick[A], slow[A])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_ratio_of_one_changes_no_bit(optimizer: str) -> None:
    def trained(**more: float) -> Named:
        named = weights()
        learner_settings = LearnerSettings.model_validate(
            {"optimizer": optimizer, "lr": 0.01, **more}
        )
        learner = MasterOptimizer(named, learner_settings)
        for step in range(2):
            take(learner, named, step, 0.01)
        return named

    plain, stated = trained(), trained(loraplus_lr_ratio=1.0)
    assert all(torch.equal(plain[name], stated[name]) for name in plain)
    faster = trained(loraplus_lr_ratio=2.0)
    assert {name for name in plain if not torch.equal(plain[name], faster[name])} == FASTER


def test_a_loaded_optimizer_goes_on_with_the_same_bits() -> None:
    settings = LearnerSettings(lr=0.01, weight_decay=0.1, loraplus_lr_ratio=16.0)
    named, other = weights(), weights()
    uninterrupted, resumed = MasterOptimizer(named, settings), MasterOptimizer(other, settings)
    for step in range(2):
        take(uninterrupted, named, step, 0.01)
    saved, state = ({n: t.clone() for n, t in kept.items()}
                    for kept in (uninterrupted.weights(), uninterrupted.state()))  # fmt: skip
    resumed.load(saved, state)
    take(uninterrupted, named, 2, 0.005)
    take(resumed, other, 2, 0.005)
    assert all(torch.equal(named[name], other[name]) for name in named)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="greater than 0"):
        LearnerSettings(loraplus_lr_ratio=0.0)
