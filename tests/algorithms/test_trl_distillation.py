"""The same logits through TRL's GKDTrainer: the same divergence, gradient and first steps.

TRL is installed by `make test-slow` only. Where definitions agree: its beta of 0 is our
"forward_kl", 1 is "reverse_kl", what lies between "jsd"; its mean over all tokens of a micro-batch
is our aggregation "token" over one update.
"""

from typing import Any

import numpy as np
import pytest
import torch

from helpers.packages import TRL
from postgrad.algorithms.base import LossInputs
from postgrad.algorithms.distillation import Distillation
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences

pytestmark = [pytest.mark.slow, TRL]

LENGTHS, VOCABULARY, STEPS = [3, 7, 1, 5], 40, 20


def sequences() -> Sequences:
    rows = [np.arange(n + 1) for n in LENGTHS]
    masks = [np.arange(n + 1) > 0 for n in LENGTHS]
    return Sequences(Ragged.of(rows, np.int32), Ragged.of(masks, np.bool_), np.arange(len(LENGTHS)))


def our_loss(algorithm: Distillation, student: torch.Tensor, teacher: torch.Tensor) -> Any:
    of_all = sequences()
    mask = of_all.loss_mask.values
    weights = algorithm.entry_weights(of_all, np.arange(len(LENGTHS))).values[mask]
    logprobs = student.log_softmax(-1)[:, 0]
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=None,
        columns={"divergence": algorithm.compared.of(student, teacher)},
        sequence=torch.zeros(len(weights), dtype=torch.int64),
        n_sequences=1,
        weight=torch.from_numpy(weights),
        token_weight=torch.full((len(weights),), 1.0 / len(weights)),
    )
    return algorithm.policy_loss(inputs).loss


def peer_loss(student: torch.Tensor, teacher: torch.Tensor, **knobs: float) -> Any:
    """TRL's, over rows that are padded on the right."""
    from trl.experimental.gkd import GKDTrainer

    shape = len(LENGTHS), max(LENGTHS)
    labels = torch.full(shape, -100)
    padded = [logits.new_zeros(*shape, VOCABULARY) for logits in (student, teacher)]
    for padded_logits, logits in zip(padded, (student, teacher), strict=True):
        for row, part in enumerate(logits.split(LENGTHS)):
            padded_logits[row, : len(part)] = part
            labels[row, : len(part)] = 1
    return GKDTrainer.generalized_jsd_loss(*padded, labels=labels, **knobs)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
    ("beta", "knobs"),
    [
        (0.0, {"divergence": "forward_kl"}),
        (1.0, {"divergence": "reverse_kl"}),
        (0.5, {"divergence": "jsd"}),
        (0.1, {"divergence": "jsd", "beta": 0.1}),
    ],
)
def test_the_first_steps_have_the_losses_and_gradients_of_trl(
    beta: float, knobs: dict[str, Any], temperature: float
) -> None:
    """Twenty steps of Adam on the logits themselves, each side on its own."""
    torch.manual_seed(0)
    teacher = 2 * torch.randn(sum(LENGTHS), VOCABULARY)
    start = 2 * torch.randn(sum(LENGTHS), VOCABULARY)
    algorithm = Distillation(**knobs, temperature=temperature)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    steppers = [torch.optim.Adam([logits], lr=0.05) for logits in (ours, theirs)]
    for _ in range(STEPS):
        our_result = our_loss(algorithm, ours, teacher)
        other = peer_loss(theirs, teacher, beta=beta, temperature=temperature)
        assert float(our_result.detach()) == pytest.approx(float(other.detach()), abs=1e-5)
        for loss, stepper in ((our_result, steppers[0]), (other, steppers[1])):
            stepper.zero_grad()
            loss.backward()
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        for stepper in steppers:
            stepper.step()
