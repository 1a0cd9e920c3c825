"""OpenRLHF's schedules and optimizers: deepspeed.py, and the options of each program."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peer_objectives.learning import (
    RATE,
    Optimizes,
    Rates,
    argument_defaults,
    dummy,
    ticks,
    words_of,
)
from benchmarks.peer_objectives.loading import statements

MODEL = {"model.model_name_or_path": "m", "data.dataset": "d"}
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {  # -> prefix of its options, options
    "sft": ("", MODEL),
    "rm": ("", MODEL),
    "dpo": ("", MODEL),
    "ppo_ray": ("actor.", {"actor.model_name_or_path": "m", "data.prompt_dataset": "d",
                           "reward.model_name_or_path": "r", "train.batch_size": 20,
                           "rollout.batch_size": 20, "rollout.n_samples_per_prompt": 4,
                           "train.micro_batch_size": 4, "train.colocate_all": True,
                           "actor.num_gpus_per_node": 1}),
}  # fmt: skip
SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("defaults", {}),
    ("cosine_with_min_lr, 0.2, warm-up 0.1", {"min_lr_ratio": 0.2, "lr_warmup_ratio": 0.1}),
    ("constant", {"lr_scheduler": "constant"}),
    ("constant_with_warmup", {"lr_scheduler": "constant_with_warmup", "lr_warmup_ratio": 0.1}),
    ("linear, no warm-up", {"lr_scheduler": "linear", "lr_warmup_ratio": 0.0}),
    ("cosine", {"lr_scheduler": "cosine", "lr_warmup_ratio": 0.06}),
)


class Trained:
    """What its trainers do with an optimizer's config."""

    def __init__(self, checkout: Path) -> None:
        utils = checkout / "openrlhf" / "utils" / "deepspeed"
        self.schedule = statements(utils / "deepspeed.py", "scheduler_steps = cfg", 4)
        self.space: dict[str, Any] = {}
        statements(utils / "deepspeed_utils.py", "def get_optimizer_grouped_parameters")(self.space)
        self.cli = checkout / "openrlhf" / "cli"

    def rates(self, program: str, options: dict[str, Any], count: int) -> list[float]:
        """Of `sched_factory`, with the options' own defaults."""
        from transformers.optimization import get_scheduler

        prefix, _ = PROGRAMS[program]
        arguments = argument_defaults(self.cli / f"train_{program}.py")
        names = ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio")
        cfg = {name: options.get(name, arguments[f"{prefix}{name}"]) for name in names}
        space = {"cfg": {**cfg, "scheduler_steps": count}, "math": math, "partial": partial,
                 "get_scheduler": get_scheduler}  # fmt: skip
        self.schedule(space)
        return ticks(space["sched_factory"](dummy()), count)

    def optimizer(
        self, program: str, options: dict[str, Any], model: nn.Module
    ) -> tuple[torch.optim.Optimizer, float]:
        """AdamW, as DeepSpeed makes it of the config."""
        prefix, _ = PROGRAMS[program]
        arguments = argument_defaults(self.cli / f"train_{program}.py")
        at = {name: options.get(name, arguments[f"{prefix}{name}"])
              for name in ("adam.betas", "adam.eps", "adam.weight_decay", "max_norm")}  # fmt: skip
        groups = self.space["get_optimizer_grouped_parameters"](model, at["adam.weight_decay"])
        their_optimizer = torch.optim.AdamW(
            groups, lr=RATE, betas=tuple(at["adam.betas"]), eps=at["adam.eps"]
        )
        return their_optimizer, at["max_norm"]


def cases(checkout: Path) -> Iterator[Rates | Optimizes]:
    """All that is compared."""
    peer = Trained(checkout)
    for program, (prefix, base) in PROGRAMS.items():
        for name, options in SCHEDULES if program in ("sft", "ppo_ray") else SCHEDULES[:1]:
            stated = base | {f"{prefix}{key}": value for key, value in options.items()}
            yield Rates(f"{program}, {name}", words_of(program, stated),
                        partial(peer.rates, program, options))  # fmt: skip
        for name, options in (
            ("AdamW's defaults", {}),
            ("weight_decay 0.1, betas and eps", {
                "adam.weight_decay": 0.1, "adam.betas": [0.8, 0.99], "adam.eps": 1e-6,
                "max_norm": 0.5}),
        ):  # fmt: skip
            stated = base | {f"{prefix}{key}": value for key, value in options.items()}
            yield Optimizes(f"{program}, {name}", words_of(program, stated),
                            partial(peer.optimizer, program, options))  # fmt: skip
