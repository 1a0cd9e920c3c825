"""Losses of routers: those of transformers over the whole batch, whatever the cut."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from helpers.model_types import config_of
from postgrad.algorithms.sft import SFT
from postgrad.core.errors import UsageError
from postgrad.core.records import Experience
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Routing, Update
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.routers import Routed, Routers, loss_of, routers_of, sums_of
from postgrad.models.settings import ModelSettings
from postgrad.parallel.ranks import ALONE

balance_of_transformers: Any = load_balancing_loss_func
MIXTURES = ("qwen3_moe", "mixtral", "olmoe")
ALL = np.arange(9)
COEFFICIENTS = (0.5, 0.02)  # of balance and z


def mixture(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config_of(kind, 37)).to(dtype)
    lm.set_attn_implementation(ATTENTION_NAME)
    lm.config._experts_implementation = "eager"  # the grouped product takes no float64
    return lm


def backbone_of(lm: Any, micro: MicroBatch | None = None) -> Backbone:
    backbone = Backbone(lm, torch.device("cpu"), micro or MicroBatch())
    backbone.routers = Routers(lm, *COEFFICIENTS)
    backbone.divide(ALONE, "none")
    return backbone


def gradients(lm: Any) -> Tensor:
    """Of all weights; zeros of those that no loss reaches, such as the last layer's experts."""
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in lm.parameters()]
    )


def packed(backbone: Backbone, update: Update) -> tuple[Tensor, dict[str, float]]:
    """The gradient of the routers' losses alone, and their metrics."""
    rows, routing = update.rows_with_gradient, Routing(backbone, update)

    def layouts() -> Any:
        return backbone.micro_batches(update.experience.sequences, rows)

    with torch.no_grad():
        for layout in layouts():
            with routing.watching(layout):
                backbone.logprobs(layout, 1.0)
    routing.have_counted()
    for layout in layouts():
        with routing.watching(layout):
            logprobs, _ = backbone.logprobs(layout, 1.0)
        (routing.loss(layout) + 0.0 * logprobs.sum()).backward()
    return gradients(backbone.lm), routing.metrics("policy")


def padded(lm: Any, experience: Experience, rows: Any) -> tuple[tuple[Tensor, ...], Tensor]:
    """transformers' router logits [B * T, E] of each layer, over a padded batch, and its mask."""
    lm.set_attn_implementation("eager")
    tokens = [experience.sequences.tokens.row(row) for row in rows]
    longest = max(map(len, tokens))
    ids = torch.zeros(len(tokens), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(tokens):
        ids[place, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask[place, : len(row)] = 1
    out = lm(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    return out.router_logits, mask


@pytest.mark.parametrize("kind", MIXTURES)
def test_losses_and_gradients_are_those_of_transformers_over_the_whole_batch(
    kind: str, experience: Experience
) -> None:
    """In float64, but for norms, rotations and sums that transformers computes in float32."""
    update = Update(experience, ALL)
    gradient, metrics = packed(backbone_of(mixture(kind), MicroBatch(max_sequences=2)), update)
    lm = mixture(kind)
    logits, mask = padded(lm, experience, update.rows_with_gradient)
    theirs = balance_of_transformers(logits, 4, 2, mask)
    assert metrics["policy/router_balance"] == pytest.approx(theirs.item(), rel=1e-5)
    real = [layer[mask.flatten().bool()] for layer in logits]
    together = torch.cat(real)
    probabilities = together.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2).indices, 1.0)
    balance = 4 * (chosen.mean(0) * probabilities.mean(0)).sum()
    z = together.logsumexp(-1).square().mean()
    assert metrics["policy/router_balance"] == pytest.approx(balance.item(), rel=1e-6)
    assert metrics["policy/router_z"] == pytest.approx(z.item(), rel=1e-6)
    loads = torch.stack([layer.topk(2).indices.flatten().bincount(minlength=4) for layer in real])
    assert metrics["policy/router_max_load"] == pytest.approx(
        float((loads * 4 / loads.sum(1, keepdim=True)).max())
    )
    assert metrics["policy/router_unused"] == float((loads == 0).double().mean())
    (COEFFICIENTS[0] * balance + COEFFICIENTS[1] * z).backward()
    expected = gradients(lm)
    assert expected.norm() > 0
    assert (gradient - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("shares", [True, False])
def test_the_cut_and_shared_prompts_change_nothing(
    kind: str, shares: bool, experience: Experience
) -> None:
    undivided, metrics = packed(backbone_of(mixture(kind)), Update(experience, ALL))
    if not shares:
        sequences = dataclasses.replace(experience.sequences, group=ALL)
        experience = dataclasses.replace(experience, sequences=sequences)
    for most in (1, 2, 4):
        backbone = backbone_of(mixture(kind), MicroBatch(max_sequences=most))
        cut, again = packed(backbone, Update(experience, ALL))
        assert (cut - undivided).norm() < 1e-6 * undivided.norm()
        assert again == pytest.approx(metrics, rel=1e-6)


def test_parts_of_micro_batches_add_up_to_the_formulas_in_float64() -> None:
    """60 tokens in 3 layers of 5 experts, each token of 1 to 4 sequences; two choices a row."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(60, 5, generator=generator, dtype=torch.float64) for _ in range(3)]
    leaves = [each.requires_grad_() for each in logits]
    copies = torch.randint(1, 5, (60,), generator=generator).double()
    rows = 3 * float(copies.sum())
    unshared = torch.cat([each.repeat_interleave(copies.long(), 0) for each in leaves])
    p = unshared.softmax(-1)
    f = torch.zeros_like(p).scatter(1, p.topk(2).indices, 1.0).mean(0)
    balance, z = 5 * (f * p.mean(0)).sum(), unshared.logsumexp(-1).square().mean()
    expected = torch.autograd.grad(0.3 * balance + 0.7 * z, leaves)
    cuts = [slice(0, 17), slice(17, 44), slice(44, 60)]
    parts = [[Routed(each[cut], each[cut].topk(2).indices) for each in leaves] for cut in cuts]
    pairs = list(zip(parts, (copies[cut] for cut in cuts), strict=True))
    sums = torch.stack([sums_of(part, times) for part, times in pairs]).sum(0)
    shares = sums[0].sum(0) * 0.3 * 5 / rows**2
    loss = torch.stack([loss_of(part, times, shares, 0.7, rows) for part, times in pairs]).sum()
    assert loss.item() == pytest.approx((0.3 * balance + 0.7 * z).item(), rel=1e-13)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected, rtol=1e-12, atol=0.0)
    assert sums[2].sum().item() / rows == pytest.approx(z.item(), rel=1e-13)


def learner_of(kind: str, balance: float, *, checkpointing: bool = False) -> PolicyLearner:
    lm = mixture(kind, torch.float32)
    if checkpointing:
        lm.train()
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    backbone = backbone_of(lm, MicroBatch(max_sequences=5))
    backbone.routers = Routers(lm, balance)
    return PolicyLearner(backbone, LearnerSettings(lr=1e-2), 100)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_updates_with_the_balance_loss_spread_tokens_over_experts(
    checkpointing: bool, experience: Experience
) -> None:
    """Where nothing but the loss acts on the routers: SFT's own loss is multiplied by nothing, and
    both learners see it.
    """
    sft = SFT()
    update = Update(sft.experience(experience.sequences), ALL)
    balances: dict[float, list[float]] = {}
    for coefficient in (0.0, 10.0):
        learner = learner_of("qwen3_moe", coefficient, checkpointing=checkpointing)
        reports = [learner.update(update, sft).result().metrics for _ in range(12)]
        balances[coefficient] = [report["policy/router_balance"] for report in reports]
    assert balances[0.0][0] == pytest.approx(balances[10.0][0])
    assert balances[10.0][-1] < balances[0.0][-1]
    assert balances[10.0][-1] < 2.02  # with k = 2 choices a token an even load costs 2


def test_an_update_without_gradient_has_no_metrics_of_routers(experience: Experience) -> None:
    nothing = dataclasses.replace(experience, has_gradient=np.zeros(9, bool))
    routing = Routing(backbone_of(mixture("mixtral")), Update(nothing, ALL))
    assert not routing.counts_first
    assert routing.metrics("policy") == {}


def test_the_coefficient_is_the_recipes_or_that_of_the_models_config() -> None:
    lm = mixture("olmoe")
    lm.config.router_aux_loss_coef = 0.25
    routers = routers_of(lm, ModelSettings())
    assert routers is not None
    assert (routers.balance, routers.z) == (0.25, 0.0)
    stated = routers_of(lm, ModelSettings(router_aux_loss_coef=0.0, router_z_loss_coef=0.5))
    assert stated is not None
    assert (stated.balance, stated.z) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("llama", "router_aux_loss_coef"),
        ("llama", "router_z_loss_coef"),
        ("deepseek_v3", "router_aux_loss_coef"),
    ],
)
def test_a_coefficient_that_a_type_has_no_loss_for_is_refused(kind: str, key: str) -> None:
    settings = ModelSettings.model_validate({key: 0.1})
    with pytest.raises(UsageError, match=rf"model\.{key} = 0\.1: .*{kind}"):
        routers_of(mixture(kind), settings)


def test_routers_that_choose_by_a_bias_report_the_experts_that_they_chose(
    experience: Experience,
) -> None:
    """DeepSeek adds a bias that is no part of the logits: with a large one it chooses others."""
    lm = mixture("deepseek_v3")
    routers = [m for m in lm.modules() if hasattr(m, "e_score_correction_bias")]
    assert routers
    for router in routers:
        router.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    backbone = backbone_of(lm)
    backbone.routers = Routers(lm)
    update = Update(experience, ALL)
    routing = Routing(backbone, update)
    for layout in backbone.micro_batches(experience.sequences, update.rows_with_gradient):
        with routing.watching(layout):
            backbone.logprobs(layout, 1.0)
    metrics = routing.metrics("policy")
    assert metrics["policy/router_max_load"] == 2.0  # two of four experts get every token
    assert metrics["policy/router_unused"] == 0.5
