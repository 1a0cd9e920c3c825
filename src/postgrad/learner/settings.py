"""The recipe's settings for training a role, and the learning rates that follow from them."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from postgrad.algorithms.base import Algorithm
from postgrad.algorithms.critic import Critic
from postgrad.core.batch import BatchGeometry
from postgrad.core.errors import UsageError
from postgrad.core.settings import Settings, ShardingStage
from postgrad.core.text import how_many

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]  # share of the past in a moving average


def rate_ratio(settings: "LearnerSettings", name: str) -> float:
    """What the learning rate of a weight is multiplied by: loraplus_lr_ratio for B of an adapter,
    on linear layers, experts and routers alike.
    """
    return settings.loraplus_lr_ratio if ".lora_B." in name else 1.0


class LearnerSettings(Settings):
    """Optimizer, schedule, and how the weights of a role are divided over ranks.

    Warm-up: update u (from 0) of W uses (u + 1) / W of the rate, or what warmup_start_ratio says;
    then the schedule falls to min_lr_ratio, reached one update after the last. With decay_updates
    or decay_ratio it falls in that last part of the run only, and stays at `lr` before
    (warmup-stable-decay, WSD).

    optimizer "muon": Muon for the matrices of the decoder's layers, AdamW for all else. Its steps
    are about as long as AdamW's, so that `lr` is the rate of both; `muon_lr` gives Muon another
    rate, on the same schedule.

    optimizer_state "8bit": AdamW's moments of matrices take a byte a number (arXiv:2110.02861).
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    optimizer_state: Literal["float32", "8bit"] = "float32"  # AdamW's moments of matrices
    lr: float = Field(default=1e-6, gt=0.0)  # the rate after warm-up
    schedule: Literal["constant", "linear", "cosine", "1-sqrt"] = "constant"
    warmup_updates: int = Field(default=0, ge=0)  # or warmup_ratio
    warmup_ratio: float = Field(default=0.0, ge=0.0, le=1.0)  # share of all updates, rounded up
    # Share of lr that the first update of the warm-up has; from there the rate rises by equal
    # steps, and has lr behind the last one. Left out: 1/W, 2/W, ... of lr in W updates.
    warmup_start_ratio: float | None = Field(default=None, ge=0.0, le=1.0)
    decay_updates: int = Field(default=0, ge=0)  # last updates, in which the rate falls; 0: all
    decay_ratio: float = Field(default=0.0, ge=0.0, le=1.0)  # the same as a share, rounded up
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)  # one update after the last
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # of AdamW
    eps: float = Field(default=1e-8, gt=0.0)  # of AdamW
    weight_decay: float = Field(default=0.0, ge=0.0)  # norms and biases do not decay
    max_grad_norm: float = Field(default=1.0, ge=0.0)  # 0: no clipping
    muon_lr: float | None = Field(default=None, gt=0.0)  # lr where left out
    muon_momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    muon_nesterov: bool = True
    muon_ns_steps: int = Field(default=5, ge=1, le=20)  # of Newton-Schulz
    # Learning rate of an adapter's B over that of all else (LoRA+, Hayou et al. 2024,
    # arXiv:2402.12354).
    loraplus_lr_ratio: float = Field(default=1.0, gt=0.0)
    ema_decay: float = Field(default=0.0, ge=0.0, lt=1.0)  # 0: no moving average of the weights
    # How weights, gradients and optimizer state are divided over ranks (docs/distributed.md).
    sharding: ShardingStage = "none"
    # What lies in the host's memory: divided state, copied layer by layer to the GPU that computes
    # (true); or all that the engine has no use for, while it samples on this GPU ("sampling").
    offload: bool | Literal["sampling"] = False
    # HSDP: so many groups of ranks hold a whole copy each, divided within the group; one a node.
    shard_groups: int = Field(default=1, ge=1)
    ranks: int = Field(default=1, ge=1)  # processes that train
    tensor_parallel: int = Field(default=1, ge=1)  # ranks that share each matrix
    context_parallel: int = Field(default=1, ge=1)  # ranks that share the tokens of a sequence
    # Ranks that share the experts of one copy of a mixture: each has its own tokens, and sends them
    # to the ranks that have their experts.
    expert_parallel: int = Field(default=1, ge=1)
    # CPU threads; chosen at start where left out
    threads: int | None = Field(default=None, ge=1, le=1024)
    deterministic: bool = True  # torch's deterministic algorithms

    @model_validator(mode="after")
    def _one_warm_up(self) -> Self:
        if self.warmup_updates and self.warmup_ratio:
            raise ValueError(
                f"warmup_updates = {self.warmup_updates} and warmup_ratio = {self.warmup_ratio:g} "
                "both say how long the rate warms up: leave one of them out, or set it to 0"
            )
        if self.warmup_start_ratio is not None and not (self.warmup_updates or self.warmup_ratio):
            raise ValueError(
                f"warmup_start_ratio = {self.warmup_start_ratio:g} says where a warm-up begins, "
                "and there is none: set warmup_updates or warmup_ratio, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _one_decay(self) -> Self:
        if self.decay_updates and self.decay_ratio:
            raise ValueError(
                f"decay_updates = {self.decay_updates} and decay_ratio = {self.decay_ratio:g} "
                "both say how long the rate falls: leave one of them out, or set it to 0"
            )
        if self.schedule == "constant" and (self.decay_updates or self.decay_ratio):
            name = "decay_updates" if self.decay_updates else "decay_ratio"
            raise ValueError(
                f"{name} = {getattr(self, name):g} says how long the rate falls, and schedule = "
                '"constant" does not fall: set schedule to "linear", "cosine" or "1-sqrt"'
            )
        if self.warmup_ratio + self.decay_ratio > 1.0 + 1e-9:  # 0.7 + 0.3 is not exactly 1
            raise ValueError(
                f"warmup_ratio = {self.warmup_ratio:g} and decay_ratio = {self.decay_ratio:g} are "
                "more than the whole run together: lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _has_quantized_state(self) -> Self:
        if self.optimizer_state == "8bit" and self.optimizer != "adamw":
            raise ValueError(
                f'optimizer_state = "8bit" is of AdamW\'s moments, and optimizer is '
                f'"{self.optimizer}": take "adamw", or leave optimizer_state out'
            )
        if self.optimizer_state == "8bit" and self.tensor_parallel > 1:
            raise ValueError(
                f'optimizer_state = "8bit" quantises rows of matrices, which tensor_parallel = '
                f"{self.tensor_parallel} cuts: use 1, and sharding over the ranks"
            )
        return self

    @model_validator(mode="after")
    def _read_by_muon(self) -> Self:
        if self.optimizer != "muon":
            for name, field in type(self).model_fields.items():
                if name.startswith("muon_") and getattr(self, name) != field.default:
                    raise ValueError(f'{name} is read by Muon only: set optimizer = "muon"')
        return self

    def on_ranks(self, ranks: int) -> Self:
        """These settings on `ranks` ranks that share neither matrices, sequences nor experts, as
        those of a role beside the policy. One rank divides nothing.
        """
        changes: dict[str, Any] = {"ranks": ranks, "expert_parallel": 1}
        if self.offload == "sampling":  # no engine samples on their GPUs
            changes["offload"] = False
        changes |= {"tensor_parallel": 1, "context_parallel": 1, "shard_groups": 1}
        if ranks == 1:
            changes |= {"sharding": "none", "offload": False}
        return self.model_copy(update=changes)


def require_shared_experts(kind: str, experts: int, size: int) -> None:
    """Raises UsageError where `size` ranks cannot share the experts of a `kind` model. experts: of
    a layer, those that can be shared; 0: none.
    """
    if size > 1 and not experts:
        raise UsageError(
            f"learner.expert_parallel = {size}: this {kind} model has no experts that ranks can "
            "share: it is no mixture, or computes them in a way of its own: use 1, and sharding = "
            '"zero3" to divide its weights'
        )
    if experts % size:
        fitting = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise UsageError(
            f"learner.expert_parallel = {size}: {experts} experts of this {kind} model cannot be "
            f"divided into {size} equal parts; what works: {fitting}"
        )


def horizon(algorithm: Algorithm, geometry: BatchGeometry) -> int | None:
    """Number of updates of the policy, or of another role that a job trains; None while the size of
    the data is unknown. Steps that train the critic alone (critic_warmup_steps) are not counted, or
    the policy's schedule would not reach its end.
    """
    if geometry.total_updates is None:
        return None
    alone = algorithm.critic_warmup_steps if isinstance(algorithm, Critic) else 0
    return max(1, geometry.total_updates - alone * geometry.updates_per_step)


def warmup_updates(settings: LearnerSettings, total_updates: int) -> int:
    """Number of warm-up updates: warmup_updates, or warmup_ratio of all, rounded up; never more
    than all.
    """
    return min(
        settings.warmup_updates or _share(settings.warmup_ratio, total_updates), total_updates
    )


def decay_updates(settings: LearnerSettings, total_updates: int) -> int:
    """Number of last updates in which the rate falls: decay_updates, or decay_ratio of all, rounded
    up; all after the warm-up where neither is set, and never more than those.
    """
    after = total_updates - warmup_updates(settings, total_updates)
    stated = settings.decay_updates or _share(settings.decay_ratio, total_updates)
    return min(stated or after, after)


def _share(ratio: float, total_updates: int) -> int:
    return math.ceil(round(ratio * total_updates, 6))  # 0.07 * 100 is 7.000000000000001


def shortened(settings: LearnerSettings, total_updates: int) -> str | None:
    """A message where warmup_updates or decay_updates are more than the updates that the run has
    for them; else None.
    """
    run = f"the {how_many(total_updates, 'update')} of the run"
    if settings.warmup_updates > total_updates:
        return (
            f"warmup_updates = {settings.warmup_updates} is more than {run}: the learning rate "
            "rises until the last of them"
        )
    warm = warmup_updates(settings, total_updates)
    if settings.decay_updates > total_updates - warm:
        behind = f" after {warm} of warm-up" if warm else ""
        return (
            f"decay_updates = {settings.decay_updates} is more than {run}{behind}: the learning "
            "rate falls in all of these, with no stable part before"
        )
    return None


def learning_rate(settings: LearnerSettings, update: int, total_updates: int) -> float:
    """The learning rate of `update` (from 0) out of `total_updates`.

    Warm-up update u of W uses (u + 1) / W of settings.lr, or s + (1 - s) * u / W with s =
    warmup_start_ratio, as Megatron and torch's LinearLR do. Then the rate is constant, or falls in
    the last D updates, all after the warm-up unless the settings say fewer: from lr at the first of
    them to `min_lr_ratio` of it one update after the last. Later updates keep that rate. So every
    update of the run moves the weights, unless a warm-up is told to start at 0.
    """
    warmup, start = warmup_updates(settings, total_updates), settings.warmup_start_ratio
    if update < warmup and start is not None:
        return settings.lr * (start + (1.0 - start) * update / warmup)
    if update < warmup:
        return settings.lr * (update + 1) / warmup
    falling = decay_updates(settings, total_updates)
    begin = total_updates - falling
    if settings.schedule == "constant" or update < begin:
        return settings.lr
    ended = update >= total_updates
    progress = 1.0 if ended else (update - begin) / falling
    if settings.schedule == "linear":
        left = 1.0 - progress
    elif settings.schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        left = 1.0 - math.sqrt(progress)
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * left)


def require_no_sharers(kind: str, sharers: int) -> None:
    """Raises UsageError where `sharers` ranks, more than one, would share the rows or matrices of
    layers of a `kind` model, which carry a state along each sequence.
    """
    if sharers > 1:
        raise UsageError(
            f"a {kind} model carries a state along each sequence, whose rows and matrices ranks "
            "cannot share: use learner.tensor_parallel = 1 and learner.context_parallel = 1"
        )
