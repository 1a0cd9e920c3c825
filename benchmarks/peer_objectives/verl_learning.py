"""verl's schedules and optimizers, of the backend FSDP: it sets the rate once a step."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import nn

from benchmarks.peer_objectives.comparing import Known
from benchmarks.peer_objectives.learning import RATE, Optimizes, Rates, dummy, ticks
from benchmarks.peer_objectives.loading import Checkout, statements
from benchmarks.peer_objectives.verl import ACTOR, BASE, read

# 20 prompts of 4 samples a step, in four updates
STEP = ("data.train_batch_size=20", f"{ACTOR}ppo_mini_batch_size=5",
        "algorithm.adv_estimator=grpo")  # fmt: skip
SFT = ("sft", "model.path=m", "data.train_files=d", "data.train_batch_size=8",
       "trainer.n_gpus_per_node=1")  # fmt: skip
WITHIN = Known("all four updates of a step have one rate there",
               "there with each step of 4 updates", within=0.11)  # fmt: skip
WARM = Known("all four updates of a step have one rate there, and the first step 0",
             "steps of 4 updates", within=0.21)  # fmt: skip
SHARE = Known("all four updates of a step have one rate there, and the first step 0",
              "rounded up; down there", within=0.21)  # fmt: skip
DECAYS = Known("norms and biases decay too there", "there of norms and biases too")
SCHEDULES: tuple[tuple[str, Mapping[str, Any], Known | None], ...] = (
    ("defaults", {}, None),
    ("lr_warmup_steps 10", {"lr_warmup_steps": 10}, WARM),
    ("lr_warmup_steps_ratio 0.1", {"lr_warmup_steps_ratio": 0.1}, SHARE),
    ("cosine, no warm-up", {"lr_scheduler_type": "cosine"}, WITHIN),
    ("cosine, min_lr_ratio 0.1, lr_warmup_steps 5", {
        "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1, "lr_warmup_steps": 5}, WARM),
    ("cosine, num_cycles 1", {"lr_scheduler_type": "cosine", "num_cycles": 1.0},
     Known("the rate rises again there", "falls once, to min_lr_ratio")),
)  # fmt: skip
OPTIMIZERS: tuple[tuple[str, Mapping[str, Any], Known | None], ...] = (
    ("AdamW's defaults", {}, DECAYS),
    ("weight_decay 0, betas, clip_grad 0.5", {
        "weight_decay": 0.0, "betas": [0.8, 0.99], "clip_grad": 0.5}, None),
)  # fmt: skip


class Trained:
    """FSDPEngine's schedule and build_optimizer, with the defaults of verl's YAML."""

    def __init__(self, checkout: Path) -> None:
        folder = checkout / "verl"
        files = Checkout(folder, ("omegaconf", "tensordict", "hydra", "codetiming"))
        functional: Any = files.module("verl.utils.torch_functional")
        self.space: dict[str, Any] = {
            name: getattr(functional, name)
            for name in ("get_constant_schedule_with_warmup", "get_cosine_schedule_with_warmup")
        } | {"self": SimpleNamespace(rank=1), "FSDPOptimizerConfig": Any}
        self.schedule = statements(
            folder / "workers" / "engine" / "fsdp" / "transformer_impl.py",
            "total_steps = optim_config.total_training_steps", 9,
        )  # fmt: skip
        statements(folder / "workers" / "config" / "optimizer.py", "def build_optimizer")(
            self.space)  # fmt: skip
        config = folder / "trainer" / "config"
        self.defaults = yaml.safe_load((config / "optim" / "fsdp.yaml").read_text("utf-8"))
        self.actor = yaml.safe_load((config / "actor" / "actor.yaml").read_text("utf-8"))["optim"]

    def config(self, words: tuple[str, ...], count: int = -1) -> Any:
        """The optimizer's config that Hydra makes of overrides."""
        stated = {name.split("optim.")[-1]: read(value) for name, value in
                  (word.split("=", 1) for word in words[1:]) if "optim." in name}  # fmt: skip
        of_role = self.actor if words[0] == "ppo" else {}
        table = self.defaults | of_role | stated | {"total_training_steps": count, "lr": RATE}
        return SimpleNamespace(**table)

    def rates(self, words: tuple[str, ...], count: int) -> list[float]:
        """Of _build_lr_scheduler, a tick after each step."""
        space = self.space | {"optim_config": self.config(words, count), "optimizer": dummy()}
        self.schedule(space)
        return ticks(space["lr_scheduler"], count)

    def optimizer(
        self, words: tuple[str, ...], model: nn.Module
    ) -> tuple[torch.optim.Optimizer, float]:
        """Of build_optimizer, on the model's parameters."""
        config = self.config(words)
        config.betas = tuple(config.betas)
        return self.space["build_optimizer"](model.parameters(), config), config.clip_grad


def cases(checkout: Path) -> Iterator[Rates | Optimizes]:
    """All that is compared."""
    peer = Trained(checkout)
    programs = ("ppo", (*BASE, *STEP), f"{ACTOR}optim."), ("sft", SFT, "optim.")
    for program, base, prefix in programs:
        for name, options, known_difference in SCHEDULES:
            words = (*base, *(f"{prefix}{key}={value}" for key, value in options.items()))
            is_same = program == "sft" and (
                known_difference is None or "four updates" in known_difference.why
            )
            yield Rates(f"{program}, {name}", words, partial(peer.rates, words),
                        None if is_same else known_difference, in_steps=True)  # fmt: skip
        for name, options, known_difference in OPTIMIZERS:
            words = (*base, *(f"{prefix}{key}={value}" for key, value in options.items()))
            yield Optimizes(
                f"{program}, {name}", words, partial(peer.optimizer, words), known_difference
            )
