"""OpenRLHF 0.8.4's schedules and optimizers: each program makes its own."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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

ROWS = {"pretrain": "m", "dataset": "d"}
PROGRAMS: dict[str, dict[str, Any]] = {
    "sft": ROWS, "rm": ROWS, "prm": ROWS | {"placeholder_token": "x"}, "dpo": ROWS, "kto": ROWS,
    "kd": ROWS | {"teacher_model": "t"},
    "ppo_ray": {"pretrain": "m", "prompt_data": "d", "reward_pretrain": "r",
                "train_batch_size": 20, "rollout_batch_size": 20, "n_samples_per_prompt": 4,
                "micro_train_batch_size": 4, "actor_num_gpus_per_node": 1,
                "colocate_all_models": True},
}  # fmt: skip
SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("defaults", {}),
    ("lr_warmup_ratio 0.1", {"lr_warmup_ratio": 0.1}),
)


class Trained:
    """What its programs do with their options."""

    def __init__(self, checkout: Path) -> None:
        package = checkout / "openrlhf"
        self.cli, self.trainer = package / "cli", package / "trainer" / "ray" / "ppo_actor.py"
        self.space: dict[str, Any] = {}
        path = package / "utils" / "deepspeed" / "deepspeed_utils.py"
        statements(path, "def get_optimizer_grouped_parameters")(self.space)

    def options(self, program: str, stated: dict[str, Any]) -> Any:
        """All options; those of the policy have the other programs' names."""
        arguments = argument_defaults(self.cli / f"train_{program}.py") | stated
        return SimpleNamespace(**arguments | {"learning_rate": RATE, "actor_learning_rate": RATE})

    def rates(self, program: str, stated: dict[str, Any], count: int) -> list[float]:
        """Of the program's get_scheduler."""
        from transformers.optimization import get_scheduler

        args, of_policy = self.options(program, stated), program == "ppo_ray"
        path = self.trainer if of_policy else self.cli / f"train_{program}.py"
        name = "actor_scheduler" if of_policy else "scheduler"
        space = {"args": args, "max_steps": count, "math": math, "get_scheduler": get_scheduler}
        space |= dict.fromkeys(("optim", "actor_optim"), dummy())
        statements(path, f"{name} = get_scheduler(")(space)
        return ticks(space[name], count)

    def optimizer(
        self, program: str, stated: dict[str, Any], model: nn.Module
    ) -> tuple[torch.optim.Optimizer, float]:
        """create_optimizer's groups, in AdamW with its default eps."""
        args = self.options(program, stated)
        groups = self.space["get_optimizer_grouped_parameters"](model, args.l2)
        return torch.optim.AdamW(groups, lr=RATE, betas=tuple(args.adam_betas)), args.max_norm


def cases(checkout: Path) -> Iterator[Rates | Optimizes]:
    """All that is compared."""
    peer = Trained(checkout)
    for program, base in PROGRAMS.items():
        for name, options in SCHEDULES:
            stated = base | options
            yield Rates(f"{program}, {name}", words_of(program, stated),
                        partial(peer.rates, program, options))  # fmt: skip
        for name, options in (
            ("AdamW's defaults", {}),
            ("l2 0.1, betas and max_norm", {"l2": 0.1, "adam_betas": [0.8, 0.99], "max_norm": 0.5}),
        ):  # fmt: skip
            yield Optimizes(f"{program}, {name}", words_of(program, base | options),
                            partial(peer.optimizer, program, options))  # fmt: skip
