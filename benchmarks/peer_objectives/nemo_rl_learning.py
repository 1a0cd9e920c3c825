"""NeMo RL's schedules and optimizers, of the backend DTensor: it sets the rate once a step."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peer_objectives.comparing import Known
from benchmarks.peer_objectives.learning import RATE, Optimizes, Rates, dummy, ticks
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.nemo_rl import BASE

TORCH = "torch.optim.lr_scheduler."
OPTIMIZER = "policy.optimizer.kwargs."


def linear(updates: int, start: float = 0.1) -> dict[str, Any]:
    """A part of a list of schedules: a warm-up."""
    return {"name": f"{TORCH}LinearLR", "kwargs": {
        "start_factor": start, "end_factor": 1.0, "total_iters": updates}}  # fmt: skip


CONSTANT = {"name": f"{TORCH}ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10**9}}
DECAYS = Known("norms and biases decay too there", "there of norms and biases too")
WARM = Known("all four updates of a step have one rate there", "steps of 4 updates", within=0.1)
FALLS = Known("all four updates of a step have one rate there", "there with each step of 4 updates",
              within=0.1)  # fmt: skip
COSINE = {"name": f"{TORCH}CosineAnnealingLR", "kwargs": {"T_max": 50, "eta_min": RATE / 10}}
DOWN = {"name": f"{TORCH}LinearLR", "kwargs": {
    "start_factor": 1.0, "end_factor": 0.1, "total_iters": 20}}  # fmt: skip
SCHEDULES: tuple[tuple[str, Sequence[dict[str, Any]], bool, Known | None], ...] = (
    # name, parts, whether a step is four updates
    ("none", (), False, None),
    ("warm-up over 10 steps, constant", (linear(10), CONSTANT, {"milestones": [10]}), False, None),
    ("warm-up over 10 steps of 4 updates, constant", (
        linear(10), CONSTANT, {"milestones": [10]}), True, WARM),
    ("constant, a line over the last 20 steps", (
        CONSTANT, DOWN, {"milestones": [30]}), False, None),
    ("cosine", (COSINE, {"milestones": []}), False, None),
    ("cosine, steps of 4 updates", (COSINE, {"milestones": []}), True, FALLS),
)  # fmt: skip
OPTIMIZERS: tuple[tuple[str, Mapping[str, Any], Known | None], ...] = (
    ("AdamW, weight_decay 0.01", {"weight_decay": 0.01}, DECAYS),
    ("AdamW, torch's defaults", {}, DECAYS),
    ("AdamW, betas, eps, no decay", {
        "weight_decay": 0.0, "betas": [0.8, 0.99], "eps": 1e-6}, None),
)  # fmt: skip


def _class(name: str) -> Any:
    """What hydra's get_class gives."""
    module, _, kind = name.rpartition(".")
    return getattr(import_module(module), kind)


class Trained:
    """What automodel/setup.py makes of policy.optimizer and policy.scheduler."""

    def __init__(self, checkout: Path) -> None:
        path = checkout / "nemo_rl" / "models" / "automodel" / "setup.py"
        self.schedules = statements(path, "if 'scheduler' in config and optimizer is not None")
        self.optimizers = statements(path, "optimizer_cls = get_class(", 4)
        self.space: dict[str, Any] = {"torch": torch, "get_class": _class}

    def rates(self, parts: Sequence[dict[str, Any]], count: int) -> list[float]:
        """A tick after all updates of a step."""
        config = {"scheduler": list(parts)} if parts else {}
        space = self.space | {"config": config, "optimizer": dummy()}
        self.schedules(space)
        return ticks(space["scheduler"], count)

    def optimizer(
        self, kwargs: Mapping[str, Any], model: nn.Module
    ) -> tuple[torch.optim.Optimizer, float]:
        """The class that the config names, on all parameters. Configs clip at 1."""
        optimizer_table = {"name": "torch.optim.AdamW", "kwargs": {"lr": RATE, **kwargs}}
        space = self.space | {"config": {"optimizer": optimizer_table}, "model": model}
        self.optimizers(space)
        return space["optimizer"], 1.0


def cases(checkout: Path) -> Iterator[Rates | Optimizes]:
    """All that is compared."""
    peer = Trained(checkout)
    base = BASE | {"policy.optimizer.name": "torch.optim.AdamW", f"{OPTIMIZER}lr": RATE,
                   "policy.max_grad_norm": 1.0}  # fmt: skip
    for name, parts, several, known_difference in SCHEDULES:
        options = base | ({"policy.train_global_batch_size": 5} if several else {})
        for number, part in enumerate(parts):
            for key, value in part.items():
                inner = value.items() if isinstance(value, dict) else [("", value)]
                options |= {f"policy.scheduler.{number}.{key}{'.' if word else ''}{word}": entry
                            for word, entry in inner}  # fmt: skip
        yield Rates(
            f"schedule: {name}",
            words(options),
            partial(peer.rates, parts),
            known_difference,
            in_steps=True,
        )
    for name, kwargs, known_difference in OPTIMIZERS:
        options = base | {f"{OPTIMIZER}{key}": value for key, value in kwargs.items()}
        yield Optimizes(name, words(options), partial(peer.optimizer, kwargs), known_difference)


def words(options: Mapping[str, Any]) -> list[str]:
    """Overrides of a config of run_grpo.py."""
    return ["grpo", *(f"{key}={value}" for key, value in options.items())]
