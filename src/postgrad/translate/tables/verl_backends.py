"""verl's options of backends, engines and optimizers, as keys of a recipe."""

from typing import Any

from postgrad.translate import common, images, learning, places
from postgrad.translate.draft import Draft
from postgrad.translate.rules import (
    OFF,
    ON,
    Rule,
    family,
    missing,
    missing_above_1,
    missing_but,
    needless,
    on,
    to,
)

_EXPERTS = "experts compute as torch has them; learner.expert_parallel sends tokens to their ranks"
_LAYERS = "Megatron's layers are not here: layers are transformers' or a decoder of postgrad's own"
_PIPELINE = "layers are not divided over ranks: learner.sharding divides weights"
_SO_FUSED = "torch's kernels do it, fused or not"
_MOVES = "learner.offload moves weights, gradients and optimizer state together, or nothing"
_CHUNKS = "entropy and logprobs are computed in chunks of rows, without padding"
_EIGHT = "weights are in model.dtype, here and in the engine"

_SHARDED = "learner.sharding divides weights over the ranks, with FSDP2"


def router_replay(draft: Draft, name: str, value: Any, _: str) -> None:
    """The experts that a token is sent to: R3 replays those of the engine, R2 those of the policy
    before the step.
    """
    if str(value) == "R3":
        draft.put("rollout.router_replay", "sampled", "R3")
    elif str(value) != "disabled":
        draft.miss(name, value, 'rollout.router_replay = "sampled" is R3')


TORCH: dict[str, Rule] = {  # after fsdp_config., veomni., torchtitan. or engine.
    **family("", "param_offload optimizer_offload", learning.offload_while_sampling),
    **family("", "offload_policy fsdp_offload enable_fsdp_offload", learning.offload),
    **family(
        "",
        "forward_prefetch use_orig_params wrap_policy wrap_policy.* full_determinism strategy "
        "forward_only distributed_strategy data_parallel_replicate_size data_parallel_shard_size "
        "data_parallel_size enable_full_shard init_device seed mixed_precision.*",
        needless("FSDP2 keeps float32 weights and gathers them in model.dtype"),
    ),
    "model_dtype": missing_but(
        ("fp32", "float32"), "weights that the optimizer updates, and its moments, are float32"
    ),
    **family(
        "",
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing "
        "pad_to_length pad_to_length_bucket use_remove_padding max_seq_len",
        needless(_CHUNKS),
    ),
    "use_torch_compile": needless("it compiles the entropy there; model.compile compiles layers"),
    **family(
        "",
        "activation_checkpoint activation_checkpointing",
        to("model.gradient_checkpointing", read=lambda value: on(value is not None and value)),
    ),
    **family("", "pipeline_parallel_size pp_size pp", missing_above_1(_PIPELINE)),
    **family("", "expert_tensor_parallel_size etp", missing_above_1("an expert is on one rank")),
    **family(
        "",
        "attn_implementation attn_type attention_backend_override spmd_backend "
        "cross_entropy_loss_implementation rms_norm_implementation swiglu_mlp_implementation "
        "rotary_pos_emb_implementation load_balancing_loss_implementation "
        "dsa_indexer_implementation dsa_attention_implementation mhc_implementation",
        missing(common.ATTENTION),
    ),
    **family("", "moe_implementation backend_config.* impl_cfg.*", missing(_EXPERTS)),
    "turbo_config.*": missing(_SHARDED),
    "router_replay.mode": router_replay,
    "vpp": missing_above_1(_PIPELINE),
    **family("", "qat qat.* override_config override_config.*", missing(_EIGHT)),
    "grad_offload": learning.offload_while_sampling,
}  # fmt: skip

MEGATRON: dict[str, Rule] = {  # after megatron., or engine.
    **family("", "param_offload optimizer_offload grad_offload", learning.offload_while_sampling),
    "pipeline_model_parallel_size": missing_above_1(_PIPELINE),
    "expert_tensor_parallel_size": missing_above_1("an expert is on one rank as a whole"),
    "sequence_parallel": needless("learner.tensor_parallel divides norms and residuals as well"),
    "use_distributed_optimizer": missing_but(ON, "learner.sharding divides the optimizer's state"),
    **family(
        "",
        "use_mbridge vanilla_mbridge use_dist_checkpointing dist_checkpointing_path seed extra "
        "dist_checkpointing_prefix forward_only override_mcore_model_config "
        "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient "
        "override_ddp_config override_ddp_config.*",
        needless("weights are read from and written as Hugging Face's files"),
    ),
    **family(
        "",
        "use_remove_padding pad_bshd_to_minibatch_max pad_to_length pad_to_length_bucket "
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size",
        needless(_CHUNKS),
    ),
    **family(
        "",
        "dynamic_context_parallel max_seqlen_per_dp_cp_rank",
        missing("ranks that share sequences share each of them"),
    ),
    **family(
        "override_transformer_config.",
        "recompute_method recompute_num_layers recompute_modules",
        needless("of checkpointing, where whole layers are computed again"),
    ),
    **family(
        "override_transformer_config.",
        "apply_rope_fusion bias_activation_fusion bias_dropout_fusion masked_softmax_fusion "
        "persist_layer_norm gradient_accumulation_fusion use_flash_attn attention_backend "
        "use_naive_l2norm cross_entropy_loss_fusion cross_entropy_fusion_impl "
        "apply_dsa_kernel_fusion use_fused_mhc use_fused_rmsnorm use_fused_swiglu "
        "use_fused_rotary_pos_emb",
        missing(_SO_FUSED),
    ),
    **family(
        "override_transformer_config.",
        "moe_router_score_function moe_router_pre_softmax",
        missing("how routers choose is the model's own code"),
    ),
    **family(
        "override_transformer_config.",
        "moe_permute_fusion moe_grouped_gemm moe_token_dispatcher_type moe_enable_deepep "
        "moe_shared_expert_overlap moe_alltoall_overlap_comm moe_expert_capacity_factor",
        missing(_EXPERTS),
    ),
    **family(
        "",
        "virtual_pipeline_model_parallel_size",
        needless("of pipelines, which are lost where there is one"),
    ),
    **family(
        "override_transformer_config.",
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
        "pipeline_model_parallel_layout account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split pipeline_num_transformer_layers "
        "deallocate_pipeline_outputs variable_seq_lengths",
        needless("of pipelines, which are lost where there is one"),
    ),
    "override_transformer_config.*": missing(_LAYERS),
    "router_replay.mode": router_replay,
    **family("", "qat qat.*", missing(_EIGHT)),
    "*": missing(_LAYERS),
    **{f"bridge_config.{name}": rule for name, rule in images.freezes().items()},
}

OPTIMIZER: dict[str, Rule] = {  # after optim.
    **family(
        "",
        "total_training_steps zero_indexed_step optimizer_impl lr_decay_steps "
        "weight_decay_incr_style use_checkpoint_opt_param_scheduler "
        "min_lr_factor main_grads_dtype master_weights "
        "foreach fused",
        needless("a schedule ends with the run, and AdamW is torch's"),
    ),
    "num_cycles": missing_but(("0.5",), "learner.schedule falls once, to min_lr_ratio"),
    **family(
        "",
        "use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype store_param_remainders "
        "override_optimizer_config.use_precision_aware_optimizer "
        "override_optimizer_config.bf16_stochastic_round",
        missing("learner.optimizer_state has float32 and 8bit; master weights are float32"),
    ),
    "override_optimizer_config.optimizer_cpu_offload": learning.offload,
    **family(
        "override_optimizer_config.",
        "optimizer_offload_fraction offload_fraction overlap_cpu_optimizer_d2h_h2d "
        "decoupled_weight_decay",
        needless(_MOVES),
    ),
    "override_optimizer_config.*": missing("learner.optimizer knows adamw and muon"),
    "muon_momentum": to("learner.muon_momentum", read=float),
    "muon_nesterov": to("learner.muon_nesterov"),
    "muon_num_ns_steps": to("learner.muon_ns_steps", read=int),
    **family("", "muon_split_qkv muon_scale_mode muon_coefficient_type muon_tp_mode "
             "muon_fp32_matmul_prec muon_extra_scale_factor muon_scalar_optimizer "
             "muon_match_adamw_update_rms use_layer_wise_distributed_optimizer",
             missing("Muon here is Jordan's, in torch (docs/optimizers.md)")),
}  # fmt: skip

_TOOLS = 'write tools as Python functions, and [environment] type = "tools" (docs/environments.md)'

ROLLOUT: dict[str, Rule] = {  # after actor_rollout_ref.rollout.
    **family(
        "",
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu",
        needless(common.CUT_BY_TOKENS),
    ),
    "max_num_seqs": to("rollout.slots", "max_num_seqs of each engine", int),
    "do_sample": missing_but(ON, "the policy samples; eval.greedy is an evaluation's"),
    "calculate_log_probs": needless("engines return the logprobs of their samples"),
    "enable_rollout_routing_replay": common.router_replay,
    **family(
        "",
        "data_parallel_size expert_parallel_size pipeline_model_parallel_size "
        "moe_tensor_parallel_size",
        missing_above_1("engines are divided by tensor parallelism"),
    ),
    **family(
        "",
        "enable_chunked_prefill enable_prefix_caching",
        missing_but(ON, "it is always on with vLLM"),
    ),
    "max_model_len": needless("data.max_len bounds prompt and answer"),
    "logprobs_mode": missing_but(
        ("processed_logprobs",), "logprobs are those of the distribution that is sampled"
    ),
    "ignore_eos": missing_but(OFF, "an answer ends at the model's end tokens"),
    "dtype": missing_but(("bfloat16",), "rollout.dtype follows the policy's"),
    "cudagraph_capture_sizes": missing(
        "rollout.vllm.engine_args has it, as a part of compilation_config"
    ),
    **family("", "quantization quantization_config_file qat qat.*", missing(_EIGHT)),
    **family(
        "",
        "mode load_format disable_log_stats skip_tokenizer_init scheduling_policy seed "
        "full_determinism layered_summon multi_stage_wake_up prompt_length "
        "response_length limit_images nnodes n_gpus_per_node prometheus.* trace.* "
        "agent.num_workers moe_load_balance_metrics_interval val_kwargs.do_sample profiler "
        "profiler.*",
        needless(common.SO_HERE),
    ),
    **family("", "checkpoint_engine.* update_weights_bucket_megabytes", needless(places.WAY)),
    **family(
        "",
        "skip_rollout skip_dump_dir skip.*",
        needless('rollout.source = "replay" reads samples of another run'),
    ),
    "standalone_gpu_memory_utilization": missing(
        "rollout.vllm.memory_fraction holds for every engine"
    ),
    "single_turn_response_length": missing("environment.turn_tokens bounds turns"),
    "over_sample_rate": missing("every group that a step starts is waited for"),
    **family(
        "",
        "engine_kwargs.* sglang_rollout_mode server.*",
        needless("of an engine that does not sample here"),
    ),
    **family("", "multi_turn.* agent.*", missing(_TOOLS)),
    "mtp": missing("the engine decodes without a draft model"),
    "disaggregation.*": missing("an engine prefills and decodes"),
    "enable_sleep_mode": missing_but(ON, "rollout.vllm.sleep says whether an engine sleeps"),
}
