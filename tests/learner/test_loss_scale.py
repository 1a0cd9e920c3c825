"""Training in float16: the scale of the loss against torch's, gradients against float64, updates
that overflow, and their state.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.rank_cases import Case, algorithm, experience, learner, model
from postgrad.core.errors import RunError
from postgrad.learner import loss_scale
from postgrad.learner.learner import UpdateResult
from postgrad.learner.loss_scale import LossScale
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.parallel.ranks import Ranks

PLAIN = LearnerSettings(lr=0.25, eps=1e-30, weight_decay=0.0, max_grad_norm=0.0)
HALF = Case("none", kind="sft", dtype="float16", tied=False)


def optimizer(weight: Tensor, settings: LearnerSettings = PLAIN) -> tuple[Any, MasterOptimizer]:
    """A float16 parameter and what trains it."""
    parameter = nn.Parameter(weight.half())
    return parameter, MasterOptimizer({"weight": parameter}, settings, scale=LossScale())


def backward(parameter: Tensor, inputs: Tensor, scaled: float) -> None:
    """Of the loss sum(inputs * parameter), in float16."""
    ((inputs.half() * parameter).float().sum() * scaled).backward()


def test_the_scale_is_that_of_torch_s_gradscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INTERVAL", 5)
    ours, rng = LossScale(), np.random.default_rng(0)
    theirs = torch.amp.GradScaler("cpu", init_scale=loss_scale.FIRST, growth_interval=5)
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.0)
    grown = 0
    for update in range(120):
        finite = bool(rng.random() < 0.85)
        weight.grad = None
        theirs.scale(weight.sum() * (1.0 if finite else torch.inf)).backward()
        theirs.step(sgd)
        theirs.update()
        before = ours.scale
        ours.taken() if finite else ours.skipped(update)
        grown += ours.scale > before
        assert ours.scale == theirs.get_scale()
    assert grown > 3


def test_gradients_that_float16_would_round_to_zero_survive() -> None:
    """Inputs of 2^-20 are no more than 4 of float16's smallest steps, and gradients of 2^-30 none;
    scaled by 2^16 they are whole. AdamW's first step is the learning rate for each.
    """
    parameter, adamw = optimizer(torch.ones(3))
    scale = adamw.scale
    assert scale is not None
    inputs = torch.tensor([1.0, -1.0, 0.5])
    (((inputs.half() * parameter).float() * 2.0**-30).sum() * scale.scale).backward()
    norm = adamw.step(0.25)
    assert norm == 1.5 * 2.0**-30  # sqrt(1 + 1 + 1/4), and exact
    np.testing.assert_allclose(adamw.weights()["weight"], [0.75, 1.25, 0.75], rtol=1e-6)
    plain = nn.Parameter(torch.ones(3).half())
    ((inputs.half() * plain).float() * 2.0**-30).sum().backward()
    assert plain.grad is not None
    assert not plain.grad.any()


def test_the_norm_is_clipped_after_the_sum_is_divided_by_the_scale() -> None:
    """Two micro-batches whose gradients are (3, 0) and (0, 4): their norm is 5, whatever the scale,
    and what AdamW averages is a fifth of them.
    """
    settings = PLAIN.model_copy(update={"max_grad_norm": 1.0})
    parameter, adamw = optimizer(torch.ones(2), settings)
    assert adamw.scale is not None
    adamw.scale.scale = 1024.0
    for inputs in ([3.0, 0.0], [0.0, 4.0]):
        backward(parameter, torch.tensor(inputs), 1024.0)
    assert adamw.step(0.25) == pytest.approx(5.0, rel=1e-6)
    average = adamw.state()["weight.exp_avg"].double().numpy() / (1 - settings.betas[0])
    np.testing.assert_allclose(average, [0.6, 0.8], rtol=1e-5)


def test_an_overflow_in_one_micro_batch_skips_the_whole_update() -> None:
    parameter, adamw = optimizer(torch.ones(2))
    scale = adamw.scale
    assert scale is not None
    scale.scale = 2.0**15
    backward(parameter, torch.tensor([0.5, 0.5]), scale.scale)
    adamw.step(0.25)
    before = {name: tensor.clone() for name, tensor in adamw.state().items()}
    weight = adamw.weights()["weight"].clone()
    backward(parameter, torch.tensor([0.5, 0.5]), scale.scale)
    backward(parameter, torch.tensor([4.0, 0.5]), scale.scale)  # 131072 is more than 65504
    assert not adamw.step(0.25) < float("inf")
    after = adamw.state()
    assert float(after.pop("loss_scale")) == float(before.pop("loss_scale")) / 2
    assert (int(before.pop("loss_scale_steps")), int(after.pop("loss_scale_steps"))) == (1, 0)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert adamw.updates == 1
    assert torch.equal(adamw.weights()["weight"], weight)
    backward(parameter, torch.tensor([1.0, 0.5]), scale.scale)
    assert adamw.step(0.25) == pytest.approx(1.25**0.5, rel=1e-6)
    assert adamw.updates == 2


def test_a_scale_that_collapses_ends_the_run() -> None:
    parameter, adamw = optimizer(torch.ones(1))
    scale = adamw.scale
    assert scale is not None
    with pytest.raises(RunError, match="update 1 is not finite in float16, whatever the scale"):  # noqa: PT012
        for _ in range(40):
            backward(parameter, torch.tensor([torch.inf]), scale.scale)
            adamw.step(0.25)
    assert adamw.updates == 0
    assert scale.scale == loss_scale.LEAST / 2


def updated(role: Any, case: Case, numbers: range) -> list[UpdateResult]:
    results: list[UpdateResult] = []
    for number in numbers:
        drawn = experience(case, number)
        update = Update(drawn, np.arange(len(drawn)))
        results.append(role.update(update, algorithm(case)).result())
    return results


def test_of_a_whole_model_the_gradient_s_norm_is_that_of_float64() -> None:
    """The same weights, rounded to float16, and the same tokens, without packing."""
    drawn = experience(HALF, 0)
    reference = model(HALF).double()
    reference.set_attn_implementation("eager")
    count = int(drawn.sequences.loss_mask.values.sum())
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, mask in zip(drawn.sequences.tokens, drawn.sequences.loss_mask, strict=True):
        ids = torch.from_numpy(tokens.astype(np.int64))
        logprobs = reference(ids[None]).logits[0, :-1].log_softmax(-1)
        of_tokens = logprobs.gather(-1, ids[1:, None])[:, 0]
        loss = loss - of_tokens[torch.from_numpy(mask[1:])].sum() / count
    loss.backward()
    squares = sum(float(p.grad.square().sum()) for p in reference.parameters())
    role: Any = learner(HALF, Ranks())
    role.optimizer.scale.scale = 1024.0
    (result,) = updated(role, HALF, range(1))
    assert result.metrics["policy/loss"] == pytest.approx(float(loss.detach()), rel=1e-3)
    assert result.metrics["policy/grad_norm"] == pytest.approx(squares**0.5, rel=3e-3)
    assert result.metrics["policy/skipped_updates"] == 0.0
    assert result.metrics["policy/loss_scale"] == 1024.0


@pytest.mark.parametrize("lora", [False, True])
def test_a_role_goes_on_from_its_state_with_the_same_bits(lora: bool) -> None:
    case = HALF._replace(lora=lora)
    uninterrupted: Any = learner(case, Ranks())
    uninterrupted.optimizer.scale.scale = 2.0**22  # some updates are skipped
    first = updated(uninterrupted, case, range(12))
    skipped = [result.metrics["policy/skipped_updates"] for result in first]
    assert skipped[0] == 1.0
    assert skipped[-1] == 0.0
    assert uninterrupted.updates == skipped.count(0.0)
    assert all(
        ("policy/grad_norm" in r.metrics) == (not s) for r, s in zip(first, skipped, strict=True)
    )
    saved = {
        stem: {name: tensor.clone() for name, tensor in tensors.items()}
        for stem, tensors in uninterrupted.tensors().items()
    }
    resumed: Any = learner(case, Ranks())
    resumed.load(saved.__getitem__)
    assert resumed.optimizer.scale.state() == uninterrupted.optimizer.scale.state()
    for straight, other in zip(
        updated(uninterrupted, case, range(12, 14)),
        updated(resumed, case, range(12, 14)),
        strict=True,
    ):
        assert straight.metrics == other.metrics
    for name, weight in uninterrupted.weights().items():
        assert torch.equal(weight, resumed.weights()[name])
    with pytest.raises(RunError, match=r"unknown.*loss_scale"):
        learner(case._replace(dtype="bfloat16"), Ranks()).load(saved.__getitem__)


def test_a_state_that_no_run_can_have_is_refused() -> None:
    numbers = LossScale().state()
    for wrong in ({"loss_scale": torch.tensor(0.0)}, {"loss_scale_steps": torch.tensor(2000)}):
        with pytest.raises(RunError, match="loss scale"):
            LossScale().load(numbers | wrong)
