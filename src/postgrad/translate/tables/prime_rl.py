"""prime-rl's options: their defaults, and what they are in a recipe."""

from typing import Any

from postgrad.translate import common, learning, mixtures, places
from postgrad.translate.draft import Draft
from postgrad.translate.rules import (
    OFF,
    ON,
    Rule,
    decimal,
    family,
    flag,
    missing,
    missing_above_1,
    missing_but,
    needless,
    to,
)

JOBS = {"rl": ("rl", "dr_grpo")}
OTHERS = {
    "sft": 'write a recipe of job = "sft" (docs/recipes.md)',
    "eval|eval_offline": "postgrad eval RUN_DIR (docs/evaluation.md)",
    "trainer|orchestrator|inference|env_server": "`rl` starts all of them: translate its config",
}
ALGORITHMS = {
    "grpo": "dr_grpo",
    "echo": "dr_grpo",
    "max_rl": "maxrl",
    "opd": "on_policy_distillation",
    "opsd": "on_policy_distillation",
}
DEFAULTS: dict[str, Any] = {
    "model.name": "Qwen/Qwen3-0.6B",
    "seq_len": 2048,
    "orchestrator.batch_size": 128,
    "orchestrator.group_size": 1,
    "orchestrator.max_off_policy_steps": 8,
    "inference.vllm.gpu_memory_utilization": 0.9,
    "trainer.model.moe_router_dtype": "float32",
    "trainer.optim.lr": 1e-6,
    "trainer.optim.weight_decay": 0.01,
    "trainer.optim.max_norm": 1.0,
}
LORA_DEFAULTS: dict[str, Any] = {"trainer.model.lora.rank": 16, "trainer.model.lora.alpha": 32}

_EXPERTS = "experts compute as torch has them; learner.expert_parallel sends tokens to their ranks"
_HARNESS = (
    "the package's own conversation plays a task; a program as harness is an agent: "
    "docs/environments.md"
)
_MODEL_CODE = "layers are transformers' or a decoder of postgrad's own, chosen by the type of model"
_PACED = "rollout.max_staleness paces what starts, and vLLM has limits of its own"
_PER_SOURCE = "a setting of one source; here it is one for all"
_REPLICA = (
    "an engine is one process group with tensor parallelism; more are cluster.rollout.workers"
)
_TEMPLATE = "the chat template decides; data.chat_template_kwargs go to it"


def _in_sections(names: str, rule: Rule) -> dict[str, Rule]:
    """The rule for an option of the shared sections and of each process's own."""
    return {
        f"{section}{name}": rule
        for section in ("", "trainer.", "orchestrator.", "inference.")
        for name in names.split()
    }


def _section(draft: Draft, name: str, value: Any, _: str) -> None:
    """An empty table, which stands for the section's defaults; a word is a file of the section."""
    if value and value is not True:
        draft.miss(name, value, "a config of one section: put the sections into one file")


def _compiled(draft: Draft, name: str, value: Any, default: str) -> None:
    learning.compiled(draft, name, True if value == {} else value, default)


def _checkpointing(draft: Draft, name: str, value: Any, _: str) -> None:
    if value in (1, {}, "full"):
        draft.skip(name, value, "model.gradient_checkpointing keeps one activation a layer")
    else:
        draft.miss(name, value, "activations of whole layers are kept or computed again, no others")


def _offloading(draft: Draft, name: str, value: Any, default: str) -> None:
    """A setting of ac_offloading, whose table alone turns it on."""
    learning.host_inputs(draft, "trainer.model.ac_offloading", True, default)
    draft.skip(name, value, "inputs of two layers are on the device, pinned memory has the others")


def _resumed(draft: Draft, name: str, value: Any, _: str) -> None:
    if value in ({}, None, True):
        draft.skip(name, value, common.SO_HERE)
    else:
        draft.miss(
            name,
            value,
            "a run goes on from its newest checkpoint: `postgrad fork` makes one of an earlier one",
        )


RULES: dict[str, Rule] = {
    **family("", "trainer orchestrator inference ckpt trainer.ckpt orchestrator.ckpt", _section),
    "max_steps": to("steps"),
    "trainer.max_steps": to("steps"),
    "orchestrator.max_steps": to("steps"),
    "trainer.optim.weight_decay": to("learner.weight_decay", learning.ALL_DECAY, decimal),
    "trainer.optim.max_norm": to("learner.max_grad_norm", read=decimal),
    "trainer.optim.mu": to("learner.muon_momentum", read=decimal),
    "trainer.optim.momentum": missing("of SGD, which is not here"),
    "trainer.optim.nesterov": missing("of SGD, which is not here"),
    "trainer.model.compile": _compiled,
    "trainer.model.compile.fullgraph": missing("layers are compiled as far as torch can"),
    "trainer.model.ac": _checkpointing,
    "trainer.model.ac.freq": _checkpointing,
    "trainer.model.ac.mode": _checkpointing,
    "trainer.model.ac.targets": missing("whole layers are computed again"),
    "trainer.model.ac_offloading": learning.host_inputs,
    **family("trainer.model.ac_offloading.", "pin_memory max_inflight_activations", _offloading),
    **family("trainer.model.", "optim_cpu_offload full_offload fsdp_cpu_offload", learning.offload),
    "trainer.model.full_offload.*": missing(
        "learner.offload moves weights, gradients and optimizer"
    ),
    "trainer.model.attn": missing_but(("auto",), common.ATTENTION),
    "trainer.model.impl": needless(_MODEL_CODE),
    "trainer.model.cp_style": missing("ranks that share a sequence gather keys and values"),
    **family(
        "trainer.model.",
        "ep_comm_backend deepep_num_sms deepep_token_chunk_size moe_use_grouped_mm "
        "moe_fused_kernel",
        missing(_EXPERTS),
    ),
    "trainer.model.moe_router_dtype": mixtures.router_dtype,
    "trainer.model.freeze_moe_router": mixtures.frozen_routers,
    "trainer.model.index_cache.*": missing("sparse attention is not here"),
    "trainer.model.dp_replicate": missing_above_1(
        "copies of the whole state; learner.shard_groups is near"
    ),
    "trainer.model.reshard_after_forward": missing_but(
        ON, "learner.sharding zero2 keeps weights whole"
    ),
    "trainer.model.optimization_dtype": missing_but(("float32",), "trained weights are float32"),
    "trainer.model.reduce_dtype": missing_but(("float32",), "gradients are summed in float32"),
    "trainer.model.quantization.*": missing("the learner computes in model.dtype"),
    "trainer.model.fused_lm_head_token_chunk_size": needless(
        "logits are computed in float32, in chunks"
    ),
    "trainer.model.lora.modules_to_save": to("model.lora.modules_to_save"),
    **family(
        "trainer.model.", "trust_remote_code conversion_dir", missing("code of models is not run")
    ),
    **family(
        "",
        "model.trust_remote_code orchestrator.model.trust_remote_code",
        missing("code of models is not run"),
    ),
    "trainer.model.debug.*": missing("a debugging aid of prime-rl"),
    "trainer.enable_router_replay": common.router_replay,
    "trainer.dist_timeout_seconds": to("cluster.limit_seconds"),
    "trainer.matmul_precision": missing("float32 products are float32"),
    "trainer.loss.adv_tau": missing_but(("1.0", "1"), "advantages have no factor here"),
    **family(
        "trainer.loss.",
        "import_path kwargs kwargs.*",
        missing('an algorithm of your own: algorithm.type = "module:Class"'),
    ),
    **family(
        "trainer.",
        "enable_token_export memory_profiler_path trace_path metrics_server.* heartbeat.* gc "
        "gc.interval",
        needless(common.LOGGING),
    ),
    "trainer.data.*": missing("made-up data: postgrad train --dry-run tries a recipe"),
    "orchestrator.token_batch_size": missing("a step counts samples: batch.rollout_batch_size"),
    **family(
        "orchestrator.concurrency.", "initial_inflight min_inflight max_inflight", needless(_PACED)
    ),
    "orchestrator.tasks_per_minute": missing("environment.concurrent bounds how many run at once"),
    **family(
        "orchestrator.",
        "num_train_workers pad_to_multiple_of env_server_base_port inference_metrics_roles "
        "collect_inference_metrics heartbeat.*",
        needless(common.SO_HERE),
    ),
    "orchestrator.train.filter_zero_advantages": missing_but(
        OFF, "groups without gradient stay in the denominator"
    ),
    **family(
        "orchestrator.algo.",
        "decay episode_agents roles.* filter.* demo_key template renderer.* sampling.*",
        missing("of an algorithm that is not here"),
    ),
    **family(
        "orchestrator.algo.teacher.",
        "api_key_var headers.* timeout *",
        missing("teacher.server has keys of its own"),
    ),
    "orchestrator.model.name": missing("the engine has the policy's weights, and no others"),
    "orchestrator.model.lora.*": needless("the adapter is one, and has no name"),
    "orchestrator.model.client.*": needless(common.SO_HERE),
    **family(
        "orchestrator.train.sampling.",
        "top_p top_k",
        missing(
            "prime-rl learns over what they leave, and vLLM's samples come without it here: set "
            'them in [rollout] with keep_sampling_mask = true and type = "local"'
        ),
    ),
    "orchestrator.train.sampling.extra_body.*": missing("rollout has the settings of sampling"),
    "orchestrator.eval.retrigger_on_resume": needless(
        "an evaluation that a kill cut off is done at resume"
    ),
    **family(
        "orchestrator.eval.sampling.",
        "reasoning_effort extra_body.*",
        missing("evaluation samples by temperature, top_p, top_k and min_p"),
    ),
    "orchestrator.renderer.*": missing(_TEMPLATE),
    **family(
        "inference.vllm.",
        "data_parallel_size data_parallel_size_local data_parallel_rpc_port api_server_count",
        needless(_REPLICA),
    ),
    "inference.vllm.max_model_len": needless("data.max_len bounds prompt and answer"),
    "inference.vllm.enable_prefix_caching": missing_but(ON, "it is always on with vLLM"),
    "inference.vllm.enable_lora": to(
        "rollout.vllm.lora", read=lambda value: "adapter" if flag(value) else None
    ),
    "inference.vllm.reasoning_parser": needless("orchestrator.renderer says what thoughts are"),
    "inference.vllm.model": missing("the engine has the policy's weights, and no others"),
    "inference.vllm.enable_return_routed_experts": to(
        "rollout.router_replay", read=lambda value: "sampled" if flag(value) else None
    ),
    "inference.vllm.safetensors_load_strategy": needless(
        "the engine's weights come from the learner"
    ),
    **family(
        "inference.vllm.",
        "enable_expert_parallel enable_ep_weight_filter enable_eplb quantization *",
        common.engine_argument("inference.vllm."),
    ),
    **family(
        "inference.",
        "use_deep_gemm enable_fp32_lm_head kv_cache_offload.* deployment.* router.* *",
        missing("engines are plain vLLM; requests are dealt round-robin"),
    ),
    "inference.deployment.num_nodes": needless(_REPLICA),
    **family("weight_broadcast.", "type port host timeout session_id", needless(places.WAY)),
    "weight_broadcast.quantize_in_weight_transfer": missing("weights travel in model.dtype"),
    **_in_sections("weight_broadcast.* rollout_transport.*", needless(places.WAY)),
    "deployment.nodes_per_fsdp_group": missing(
        "copies of the whole state; learner.shard_groups is near"
    ),
    "deployment.orchestrator_on_inference": needless(common.LAUNCH),
    **family("", "clean dry_run slurm slurm.*", needless(common.LAUNCH)),
    **_in_sections(
        "max_async_level",
        missing_but(("1",), "the weights that sample are behind by one step at most"),
    ),
    **_in_sections("resume resume.step resume.dir", _resumed),
    **_in_sections("log.level log.* monitors.* wandb.*", needless(common.LOGGING)),
    **_in_sections("env_vars.*", missing("variables are set around the run")),
    "run.*": needless(common.LOGGING),
    **_in_sections("tokenizer.trust_remote_code", missing("code of models is not run")),
    **_in_sections("ckpt.output_dir", missing("checkpoints are in run_dir")),
    **_in_sections(
        "ckpt.skip_optimizer ckpt.skip_scheduler ckpt.skip_dataloader ckpt.skip_progress",
        missing("a run resumes with all of its state, or not at all"),
    ),
}

# Of one of orchestrator.train.source and orchestrator.eval.source: patterns of what stands after
# its number, the first that matches.
SOURCE_RULES: dict[str, Rule] = {
    r"name": needless(common.LOGGING),
    r"ratio": missing("one taskset is played"),
    r"sampling\..*|group_size|num_examples|interval": missing(_PER_SOURCE),
    r"algo\..*": missing(_PER_SOURCE),
    r"curriculum\.sampler\..*": missing("rollout.curriculum retires and postpones prompts"),
    r"curriculum\..*": missing("rollout.dynamic_sampling drops groups whose samples score alike"),
    r"env\.\w+\.harness\.id": missing_but(("null",), _HARNESS),
    r"env\.\w+\.harness\..*": missing(_HARNESS),
    r"env\.\w+\.runtime\.type": missing_but(
        ("subprocess",), "tool servers are processes of this machine"
    ),
    r"env\.\w+\.runtime\..*": missing("tool servers are processes of this machine"),
    r"env\.\w+\.timeout\..*": missing("environment.episode_seconds bounds a task"),
    r"env\..*": missing("the environment verifiers has no such setting: docs/environments.md"),
    r"serve\..*": needless(common.SO_HERE),
}
