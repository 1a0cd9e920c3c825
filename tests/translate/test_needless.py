"""Options that translate calls "not needed": none of them may change time or memory by a tenth."""

import importlib
from pathlib import Path

import pytest

from postgrad.translate import tables
from postgrad.translate.draft import Draft
from postgrad.translate.translate import SYSTEMS

# Why an option changes neither the seconds of a step nor the peak of memory by more than a tenth.
# An option with such an effect belongs into `missing`, or into a key of the recipe.
REASONS = {
    "a table of rotary positions has megabytes, and rows are as long as data.max_len": """
        policy.hf_config_overrides.max_position_embeddings
        actor_rollout_ref.model.override_config.max_position_embeddings
        actor_rollout_ref.model.override_config.model_config.max_position_embeddings""",
    "rows with images say it themselves": "data.max_images_per_prompt policy.is_vlm",
    "it names, places or logs a run: kilobytes a step": """
        logging_steps logging_first_step logging_strategy report_to run_name log_level
        log_completions num_completions_to_print log_unique_prompts trackio_space_id logging_dir
        diagnostics_warning_interval diagnostics_flat_tolerance
        project do_train do_eval overwrite_output_dir hub_strategy hub_model_revision
        save_safetensors log_on_each_node logging_nan_inf_filter log_level_replica disable_tqdm
        include_num_input_tokens_seen trackio_bucket_id trackio_static_space_id log_multimodal
        log_completions_hub_repo skip_memory_metrics do_predict save_on_each_node hub_token
        hub_always_push hub_revision with_tracking exp_name wandb_project_name wandb_entity
        wandb_project
        verbose save_traces rollouts_save_path hf_metadata_dataset gs_bucket_path
        send_slack_alerts save_to_hub do_not_randomize_output_dir hf_repo_revision
        logger.logging_steps logger.wandb.key logger.wandb.org logger.wandb.group
        logger.wandb.project logger.wandb.run_name logger.tensorboard_dir logger.perf
        max_possible_score model_adapter_name ignore_bias_buffers env logger.* name run.* log.level
        log.* monitors.* wandb.* trainer.log.level trainer.log.* trainer.monitors.* trainer.wandb.*
        orchestrator.log.level orchestrator.log.* orchestrator.monitors.* orchestrator.wandb.*
        inference.log.level inference.log.* inference.monitors.* inference.wandb.*
        trainer.enable_token_export trainer.metrics_server.* trainer.heartbeat.*
        orchestrator.heartbeat.* orchestrator.inference_metrics_roles
        orchestrator.collect_inference_metrics orchestrator.model.lora.* moe_per_layer_logging
        track_moe_metrics grpo.debug_payload_metrics env.should_log_nemo_gym_responses
        policy.generation.vllm_cfg.enable_vllm_metrics_logger
        policy.generation.vllm_cfg.vllm_metrics_logger_interval
        policy.generation.vllm_cfg.use_tqdm""",
    "it is logged here in every step, and its time is in the plan": "record_entropy log_grad_norm",
    "another program of Ai2's does it, after the run": """
        try_launch_beaker_eval_jobs try_launch_beaker_eval_jobs_on_weka try_auto_save_to_beaker
        oe_eval_tasks oe_eval_max_length oe_eval_gpu_multiplier eval_priority eval_workspace
        oe_eval_beaker_image beaker_eval_freq clean_checkpoints_at_end""",
    "rows are read and tokenised once, before the first step, and cached": """
        dataset_num_proc preprocessing_num_workers dataloader_num_workers dataset_kwargs
        dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor label_names
        dataloader_multiprocessing_context dataloader_in_order dataloader_drop_last
        remove_unused_columns use_slow_tokenizer use_fast_tokenizer dataset_mix_dir
        dataset_cache_mode dataset_skip_cache dataset_local_cache_dir dataset_transform_fn
        overwrite_cache transform_fn max_prompt_token_length cache_dataset_only
        get_tokenizer_fn local_cache_dir skip_cache data.multiturn data.disable_fast_tokenizer
        data.dataloader_num_workers data.num_workers policy.tokenizer.use_fastokens
        data.max_input_seq_length""",
    "no run here computes padding, with or without the option": """
        packing padding_free pad_to_multiple_of packing_strategy eval_packing pad_token
        group_by_length length_column_name padding_value
        ds.packing_samples model.packing allow_world_padding
        orchestrator.pad_to_multiple_of policy.make_sequence_length_divisible_by
        policy.sequence_packing.* policy.dynamic_batching.*""",
    "passes without gradients keep one layer's activations: their peak is below the update's, and "
    "a thousand tokens at a time fill a GPU as well as more do": """
        local_rollout_forward_batch_size per_device_eval_batch_size eval_batch_size
        precompute_ref_batch_size rollout.micro_batch_size rollout.max_tokens_per_gpu
        policy.generation_batch_size policy.logprob_batch_size policy.logprob_chunk_size
        grpo.val_batch_size""",
    "an address or a limit: cards and engines are counted elsewhere": """
        vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout
        weight_sync_timeout request_timeout heartbeat_stale_after_s queue_maxsize
        fork_threshold_tokens
        vllm_group_port vllm_max_model_length backend_timeout timeout ddp_timeout
        ddp_find_unused_parameters ddp_backend ddp_bucket_cap_mb
        ddp_broadcast_buffers ddp_static_graph fsdp_config accelerator_config
        average_tokens_across_devices num_nodes
        local_rank actor.init_on_gpu orchestrator.env_server_base_port
        orchestrator.model.client.* serve\\..* weight_broadcast.port weight_broadcast.host
        weight_broadcast.timeout weight_broadcast.session_id inference.vllm.data_parallel_rpc_port
        inference.vllm.api_server_count policy.generation.port_range_low
        policy.generation.port_range_high policy.generation.http_refit_server_port
        policy.generation.zmq_refit_server_port cluster.master_port_range_low
        policy.generation.vllm_cfg.http_refit_api_key_env_var
        policy.generation.vllm_cfg.http_refit_server_port
        policy.generation.vllm_cfg.zmq_refit_server_port cluster.master_port_range_high
        cluster.segment_size slurm slurm.* clean dry_run deployment.orchestrator_on_inference
        grpo.async_grpo.max_generation_failures inference.vllm.max_model_len
        policy.generation.vllm_cfg.max_model_len
        policy.generation.vllm_cfg.cap_max_tokens_to_context""",
    "read by launch, places and precision where it says something": """
        deepspeed fsdp accelerate_config bf16 eval_on_start orchestrator.num_train_workers
        inference.vllm.data_parallel_size inference.vllm.data_parallel_size_local
        inference.deployment.num_nodes optimizer.bf16 optimizer.fp16 optimizer.params_dtype
        pipeline_dtype _v2 converter_type force_reconvert_from_hf train_iters _override_""",
    "the same work in another form: which graph keeps activations, a pass that profiles": """
        model.gradient_checkpointing_reentrant profiling use_cache torch_empty_cache_steps
        debug
        policy.optimizer.kwargs.foreach policy.optimizer.kwargs.fused use_gloo_process_groups
        trainer.memory_profiler_path trainer.trace_path trainer.gc trainer.gc.interval
        empty_unused_memory_level clear_memory_caches_before_refit clear_cache_every_n_steps
        sequence_parallel grpo.calculate_advantages_on_gpu trainer.model.impl
        policy.generation.vllm_cfg.async_engine policy.generation.vllm_cfg.skip_tokenizer_init
        distributed_data_parallel_config.* inference.vllm.reasoning_parser""",
    "logits are made in chunks and in float32, whatever the option says": """
        model.compute_fp32_loss_enable defer_fp32_logits use_fused_linear_logprobs
        fused_linear_logprobs_chunk_size trainer.model.fused_lm_head_token_chunk_size""",
    "losses are sums over a denominator of the whole update": """
        calculate_per_token_loss cp_normalize do_not_average_loss scale_loss_by_dp_cp_size""",
    "it belongs to a part that is lost as a whole, or that is not asked": """
        grpo.adv_estimator.minus_baseline
        fp8_cfg.* cuda_graph_modules cuda_graph_warmup_steps optimizer.sgd_momentum
        scheduler.weight_decay_incr_style scheduler.override_opt_param_scheduler
        optimizer.optimizer_offload_fraction optimizer.overlap_cpu_optimizer_d2h_h2d
        policy.generation.mcore_generation_config.* policy.generation.sglang_cfg.*
        policy.generation.dynamo_cfg.* policy.generation.trtllm_cfg.*
        policy.generation.trtllm_kwargs.* policy.generation.real_quant_export_cpu_offload
        grpo.deduplicate_multimodal_data
        policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update""",
    "what starts is paced by versions of the weights, and vLLM bounds its own batch": """
        orchestrator.concurrency.initial_inflight orchestrator.concurrency.min_inflight
        orchestrator.concurrency.max_inflight""",
    "a pass less, where the recipe has none either": """
        loss_fn.force_on_policy_ratio grpo.skip_reference_policy_logprobs_calculation""",
    "checkpoints are written behind the run, each complete": """
        checkpoint.* checkpointing.model_save_format checkpointing.save_consolidated
        enable_jit_checkpoint restore_callback_states_from_checkpoint
        orchestrator.eval.retrigger_on_resume""",
    "0.4 of 4.5 bits of a frozen matrix; both types have four bits": """
        use_bnb_nested_quant bnb_4bit_quant_type bnb_4bit_quant_storage""",
    "of an evaluation, which counts row by row in model.dtype; of its best checkpoint": """
        prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
        include_for_metrics batch_eval_metrics generate_during_eval bf16_full_eval fp16_full_eval
        metric_for_best_model greater_is_better""",
    "of what the run does not have: a moving reference, a KL, an encoder, another loss": """
        ref_model_mixup_alpha ref_model_sync_steps use_bias_correction_kl is_encoder_decoder
        max_completion_length completion_only_loss assistant_only_loss""",
    "products with frozen weights are in model.dtype, of 16 bits as there": """
        bnb_4bit_compute_dtype""",
    "it names weights or formats": """
        lora_task_type config_name ds.use_universal_ckpt ds.value_head_prefix""",
    "a layer of zeros and ones at most": "disable_dropout",
    "it belongs to a mode that is off": "train.async_queue_size ptx_coef",
    "weights are read once, and then come from the learner": """
        inference.vllm.safetensors_load_strategy policy.generation.vllm_cfg.load_format""",
    "frozen models are computed once and then freed; there is one way of sending weights, which is "
    "chosen by what is fastest": """
        ref.offload reward.offload ref_reward_offload vllm_sync_backend vllm.sync_backend
        vllm.sync_with_ray weight_broadcast.type weight_broadcast.* rollout_transport.*
        trainer.weight_broadcast.* trainer.rollout_transport.* orchestrator.weight_broadcast.*
        orchestrator.rollout_transport.* inference.weight_broadcast.*
        inference.rollout_transport.* policy.refit_buffer_size_gb policy.generation.refit_cfg.*
        policy.generation.use_async_rollouts policy.generation.refit_transport data_plane
        data_plane.*""",
    "max_staleness paces what starts, slots what is decoded; what fails or stalls is an event, and "
    "requests are dealt to engines by their load": """
        async_rl.max_inflight_prompts async_rl.max_buffered_rollouts async_rl.rollout_failure.*
        async_rl.stall_watchdog.* async_rl.generation_fleet_health.* async_rl.generation_router.*
        async_rl.diagnostics""",
    "it names what a run does in any case, or how rows and samples are handed on": """
        _target_ actor_rollout_ref.rollout.agent.num_workers
        actor_rollout_ref.rollout.disable_log_stats
        actor_rollout_ref.rollout.full_determinism actor_rollout_ref.rollout.layered_summon
        actor_rollout_ref.rollout.limit_images actor_rollout_ref.rollout.load_format
        actor_rollout_ref.rollout.mode
        actor_rollout_ref.rollout.moe_load_balance_metrics_interval
        actor_rollout_ref.rollout.multi_stage_wake_up
        actor_rollout_ref.rollout.n_gpus_per_node actor_rollout_ref.rollout.nnodes
        actor_rollout_ref.rollout.profiler actor_rollout_ref.rollout.profiler.*
        actor_rollout_ref.rollout.prometheus.* actor_rollout_ref.rollout.prompt_length
        actor_rollout_ref.rollout.response_length
        actor_rollout_ref.rollout.scheduling_policy actor_rollout_ref.rollout.seed
        actor_rollout_ref.rollout.skip_tokenizer_init actor_rollout_ref.rollout.trace.*
        actor_rollout_ref.rollout.val_kwargs.do_sample async_training.checkpoint_engine.*
        async_training.concurrent_samples_per_replica async_training.use_trainer_do_validate
        critic.optim.num_cycles critic.optim.optimizer_impl
        critic.optim.total_training_steps critic.optim.zero_indexed_step data.audio_key
        data.balance_dp_token data.cache_dir data.filter_overlong_prompts_workers
        data.gen_batch_size data.ignore_input_ids_mismatch data.multiturn.enable
        data.image_patch_size
        data.pad_mode data.return_full_prompt data.return_multi_modal_inputs
        data.return_raw_chat data.return_raw_input_ids data.tools_key data.use_shm
        data.val_batch_size data.validation_shuffle data.video_key trainer.balance_batch
        trainer.del_local_ckpt_after_load trainer.device
        trainer.esi_redundant_time trainer.experiment_name trainer.log_val_generations
        trainer.logger trainer.max_critic_ckpt_to_keep trainer.n_gpus_per_node
        trainer.nnodes trainer.profile_interval trainer.profile_steps trainer.project_name
        trainer.ray_wait_register_center_timeout trainer.resume_from_path
        trainer.rl_logging_board_dir trainer.rollout_data_dir trainer.tensorboard_dir
        trainer.use_legacy_worker_impl trainer.use_v1 trainer.v1.*
        trainer.validation_data_dir trainer.worker_env.*""",
    "verl's padding, and how its entropy is cut: both are cut by tokens here, whatever is "
    "stated": """
        actor_rollout_ref.actor.calculate_entropy
        actor_rollout_ref.actor.calculate_sum_pi_squared
        actor_rollout_ref.actor.data_loader_seed
        actor_rollout_ref.actor.entropy_checkpointing
        actor_rollout_ref.actor.entropy_from_logits_chunk_size
        actor_rollout_ref.actor.entropy_from_logits_with_chunking
        actor_rollout_ref.actor.load_weight actor_rollout_ref.actor.pad_to_length
        actor_rollout_ref.actor.rollout_n actor_rollout_ref.actor.shuffle
        actor_rollout_ref.actor.sum_pi_squared_checkpointing
        actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.actor.use_remove_padding
        actor_rollout_ref.actor.use_rollout_log_probs actor_rollout_ref.model.external_lib
        actor_rollout_ref.model.use_remove_padding actor_rollout_ref.model.use_shm
        entropy_checkpointing entropy_from_logits_chunk_size
        entropy_from_logits_with_chunking max_seq_len model.external_lib model.strategy
        model.use_remove_padding model.use_shm pad_bshd_to_minibatch_max pad_to_length
        pad_to_length_bucket use_remove_padding""",
    "it belongs to what is lost as a whole, or that another key says": """
        actor_rollout_ref.actor.router_replay.record_file
        actor_rollout_ref.actor.router_replay.replay_file actor_rollout_ref.hybrid_engine
        actor_rollout_ref.model.tiled_mlp.num_shards actor_rollout_ref.nccl_timeout
        actor_rollout_ref.rollout.engine_kwargs.* actor_rollout_ref.rollout.max_model_len
        actor_rollout_ref.rollout.server.* actor_rollout_ref.rollout.sglang_rollout_mode
        actor_rollout_ref.rollout.skip.* actor_rollout_ref.rollout.skip_dump_dir
        actor_rollout_ref.rollout.skip_rollout
        algorithm.filter_groups.max_inflight_gen_batches algorithm.pf_ppo.* async_training.*
        override_optimizer_config.decoupled_weight_decay
        override_optimizer_config.offload_fraction
        override_optimizer_config.optimizer_offload_fraction
        override_optimizer_config.overlap_cpu_optimizer_d2h_h2d
        override_transformer_config.account_for_embedding_in_pipeline_split
        override_transformer_config.account_for_loss_in_pipeline_split
        override_transformer_config.deallocate_pipeline_outputs
        override_transformer_config.num_layers_in_first_pipeline_stage
        override_transformer_config.num_layers_in_last_pipeline_stage
        override_transformer_config.pipeline_model_parallel_layout
        override_transformer_config.pipeline_num_transformer_layers
        override_transformer_config.recompute_method
        override_transformer_config.recompute_modules
        override_transformer_config.recompute_num_layers
        override_transformer_config.variable_seq_lengths
        virtual_pipeline_model_parallel_size""",
    "weights under an adapter are frozen, and engines get merged ones": """
        actor_rollout_ref.model.lora.a2a_experimental actor_rollout_ref.model.lora.dtype
        actor_rollout_ref.model.lora.freeze_language_model
        actor_rollout_ref.model.lora.freeze_vision_model
        actor_rollout_ref.model.lora.freeze_vision_projection
        actor_rollout_ref.model.lora.fully_sharded_loras actor_rollout_ref.model.lora.merge""",
    "the same work: one prompt for all of its samples": """
        actor_rollout_ref.actor.use_prefix_grouper""",
    "a kernel of the entropy, which is a small part of a head in chunks": """
        actor_rollout_ref.actor.use_torch_compile use_torch_compile""",
    "verl's checkpoints: here one is complete, and written behind the run": """
        actor_rollout_ref.actor.checkpoint.* actor_rollout_ref.actor.checkpoint.async_save
        actor_rollout_ref.actor.checkpoint.load_contents
        actor_rollout_ref.actor.checkpoint.mbridge_config.*
        actor_rollout_ref.actor.checkpoint.save_contents
        actor_rollout_ref.actor.checkpoint.strict checkpoint.async_save
        checkpoint.load_contents checkpoint.save_contents""",
    "a profile costs what it costs: it is another command here": """
        actor_rollout_ref.actor.profile.* actor_rollout_ref.actor.profiler
        actor_rollout_ref.actor.profiler.* actor_rollout_ref.ref.profile.*
        actor_rollout_ref.ref.profiler.* global_profiler.* profiler profiler.* skip.*""",
    "verl's passes without gradients: their peak is below the update's": """
        actor_rollout_ref.ref.* actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
        actor_rollout_ref.rollout.log_prob_micro_batch_size
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        actor_rollout_ref.rollout.log_prob_use_dynamic_bsz""",
    "an engine computes the logprobs that it samples by": """
        actor_rollout_ref.rollout.calculate_log_probs""",
    "verl's way of weights: there is one here, which is chosen by what is fastest": """
        actor_rollout_ref.rollout.checkpoint_engine.*
        actor_rollout_ref.rollout.update_weights_bucket_megabytes""",
    "verl's critic: it learns in the policy's micro-batches; its offload is read by "
    "verl_policy": """
        critic.checkpoint.* critic.data_loader_seed critic.enable
        critic.forward_max_token_len_per_gpu critic.forward_micro_batch_size
        critic.forward_micro_batch_size_per_gpu critic.fsdp critic.fsdp.* critic.load_weight
        critic.megatron.* critic.model.external_lib critic.model.override_config
        critic.model.override_config.* critic.model.tokenizer_path
        critic.model.trust_remote_code critic.model.use_remove_padding critic.model.use_shm
        critic.model_engine critic.ppo_max_token_len_per_gpu critic.ppo_micro_batch_size
        critic.ppo_micro_batch_size_per_gpu critic.profiler.* critic.rollout_n
        critic.shuffle critic.strategy critic.ulysses_sequence_parallel_size
        critic.use_dynamic_bsz""",
    "programs of samples run in this machine's sandbox, in workers of the scorer": """
        reward.sandbox_fusion.max_concurrent reward.sandbox_fusion.memory_limit_mb
        reward.sandbox_fusion.url""",
    "a reward model scores a step's samples once, without gradients; places says where": """
        reward.reward_model.enable_resource_pool
        reward.reward_model.forward_max_token_len_per_gpu
        reward.reward_model.launch_reward_fn_async reward.reward_model.max_length
        reward.reward_model.micro_batch_size reward.reward_model.micro_batch_size_per_gpu
        reward.reward_model.model.* reward.reward_model.n_gpus_per_node
        reward.reward_model.nnodes reward.reward_model.profiler.*
        reward.reward_model.rollout.* reward.reward_model.strategy
        reward.reward_model.ulysses_sequence_parallel_size
        reward.reward_model.use_dynamic_bsz reward.reward_model.use_reward_loop""",
    "a teacher reads a step's samples once, without gradients": """
        distillation.n_gpus_per_node distillation.nnodes distillation.teacher_key
        distillation.teacher_models.*""",
    "what verl's forward_kl_topk alone reads, which is lost, a clip that two others override, and "
    "the one value that its teachers accept": """
        distillation.distillation_loss.clip_ratio
        distillation.distillation_loss.log_prob_min_clamp
        distillation.distillation_loss.policy_loss_mode distillation.distillation_loss.topk""",
    "how verl's processes are started": """
        config-name config-path config_path hydra.* model_engine ray_init.* ray_kwargs.*
        rollout.name transfer_queue.*""",
    "FSDP2's own ways, which it has here too": """
        data_parallel_replicate_size data_parallel_shard_size data_parallel_size
        distributed_strategy enable_full_shard forward_prefetch full_determinism init_device
        mixed_precision.* strategy use_orig_params wrap_policy wrap_policy.*""",
    "where Megatron reads and writes weights, and Megatron's own buckets": """
        dist_checkpointing_path dist_checkpointing_prefix dist_ckpt_optim_fully_reshardable
        distrib_optim_fully_reshardable_mem_efficient extra forward_only override_ddp_config
        override_ddp_config.* override_mcore_model_config seed use_dist_checkpointing
        use_mbridge vanilla_mbridge""",
    "of schedules and optimizers: numbers of a step that cost nothing": """
        foreach fused lr_decay_steps lr_min
        main_grads_dtype master_weights min_lr_factor num_cycles optimizer_impl
        total_training_steps use_checkpoint_opt_param_scheduler weight_decay_incr_style
        zero_indexed_step""",
}
TABLES = Path(tables.__file__ or "").parent
KNOWN = {name for names in REASONS.values() for name in names.split()}


@pytest.mark.parametrize("system", SYSTEMS.values())
def test_what_is_not_needed_changes_neither_time_nor_memory_by_a_tenth(system: str) -> None:
    modules = [
        vars(importlib.import_module(f"postgrad.translate.tables.{path.stem}"))
        for path in TABLES.glob(f"{system}*.py")
    ]
    rules = {
        option: rule
        for module in modules
        for name in module
        if name in ("RULES", "SOURCE_RULES", "MEGATRON", "DTENSOR", "TORCH", "OPTIMIZER")
        for option, rule in module[name].items()
    }
    needless = {name for name, rule in rules.items() if rule.__qualname__.startswith("needless.")}
    assert needless, "the rule has another name now"
    assert needless - KNOWN == set(), "say above why, or list the option as missing"


def test_an_option_has_one_reason() -> None:
    assert len(KNOWN) == sum(len(names.split()) for names in REASONS.values())


@pytest.mark.parametrize(
    ("system", "name", "same", "other"),
    [
        ("trl", "precompute_ref_log_probs", True, False),
        ("trl", "save_only_model", False, True),
        ("open_instruct", "concatenated_forward", True, False),
        ("open_instruct", "vllm_enable_prefix_caching", "true", "false"),
        ("open_instruct", "gather_whole_model", False, True),
        ("openrlhf", "vllm.enable_prefix_caching", True, False),
    ],
)
def test_a_switch_that_costs_more_is_missing_where_it_differs_from_a_run_here(
    system: str, name: str, same: object, other: object
) -> None:
    rule = importlib.import_module(f"postgrad.translate.tables.{system}").RULES[name]
    draft = Draft("rl", system)
    rule(draft, name, same, "")
    assert [option.name for option in draft.needless] == [name]
    rule(draft, name, other, "")
    assert [(option.name, option.value) for option in draft.missing] == [(name, other)]
