"""The policy of NeMo RL's configs: where it trains and samples, its adapter and optimizer.

One of two backends trains: DTensor (FSDP2) or Megatron. What a config says of the other one counts
as not needed.
"""

import re
from collections.abc import Mapping
from typing import Any

from postgrad.translate import common, learning, mixtures, places
from postgrad.translate.draft import Draft
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, Rule, decimal, flag, needless
from postgrad.translate.tables.nemo_rl_backends import DTENSOR, MEGATRON

_ENGINES = places.EngineOptions(
    tensor_parallel="policy.generation.vllm_cfg.tensor_parallel_size",
    memory="policy.generation.vllm_cfg.gpu_memory_utilization",
    eager="policy.generation.vllm_cfg.enforce_eager",
)  # fmt: skip
_ADAMW = ("torch.optim.AdamW", "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam")
_MIXTURE = re.compile(r"(?i)-A\d+B\b|moe")  # in the names of models with experts
_MEGATRON = "policy.megatron_cfg."
_OTHER = "the other backend trains"
_SCHEDULERS = "torch.optim.lr_scheduler."


def _megatron(options: Options) -> bool:
    return flag(options.take("policy.megatron_cfg.enabled", False))


def rules(options: Options) -> dict[str, Rule]:
    """The rules of both backends: those of the one that trains, and that the other is not asked."""
    other = needless(_OTHER)
    trains, idle = ("megatron_cfg", "dtensor_cfg")[:: 1 if _megatron(options) else -1]
    table = MEGATRON if trains == "megatron_cfg" else DTENSOR
    routers = mixtures.megatron(options, _MEGATRON) if trains == "megatron_cfg" else {}
    return {
        **routers,
        **{f"policy.{trains}.{name}": rule for name, rule in table.items()},
        f"policy.{idle}": other,
        f"policy.{idle}.*": other,
    }


def balanced(draft: Draft, options: Options) -> None:
    """A mixture that Megatron trains without a balance loss. DTensor's has that of its config."""
    if _megatron(options) and not mixtures.balances(options, _MEGATRON):
        mixtures.balanced(draft)


def policy(draft: Draft, options: Options, source: SourceCommand) -> None:
    """[model], [learner], [cluster] and the engines of [rollout]."""
    draft.put("model.path", options.take("policy.model_name"))
    draft.put("model.dtype", str(options.take("policy.precision", "bfloat16")))
    common.tokenizer(draft, options, "policy.tokenizer.name", "policy.tokenizer.revision")
    template = options.take("policy.tokenizer.chat_template")
    if template not in (None, "default"):
        common.chat_template(draft, "policy.tokenizer.chat_template", template, "")
    kwargs = "policy.tokenizer.chat_template_kwargs."
    for name in [name for name in options.stated if name.startswith(kwargs)]:
        draft.put(f"data.chat_template_kwargs.{name.removeprefix(kwargs)}", options.take(name))
    _placed(draft, options, source)
    of_experts = re.compile(r"policy\.megatron_cfg\.(freeze_)?moe_\w+")
    dense = draft.images is not None and not _MIXTURE.search(draft.images.model)
    for name in [name for name in options.stated if dense and of_experts.fullmatch(name)]:
        draft.skip(name, options.take(name), "the run's model has no experts")
    if _megatron(options):
        _of_megatron(draft, options)
    else:
        _of_torch(draft, options)


def _placed(draft: Draft, options: Options, source: SourceCommand) -> None:
    """Ranks and engines: on the same GPUs, or engines on GPUs or nodes of their own."""
    each, nodes = options.number("cluster.gpus_per_node"), options.number("cluster.num_nodes")
    resources = "policy.generation.colocated.resources."
    gpus = options.number(f"{resources}gpus_per_node", each)
    apart = options.number(f"{resources}num_nodes", 1)
    ahead = flag(options.stated.get("grpo.async_grpo.enabled", False))
    shared = flag(options.take("policy.generation.colocated.enabled", True)) and not ahead
    machines, ranks, infer = nodes, nodes * each, 0
    if not shared and nodes == 1:
        infer = min(gpus, max(1, each - 1))
        ranks = max(1, each - infer)
    elif not shared:
        machines = max(1, nodes - apart)
        ranks, infer = machines * each, apart * gpus
    places.processes(draft, "GPUs of the policy", source.devices or ranks, machines)
    ranks = int(draft.get("learner.ranks") or 1)
    section = "policy.megatron_cfg." if _megatron(options) else "policy.dtensor_cfg."
    tensor = f"{section}{'tensor_model' if _megatron(options) else 'tensor'}_parallel_size"
    context = f"{section}context_parallel_size"
    experts = f"{section}expert_{'model_' if _megatron(options) else ''}parallel_size"
    options.take("policy.dtensor_cfg.enabled")
    shares = {
        "tensor_parallel": (tensor, options.take(tensor)),
        "context_parallel": (context, options.take(context)),
        "expert_parallel": (experts, options.take(experts)),
    }
    stage = 1 if _megatron(options) else 3
    places.divided(draft, (f"{section}enabled", stage if ranks > 1 else None), shares)
    backend = str(options.take("policy.generation.backend", "vllm"))
    if backend != "vllm":
        draft.miss("policy.generation.backend", backend, "engines are vLLM's here")
    places.engines(draft, options, _ENGINES, shared=shared, fill=True)
    if shared and draft.get("learner.offload") is None:
        draft.put("learner.offload", "sampling", "as there, where engines share the GPUs")
    if not shared:
        size = int(draft.get("rollout.vllm.tensor_parallel") or 1)
        draft.put("cluster.rollout.workers", max(1, infer // size),
                  f"engines of {size} GPUs: {infer} GPUs of generation")  # fmt: skip


def _adapter(draft: Draft, options: Options, section: str) -> None:
    names = tuple(f"{section}{key}" for key in ("dim", "alpha", "dropout", "target_modules"))
    every = options.take(f"{section}match_all_linear")
    if flag(options.take(f"{section}enabled", False)):
        if flag(every if every is not None else False):
            options.stated.pop(names[3], None)
        learning.adapter(draft, options, names, "")
        return
    for name in [name for name in options.stated if name.startswith(section)]:
        options.take(name)


def _of_torch(draft: Draft, options: Options) -> None:
    """The DTensor backend: torch's optimizer and a list of its schedulers."""
    _adapter(draft, options, "policy.dtensor_cfg.lora_cfg.")
    name = str(options.take("policy.optimizer.name", _ADAMW[0]))
    if name not in _ADAMW:
        draft.miss("policy.optimizer.name", name, "learner.optimizer knows adamw and muon")
    betas = options.numbers("policy.optimizer.kwargs.betas")
    draft.put("learner.betas", betas if betas and betas != [0.9, 0.999] else None)
    rate = decimal(options.take("policy.optimizer.kwargs.lr", 0.0))
    draft.put("learner.lr", rate or None)
    if name == _ADAMW[0] and not options.states("policy.optimizer.kwargs.weight_decay"):
        draft.put("learner.weight_decay", 0.01, f"torch's default, {learning.ALL_DECAY}")
    parts: dict[str, dict[str, Any]] = {}
    for option in [option for option in options.stated if option.startswith("policy.scheduler.")]:
        number, _, key = option.removeprefix("policy.scheduler.").partition(".")
        parts.setdefault(number, {})[key] = options.take(option)
    stays = False
    for number, part in parts.items():
        _scheduler(draft, f"policy.scheduler.{number}", part, rate, stays=stays)
        stays = stays or str(part.get("name", "")).endswith("ConstantLR")


def _scheduler(
    draft: Draft, place: str, part: Mapping[str, Any], rate: float, *, stays: bool
) -> None:
    """One of the schedulers that follow each other: a warm-up, then a constant, a line down or a
    cosine. stays: whether a constant came before, so that this one is of the last steps.
    """
    name = str(part.get("name", "")).removeprefix(_SCHEDULERS)
    last, until = (
        "in the last updates of the run; there where the list says",
        "to the end of the run",
    )
    end = decimal(part.get("kwargs.end_factor", 1.0))
    if name == "LinearLR" and end < 1.0 and decimal(part.get("kwargs.start_factor", 1 / 3)) == 1.0:
        draft.put("learner.schedule", "linear", last if stays else until)
        draft.put("learner.min_lr_ratio", end or None)
        iterations = int(decimal(part.get("kwargs.total_iters", 5)))
        draft.put("learner.decay_updates", iterations if stays else None)
    elif name == "LinearLR" and end == 1.0:
        updates = int(decimal(part.get("kwargs.total_iters", 5)))
        start = decimal(part.get("kwargs.start_factor", 1 / 3))  # torch's default
        draft.put("learner.warmup_updates", updates)
        draft.put("learner.warmup_start_ratio", start if updates else None)
    elif name == "CosineAnnealingLR":
        least = decimal(part.get("kwargs.eta_min", 0.0))
        draft.put("learner.schedule", "cosine", last if stays else until)
        iterations = int(decimal(part.get("kwargs.T_max", 0)))
        draft.put("learner.decay_updates", (iterations or None) if stays else None)
        draft.put("learner.min_lr_ratio", round(least / rate, 12) if least and rate else None)
    elif name not in ("", "ConstantLR") or decimal(part.get("kwargs.factor", 1.0)) != 1.0:
        draft.miss(place, name, f"learner.schedule {learning.KNOWN}, after a warm-up")


def _of_megatron(draft: Draft, options: Options) -> None:
    section = "policy.megatron_cfg."
    of_torch = ("policy.optimizer.", "policy.scheduler.")
    for name in [name for name in options.stated if name.startswith(of_torch)]:
        draft.skip(name, options.take(name), _OTHER)
    _adapter(draft, options, f"{section}peft.")
    rate = decimal(options.take(f"{section}optimizer.lr", 1e-6))
    least = decimal(options.take(f"{section}optimizer.min_lr", 0.0))
    draft.put("learner.lr", rate)
    betas = [
        decimal(options.take(f"{section}optimizer.adam_beta{n}", default))
        for n, default in ((1, 0.9), (2, 0.999))
    ]
    draft.put("learner.betas", betas if betas != [0.9, 0.999] else None)
    style = str(options.take(f"{section}scheduler.lr_decay_style", "constant"))
    over = options.take(f"{section}scheduler.lr_decay_iters")
    warm = options.take(f"{section}scheduler.lr_warmup_iters")
    of_stable = [f"{section}scheduler.lr_wsd_decay_{key}" for key in ("style", "iters")]
    if style == "WSD":
        learning.stable(draft, options, f"{section}scheduler.", "lr_wsd_decay_iters")
    else:
        learning.unstable(draft, options, of_stable)
    if style in ("linear", "cosine"):
        draft.put("learner.schedule", style, f"to the end of the run; there over {over} updates")
    elif style not in ("constant", "WSD"):
        draft.miss(
            f"{section}scheduler.lr_decay_style", style, f"learner.schedule {learning.KNOWN}"
        )
    if style in ("linear", "cosine", "WSD"):
        draft.put("learner.min_lr_ratio", round(least / rate, 12) if least and rate else None)
    draft.put("learner.warmup_updates", int(warm) if warm else None)
    learning.warmup_start(draft, options, f"{section}scheduler.lr_warmup_init", rate)
