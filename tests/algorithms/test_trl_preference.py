"""The same tensors through TRL's trainers of preferences and of reward models.

TRL is installed by `make test-slow` only. Its loss methods are called on trainers that were never
set up, with a model that hands out the logprobs or scores given here. The pages of docs/algorithms
name where definitions differ.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.layouts import total, undivided
from helpers.packages import TRL
from postgrad.algorithms.registry import algorithm_class
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences

pytestmark = [pytest.mark.slow, TRL]

PROMPT = 2
LENGTHS = [3, 7, 1, 5, 4, 2]  # of answers: chosen, rejected, chosen, ...
SAME = SimpleNamespace(
    device=torch.device("cpu"),
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    unwrap_model=lambda x: x,
)


def bare(kind: type, **attributes: Any) -> Any:
    """A trainer that was never set up, with what its loss reads."""
    trainer = kind.__new__(kind)
    common = {
        "accelerator": SAME,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "model": SimpleNamespace(training=True),
    }
    for name, value in (common | attributes).items():
        object.__setattr__(trainer, name, value)
    return trainer


def padded(flat: Tensor, rows: list[int]) -> Tensor:
    """[rows, PROMPT + longest - 1] as a model of next tokens gives them, 0 outside answers."""
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    width = PROMPT + max(LENGTHS) - 1
    return torch.stack(
        [
            torch.nn.functional.pad(
                flat[starts[i] : starts[i + 1]], (PROMPT - 1, width - LENGTHS[i] - PROMPT + 1)
            )
            for i in rows
        ]
    )


def model_of(logprobs: Tensor) -> Any:
    """What TRL's fused head returns."""
    zeros = torch.zeros_like(logprobs)
    outputs = SimpleNamespace(
        log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    return lambda **_: outputs


def masks(rows: list[int]) -> Tensor:
    """[rows, PROMPT + longest] 1 at answers."""
    wide = [[0] * PROMPT + [1] * LENGTHS[i] + [0] * (max(LENGTHS) - LENGTHS[i]) for i in rows]
    return torch.tensor(wide)


def tensors(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs and the reference's over all answers' tokens."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.0, sum(LENGTHS))
    ref = (logprobs + rng.normal(0, 0.5, len(logprobs))).astype(np.float32)
    return logprobs, ref.astype(np.float64)


def ours(
    name: str, knobs: dict[str, Any], logprobs: np.ndarray, ref: np.ndarray, **columns: Any
) -> tuple[float, np.ndarray, dict[str, float]]:
    algorithm: Any = algorithm_class(name)(**knobs)
    mask = Ragged.of([[0] * PROMPT + [1] * n for n in LENGTHS], np.bool_)

    def wide(flat: np.ndarray) -> np.ndarray:
        scattered = np.zeros(len(mask.values))
        scattered[mask.values] = flat
        return scattered

    group = np.arange(len(LENGTHS)) // 2
    sequences = Sequences(mask.like(np.zeros(len(mask.values), np.int32)), mask, group)
    column = mask.like(wide(ref).astype(np.float32)) if algorithm.needs().reference else None
    labels = columns.get("labels", np.arange(len(LENGTHS)) % 2 == 0)
    experience = algorithm.experience(sequences, labels, column, columns.get("mismatched"))
    if name == "aot":
        experience = algorithm.with_own(experience, [mask.like(wide(logprobs))])
    loss, gradient, metrics = total(algorithm, experience, undivided(experience), wide(logprobs))
    return loss, gradient[mask.values], algorithm.report(metrics)


def agree(outcome: Any, loss: Tensor, leaf: Tensor) -> None:
    loss.backward()
    assert leaf.grad is not None
    assert outcome[0] == pytest.approx(float(loss.detach()), rel=1e-6)
    np.testing.assert_allclose(outcome[1], leaf.grad.numpy(), rtol=1e-5, atol=1e-8)


CHOSEN, REJECTED = [0, 2, 4], [1, 3, 5]


VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dpo", {"beta": 0.3}, {"loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.3}),
    *(
        (
            "aot",
            {"beta": 0.3, "paired": paired, **more},
            {"loss_types": [theirs], "loss_weights": [1.0], "beta": 0.3, **more},
        )
        for paired, theirs in ((True, "aot"), (False, "aot_unpaired"))
        for more in ({}, {"label_smoothing": 0.1})
    ),
    ("ipo", {"beta": 0.3}, {"loss_types": ["ipo"], "loss_weights": [1.0], "beta": 0.3}),
    *(
        ("dpo", {"beta": 0.3, "loss": ours, **more}, {"loss_types": [theirs], **more})
        for ours, theirs, more in (
            ("hinge", "hinge", {}),
            ("robust", "robust", {"label_smoothing": 0.1}),
            ("exo", "exo_pair", {"label_smoothing": 0.01}),
            ("discopop", "discopop", {}),
            ("nca", "nca_pair", {}),
            ("bco", "bco_pair", {}),
            ("sppo", "sppo_hard", {}),
            ("apo_zero", "apo_zero", {}),
            ("apo_down", "apo_down", {}),
        )
    ),
    (
        "dpo",
        {"beta": 0.3, "loss": {"sigmoid": 0.8, "bco": 0.2}},
        {"loss_types": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2]},
    ),
    ("dpo", {"beta": 0.3, "length_normalised": True}, {"loss_types": ["sigmoid_norm"]}),
    ("dpo", {"beta": 0.3, "divergence": "forward_kl"}, {"f_divergence_type": "forward_kl"}),
    ("dpo", {"beta": 0.3, "divergence": "js"}, {"f_divergence_type": "js_divergence"}),
]


DPO_TRAINER: dict[str, Any] = {
    "ld_alpha": None, "precompute_ref_logps": True, "f_divergence_type": "reverse_kl",
    "use_weighting": False, "loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.3,
    "label_smoothing": 0.0, "args": SimpleNamespace(discopop_tau=0.05),
}  # fmt: skip


def loss_of(trainer: Any, leaf: Tensor, ref: np.ndarray) -> Tensor:
    """The loss of TRL's DPOTrainer on logprobs of all answers' tokens."""
    rows = CHOSEN + REJECTED
    sums = padded(torch.tensor(ref), rows).sum(1)
    mask = masks(rows)
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": sums[:3],
        "ref_rejected_logps": sums[3:],
    }
    return trainer._compute_loss(model_of(padded(leaf, rows)), inputs, False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "knobs", "theirs"), VARIANTS)
def test_dpo_trainer_gives_the_same_loss_gradient_and_metrics(
    name: str, knobs: dict[str, Any], theirs: dict[str, Any], seed: int
) -> None:
    from trl import DPOTrainer

    logprobs, ref = tensors(seed)
    leaf = torch.tensor(logprobs, requires_grad=True)
    trainer = bare(DPOTrainer, **DPO_TRAINER | theirs)
    loss = loss_of(trainer, leaf, ref)
    outcome = ours(name, knobs, logprobs, ref)
    agree(outcome, loss, leaf)
    if name == "dpo" and knobs == {"beta": 0.3}:
        metrics = {key: value[0] for key, value in trainer._metrics["train"].items()}
        for metric, peer in (
            ("reward_chosen", "rewards/chosen"),
            ("reward_rejected", "rewards/rejected"),
            ("reward_margin", "rewards/margins"),
            ("accuracy", "rewards/accuracies"),
            ("logprob_chosen", "logps/chosen"),
            ("logprob_rejected", "logps/rejected"),
        ):
            assert outcome[2][f"policy/{metric}"] == pytest.approx(metrics[peer], rel=1e-5)


@pytest.mark.parametrize(("name", "knobs", "theirs"), VARIANTS)
def test_twenty_steps_of_dpo_trainer_have_the_same_losses(
    name: str, knobs: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """A table of logits for each token before, trained by SGD on new pairs in every step. Each
    side follows its own gradient, so that a difference would grow. (Adam would divide by gradients
    that cancel up to rounding, and amplify that.)
    """
    from trl import DPOTrainer

    rng = np.random.default_rng(7)
    start = torch.tensor(rng.normal(0, 1, (8, 8)))
    tables = [start.clone().requires_grad_() for _ in range(2)]
    optimizers = [torch.optim.SGD([table], lr=0.3, momentum=0.9) for table in tables]
    trainer = bare(DPOTrainer, **DPO_TRAINER | theirs)
    losses: list[tuple[float, float]] = []
    for _ in range(20):
        before, after = torch.tensor(rng.integers(0, 8, (2, sum(LENGTHS))))
        ref = start.log_softmax(-1)[before, after].float().double().numpy()
        policy_logprobs, peer = (table.log_softmax(-1)[before, after] for table in tables)
        loss, gradient, _ = ours(name, knobs, policy_logprobs.detach().numpy(), ref)
        policy_logprobs.backward(torch.tensor(gradient))
        other = loss_of(trainer, peer, ref)
        other.backward()
        losses.append((loss, float(other.detach())))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    our_losses, peers = np.array(losses).T
    np.testing.assert_allclose(our_losses, peers, rtol=1e-5, atol=1e-5)
    assert np.ptp(our_losses) > 0.01  # they moved


@pytest.mark.parametrize("seed", range(3))
def test_the_sft_term_of_dpo_trainer_is_the_same_where_answers_are_of_one_length(seed: int) -> None:
    """TRL takes the mean over all chosen tokens of the micro-batch, here an answer counts once."""
    from unittest import mock

    from trl import DPOTrainer

    with mock.patch(f"{__name__}.LENGTHS", [4, 7, 4, 5, 4, 2]):
        logprobs, ref = tensors(seed)
        leaf = torch.tensor(logprobs, requires_grad=True)
        rows = CHOSEN + REJECTED
        sums = padded(torch.tensor(ref), rows).sum(1)
        trainer = bare(
            DPOTrainer, ld_alpha=None, precompute_ref_logps=True, use_weighting=False,
            f_divergence_type="reverse_kl", beta=0.1,
            loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.3],
        )  # fmt: skip
        mask = masks(rows)
        inputs = {
            "input_ids": torch.ones_like(mask),
            "attention_mask": torch.ones_like(mask),
            "completion_mask": mask,
            "ref_chosen_logps": sums[:3],
            "ref_rejected_logps": sums[3:],
        }
        loss = trainer._compute_loss(model_of(padded(leaf, rows)), inputs, False)
        agree(ours("dpo", {"nll_coef": 0.3}, logprobs, ref), loss, leaf)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "knobs", "theirs"),
    [
        ("simpo", {"beta": 1.5, "gamma": 0.4}, {"loss_type": "simpo", "beta": 1.5}),
        (
            "dpo",
            {"beta": 0.3, "label_smoothing": 0.2},
            {"loss_type": "sigmoid", "beta": 0.3, "label_smoothing": 0.2},
        ),
        (
            "cpo",
            {"beta": 0.3, "label_smoothing": 0.2, "nll_coef": 0.0},
            {"loss_type": "sigmoid", "beta": 0.3, "label_smoothing": 0.2},
        ),
    ],
)
def test_cpo_trainer_gives_the_same_loss_and_gradient(
    name: str, knobs: dict[str, Any], theirs: dict[str, Any], seed: int
) -> None:
    """Its sigmoid loss with label smoothing, of log-ratios instead of logprobs, is cDPO: TRL's DPO
    trainer has only "robust", another loss."""
    from trl.experimental.cpo import CPOTrainer

    logprobs, ref = tensors(seed)
    leaf = torch.tensor(logprobs, requires_grad=True)
    settings = {"alpha": 0.0, "simpo_gamma": 0.4, "label_smoothing": 0.0}
    trainer = bare(CPOTrainer, **(settings | theirs))
    lengths = torch.tensor(LENGTHS)
    each = torch.split(leaf - torch.tensor(ref) if name == "dpo" else leaf, LENGTHS)
    sums = torch.stack([logprobs_of_row.sum() for logprobs_of_row in each])
    values = sums / lengths if name == "simpo" else sums
    losses, *_ = trainer.cpo_loss(values[CHOSEN], values[REJECTED])
    agree(ours(name, knobs, logprobs, ref), losses.mean(), leaf)


@pytest.mark.parametrize("seed", range(3))
def test_orpo_trainer_gives_the_same_odds_ratio_term(seed: int) -> None:
    """Without the NLL, which TRL takes over prompts too. TRL takes float32 odds."""
    from trl.experimental.orpo import ORPOTrainer

    logprobs, ref = tensors(seed)
    leaf = torch.tensor(logprobs, requires_grad=True)
    means = torch.stack([logprobs_of_row.mean() for logprobs_of_row in torch.split(leaf, LENGTHS)])
    losses, *_ = bare(ORPOTrainer, beta=0.3).odds_ratio_loss(means[CHOSEN], means[REJECTED])
    outcome = ours("orpo", {"odds_coef": 0.3, "nll_coef": 0.0}, logprobs, ref)
    loss = -losses.mean()
    loss.backward()
    assert leaf.grad is not None
    assert outcome[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    np.testing.assert_allclose(outcome[1], leaf.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shift", [-1.0, 1.0])
@pytest.mark.parametrize("kind", ["kto", "apo_zero"])
@pytest.mark.parametrize("seed", range(3))
def test_kto_trainer_gives_the_same_loss_gradient_and_metrics(
    seed: int, kind: str, shift: float
) -> None:
    """shift moves the reference point of "kto" to either side of 0; "apo_zero" has none."""
    from trl import KTOTrainer

    logprobs, ref = tensors(seed)
    rng = np.random.default_rng(seed)
    labels, mismatched = rng.permutation(6) < 3, rng.normal(shift, 0.1, len(LENGTHS))
    leaf = torch.tensor(logprobs, requires_grad=True)
    rows = list(range(len(LENGTHS)))
    mask = masks(rows)
    trainer = bare(
        KTOTrainer, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5,
        loss_type="kto" if kind == "kto" else "apo_zero_unpaired", calculate_KL=kind == "kto",
        precompute_ref_logps=True,
    )  # fmt: skip
    object.__setattr__(trainer, "_compute_kl_logps", lambda *_: torch.tensor(mismatched))
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": torch.tensor(labels),
        "ref_logps": padded(torch.tensor(ref), rows).sum(1),
        "ref_KL_logps": torch.zeros(len(rows)),
    }
    loss = trainer._compute_loss(model_of(padded(leaf, rows)), inputs, False)
    knobs = {"loss": kind, "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    outcome = ours("kto", knobs, logprobs, ref, labels=labels, mismatched=mismatched)
    agree(outcome, loss, leaf)
    metrics = {key: value[0] for key, value in trainer._metrics["train"].items()}
    for metric, peer in (
        ("z", "kl"),
        ("reward_desirable", "rewards/chosen"),
        ("reward_undesirable", "rewards/rejected"),
        ("reward_margin", "rewards/margins"),
        ("logprob_desirable", "logps/chosen"),
    ):
        assert outcome[2][f"policy/{metric}"] == pytest.approx(metrics[peer], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("centre", [None, 0.01])
@pytest.mark.parametrize("margin", [False, True])
def test_reward_trainer_gives_the_same_loss_gradient_and_metrics(
    seed: int, centre: float | None, margin: bool
) -> None:
    from trl import RewardTrainer

    rng = np.random.default_rng(seed)
    scores, margins = rng.normal(0, 2, 6), rng.exponential(1.0, 3)
    leaf = torch.tensor(scores, requires_grad=True)
    trainer = bare(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=centre))
    rows = CHOSEN + REJECTED
    inputs = {"attention_mask": torch.ones(6, 2)} | (
        {"margin": torch.tensor(margins)} if margin else {}
    )
    outputs = SimpleNamespace(logits=leaf[rows][:, None])
    loss = trainer.compute_loss(lambda **_: outputs, inputs)
    algorithm: Any = algorithm_class("bradley_terry")(margin=margin, centre_coef=centre or 0.0)
    tokens = Ragged.of([[1, 2]] * 6, np.int32)
    sequences = Sequences(tokens, tokens.like(np.zeros(12, np.bool_)), np.arange(6) // 2)
    experience = algorithm.experience(sequences, margins)
    outcome = total(algorithm, experience, undivided(experience), np.repeat(scores, 2), "score")
    agree((outcome[0], outcome[1][1::2]), loss, leaf)
    metrics = {key: value[0] for key, value in trainer._metrics["train"].items()}
    report = algorithm.report(outcome[2])
    assert report["reward_model/accuracy"] == pytest.approx(metrics["accuracy"], rel=1e-6)
    assert report["reward_model/margin"] == pytest.approx(metrics["margin"], rel=1e-5)
    assert report["reward_model/reward_mean"] == pytest.approx(metrics["mean_reward"], rel=1e-5)
