"""Gradients of updates, for tests that compare them."""

from typing import Any

import torch

from postgrad.learner.update import Update


def gradient_of(learner: Any, update: Update, algorithm: Any) -> torch.Tensor:
    """The gradient of an update: what the optimizer finds when it is asked to step."""
    kept: dict[str, torch.Tensor] = {}

    def keep(rate: float) -> float:
        kept["flat"] = torch.cat([p.grad.flatten() for p in learner.optimizer.master.values()])
        return 0.0

    learner.optimizer.step = keep
    learner.update(update, algorithm).result()
    return kept["flat"].double()
