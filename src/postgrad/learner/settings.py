"""What a recipe says about training a role."""

from typing import Literal

from pydantic import Field

from postgrad.core.settings import Settings


class LearnerSettings(Settings):
    """Optimizer, schedule and where the weights of a role are trained.

    Warm-up: update u (from 0) of W uses (u + 1) / W of the rate; then the schedule goes down to
    min_lr_ratio at the last update. max_grad_norm 0 turns clipping off.
    """

    lr: float = Field(default=1e-6, gt=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = Field(default=0, ge=0)
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    max_grad_norm: float = Field(default=1.0, ge=0.0)
    ema_decay: float = Field(default=0.0, ge=0.0, lt=1.0)  # 0: no moving average of the weights
    sharding: Literal["none", "zero1", "zero2", "zero3"] = "none"
    ranks: int = Field(default=1, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    context_parallel: int = Field(default=1, ge=1)
    threads: int | None = Field(default=None, ge=1)  # CPU threads; chosen at start where left out
    deterministic: bool = True
