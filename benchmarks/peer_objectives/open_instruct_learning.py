"""Open-Instruct's schedules and optimizers: transformers' in most programs, OLMo-core's in some."""

import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union

import torch
from torch import nn

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

MODEL = {"model_name_or_path": "m"}
SUPERVISED = MODEL | {"dataset_mixer_list": ["d", "1.0"]}
PROGRAMS: dict[str, tuple[str, str, dict[str, Any]]] = {  # -> file, class of options, options
    "sft": ("finetune.py", "FlatArguments", SUPERVISED),
    "dpo": ("dpo_tune_cache.py", "", SUPERVISED),
    "reward": ("reward_modeling.py", "Args", SUPERVISED),
    "grpo": ("grpo_fast.py", "", SUPERVISED | {
        "num_unique_prompts_rollout": 20, "num_samples_per_prompt_rollout": 4,
        "response_length": 64, "num_mini_batches": 4}),
}  # fmt: skip
DECAYS = Known("norms and biases decay too there", "there of norms and biases too")
ROUNDED = Known("a warm-up of 0.03 * 50 updates is 1 there, 2 here", "rounded up; down there")
SCHEDULES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *((program, "defaults", {}) for program in PROGRAMS),
    ("sft", "linear, final_lr_ratio 0.2", {"final_lr_ratio": 0.2, "warmup_ratio": 0.1}),
    ("sft", "constant", {"lr_scheduler_type": "constant"}),
    ("sft", "constant_with_warmup", {
        "lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1}),
    ("dpo", "cosine", {"lr_scheduler_type": "cosine"}),
    ("reward", "linear, warm_up_steps 5", {"warm_up_steps": 5}),
    ("reward", "constant, warm_up_steps 5", {"warm_up_steps": 5, "lr_scheduler_type": "constant"}),
    ("grpo", "constant", {"lr_scheduler_type": "constant"}),
    ("grpo", "linear, warmup_ratio 0.1", {"warmup_ratio": 0.1}),
)  # fmt: skip
DECAY = {"weight_decay": 0.1}
OPTIMIZERS: tuple[tuple[str, str, dict[str, Any], Known | None], ...] = (
    *((program, "AdamW's defaults", {}, DECAYS if program == "reward" else None)
      for program in PROGRAMS),
    *((program, "weight_decay 0.1", DECAY, None) for program in ("sft", "dpo", "grpo")),
    ("sft", "clip_grad_norm 0.5", {"clip_grad_norm": 0.5}, None),
    ("dpo", "max_grad_norm 0.5", {"max_grad_norm": 0.5}, None),
    ("grpo", "weight_decay 0.1, set_weight_decay_on_bias_and_norm off", {
        **DECAY, "set_weight_decay_on_bias_and_norm": False}, DECAYS),
)  # fmt: skip


class Trained:
    """What its programs do with their options."""

    def __init__(self, checkout: Path) -> None:
        self.folder = checkout / "open_instruct"
        self.space: dict[str, Any] = {"torch": torch, "optim": torch.optim}
        statements(self.folder / "utils.py", "def get_optimizer_grouped_parameters")(self.space)

    def options(self, program: str, stated: dict[str, Any]) -> dict[str, Any]:
        """All options of a program: its class's fields, and those of TrainingConfig."""
        file, kind, _ = PROGRAMS[program]
        fields = class_defaults(self.folder / "olmo_core_utils.py", "TrainingConfig")
        if kind:
            fields = class_defaults(self.folder / file, kind)
        if program == "grpo":
            grpo_fields = class_defaults(self.folder / "grpo_utils.py", "GRPOExperimentConfig")
            fields |= grpo_fields | {"warmup_ratio": 0.0, "max_grad_norm": 1.0}  # its set_defaults
        return fields | {"use_qlora": False, "dpo_use_paged_optimizer": False,
                         "fused_optimizer": False} | stated | {"learning_rate": RATE}  # fmt: skip

    def rates(self, program: str, stated: dict[str, Any], count: int) -> list[float]:
        """Of the statements that make a scheduler."""
        from transformers import get_scheduler

        args, file = SimpleNamespace(**self.options(program, stated)), PROGRAMS[program][0]
        optimizer, path = dummy(), self.folder / file
        space: dict[str, Any] = {"args": args, "get_scheduler": get_scheduler, "self": args}
        space |= {"optimizer": optimizer, "num_training_steps_for_scheduler": count,
                  "FlatArguments": Any}  # fmt: skip
        if program == "sft":
            statements(path, "def _create_scheduler")(space)
            scheduler = space["_create_scheduler"](args, optimizer, count)
        elif program == "grpo":
            args.num_training_steps, args.num_epochs = count // args.num_mini_batches, 1
            args.optimizer = optimizer
            statements(path, "num_scheduler_steps = ", 3)(space)
            scheduler = space["scheduler"]
        else:
            args.num_training_steps, args.num_train_epochs = count, 1
            name = "lr_scheduler" if program == "dpo" else "scheduler"
            statements(path, f"{name} = get_scheduler(")(space)
            scheduler = space[name]
        return ticks(scheduler, count)

    def optimizer(
        self, program: str, stated: dict[str, Any], model: nn.Module
    ) -> tuple[torch.optim.Optimizer, float]:
        """Of the statements that make an optimizer; gradients are clipped where a bound is above 0,
        in reward_modeling.py never.
        """
        args = SimpleNamespace(**self.options(program, stated))
        path = self.folder / PROGRAMS[program][0]
        space = self.space | {"args": args, "model": model, "self": SimpleNamespace(policy=model)}
        if program == "grpo":
            statements(path, "if args.set_weight_decay_on_bias_and_norm:", 2)(space)
            their_optimizer = space["self"].optimizer
        elif program == "reward":
            statements(path, "optimizer = optim.AdamW(")(space)
            their_optimizer = space["optimizer"]
        else:
            statements(path, "optimizer_grouped_parameters =", 2)(space)
            their_optimizer = space["optimizer"]
        bound = {"sft": "clip_grad_norm", "reward": ""}.get(program, "max_grad_norm")
        return their_optimizer, max(0.0, getattr(args, bound, None) or 0.0)


class OfOLMoCore:
    """The schedules of OLMo-core, of its file alone: the package needs many others."""

    def __init__(self, checkout: Path, file: Path) -> None:
        base = type("Scheduler", (), {"register": lambda name: lambda kind: kind})
        space: dict[str, Any] = {"Scheduler": base, "dataclass": dataclass, "torch": torch,
                                 "Optional": Optional, "Union": Union, "warnings": warnings,
                                 "cos": math.cos, "pi": math.pi}  # fmt: skip
        kinds = {"cos_with_warmup": "Cos", "linear_with_warmup": "Linear",
                 "constant_with_warmup": "Constant"}  # fmt: skip
        statements(file, "def _linear_warmup")(space)
        for name, kind in kinds.items():
            statements(file, f"@Scheduler.register('{name}')\n@dataclass\nclass {kind}")(space)
        space["olmo_optim"] = SimpleNamespace(**space)
        statements(checkout / "open_instruct" / "olmo_core_utils.py", "def build_scheduler")(space)
        self.build: Any = space["build_scheduler"]

    def rates(self, kind: str, share: float, count: int) -> list[float]:
        """Steps of OLMo-core's trainer count from 1."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scheduler = self.build(kind, share, count)
        return [float(scheduler.get_lr(RATE, step, count)) / RATE for step in range(1, count + 1)]


def cases(checkout: Path) -> Iterator[Rates | Optimizes]:
    """All that is compared. An update here has as many samples as num_mini_batches makes of it."""
    peer = Trained(checkout)
    for program, name, options in SCHEDULES:
        stated = PROGRAMS[program][2] | options
        known_difference = ROUNDED if (program, name) == ("sft", "defaults") else None
        yield Rates(f"{program}, {name}", words_of(program, stated),
                    partial(peer.rates, program, stated), known_difference)  # fmt: skip
    for program, name, options, known_difference in OPTIMIZERS:
        stated = PROGRAMS[program][2] | options
        yield Optimizes(f"{program}, {name}", words_of(program, stated),
                        partial(peer.optimizer, program, stated), known_difference)  # fmt: skip
    package = find_spec("olmo_core")
    if package is None or package.origin is None:
        print("without ai2-olmo-core its schedules are not compared", file=sys.stderr)
        return
    sooner = Known("the rate falls one update sooner there", within=0.04)
    of_olmo = OfOLMoCore(checkout, Path(package.origin).parent / "optim" / "scheduler.py")
    for kind in ("linear", "cosine", "constant"):
        stated = SUPERVISED | {"lr_scheduler_type": kind, "warmup_ratio": 0.1}
        yield Rates(f"olmo_core_dpo, {kind}", words_of("olmo_core_dpo", stated),
                    partial(of_olmo.rates, kind, 0.1), sooner)  # fmt: skip
