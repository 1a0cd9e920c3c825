"""TRL's schedules and optimizers: what transformers' Trainer makes of its configs."""

import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peer_objectives.comparing import Known
from benchmarks.peer_objectives.learning import (
    RATE,
    Optimizes,
    Rates,
    dummy,
    ticks,
    words_of,
)

BASE = {"model_name_or_path": "m", "dataset_name": "d"}
CONFIGS = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
MORE = {"grpo": {"num_generations": 8, "reward_funcs": "a.b"},
        "rloo": {"num_generations": 2, "reward_funcs": "a.b"}}  # fmt: skip
SOONER = Known("the rate falls one update sooner there", within=0.032)  # of 45 updates
OTHER = Known("the rate rises again there", "falls once, to min_lr_ratio")
SCHEDULES: tuple[tuple[str, dict[str, Any], Known | None], ...] = (
    ("defaults", {}, None),
    ("linear, warmup_steps 10", {"warmup_steps": 10}, None),
    ("linear, warmup_steps 0.07", {"warmup_steps": 0.07}, None),
    ("constant, warmup_steps 10", {"lr_scheduler_type": "constant", "warmup_steps": 10}, None),
    ("constant_with_warmup", {
        "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, None),
    ("cosine", {"lr_scheduler_type": "cosine", "warmup_steps": 0.1}, None),
    ("cosine_with_min_lr, min_lr_rate 0.2", {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.2}}, None),
    ("cosine_with_min_lr, min_lr 1e-6", {
        "lr_scheduler_type": "cosine_with_min_lr", "learning_rate": RATE,
        "lr_scheduler_kwargs": {"min_lr": 1e-6}}, None),
    ("cosine_warmup_with_min_lr", {
        "lr_scheduler_type": "cosine_warmup_with_min_lr", "warmup_steps": 5,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, SOONER),
    ("warmup_stable_decay, its defaults", {
        "lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 5,
        "lr_scheduler_kwargs": {"num_decay_steps": 20}}, None),
    ("warmup_stable_decay, 1-sqrt, min_lr_ratio 0.1", {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 20, "decay_type": "1-sqrt",
                                "min_lr_ratio": 0.1}}, None),
    ("cosine, num_cycles 1", {
        "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1.0}}, OTHER),
)  # fmt: skip


class Trained:
    """transformers' Trainer, with the config of a trainer of TRL."""

    def __init__(self, checkout: Path) -> None:
        sys.path.insert(0, str(checkout.resolve()))
        self.trl: Any = import_module("trl")

    def trainer(self, program: str, options: dict[str, Any], model: Any) -> Any:
        """A Trainer that was never set up, with the config that options make."""
        from transformers import Trainer

        kind = getattr(self.trl, f"{CONFIGS[program]}Config")
        trainer: Any = Trainer.__new__(Trainer)
        trainer.args = kind(output_dir="/tmp/none", use_cpu=True, bf16=False, **options)
        trainer.model, trainer.optimizer, trainer.lr_scheduler = model, None, None
        trainer.optimizer_cls_and_kwargs = None
        trainer.is_deepspeed_enabled = trainer.is_fsdp_xla_enabled = False
        return trainer

    def rates(self, program: str, options: dict[str, Any], count: int) -> list[float]:
        """Of create_scheduler."""
        arguments = {name: value for name, value in options.items() if name != "learning_rate"}
        trainer = self.trainer(program, arguments, None)
        return ticks(trainer.create_scheduler(count, dummy()), count)

    def optimizer(
        self, program: str, options: dict[str, Any], model: nn.Module
    ) -> tuple[torch.optim.Optimizer, float]:
        """Of create_optimizer."""
        trainer = self.trainer(program, options, model)
        return trainer.create_optimizer(), trainer.args.max_grad_norm


def cases(checkout: Path) -> Iterator[Rates | Optimizes]:
    """All that is compared."""
    peer = Trained(checkout)
    for program in CONFIGS:
        base = BASE | MORE.get(program, {})
        for name, options, known_difference in SCHEDULES if program == "sft" else SCHEDULES[:1]:
            yield Rates(f"{program}, {name}", words_of(program, base | options),
                        partial(peer.rates, program, options), known_difference)  # fmt: skip
        for name, options in (
            ("AdamW's defaults", {}),
            ("weight_decay 0.1, betas and eps", {
                "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.99,
                "adam_epsilon": 1e-6, "max_grad_norm": 0.5}),
        ):  # fmt: skip
            yield Optimizes(f"{program}, {name}", words_of(program, base | options),
                            partial(peer.optimizer, program, options))  # fmt: skip
