"""How a model learns, as several systems state it: schedules, adapters, optimizers, memory."""

import re
from collections.abc import Collection, Sequence
from typing import Any, cast

from postgrad.translate import mixtures
from postgrad.translate.draft import Draft
from postgrad.translate.images import ON_LANGUAGE, carries_states
from postgrad.translate.places import engine_beside
from postgrad.translate.rules import Options, Rule, decimal, flag

# transformers' names, also after "paged_", which lets moments swap to the host
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_32bit")
EIGHT_BITS = ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit")
ALL_DECAY = "of matrices; there of norms and biases too"

# transformers' name -> schedule here, share of the rate at the end (None: it stays constant)
_SCHEDULES = {
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "cosine_with_min_lr": ("cosine", 0.1),
    "cosine_warmup_with_min_lr": ("cosine", 0.1),
}
KNOWN = "knows constant, linear, cosine and 1-sqrt"
_MEGATRON = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}  # ways down of its WSD


def schedule(
    draft: Draft, scheduler: Any, least: Any = None, role: str = "learner", comment: str = ""
) -> None:
    """The learning rate's schedule. scheduler: transformers' name. least: the share of the rate
    that is left at the end. role: the place of its [learner] table.
    """
    counterpart = _SCHEDULES.get(_bare(scheduler))
    if counterpart is None:
        draft.miss("lr_scheduler", scheduler, f"{role}.schedule {KNOWN}")
        return
    name, final_ratio = counterpart
    draft.put(f"{role}.schedule", name, comment)
    share = final_ratio if least is None or not final_ratio else float(least)
    if share:
        draft.put(f"{role}.min_lr_ratio", share)


def stable(draft: Draft, options: Options, prefix: str, steps: str, role: str = "learner") -> None:
    """Megatron's schedule WSD: the rate falls in the last steps. prefix: of the optimizer's
    options; steps: the name of the number of these steps.
    """
    name = f"{prefix}lr_wsd_decay_style"
    style = str(options.take(name) or "exponential")
    default = "" if options.states(name) else " (Megatron's default)"
    if style not in _MEGATRON:
        draft.miss(name, style, f"there{default} the rate falls as 2 * 0.5^p - 1; here on a line")
    draft.put(f"{role}.schedule", _MEGATRON.get(style, "linear"))
    count = options.take(f"{prefix}{steps}")
    draft.put(f"{role}.decay_updates", None if count is None else int(decimal(count)))


def unstable(draft: Draft, options: Options, names: Sequence[str]) -> None:
    """Options of Megatron's schedule WSD beside another schedule, which does not read them."""
    for name in names:
        if options.take(name) is not None and options.states(name):
            draft.skip(name, options.take(name), "of the schedule WSD, which this run has not")


def _bare(scheduler: Any) -> str:
    """transformers' name of a schedule, without that of its enumeration."""
    return str(scheduler).removeprefix("SchedulerType.").lower()


def is_stable(scheduler: Any) -> bool:
    """Whether it is transformers' schedule whose rate falls in the last updates alone."""
    return _bare(scheduler) == "warmup_stable_decay"


def unwarmed(draft: Draft, options: Options, scheduler: Any, names: Sequence[str]) -> bool:
    """Whether the rate of transformers' schedule begins at its full height, whatever the options
    for a warm-up say: that of "constant", which is not "constant_with_warmup".
    """
    if _bare(scheduler) != "constant":
        return False
    for name in names:
        if options.take(name) and options.states(name):
            why = f"the schedule {scheduler} has no warm-up; constant_with_warmup has one"
            draft.skip(name, options.take(name), why)
    return True


def counted_in_steps(draft: Draft, updates: int, roles: Sequence[str] = ("learner",)) -> None:
    """Warm-ups and schedules of a system that sets the rate once for all `updates` of a step."""
    for role in roles if updates > 1 else ():
        for key in ("warmup_updates", "decay_updates"):
            if steps := draft.get(f"{role}.{key}"):
                comment = draft.comments.get((*role.split("."), key), "")
                of_steps = f"{steps} steps of {updates} updates"
                draft.put(f"{role}.{key}", steps * updates,
                          f"{of_steps}; {comment}" if comment else of_steps)  # fmt: skip
        if draft.get(f"{role}.schedule", "constant") != "constant":
            comment = draft.comments.get((*role.split("."), "schedule"), "")
            falls = f"falls with each update; there with each step of {updates} updates"
            draft.put(f"{role}.schedule", draft.get(f"{role}.schedule"),
                      f"{falls}, {comment}" if comment else falls)  # fmt: skip


def warmup(draft: Draft, share: float, role: str = "learner", comment: str = "") -> None:
    """The share of all updates in which the rate warms up, rounded up as transformers does."""
    if share or role != "learner":
        draft.put(f"{role}.warmup_ratio", share, comment)


def warmup_start(
    draft: Draft, options: Options, name: str, rate: float, role: str = "learner"
) -> None:
    """learner.warmup_start_ratio from the rate at which a warm-up begins. name: of the option that
    states it. rate: what it is a share of, 1 where the option is a share itself.
    """
    start = options.take(name)
    warms = draft.get(f"{role}.warmup_updates") or draft.get(f"{role}.warmup_ratio")
    if start is not None and warms and rate and 0.0 <= decimal(start) <= rate:
        draft.put(f"{role}.warmup_start_ratio", round(decimal(start) / rate, 12),
                  "" if options.states(name) else "the default there")  # fmt: skip
    elif options.states(name) and warms:
        draft.miss(name, start, "a warm-up begins at a share of the rate, between 0 and 1")
    elif options.states(name):
        draft.skip(name, start, "the rate begins at its full height: there is no warm-up")


def adapter(draft: Draft, options: Options, names: Sequence[str], four_bits: str) -> None:
    """[model.lora] and model.quantize. names: of the options for rank, alpha, dropout and target
    modules. four_bits: of the option for weights in four bits.
    """
    rank, alpha, dropout, targets = names
    value = options.number(rank, 0)
    layers = options.texts(targets)
    alphas, drops = options.number(alpha, 16), float(options.take(dropout, 0.0))
    quantize = options.take(four_bits)
    if value:
        draft.put("model.lora.rank", value, ON_LANGUAGE if draft.images else "")
        draft.put("model.lora.alpha", alphas)
        if drops:
            draft.put("model.lora.dropout", drops)
        if layers and layers != ["all-linear"]:
            draft.put("model.lora.targets", layers)
    if quantize and mixtures.named_in(options):
        draft.miss(four_bits, quantize, "experts of a mixture are not held in four bits")
    elif quantize and value:
        draft.put("model.quantize", "4bit")
    elif quantize:
        draft.miss(four_bits, quantize, "weights in four bits are frozen: they need an adapter")


def adapter_start(draft: Draft, name: str, value: Any, _: str) -> None:
    """A rule: PEFT's init_lora_weights."""
    if value in (True, None):
        return
    if re.fullmatch(r"pissa(_niter_[1-9]\d{0,3})?", str(value)):
        draft.put("model.lora.init", value)
    else:
        draft.miss(name, value, "an adapter begins as PEFT's default does, or by PiSSA")


def by_name(key: str) -> Rule:
    """A rule: a list of layers by the ends of their names, or a table from there to numbers, which
    `key` is here. Regular expressions are missing.
    """

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        names = cast(Collection[Any], [value] if isinstance(value, str) else value or [])
        if names and not draft.get("model.lora.rank"):
            draft.skip(name, value, "of an adapter that the run does not have")
        elif all(re.fullmatch(r"\w+(\.\w+)*", str(end), re.ASCII) for end in names):
            draft.put(key, names or None, default)
        else:
            draft.miss(name, value, f"{key} has ends of names, and no patterns")

    return rule


def offload(draft: Draft, name: str, value: Any, _: str) -> None:
    """A rule: optimizer state, or weights, in the host's memory."""
    if not flag(value):
        return
    if draft.get("learner.sharding"):
        draft.put("learner.offload", True, "weights, gradients and optimizer state")
    else:
        draft.miss(name, value, "state that is not divided over ranks stays on its device")


def offload_while_sampling(draft: Draft, name: str, value: Any, _: str) -> None:
    """A rule: weights, or optimizer state, are in the host's memory but for updates."""
    if not flag(value):
        return
    if not engine_beside(draft):
        draft.skip(name, value, "no engine samples on the learner's devices")
    elif draft.get("learner.offload") is not True:  # for the whole run
        draft.put("learner.offload", "sampling", "weights and optimizer state, while it samples")


def recomputed(draft: Draft, _: str, value: Any, comment: str) -> None:
    """A rule: whether layers are computed again, beside an option of `host_inputs`."""
    if draft.get("model.gradient_checkpointing") != "offload":
        draft.put("model.gradient_checkpointing", flag(value), comment)


def host_inputs(draft: Draft, name: str, value: Any, _: str) -> None:
    """A rule: activations in the host's memory between forward and backward pass."""
    if flag(value):
        why = f"{name}: what layers read; the rest is computed again"
        draft.put("model.gradient_checkpointing", "offload", why)


def compiled(draft: Draft, name: str, value: Any, _: str) -> None:
    """A rule: whether the model's layers are compiled."""
    if not flag(value):
        return
    if carries_states(draft):
        draft.miss(name, value, "layers that carry a state along a sequence are not compiled")
    else:
        draft.put("model.compile", True)


def optimizer(draft: Draft, name: str, value: Any, default: str) -> None:
    """transformers' name of an optimizer: AdamW, with moments in float32 or in eight bits."""
    spelling = str(value).lower()
    if spelling.removeprefix("paged_") in EIGHT_BITS:
        draft.put("learner.optimizer_state", "8bit", "blocks end with each row of a matrix")
    if spelling.removeprefix("paged_") in (*EIGHT_BITS, *ADAMW):
        draft.put("learner.optimizer", "adamw", default)
    else:
        draft.miss(name, value, f"learner.optimizer knows {', '.join((*ADAMW, *EIGHT_BITS))}")
