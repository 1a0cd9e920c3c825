"""prime-rl's schedules and optimizers."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from benchmarks.peer_objectives.comparing import Known
from benchmarks.peer_objectives.learning import (
    RATE,
    Optimizes,
    Rates,
    class_defaults,
    dummy,
    ticks,
    words_of,
)
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.prime_rl import BASE

OPTIM, SCHEDULER = "trainer.optim.", "trainer.scheduler."
DECAYS = Known("norms and biases decay too there", "there of norms and biases too")
LAST = Known("the rate of the last update is min_lr there", "there in the last", within=0.11)
SCHEDULES: tuple[tuple[str, dict[str, Any], Known | None], ...] = (
    ("constant, the default", {}, None),
    ("linear, warmup_steps 5, decay_steps 0", {
        "type": "linear", "warmup_steps": 5, "decay_steps": 0}, None),
    ("linear, its defaults", {"type": "linear"}, LAST),
    ("linear, decay_steps 20, min_lr", {
        "type": "linear", "decay_steps": 20, "min_lr": RATE / 10}, LAST),
    ("cosine, its defaults", {"type": "cosine"}, None),
    ("cosine, warmup_steps 0, min_lr", {
        "type": "cosine", "warmup_steps": 0, "min_lr": RATE / 10}, None),
    ("cosine, warmup_steps 10, min_lr", {
        "type": "cosine", "warmup_steps": 10, "min_lr": RATE / 10}, None),
)  # fmt: skip
OPTIMIZERS: tuple[tuple[str, dict[str, Any], Known | None], ...] = (
    ("AdamW's defaults", {}, DECAYS),
    ("weight_decay 0, betas, max_norm 0.5", {
        "weight_decay": 0.0, "betas1": 0.8, "betas2": 0.99, "max_norm": 0.5}, None),
)  # fmt: skip


class Trained:
    """setup_scheduler and _create_optimizer, with the defaults of its configs."""

    def __init__(self, checkout: Path) -> None:
        source = checkout / "src" / "prime_rl" / "trainer"
        self.space: dict[str, Any] = {
            "Optimizer": torch.optim.Optimizer, "AdamW": torch.optim.AdamW, "nn": nn,
            **dict.fromkeys(("LRScheduler", "OptimizerConfig", "ParallelDims"), Any),
            **{name: getattr(lr_scheduler, name)
               for name in ("ConstantLR", "CosineAnnealingLR", "LinearLR", "SequentialLR")},
        }  # fmt: skip
        for kind in ("constant", "linear", "cosine"):
            statements(source / "scheduler.py", f"def setup_{kind}_scheduler")(self.space)
        statements(source / "optim" / "__init__.py", "def _create_optimizer")(self.space)
        self.configs = (checkout / "packages" / "prime-rl-configs" / "src" / "prime_rl" / "configs"
                        / "trainer.py")  # fmt: skip

    def rates(self, options: Mapping[str, Any], count: int) -> list[float]:
        """Of the schedule's type."""
        kind = options.get("type", "constant")
        fields = class_defaults(self.configs, f"{kind.capitalize()}SchedulerConfig") | {**options}
        del fields["type"]
        if kind != "constant":
            fields |= {"max_steps": count, "lr": RATE}
        return ticks(self.space[f"setup_{kind}_scheduler"](dummy(), **fields), count)

    def optimizer(
        self, options: Mapping[str, Any], model: nn.Module
    ) -> tuple[torch.optim.Optimizer, float]:
        """AdamW on all parameters."""
        fields = class_defaults(self.configs, "BaseOptimizerConfig")
        fields |= class_defaults(self.configs, "AdamWConfig") | {**options, "lr": RATE}
        config = SimpleNamespace(**fields)
        their_optimizer = self.space["_create_optimizer"](config, [*model.named_parameters()], None)
        return their_optimizer, fields["max_norm"]


def cases(checkout: Path) -> Iterator[Rates | Optimizes]:
    """All that is compared."""
    peer = Trained(checkout)
    for name, options, known_difference in SCHEDULES:
        stated = BASE | {f"{SCHEDULER}{key}": value for key, value in options.items()}
        yield Rates(f"schedule: {name}", words_of("rl", stated | {f"{OPTIM}lr": RATE}),
                    partial(peer.rates, options), known_difference)  # fmt: skip
    for name, options, known_difference in OPTIMIZERS:
        stated = BASE | {f"{OPTIM}{key}": value for key, value in options.items()}
        yield Optimizes(
            name, words_of("rl", stated), partial(peer.optimizer, options), known_difference
        )
