"""The same tensors through TRL's GRPOTrainer: the same loss and the same gradient.

TRL is installed by `make test-slow` only. Its loss method is called on a trainer that was never set
up: every attribute that it reads is given here. docs/algorithms/index.md names where definitions
differ.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.packages import TRL
from postgrad.algorithms.base import LossInputs
from postgrad.algorithms.registry import algorithm_class
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences

pytestmark = [pytest.mark.slow, TRL]

LENGTHS = [3, 7, 1, 5]
MAX_NEW = 9
BY_TOKEN = {"loss_type": "dapo"}  # a mean over the tokens of the update


def padded(rows: list[np.ndarray]) -> torch.Tensor:
    """[B, longest] float64 with zeros behind each row."""
    padded_rows = np.zeros((len(rows), max(map(len, rows))))
    for i, row in enumerate(rows):
        padded_rows[i, : len(row)] = row
    return torch.from_numpy(padded_rows)


def peer_loss(columns: dict[str, list[np.ndarray]], **knobs: Any) -> tuple[float, list[np.ndarray]]:
    """TRL's loss and its gradient on the logprobs of each response."""
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    trainer_class = GMPOTrainer if knobs.pop("gmpo", False) else GRPOTrainer
    logprobs = padded(columns["logprobs"]).requires_grad_()
    mask = padded([np.ones(n) for n in LENGTHS])
    trainer = trainer_class.__new__(trainer_class)
    same = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    settings = {
        "beta": 0.0,
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
    }
    arguments = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1,
                 "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0,
                 "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}  # fmt: skip
    arguments |= {name: knobs.pop(name) for name in arguments if name in knobs}
    for name, value in {
        "off_policy_mask_threshold": None,
        **settings,
        **knobs,
        "accelerator": same,
        "args": SimpleNamespace(**arguments),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "max_completion_length": MAX_NEW,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "model": SimpleNamespace(training=True),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
    }.items():
        object.__setattr__(trainer, name, value)
    ids = torch.ones_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": (
            torch.tensor([row[0] for row in columns["advantages"]])
            if trainer_class is GMPOTrainer
            else padded(columns["advantages"])
        ),
        "old_per_token_logps": padded(columns["old_logprobs"]),
        "ref_per_token_logps": padded(columns["ref_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
    if trainer.off_policy_mask_threshold is not None:
        inputs["sampling_per_token_logps"] = padded(columns["sampled_logprobs"])
    if trainer.use_vllm:
        ratio = padded(columns["old_logprobs"]) - padded(columns["sampled_logprobs"])
        inputs["importance_sampling_ratio"] = ratio.exp().clamp(max=2.0)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), [logprobs.grad[i, :n].numpy() for i, n in enumerate(LENGTHS)]


def our_loss(
    name: str, columns: dict[str, list[np.ndarray]], **knobs: Any
) -> tuple[float, list[np.ndarray]]:
    """Our loss and gradient, packed without padding."""
    algorithm: Any = algorithm_class(name)(**knobs).for_rollout(MAX_NEW)
    mask = Ragged.of([np.ones(n, np.bool_) for n in LENGTHS], np.bool_)
    tokens = mask.like(np.zeros(sum(LENGTHS), np.int32))
    sequences = Sequences(tokens, mask, np.array([0, 0, 1, 1]))
    weight = algorithm.entry_weights(sequences, np.arange(len(LENGTHS))).values
    flat = {key: torch.from_numpy(np.concatenate(rows)) for key, rows in columns.items()}
    logprobs = flat.pop("logprobs").clone().requires_grad_()
    lengths = torch.tensor(LENGTHS)
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=None,
        columns=flat,
        sequence=torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths),
        n_sequences=len(LENGTHS),
        weight=torch.from_numpy(weight.astype(np.float64)),
        token_weight=torch.full((sum(LENGTHS),), 1.0 / sum(LENGTHS), dtype=torch.float64),
    )
    output = algorithm.policy_loss(inputs)
    output.loss.backward()
    assert logprobs.grad is not None
    ends = np.cumsum(LENGTHS)[:-1]
    return float(output.loss.detach()), np.split(logprobs.grad.numpy(), ends)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("grpo", {}, {}),
        ("grpo", {"kl_coef": 0.04}, {"beta": 0.04}),
        ("grpo", {"clip_high": 0.28}, {"epsilon_high": 0.28}),
        ("grpo", {"dual_clip": 3.0}, {"delta": 3.0}),
        (
            "grpo",
            {"correction": "tis"},
            {"use_vllm": True, "vllm_importance_sampling_correction": True},
        ),
        ("dr_grpo", {}, {"loss_type": "dr_grpo"}),
        ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        (
            "gspo",
            {},
            {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        ),
        (
            "ppo",
            {"kl_in": "loss", "kl_coef": 0.04, "kl_estimator": "k3"},
            {"beta": 0.04} | BY_TOKEN,
        ),
        ("ppo", {"dual_clip": 3.0}, {"delta": 3.0} | BY_TOKEN),
        ("cispo", {"clip_high": 0.5}, {"loss_type": "cispo", "epsilon_high": 1.5}),
        ("sapo", {}, {"loss_type": "sapo"}),
        ("vespo", {}, {"loss_type": "vespo"}),
        ("gmpo", {}, {"gmpo": True, "epsilon_low": 0.4, "epsilon_high": 0.4}),
        (  # LUSPO
            "gspo",
            {"aggregation": "constant", "constant_length": 1},
            {
                "loss_type": "luspo",
                "importance_sampling_level": "sequence",
                "epsilon_low": 3e-4,
                "epsilon_high": 4e-4,
            },
        ),
        (
            "grpo",
            {"kl_coef": 0.04, "kl_corrected": True},
            {"beta": 0.04, "use_bias_correction_kl": True},
        ),
        ("grpo", {"off_policy_threshold": 0.05}, {"off_policy_mask_threshold": 0.05}),
    ],
)
def test_the_same_tensors_give_the_same_loss_and_gradient(
    name: str, ours: dict[str, Any], theirs: dict[str, Any], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logprobs = [-rng.exponential(1.0, n) for n in LENGTHS]
    near = [rng.normal(0.0, 0.3, n) for n in LENGTHS]
    columns = {
        "logprobs": logprobs,
        "old_logprobs": [a + b for a, b in zip(logprobs, near, strict=True)],
        "sampled_logprobs": [a - b for a, b in zip(logprobs, near, strict=True)],
        "ref_logprobs": [-rng.exponential(1.0, n) for n in LENGTHS],
        "advantages": [np.full(n, rng.normal()) for n in LENGTHS],
    }
    if name == "ppo":  # by token: TRL has no critic, but its loss takes what one would have made
        columns["advantages"] = [rng.normal(size=n) for n in LENGTHS]
    wanted, slopes = peer_loss(columns, **theirs)
    loss, gradients = our_loss(name, columns, **ours)
    assert loss == pytest.approx(wanted, rel=1e-6, abs=1e-7)  # our weights are float32
    for gradient, slope in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-9)
