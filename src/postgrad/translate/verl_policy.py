"""The trained models of verl's configs: where they train and sample, adapters, optimizers."""

from typing import Any

from postgrad.translate import common, learning, mixtures, places
from postgrad.translate.draft import Draft
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, Rule, decimal, flag, needless
from postgrad.translate.tables.verl import ACTOR, MODEL, ROLLOUT
from postgrad.translate.tables.verl_backends import MEGATRON, OPTIMIZER, TORCH
from postgrad.translate.verl_rl import Ahead, home

_ENGINES = places.EngineOptions(
    tensor_parallel=f"{ROLLOUT}tensor_model_parallel_size",
    memory=f"{ROLLOUT}gpu_memory_utilization",
    eager=f"{ROLLOUT}enforce_eager",
    sleep=f"{ROLLOUT}free_cache_engine",
)  # fmt: skip
_OF_CRITIC: dict[str, Any] = {  # keys of a learner -> what holds where verl states nothing
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "betas": [0.9, 0.999],
    "schedule": "constant",
    "min_lr_ratio": 0.0,
    "warmup_updates": 0,
    "warmup_ratio": 0.0,
    "warmup_start_ratio": 0.0,
    "decay_updates": 0,
    "decay_ratio": 0.0,
}
_OF_AUTOMODEL = {  # its own defaults
    "optim.lr": 1e-5,
    "optim.lr_scheduler_type": "cosine",
    "optim.min_lr_ratio": 0.01,
    "optim.init_lr_ratio": 0.1,
}
_OTHER = "of a backend that does not train here"
# section of a backend -> names of the options there that say how ranks share the work: matrices,
# sequences, experts
_SHARES = {
    "fsdp_config": ("", "ulysses_sequence_parallel_size", "expert_parallel_size"),
    "megatron": (
        "tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    ),
    "veomni": ("", "ulysses_parallel_size", "expert_parallel_size"),
    "torchtitan": ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"),
    "engine": ("tp", "cp", "ep"),
}  # fmt: skip
_DECAY_ALL = ("fsdp_config", "torchtitan", "automodel")  # which have no groups of weights
_SHORT = {  # of engines that only SFT has
    "automodel": ("tp_size", "cp_size", "ep_size"),
    "mlite": ("tp", "cp", "ep"),
}


def _backend(options: Options, job: str) -> str:
    """The section of the backend that trains."""
    names = ("engine@engine",) if job == "sft" else (
        "model_engine", f"{ACTOR}strategy", f"{ACTOR}model_engine", f"{ACTOR}fsdp_config.strategy",
        "actor@actor_rollout_ref.actor", "config-name", "config_name",
    )  # fmt: skip
    stated = [str(options.take(name, "")) for name in names]
    if any("megatron" in name for name in stated):
        return "megatron"
    if any(name.startswith(f"{ACTOR}engine.") for name in options.stated):
        return "engine"
    sections = (name for name in (*_SHARES, *_SHORT) if any(name in text for text in stated))
    return next(sections, "fsdp_config")


def balances(options: Options, job: str) -> bool:
    """Whether routers are balanced by a loss: by one of verl's two most used backends only where
    options of Megatron say so.
    """
    backend = _backend(options, job)
    if backend == "megatron":
        return mixtures.balances(options, _transformer(job))
    return backend != "fsdp_config"


def _transformer(job: str) -> str:
    """What options of Megatron's layers begin with."""
    return f"{'engine.' if job == 'sft' else f'{ACTOR}megatron.'}override_transformer_config."


def rules(options: Options, job: str) -> dict[str, Rule]:
    """The rules of the backend that trains, of the others, and of the optimizer."""
    trains = _backend(options, job)
    table = MEGATRON if trains == "megatron" else TORCH
    other = needless(_OTHER)
    routers = mixtures.megatron(options, _transformer(job)) if trains == "megatron" else {}
    if job == "sft":
        return {
            **routers,
            **{f"engine.{name}": rule for name, rule in table.items()},
            **{f"optim.{name}": rule for name, rule in OPTIMIZER.items()},
            "optim@optim": needless("the engine's optimizer"),
        }
    return {
        **routers,
        **{f"{ACTOR}{section}.*": other for section in _SHARES if section != trains},
        **{f"{ACTOR}{trains}.{name}": rule for name, rule in table.items()},
        **{f"{ACTOR}optim.{name}": rule for name, rule in OPTIMIZER.items()},
    }


def policy(draft: Draft, options: Options, source: SourceCommand, ahead: Ahead | None) -> None:
    """[model], [learner], [cluster] and the engines of [rollout] of an RL job."""
    section = _backend(options, "rl")
    path = options.take(f"{MODEL}path")
    draft.put("model.path", None if path is None else home(str(path)))
    _computed(draft, options, MODEL, f"{ACTOR}{section}.")
    each, nodes = options.number("trainer.n_gpus_per_node"), options.number("trainer.nnodes")
    default = "" if options.states("trainer.n_gpus_per_node") else ": verl's default"
    places.processes(draft, f"GPUs of the policy{default}", source.devices or each * nodes, nodes)
    _divided(draft, options, section, f"{ACTOR}{section}.")
    _engines(draft, options, ahead)
    _adapter(draft, options, MODEL)
    optimizer(draft, options, f"{ACTOR}optim.", "learner")


def trained(draft: Draft, options: Options, source: SourceCommand) -> None:
    """[model] and [learner] of an SFT job."""
    section = _backend(options, "sft")
    path = options.take("model.path")
    draft.put("model.path", None if path is None else home(str(path)))
    _computed(draft, options, "model.", "engine.")
    each, nodes = options.take("trainer.n_gpus_per_node"), options.number("trainer.nnodes", 1)
    count = source.devices or (int(each) * nodes if each is not None else None)
    places.processes(draft, "GPUs", count, source.machines or nodes)
    _divided(draft, options, section, "engine.")
    _adapter(draft, options, "model.")
    if section == "automodel":
        options.defaults |= _OF_AUTOMODEL
    optimizer(draft, options, "optim.", "learner")


def _computed(draft: Draft, options: Options, model: str, engine: str) -> None:
    """The dtype of products, and whether layers are computed again."""
    kind = str(options.take(f"{engine}dtype", "bfloat16"))
    draft.put("model.dtype", {"bf16": "bfloat16", "fp16": "float16"}.get(kind, kind))
    name = f"{model}enable_gradient_checkpointing"
    again = options.take(f"{engine}override_transformer_config.recompute_granularity")
    of_megatron = again is not None or engine.endswith("megatron.")
    if of_megatron and not options.states(name):
        draft.put("model.gradient_checkpointing", True if again else None, f"recompute: {again}")
    elif flag(options.take(name, True)):
        draft.put("model.gradient_checkpointing", True,
                  "" if options.states(name) else "verl's default")  # fmt: skip
    options.take(name)


def _divided(draft: Draft, options: Options, section: str, prefix: str) -> None:
    ranks = int(draft.get("learner.ranks") or 1)
    tensor, context, experts = {**_SHARES, **_SHORT}[section]
    shares = {
        key: (f"{prefix}{name}", options.take(f"{prefix}{name}"))
        for key, name in (
            ("tensor_parallel", tensor), ("context_parallel", context), ("expert_parallel", experts)
        )
        if name
    }  # fmt: skip
    reshards = flag(options.take(f"{prefix}reshard_after_forward", True))
    if section == "megatron":
        stage = 3 if flag(options.take(f"{prefix}use_megatron_fsdp", False)) else 1
    else:
        stage = 3 if reshards else 2
    places.divided(draft, (f"{prefix}strategy", stage if ranks > 1 else None), shares)
    size = options.number(f"{prefix}fsdp_size", -1)
    groups = ranks // size if 0 < size < ranks else 1
    if groups > 1 and places.replicas(draft) % groups == 0 and draft.get("learner.sharding"):
        draft.put("learner.shard_groups", groups, f"groups of {size} ranks: fsdp_size")
    elif groups > 1:
        draft.miss(f"{prefix}fsdp_size", size, "learner.shard_groups has to divide the replicas")


def _engines(draft: Draft, options: Options, ahead: Ahead | None) -> None:
    """Engines on the ranks' GPUs, or on GPUs of their own."""
    name = str(options.take(f"{ROLLOUT}name", "vllm"))
    if name == "hf":  # transformers' generate: the built-in engine stands for it
        for option in (_ENGINES.tensor_parallel, _ENGINES.memory, _ENGINES.eager, _ENGINES.sleep):
            options.take(option)
        return
    if name != "vllm":
        draft.miss(f"{ROLLOUT}name", name, "engines are vLLM's here")
    apart = ahead is not None and ahead.gpus > 0
    places.engines(draft, options, _ENGINES, shared=not apart, fill=True)
    if ahead is not None and apart:
        size = int(draft.get("rollout.vllm.tensor_parallel") or 1)
        draft.put("cluster.rollout.workers", max(1, ahead.gpus // size),
                  f"engines of {size} GPUs: {ahead.gpus} GPUs of rollout")  # fmt: skip


def _adapter(draft: Draft, options: Options, prefix: str) -> None:
    """[model.lora], by the options of FSDP's adapters or those of Megatron's below `lora`."""
    of_megatron = options.number(f"{prefix}lora.rank", 0) > 0
    names = ("lora.rank", "lora.alpha", "lora.dropout", "lora.target_modules")
    if not of_megatron:
        names = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules")
    if options.states(f"{prefix}lora.target_modules"):
        value = options.stated.pop(f"{prefix}lora.target_modules")
        draft.miss(f"{prefix}lora.target_modules", value,
                   "Megatron's names; left out, every linear layer has an adapter")  # fmt: skip
    rank, alpha, dropout, targets = (f"{prefix}{name}" for name in names)
    if not options.number(rank, 0):
        for name in (alpha, dropout, targets, f"{prefix}lora.alpha", f"{prefix}lora.dropout"):
            if options.states(name):
                draft.skip(name, options.take(name), "of an adapter that the run does not have")
        return
    learning.adapter(draft, options, (rank, alpha, dropout, targets), "")


def optimizer(draft: Draft, options: Options, prefix: str, role: str) -> None:
    """[learner] or [critic.learner]. prefix: of the options of the optimizer."""
    kind = str(options.take(f"{prefix}optimizer", "AdamW")).lower()
    if kind in ("adamw8bit", "pagedadamw8bit"):
        draft.put(f"{role}.optimizer_state", "8bit")
    elif kind in ("muon", "dist_muon"):
        draft.put(f"{role}.optimizer", "muon")
    elif kind not in ("adamw", "adam", "fusedadam", "_adamw"):
        draft.miss(f"{prefix}optimizer", kind, "learner.optimizer knows adamw and muon")
    rate = decimal(options.take(f"{prefix}lr"))
    draft.put(f"{role}.lr", rate, "" if options.states(f"{prefix}lr") else "verl's default")
    decay = decimal(options.take(f"{prefix}weight_decay"))
    default = "" if options.states(f"{prefix}weight_decay") else "verl's default, "
    of_all = _backend(options, draft.job) in _DECAY_ALL
    comment = f"{default}{learning.ALL_DECAY}" if of_all else default.removesuffix(", ")
    draft.put(f"{role}.weight_decay", decay or None, comment)
    betas = options.numbers(f"{prefix}betas")
    draft.put(f"{role}.betas", betas if betas and betas != [0.9, 0.999] else None)
    clip = options.take(f"{prefix}clip_grad")
    draft.put(f"{role}.max_grad_norm", None if clip is None else decimal(clip))
    _schedule(draft, options, prefix, role, rate)


def _schedule(draft: Draft, options: Options, prefix: str, role: str, rate: float) -> None:
    kinds = [options.take(f"{prefix}{key}") for key in ("lr_scheduler_type", "lr_decay_style")]
    kind = str(next((kind for kind in kinds if kind is not None), "constant"))
    least = options.take(f"{prefix}min_lr_ratio")
    floors = [options.take(f"{prefix}{key}") for key in ("min_lr", "lr_min")]
    floor = next((floor for floor in floors if floor is not None), None)
    if floor is not None and rate and least is None:
        least = round(decimal(floor) / rate, 12)
    over = options.take(f"{prefix}lr_decay_steps")
    updates: Any = options.take(f"{prefix}lr_warmup_steps")
    share = decimal(options.take(f"{prefix}lr_warmup_steps_ratio", 0.0))
    of_stable = [f"{prefix}lr_wsd_decay_{key}" for key in ("style", "steps")]
    if kind == "WSD":
        learning.stable(draft, options, prefix, "lr_wsd_decay_steps", role)
    else:
        learning.unstable(draft, options, of_stable)
    if kind == "wsd":  # of FSDP's trainer of SFT
        draft.put(f"{role}.schedule", "cosine")
        draft.put(f"{role}.decay_ratio", round(0.1 * (1.0 - share), 12),
                  "a tenth of the updates after the warm-up, rounded up")  # fmt: skip
    elif kind in ("linear", "cosine"):
        until = f"to the end of the run; there over {over} updates" if over else ""
        draft.put(f"{role}.schedule", kind, until)
    elif kind not in ("constant", "WSD"):
        draft.miss(f"{prefix}lr_scheduler_type", kind, f"{role}.schedule {learning.KNOWN}")
    if kind in ("linear", "cosine", "WSD") and least is not None:
        draft.put(f"{role}.min_lr_ratio", decimal(least) or None)
    if updates is not None and decimal(updates) > 0:
        draft.put(f"{role}.warmup_updates", int(decimal(updates)))
    elif share:
        draft.put(f"{role}.warmup_ratio", share, "rounded up; down there")
    learning.warmup_start(draft, options, f"{prefix}lr_warmup_init", rate, role)
    learning.warmup_start(draft, options, f"{prefix}init_lr_ratio", 1.0, role)


def counted(draft: Draft, options: Options, ahead: Ahead | None) -> None:
    """A rate there is that of all updates of a batch."""
    updates = common.per_step(draft)[1]
    if ahead is not None and ahead.updates:
        updates = options.number("async_training.require_batches", 1)
    learning.counted_in_steps(draft, updates, ("learner", "critic.learner"))


def frozen(draft: Draft, options: Options) -> None:
    """Where a reference, a reward model and a teacher are: [cluster]."""
    ref = "actor_rollout_ref.ref."
    for name in (f"{ref}fsdp_config.param_offload", f"{ref}megatron.param_offload"):
        if not flag(options.take(name, False)):
            continue
        if draft.get("algorithm.kl_coef") and not draft.get("model.lora.rank"):
            draft.put("cluster.reference.offload", True, "in the host's memory between its passes")
        else:
            draft.skip(name, True, "the run has no such model, or it lies under the adapter")
    scores = "reward.reward_model."
    apart = flag(options.take(f"{scores}enable_resource_pool", False))
    if apart and draft.get("reward_model.model.path") is not None:
        gpus = options.number(f"{scores}n_gpus_per_node", 8) * options.number(f"{scores}nnodes", 1)
        places.role_elsewhere(draft, "reward_model", gpus)
    if draft.get("teacher.model.path") is not None:
        gpus = options.number("distillation.n_gpus_per_node", 8) * options.number(
            "distillation.nnodes", 1
        )
        places.role_elsewhere(draft, "teacher", gpus)


def critic(draft: Draft, options: Options) -> None:
    """[critic], where the advantages are those of one."""
    path, clip = options.take("critic.model.path"), decimal(options.take("critic.cliprange_value"))
    warmup = options.number("trainer.critic_warmup", 0)
    names = [name for name in options.stated if name.startswith("critic.")]
    if draft.get("algorithm.type") != "ppo":
        for name in names:
            draft.skip(name, options.take(name), "there is no critic")
        for name in [name for name in options.defaults if name.startswith("critic.")]:
            options.take(name)
        return
    draft.put("critic.model.path", home(str(path)) if path is not None else None)
    draft.put("algorithm.value_clip", clip)
    draft.put("algorithm.critic_warmup_steps", warmup or None)
    optimizer(draft, options, "critic.optim.", "critic.learner")
    warms = any(draft.get(f"critic.learner.warmup_{key}") for key in ("updates", "ratio"))
    for key, default in _OF_CRITIC.items():  # what [critic.learner] leaves out is the policy's
        stated, inherited = (draft.get(f"{role}.{key}") for role in ("critic.learner", "learner"))
        if stated == inherited:
            draft.drop(f"critic.learner.{key}")
        elif stated is None and (warms or key != "warmup_start_ratio"):
            draft.put(f"critic.learner.{key}", default)
    offload = [options.take(f"critic.fsdp.{key}_offload") for key in ("param", "optimizer")]
    if offload != [None, None] and places.engine_beside(draft):
        moved = any(value is not None and flag(value) for value in offload)
        comment = "weights and optimizer state, while it samples"
        draft.put("critic.learner.offload", "sampling" if moved else False, comment * moved)
    again = options.take("critic.model.enable_gradient_checkpointing", True)
    if flag(again) != bool(draft.get("model.gradient_checkpointing")):
        draft.put("critic.model.gradient_checkpointing", flag(again))
    epochs = options.take("critic.ppo_epochs")
    if epochs is not None and int(epochs) != options.number(f"{ACTOR}ppo_epochs"):
        draft.miss("critic.ppo_epochs", epochs, "the critic learns as often as the policy")
    mini = options.take("critic.ppo_mini_batch_size")
    if mini is not None and int(mini) != options.number(f"{ACTOR}ppo_mini_batch_size"):
        draft.miss("critic.ppo_mini_batch_size", mini, "the critic learns in the policy's updates")
    for key in ("lora_rank", "lora_alpha", "target_modules"):
        name = f"critic.model.{key}"
        if options.states(name):
            draft.miss(name, options.take(name), "[critic.model.lora] is an adapter of the critic")
