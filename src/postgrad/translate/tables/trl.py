"""TRL's options: their defaults, and what they are in a recipe."""

from typing import Any, cast

from postgrad.translate import common, learning
from postgrad.translate.draft import Draft
from postgrad.translate.rules import (
    OFF,
    ON,
    Rule,
    choice,
    decimal,
    family,
    flag,
    missing,
    missing_above_1,
    missing_but,
    needless,
    non_negative,
    on,
    to,
)

JOBS = {
    "sft": ("sft", "sft"),
    "dpo": ("preference", "dpo"),
    "kto": ("preference", "kto"),
    "orpo": ("preference", "orpo"),
    "cpo": ("preference", "cpo"),
    "reward": ("reward", "bradley_terry"),
    "prm": ("reward", "process_reward"),
    "distillation": ("sft", "distillation"),
    "gkd": ("sft", "distillation"),
    "grpo": ("rl", "grpo"),
    "gmpo": ("rl", "gmpo"),
    "async_grpo": ("rl", "grpo"),
    "rloo": ("rl", "rloo"),
    "minillm": ("rl", "on_policy_distillation"),
    "sdft": ("rl", "on_policy_distillation"),
    "sdpo": ("rl", "on_policy_distillation"),
    "ppo": ("rl", "ppo"),
    "online_dpo": ("rl", "online_dpo"),
    # Scripts whose models read images.
    "sft_vlm": ("sft", "sft"),
    "dpo_vlm": ("preference", "dpo"),
    "grpo_vlm": ("rl", "grpo"),
    "rloo_vlm": ("rl", "rloo"),
    "online_dpo_vlm": ("rl", "online_dpo"),
}
SCRIPTS = {"reward_modeling": "reward", "gspo": "grpo", "ppo_tldr": "ppo", "sft_gpt_oss": "sft",
           "dpo_online": "online_dpo", "sft_gemma3": "sft", "sft_nemotron_3": "sft",
           "sft_vlm_gemma3": "sft_vlm", "mpo_vlm": "dpo_vlm", "gspo_vlm": "grpo_vlm",
           "rloo_tldr": "rloo", "grpo_continuous_batching": "grpo",
           "sft_tiny_aya_tool_calling": "sft"}  # fmt: skip
OTHERS = {
    "vllm-serve": "the run starts its engines itself: rollout.vllm and cluster.rollout",
    "chat": "postgrad chat RUN_DIR",
    "env": "postgrad doctor",
    "openenv/.*|openreward/.*|harbor/.*|grpo_agent|grpo_2048|carla.*": "an agent's world is an "
    "environment: docs/environments.md",
    "sft_diffusion_gemma": "models that denoise text are not here",
    "iw_opd|server_distillation|async_distillation": "write a recipe from that of trl "
    'distillation, or with job = "rl" and algorithm.type = "on_policy_distillation", where a '
    "teacher may be a server, and rollout.max_staleness samples ahead",
    "gold": "it compares whole distributions, sorted where tokens differ, which is not here; a "
    'teacher with other tokens grades samples in a recipe with job = "rl", algorithm.type = '
    '"on_policy_distillation" and teacher.align = "text"',
    "ssd|ssd_eval": "write a pipeline: a recipe that samples from the model, and one with job = "
    '"sft" on the rows (docs/generate.md)',
    "bco|tpo": "this trainer is not here: of preferences dpo, ipo, simpo, cpo, kto and orpo are",
    "grpo_with_replay_buffer": "groups whose rewards are equal are replaced by earlier ones there; "
    "here rollout.dynamic_sampling samples other prompts for them",
    "a2po": "it estimates the value of a prompt from samples of the start, which is not here",
    "nash_md|xpo": "they sample with the reference too: online_dpo samples with the policy alone",
}


def _eos_token(draft: Draft, name: str, value: Any, default: str) -> None:
    """Of a policy, which ends its answers with it."""
    if draft.job == "reward":
        draft.miss(name, value, "a row ends as the chat template ends it")
    else:
        draft.put("model.eos_token", value, default)


def _computed_again(draft: Draft, name: str, value: Any, _: str) -> None:
    """How layers are computed again: which of them, and where their inputs wait."""
    more = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    if flag(more.get("offload", False)):
        learning.host_inputs(draft, name, True, "")
    elif decimal(more.get("every_n_layers", 1)) > 1:
        draft.miss(name, value, "every layer is computed again, or none")
    else:
        draft.skip(name, value, _OWN_LOOP)


def _noise(draft: Draft, name: str, value: Any, _: str) -> None:
    """NEFTune's, which every trainer has there."""
    if draft.job == "sft":
        of_length = "of each conversation's length, there of the padded or packed row's"
        draft.put("algorithm.neftune_noise_alpha", decimal(value), of_length)
    else:
        draft.miss(name, value, "noise is added to embeddings in SFT alone")


def _evaluated(draft: Draft, name: str, value: Any, _: str) -> None:
    """Samples of a held-out prompt."""
    if draft.get("eval.split"):
        draft.put("eval.n_samples", int(decimal(value)))
    else:
        draft.skip(name, value, "nothing is evaluated")


def _held_out_limit(draft: Draft, name: str, value: Any, _: str) -> None:
    """Held-out rows that are read."""
    if draft.get("eval.split"):
        draft.put("eval.limit", int(decimal(value)))
    else:
        draft.skip(name, value, "nothing is evaluated")


# Of transformers' TrainingArguments and TRL's base.
SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3,
    "lr_scheduler_type": "linear", "seed": 42, "save_steps": 500, "gradient_checkpointing": True,
    "bf16": True, "max_length": 1024, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
}  # fmt: skip
_SAMPLED: dict[str, Any] = {
    "vllm_gpu_memory_utilization": 0.3,
    "max_completion_length": 512,
    "num_iterations": 1,
    "max_length": None,
}
_SELF_GRADED: dict[str, Any] = {
    "learning_rate": 5e-5, "num_generations": 8, "max_prompt_length": 512,
    "max_completion_length": 256, "vllm_gpu_memory_utilization": 0.3, "teacher_update_rate": 0.05,
    "teacher_sync_steps": 1, "distillation_is_clip": 2.0,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 2e-5},
    "dpo": {"learning_rate": 1e-6, "loss_type": "sigmoid"},
    "kto": {"learning_rate": 1e-6},
    "orpo": {"learning_rate": 1e-6, "beta": 0.1},
    "cpo": {"learning_rate": 1e-6, "beta": 0.1, "loss_type": "sigmoid"},
    "reward": {"learning_rate": 1e-4},
    "prm": {"learning_rate": 1e-5, "step_separator": "\n"},
    "distillation": {"learning_rate": 1e-6, "beta": 1.0, "temperature": 1.0, "max_length": None,
                     "max_completion_length": 512, "vllm_gpu_memory_utilization": 0.3},
    "gkd": {"learning_rate": 2e-5, "beta": 0.5, "lmbda": 0.5, "temperature": 0.9,
            "max_new_tokens": 128},
    "grpo": {"learning_rate": 1e-6, "num_generations": 8, "beta": 0.0, "loss_type": "dapo",
             "epsilon": 0.2, "use_bias_correction_kl": True, **_SAMPLED},
    "gmpo": {"learning_rate": 1e-6, "num_generations": 8, "beta": 0.0, "epsilon": 0.4, **_SAMPLED},
    "async_grpo": {"learning_rate": 1e-6, "lr_scheduler_type": "constant", "num_generations": 8,
                   "epsilon": 0.2, "max_staleness": 4, "max_completion_length": 2048},
    "minillm": {"learning_rate": 1e-6, "num_generations": 8, "beta": 0.0, "loss_type": "dapo",
                "epsilon": 0.2, "rkl_advantage": True, "single_step_decomposition": True,
                **_SAMPLED},
    "sdft": {"teacher_model_kind": "base", "distillation_mode": "topk_logits",
             "distillation_alpha": 0.5, "distillation_topk": 100,
             "teacher_prompt_template": "{prompt}\n\n{privileged_context}", **_SELF_GRADED},
    "sdpo": {"teacher_model_kind": "ema", "distillation_mode": "sampled_token",
             "distillation_alpha": 1.0, "distillation_weight": 1.0, "loss_type": "dapo",
             "importance_sampling_level": "token", "epsilon": 0.2, "max_reprompt_len": 10240,
             "success_reward_threshold": 1.0, "use_successful_as_teacher": True,
             "dont_reprompt_on_self_success": True,
             "reprompt_template": "{prompt}{solution}{feedback}\n\nCorrectly solve the original "
                                  "question.\n",
             "solution_template": "\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
             "feedback_template": "\nThe following is feedback from your unsuccessful earlier "
                                  "attempt:\n\n{feedback_raw}\n\n", **_SELF_GRADED},
    "rloo": {"learning_rate": 1e-6, "num_generations": 2, "beta": 0.05, "epsilon": 0.2,
             **_SAMPLED},
    "online_dpo": {"learning_rate": 5e-7, "beta": [0.1], "max_new_tokens": 64, "max_length": 512,
                   "temperature": 0.9, "vllm_gpu_memory_utilization": 0.55},
    "ppo": {"learning_rate": 3e-6, "num_ppo_epochs": 4, "num_mini_batches": 1, "kl_coef": 0.05,
            "kl_estimator": "k1", "cliprange": 0.2, "cliprange_value": 0.2, "gamma": 1.0,
            "lam": 0.95, "response_length": 53, "temperature": 0.7, "max_length": None},
}  # fmt: skip

# Trainers with router_aux_loss_coef: where nothing is said, the model's config says it.
BALANCED = ("sft", "dpo", "kto", "grpo", "gmpo", "async_grpo", "minillm", "rloo")
_OWN_LOOP = "the loop is one process's own"
_MASTER = "weights that train are float32, and cast to model.dtype to compute"
_SAVING = "every run saves and logs into run_dir"
_PREPARED = "rows are prepared in this process, and cached"

RULES: dict[str, Rule] = {
    "model_name_or_path": to("model.path"),
    "ref_model": to("reference.model.path"),  # an argument of trainers, not a flag
    "gradient_checkpointing": learning.recomputed,
    "learning_rate": to("learner.lr", read=decimal),
    "weight_decay": to("learner.weight_decay", read=decimal),
    "max_grad_norm": to("learner.max_grad_norm", read=decimal),
    "adam_epsilon": to("learner.eps", read=decimal),
    "seed": to("seed", read=non_negative),
    "beta": to("algorithm.beta", read=decimal),
    **family("", "label_smoothing use_weighting loss_weights f_divergence_type "
             "f_alpha_divergence_coef discopop_tau cpo_alpha simpo_gamma alpha",
             missing("not a setting of this trainer")),
    "desirable_weight": to("algorithm.desirable_weight", read=decimal),
    "undesirable_weight": to("algorithm.undesirable_weight", read=decimal),
    "center_rewards_coefficient": to("algorithm.centre_coef", read=decimal),
    "temperature": to("rollout.temperature", read=decimal),
    "top_p": to("rollout.top_p", read=decimal),
    "top_k": to("rollout.top_k", read=non_negative),
    "min_p": to("rollout.min_p", read=decimal),
    "delta": to("algorithm.dual_clip", "a bound of the ratio, for bad answers only", decimal),
    "entropy_coef": to("algorithm.entropy_coef", read=decimal),
    "chat_template_path": common.chat_template,
    "chat_template_kwargs": to("data.chat_template_kwargs"),
    "dataset_config": to("data.name"),
    "dataset_train_split": to("data.split"),
    "truncation_mode": choice("data.on_too_long", {"keep_start": "truncate"}),
    "shuffle_dataset": to("data.shuffle", read=flag),
    "resume_from_checkpoint": to("checkpoint.load_checkpoint", read=on),
    "save_total_limit": common.kept_checkpoints,
    "optim": learning.optimizer,
    "gamma": to("algorithm.gamma", read=decimal),
    "lam": to("algorithm.lam", read=decimal),
    "whiten_rewards": to("algorithm.whiten_rewards", read=on),
    "cliprange_value": to("algorithm.value_clip", read=decimal),
    "logit_softcapping": missing("logits are the model's own"),
    "use_dora": to("model.lora.dora", read=on),
    "use_rslora": to("model.lora.rslora", read=on),
    "lora_rank_pattern": learning.by_name("model.lora.rank_pattern"),
    "lora_alpha_pattern": learning.by_name("model.lora.alpha_pattern"),
    "lora_init": learning.adapter_start,
    "lora_exclude_modules": learning.by_name("model.lora.exclude_modules"),
    "lora_layers_to_transform": to(
        "model.lora.layers_to_transform",
        read=lambda value: value if isinstance(value, list) else [value],
    ),
    "load_in_8bit": missing("weights are in 16 or 32 bits, or in four"),
    "eos_token": _eos_token,
    "mask_truncated_completions": to("algorithm.mask_truncated_completions", read=on),
    "repetition_penalty": missing("tokens are drawn from the policy's own distribution"),
    "generation_kwargs": missing("sampling is temperature, top_p, top_k, min_p"),
    "top_entropy_quantile": to("algorithm.top_entropy_fraction", read=decimal),
    "off_policy_mask_threshold": to("algorithm.off_policy_threshold", read=decimal),
    "use_bias_correction_kl": needless("there is no KL without beta"),
    "sapo_temperature_pos": to("algorithm.gate_positive", read=decimal),
    "sapo_temperature_neg": to("algorithm.gate_negative", read=decimal),
    "vespo_k_pos": to("algorithm.shape_positive", read=decimal),
    "vespo_lambda_pos": to("algorithm.rate_positive", read=decimal),
    "vespo_k_neg": to("algorithm.shape_negative", read=decimal),
    "vespo_lambda_neg": to("algorithm.rate_negative", read=decimal),
    "ld_alpha": missing_but(("None", "1", "1.0"), "the loss counts every token of an answer"),
    "stop_token": missing_but(("eos",), "an answer ends with its turn; rollout.stop has texts that "
                                        "end it"),
    **family("", "streaming dataset_streaming",
             missing("a dataset is read completely before the run")),
    "precompute_ref_log_probs": missing_but(ON, "the reference's logprobs are computed once, "
                                                "before the first update"),
    "remove_unused_columns": needless("columns that nothing names are left alone"),
    **family("", "attn_implementation attn_implementation_kwargs", missing(common.ATTENTION)),
    "packing": needless(common.PACKED),
    **family("", "padding_free pad_to_multiple_of packing_strategy eval_packing pad_token "
             "group_by_length", needless(common.PACKED)),
    "label_smoothing_factor": missing("the loss is the NLL of the tokens as they are"),
    "neftune_noise_alpha": _noise,
    **family("", "vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout "
             "vllm_group_port", needless("the run starts its engines and knows where they are")),
    "vllm_max_model_length": needless("data.max_len, which bounds prompt and answer"),
    "vllm_model_impl": missing("vLLM's own layers compute the model"),
    **family("", "vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size "
             "vllm_enable_sleep_mode vllm_importance_sampling_correction "
             "vllm_importance_sampling_mode vllm_importance_sampling_cap "
             "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
             "vllm_structured_outputs_regex vllm_guided_decoding_regex",
             missing("vLLM samples where use_vllm is set")),
    **family("", "ds3_gather_for_generation cache_implementation use_transformers_paged "
             "use_transformers_continuous_batching transformers_continuous_batching_config",
             missing("the built-in engine has a paged cache and a copy of the weights")),
    "local_rollout_forward_batch_size": needless(common.CUT_BY_TOKENS),
    **family("", "logging_steps logging_first_step logging_strategy report_to run_name log_level "
             "log_completions num_completions_to_print log_unique_prompts trackio_space_id "
             "logging_dir project log_on_each_node logging_nan_inf_filter log_level_replica "
             "include_num_input_tokens_seen disable_tqdm trackio_bucket_id "
             "trackio_static_space_id log_multimodal log_completions_hub_repo "
             "skip_memory_metrics", needless(common.LOGGING)),
    **family("", "do_train do_eval overwrite_output_dir hub_strategy "
             "hub_model_revision save_safetensors eval_on_start do_predict save_on_each_node "
             "hub_token hub_always_push hub_revision",
             needless(_SAVING)),
    "load_best_model_at_end": missing_but(
        OFF, "checkpoint.best_metric keeps the best by one of docs/metrics.md"),
    **family("", "metric_for_best_model greater_is_better",
             needless("of load_best_model_at_end, which is lost where it is on")),
    "eval_delay": missing("eval.every counts from the first step"),
    **family("", "bf16_full_eval fp16_full_eval", needless("evaluation computes in model.dtype")),
    **family("", "prediction_loss_only eval_do_concat_batches eval_use_gather_object "
             "eval_accumulation_steps include_for_metrics batch_eval_metrics "
             "generate_during_eval", needless("results are added up row by row")),
    "num_generations_eval": _evaluated,
    "ignore_data_skip": missing_but(OFF, "a resumed run goes on with the rows that are next"),
    **family("", "enable_jit_checkpoint restore_callback_states_from_checkpoint",
             needless("a run that is told to end saves first, all of its state")),
    "save_only_model": missing_but(OFF, "a checkpoint always has the optimizer's state"),
    **family("", "dataset_num_proc preprocessing_num_workers "
             "dataloader_num_workers dataset_kwargs dataloader_pin_memory "
             "dataloader_persistent_workers dataloader_prefetch_factor label_names "
             "dataloader_multiprocessing_context dataloader_in_order",
             needless(_PREPARED)),
    "dataloader_drop_last": needless("updates are whole: one may reach into the next epoch"),
    "train_sampling_strategy": choice("data.shuffle", {"random": None, "sequential": False,
                                                       "group_by_length": None,
                                                       "batch_rebalance": None}),
    "data_seed": missing("the order of the rows is drawn from the run's seed"),
    "auto_find_batch_size": missing("micro-batches are as the recipe says: postgrad plan advises"),
    "parallelism_config": missing("learner.tensor_parallel, context_parallel and sharding say it"),
    "model_init_kwargs": missing("its entries are flags: dtype, attn_implementation, revision"),
    "teacher_model_init_kwargs": missing("[teacher.model] has keys for them"),
    "cast_lm_head_to_fp32": missing_but(
        OFF, "the head computes in model.dtype, what follows in float32"),
    "lora_target_parameters": missing("model.lora.targets names layers"),
    **family("", "optim_args optim_target_modules", missing("learner.betas, eps, weight_decay and "
             "optimizer say what is here of optimizers")),
    **family("", "ref_model_mixup_alpha ref_model_sync_steps", needless("of sync_ref_model")),
    **family("", "completion_only_loss assistant_only_loss",
             needless("the loss is on answers, as there")),
    **family("", "is_encoder_decoder padding_value max_completion_length",
             needless("of models with an encoder, or of padding")),
    **family("", "torch_compile_backend torch_compile_mode", missing("layers are compiled as "
             "torch does by default")),
    **family("", "use_cpu no_cuda use_mps_device", missing("a run takes the device that is there")),
    **family("", "use_adaptive_entropy entropy_target entropy_coef_delta entropy_coef_min "
             "entropy_coef_max", missing("entropy_coef stays the same")),
    "weight_sync_steps": missing_above_1("weights are published after every step"),
    **family("", "weight_sync_timeout request_timeout heartbeat_stale_after_s queue_maxsize",
             needless("rollout.max_staleness bounds what waits; a dead worker is replaced")),
    "fork_threshold_tokens": needless("of agents: a sample is the tokens that were read and "
                                      "written, and none is made anew"),
    **family("", "diagnostics_warning_interval diagnostics_flat_tolerance",
             needless("sentinels warn of steps without a gradient")),
    # Of the scripts sdft and sdpo.
    "dataset_path": to("data.path"),
    "max_train_examples": to("data.limit", read=non_negative),
    "max_eval_examples": _held_out_limit,
    "dataset_shuffle_seed": missing("the order of the rows is drawn from the run's seed"),
    **family("", "eval_num_prompts accuracy_eval_num_examples accuracy_eval_max_new_tokens "
             "tool_eval_num_examples tool_eval_max_new_tokens",
             missing("[eval] scores held-out rows with [[rewards]], and records samples of them")),
    **family("", "golden_response_column demonstration_template feedback_from_solution",
             missing("write the text into data.hint, with the names of columns in braces")),
    "max_tool_calling_iterations": missing("environment.max_turns bounds an environment's turns"),
    "precompute_ref_batch_size": needless(common.CUT_BY_TOKENS),
    "trust_remote_code": missing("code of a model's repository is never run"),
    **family("", "use_liger_kernel use_liger_loss liger_kernel_config",
             missing(common.KERNELS)),
    **family("", "dtype torch_dtype", missing_but(("float32", "auto"), _MASTER)),
    "tf32": missing("float32 products are not rounded; model.dtype = \"bfloat16\" is faster"),
    "activation_offloading": learning.host_inputs,
    "router_aux_loss_coef": to("model.router_aux_loss_coef", read=decimal),
    "torch_compile": learning.compiled,
    **family("", "activation_checkpointing_kwargs gradient_checkpointing_kwargs", _computed_again),
    **family("", "ignore_bias_buffers bf16 ddp_timeout deepspeed "
             "fsdp accelerate_config lora_task_type bnb_4bit_quant_type use_bnb_nested_quant "
             "bnb_4bit_compute_dtype "
             "disable_dropout model_adapter_name env ddp_find_unused_parameters ddp_backend "
             "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph fsdp_config "
             "accelerator_config local_rank average_tokens_across_devices use_cache "
             "torch_empty_cache_steps full_determinism debug bnb_4bit_quant_storage "
             "length_column_name",
             needless(_OWN_LOOP)),
}  # fmt: skip


LOSSES: dict[str, tuple[str, str | None]] = {  # -> type, aggregation
    "grpo": ("grpo", None),
    "dapo": ("grpo", "token"),
    "bnpo": ("grpo", "token"),
    "dr_grpo": ("grpo", "constant"),
    "cispo": ("cispo", None),
    "sapo": ("sapo", None),
    "vespo": ("vespo", None),
    "luspo": ("gspo", "constant"),
}
OWN_ROWS = "lmms-lab/multimodal-open-r1-8k-verified"  # of the scripts grpo_vlm, rloo_vlm ...
OWN_REWARDS = ("think_format_reward", "accuracy_reward")  # of the same
UNZIPPED = "FanqingM/MMIU-Benchmark"  # whose images sft_vlm_gemma3 unzips
LATEX = "well-formed LaTeX alone counts there, plain expressions here too"
FUNCTIONS: dict[str, tuple[str, dict[str, Any], str]] = {  # -> type, settings, what differs
    "accuracy_reward": ("math", {}, LATEX),
    "reasoning_accuracy_reward": ("math", {"name": "reasoning_accuracy", "after": "</think>"},
                                  LATEX),
    "think_format_reward": ("format", {"pattern": "<think>(?!.*<think>).*</think>.*"}, ""),
    "get_soft_overlong_punishment": ("overlong", {"max_new_tokens": 1280, "buffer": 256}, ""),
    "get_repetition_penalty_reward": ("repetition", {"ngram": 3, "penalty": 1.0},
                                      "n-grams of tokens there, of words here"),
}  # fmt: skip
# Functions that programs make from arguments -> the settings that these are.
MADE_FROM: dict[str, dict[str, str]] = {
    "get_soft_overlong_punishment": {"max_completion_len": "max_new_tokens",
                                     "soft_punish_cache": "buffer"},
    "get_repetition_penalty_reward": {"ngram_size": "ngram", "max_penalty": "penalty"},
}  # fmt: skip
