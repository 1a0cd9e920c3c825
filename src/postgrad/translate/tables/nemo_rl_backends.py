"""Options of NeMo RL's two backends, DTensor and Megatron, as keys of a recipe."""

from typing import Any

from postgrad.translate import common, images, learning
from postgrad.translate.draft import Draft
from postgrad.translate.rules import (
    ON,
    Rule,
    decimal,
    family,
    missing,
    missing_above_1,
    missing_but,
    needless,
    on,
    to,
)

_EXPERTS = "experts compute as torch has them; learner.expert_parallel sends tokens to their ranks"
_FP8 = "weights are in model.dtype, here and in the engine"
_MTP = "heads that predict further tokens are not trained"
_SO_FUSED = "torch's kernels do it, fused or not"


def _decay(draft: Draft, name: str, value: Any, _: str) -> None:
    """Weight decay at the start and the end of a run."""
    if decimal(value) == draft.get("learner.weight_decay", 0.0):
        draft.skip(name, value, "learner.weight_decay stays the same")
    else:
        draft.miss(name, value, "learner.weight_decay stays the same")


MEGATRON: dict[str, Rule] = {  # after policy.megatron_cfg.
    "expert_tensor_parallel_size": missing_above_1("an expert is on one rank as a whole"),
    "pipeline_model_parallel_size": missing_above_1(
        "layers are not divided over ranks: learner.sharding divides weights"
    ),
    **family(
        "",
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
        missing("layers are not divided over ranks"),
    ),
    "pipeline_dtype": needless(common.SO_HERE),
    "sequence_parallel": needless("learner.tensor_parallel divides norms and residuals as well"),
    "activation_checkpointing": to("model.gradient_checkpointing", read=on),
    **family(
        "",
        "recompute_granularity recompute_modules",
        missing_but(("full",), "whole layers are computed again"),
    ),
    **family(
        "",
        "fine_grained_activation_offloading offload_modules",
        missing('model.gradient_checkpointing = "offload" moves what layers read, no more'),
    ),
    **family(
        "",
        "moe_enable_deepep moe_token_dispatcher_type moe_shared_expert_overlap "
        "moe_permute_fusion moe_grouped_gemm moe_flex_dispatcher_backend moe_hybridep_num_sms",
        missing(_EXPERTS),
    ),
    **family("", "moe_per_layer_logging track_moe_metrics", needless(common.LOGGING)),
    **family(
        "",
        "apply_rope_fusion bias_activation_fusion gradient_accumulation_fusion "
        "use_fused_weighted_squared_relu attention_backend",
        missing(_SO_FUSED),
    ),
    "cuda_graph_impl": missing_but(("none",), "the learner makes no CUDA graphs"),
    **family(
        "",
        "cuda_graph_modules cuda_graph_warmup_steps",
        needless("of CUDA graphs, which are lost where they are on"),
    ),
    **family(
        "",
        "defer_fp32_logits use_fused_linear_logprobs fused_linear_logprobs_chunk_size",
        needless("logits are computed in float32, in chunks"),
    ),
    **family(
        "",
        "mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads",
        missing(_MTP),
    ),
    **family(
        "",
        "empty_unused_memory_level clear_memory_caches_before_refit use_gloo_process_groups "
        "force_reconvert_from_hf converter_type train_iters calculate_per_token_loss "
        "cp_normalize do_not_average_loss scale_loss_by_dp_cp_size _override_ checkpoint.*",
        needless(common.SO_HERE),
    ),
    **family(
        "",
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        missing(_FP8),
    ),
    "fp8_cfg.enabled": missing(_FP8),
    "fp8_cfg.*": needless("of products in eight bits, which are lost where they are on"),
    "model_overrides": missing(common.CONFIG),
    "model_overrides.*": missing(common.CONFIG),
    **family("", "env_vars env_vars.*", missing("variables are set around the run")),
    "optimizer.optimizer": missing_but(("adam",), "learner.optimizer knows adamw and muon"),
    "optimizer.weight_decay": to("learner.weight_decay", read=decimal),
    "optimizer.adam_eps": to("learner.eps", read=decimal),
    "optimizer.clip_grad": to("learner.max_grad_norm", read=decimal),
    **family(
        "optimizer.",
        "bf16 fp16 params_dtype sgd_momentum",
        needless(common.SO_HERE),
    ),
    "optimizer.use_distributed_optimizer": missing_but(
        ON, "learner.sharding divides the optimizer's state"
    ),
    "optimizer.use_precision_aware_optimizer": missing(
        "learner.optimizer_state has float32 and 8bit"
    ),
    "optimizer.optimizer_cpu_offload": learning.offload,
    **family(
        "optimizer.",
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d",
        needless("learner.offload moves all of it, or nothing"),
    ),
    **family("scheduler.", "start_weight_decay end_weight_decay", _decay),
    **family(
        "scheduler.",
        "weight_decay_incr_style override_opt_param_scheduler",
        needless(common.SO_HERE),
    ),
    "distributed_data_parallel_config.grad_reduce_in_fp32": missing_but(
        ON, "gradients are summed in float32"
    ),
    "distributed_data_parallel_config.*": needless(
        "gradients are sent while others are computed, as far as torch does so"
    ),
    **images.freezes(),
    **images.freezes("freeze_config."),
    "freeze_config.*": missing('model.freeze knows "vision" and "projector"'),
    "peft.*": missing("model.lora has rank, alpha, dropout and targets"),
}

DTENSOR: dict[str, Rule] = {  # after policy.dtensor_cfg.
    "_v2": needless(common.SO_HERE),
    "cpu_offload": learning.offload,
    "sequence_parallel": needless("learner.tensor_parallel divides norms and residuals as well"),
    "activation_checkpointing": to("model.gradient_checkpointing", read=on),
    "custom_parallel_plan": missing(
        "learner.tensor_parallel follows transformers' plan of the model"
    ),
    "clear_cache_every_n_steps": needless(common.SO_HERE),
    **images.freezes("automodel_kwargs.freeze_config."),
    **family(
        "",
        "automodel_kwargs automodel_kwargs.*",
        missing("layers are transformers' or a decoder of postgrad's own"),
    ),
    "lora_cfg.exclude_modules": learning.by_name("model.lora.exclude_modules"),
    "lora_cfg.*": missing("model.lora has rank, alpha, dropout and targets"),
    "moe_parallelizer.*": missing(_EXPERTS),
    **family("", "env_vars env_vars.*", missing("variables are set around the run")),
}
