"""Open-Instruct's options: their defaults, and what they are in a recipe."""

from typing import Any

from postgrad.models import named_templates
from postgrad.translate import common, learning, places
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
    texts,
    to,
)

JOBS = {
    "sft": ("sft", "sft"),
    "dpo": ("preference", "dpo"),
    "reward": ("reward", "bradley_terry"),
    "grpo": ("rl", "grpo"),
    "ppo": ("rl", "ppo"),
    "olmo_core_finetune": ("sft", "sft"),
    "olmo_core_dpo": ("preference", "dpo"),
    "olmo_core_grpo": ("rl", "grpo"),
}
OF_OLMO_CORE = {"olmo_core_finetune": "sft", "olmo_core_dpo": "dpo", "olmo_core_grpo": "grpo"}
SCRIPTS = {  # files -> programs
    "finetune": "sft",
    "olmo_core_finetune": "olmo_core_finetune",
    "dpo": "olmo_core_dpo",
    "dpo_tune": "dpo",
    "dpo_tune_cache": "dpo",
    "reward_modeling": "reward",
    "grpo": "olmo_core_grpo",
    "grpo_fast": "grpo",
    "grpo_vllm_thread_ray_gtrl": "grpo",
    "ppo_fast": "ppo",
    "ppo_vllm_thread_ray_gtrl": "ppo",
    "ppo_vllm_thread_ray_gtrl_olmo": "ppo",
}
OTHERS = {
    "merge_lora": "postgrad merge adapter ADAPTER --base MODEL --to DIR",
    "merge_models": "postgrad merge linear MODEL MODEL --to DIR, or a file of mergekit's",
    "benchmark_generators": "postgrad plan says how fast a recipe samples",
    "sample_logits_vllm": "distillation from a teacher's logits is not here",
    "olmo_core_.*": "it works on OLMo-core's own format of weights; postgrad reads Hugging Face's",
    "rejection_sampling|generation|synthetic_preference.*": "postgrad generate RECIPE.toml "
    "--to DIR --select best|pairs (docs/generate.md)",
}

_TRAINED: dict[str, Any] = {"seed": 42, "per_device_train_batch_size": 8, "learning_rate": 2e-5,
                            "gradient_accumulation_steps": 1, "lr_scheduler_type": "linear",
                            "lora_rank": 64, "lora_alpha": 16, "lora_dropout": 0.1}  # fmt: skip
_SAMPLED: dict[str, Any] = {"total_episodes": 100_000, "beta": 0.05, "learning_rate": 2e-5,
                            "lr_scheduler_type": "linear", "verification_reward": 10.0,
                            "max_prompt_token_length": 256,
                            "vllm_gpu_memory_utilization": 0.9}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {**_TRAINED, "num_epochs": 2, "warmup_ratio": 0.03, "max_seq_length": 4096},
    "dpo": {**_TRAINED, "num_epochs": 1, "warmup_ratio": 0.1, "max_seq_length": 4096, "beta": 5.0,
            "loss_type": "dpo_norm"},
    "reward": {**_TRAINED, "seed": 1, "per_device_train_batch_size": 1, "num_epochs": 1,
               "gradient_accumulation_steps": 8, "max_seq_length": 512, "eps": 1e-5,
               "weight_decay": 0.01},
    "grpo": {**_SAMPLED, "seed": 42, "num_epochs": 1, "num_mini_batches": 1, "clip_lower": 0.2,
             "clip_higher": 0.272, "kl_estimator": 2, "num_samples_per_prompt_rollout": 4,
             "num_unique_prompts_rollout": 16, "response_length": 256, "pack_length": 512,
             "advantage_normalization_type": "centered", "per_device_train_batch_size": 1,
             "filter_zero_std_samples": True, "use_rho_correction": True, "save_freq": 200,
             "rho_clamp_upper_bound": 2.0, "loss_fn": "dapo", "local_eval_every": 100,
             "async_steps": 8, "inflight_updates": True},
    "ppo": {**_SAMPLED, "seed": 1, "num_epochs": 4, "response_length": 53, "temperature": 0.7,
            "local_mini_batch_size": 64, "local_rollout_batch_size": 64, "cliprange": 0.2,
            "cliprange_value": 0.2, "kl_estimator": "kl1", "number_samples_per_prompt": 1,
            "per_device_train_batch_size": 1, "gamma": 1.0, "lam": 0.95, "eps": 1e-5,
            "whiten_rewards": False},
}  # fmt: skip
DEFAULTS |= {name: DEFAULTS[same] for name, same in OF_OLMO_CORE.items()}
DEFAULTS["olmo_core_finetune"] = DEFAULTS["sft"] | {"num_epochs": 3, "learning_rate": 8e-5}
RENAMED = {  # names that changed, or differ from program to program
    "num_train_epochs": "num_epochs", "mixer_list": "dataset_mixer_list",
    "mixer_list_splits": "dataset_mixer_list_splits", "max_token_length": "max_seq_length",
    "tokenizer_name_or_path": "tokenizer_name", "chat_template": "chat_template_name",
    "lora_r": "lora_rank", "use_peft": "use_lora", "max_grad_norm": "clip_grad_norm",
    "vllm_num_gpus": "vllm_num_engines",
    "dataset_train_splits": "dataset_mixer_list_splits",
    "dataset_eval_mixer": "dataset_mixer_eval_list",
    "dataset_eval_splits": "dataset_mixer_eval_list_splits",
    "dpo_loss_type": "loss_type", "dpo_beta": "beta", "train_file": "dataset_name",
    "load_balancing_weight": "load_balancing_loss", "num_training_steps": "max_train_steps",
    "truncated_importance_sampling_ratio_cap": "rho_clamp_upper_bound",
}  # fmt: skip
_AI2 = "Ai2's own cluster and evaluation"
# Names of Open-Instruct's chat templates that are not among those here.
_OTHER_TEMPLATES = {
    *("assistant_message_only", "olmo_old", "olmo_thinker_no_think_7b", "olmo_thinker_rlzero"),
    *("olmo_thinker_remove_intermediate_thinking", "olmo_thinker_no_think_sft_tokenization"),
    *("olmo_thinker_code_rlzero", "qwen_instruct_user_boxed_math", "tulu_thinker_r1_style"),
    "r1_simple_chat_postpend_think_orz_style",
    "r1_simple_chat_postpend_think_tool_vllm",
}


def _chat_template(draft: Draft, name: str, value: Any, default: str) -> None:
    """A rule: a template by its name. Where Open-Instruct has none of a name, it takes the
    tokenizer's own.
    """
    theirs = {*named_templates.names(), *_OTHER_TEMPLATES}
    if value in theirs or str(value).endswith(".jinja"):
        common.chat_template(draft, name, value, default)
    else:
        draft.skip(name, value, "Open-Instruct has no such template, and takes the tokenizer's too")


RULES: dict[str, Rule] = {
    "model_name_or_path": to("model.path"),
    "gradient_checkpointing": to("model.gradient_checkpointing", read=flag),
    "learning_rate": to("learner.lr", read=decimal),
    "eps": to("learner.eps", read=decimal),
    "seed": to("seed", read=non_negative),
    "beta": to("algorithm.beta", read=decimal),
    "label_smoothing": to("algorithm.label_smoothing", read=decimal),
    "temperature": to("rollout.temperature", read=decimal),
    "vllm_top_p": to("rollout.top_p", read=decimal),
    "stop_strings": to("rollout.stop", read=texts),
    "gamma": to("algorithm.gamma", read=decimal),
    "lam": to("algorithm.lam", read=decimal),
    "whiten_rewards": to("algorithm.whiten_rewards", read=on),
    "cliprange_value": to("algorithm.value_clip", read=decimal),
    "model_dtype": choice("model.dtype", {"bfloat16": "bfloat16", "float32": "float32"}),
    "checkpointing_steps": common.checkpoints,
    "resume_from_checkpoint": to("checkpoint.load_checkpoint", read=on),
    "chat_template_name": _chat_template,
    **family("", "additional_model_arguments rope_scaling_factor",
             missing(common.CONFIG)),
    "trust_remote_code": missing("code of a model's repository is never run"),
    "reward_model_revision": to("reward_model.model.revision", read=common.branch),
    "data_loader_seed": missing("a run has one seed"),
    "ephemeral_save_interval": missing("checkpoint.max_ckpt_num says how many of those that "
                                       "save_steps writes are kept"),
    "checkpoint_state_dir": to("checkpoint.ckpt_path"),
    "gs_checkpoint_state_dir": common.mirror,
    "cp_strategy": missing("ranks of learner.context_parallel exchange keys and values in one way"),
    "dist_timeout_hours": to("cluster.limit_seconds", read=lambda hours: 3600 * decimal(hours)),
    "inference_batch_size": to("rollout.slots", read=non_negative),
    "cache_logprobs_only": missing("the reference's logprobs are computed in the run itself"),
    "use_8bit_optimizer": to("learner.optimizer_state", "AdamW's moments of matrices",
                             lambda value: "8bit" if flag(value) else None),
    "concatenated_forward": missing_but(ON, "both answers of a pair are in one forward pass"),
    "mask_truncated_completions": to("algorithm.mask_truncated_completions", read=on),
    "stop_token": missing_but(("eos",), "an answer ends with its turn; rollout.stop has texts that "
                                        "end it"),
    "no_resampling_pass_rate": to("rollout.curriculum.retire_at",
                                  "of the first verifier's score", decimal),
    "load_balancing_loss": missing(common.ROUTER),
    "eval_pass_at_k": missing("there is no [eval]"),
    "eval_top_p": missing("there is no [eval]"),
    "max_train_steps": missing("total_episodes says how long a run is"),
    "max_train_samples": to("data.limit", read=non_negative),
    **family("", "deepspeed_offload_param deepspeed_offload_optimizer offload_optimizer "
             "offload_param", learning.offload),
    **family("", "max_steps tools tool_parser_type tool_configs tool_call_names pool_size "
             "per_turn_max_tokens pass_tools_to_chat_template max_tool_calls search_api_endpoint "
             "code_tool_api_endpoint only_reward_good_outputs",
             missing("of tools: docs/environments.md")),
    "reward_aggregator": missing("rewards of an environment's turns add up"),
    **family("", "add_r1_style_format_reward code_pass_rate_reward_threshold "
             "code_max_execution_time code_apply_perf_penalty apply_evolving_rubric_reward "
             "max_active_rubrics llm_judge_max_tokens llm_judge_max_context_length llm_judge_model "
             "llm_judge_temperature llm_judge_timeout code_api_url remap_verifier "
             "apply_arithmetic_reward arithmetic_reward",
             missing("no verifier of the recipe has it: docs/rewards.md")),
    "masked_mean_axis": missing("algorithm.aggregation says what divides the loss"),
    **family("", "packing padding_free", needless(common.PACKED)),
    **family("", "use_flash_attn attn_implementation", missing(common.ATTENTION)),
    "use_liger_kernel": missing(common.KERNELS),
    "compile_model": learning.compiled,
    **family("", "activation_memory_budget activation_checkpointing_mode",
             missing("model.gradient_checkpointing keeps the activations of whole layers or none")),
    **family("", "deepspeed_zpg zero_hpz_partition_size", missing_above_1(common.HPZ)),
    **family("", "fused_optimizer low_cpu_mem_usage",
             missing_but(ON, "AdamW is one kernel; weights are read tensor by tensor")),
    "gather_whole_model": missing_but(OFF, "weights are gathered and sent in pieces"),
    "vllm_sync_backend": needless(places.WAY),
    **family("", "vllm_enable_prefix_caching enable_prefix_caching",
             missing_but(ON, "it is always on with vLLM")),
    "use_fp8_kv_cache": missing("vLLM's cache has the dtype of the model"),
    "local_rollout_forward_batch_size": needless(common.CUT_BY_TOKENS),
    "backend_timeout": needless("cluster.limit_seconds bounds how long ranks wait"),
    **family("", "with_tracking report_to logging_steps exp_name run_name wandb_project_name "
             "wandb_entity wandb_project verbose save_traces record_entropy "
             "rollouts_save_path log_grad_norm", needless(common.LOGGING)),
    **family("", "try_launch_beaker_eval_jobs try_launch_beaker_eval_jobs_on_weka "
             "try_auto_save_to_beaker oe_eval_tasks "
             "oe_eval_max_length oe_eval_gpu_multiplier eval_priority eval_workspace "
             "hf_metadata_dataset gs_bucket_path send_slack_alerts "
             "save_to_hub oe_eval_beaker_image do_not_randomize_output_dir", needless(_AI2)),
    **family("", "use_slow_tokenizer use_fast_tokenizer "
             "preprocessing_num_workers dataset_mix_dir dataset_cache_mode dataset_skip_cache "
             "dataset_local_cache_dir dataset_transform_fn overwrite_cache transform_fn "
             "max_prompt_token_length cache_dataset_only hf_repo_revision timeout "
             "per_device_eval_batch_size num_nodes "
             "eval_batch_size max_possible_score allow_world_padding "
             "profiling config_name beaker_eval_freq "
             "clean_checkpoints_at_end get_tokenizer_fn local_cache_dir skip_cache",
             needless(common.SO_HERE)),
}  # fmt: skip


KL_ESTIMATORS = {0: "k1", 1: "k2", 2: "k3", "kl1": "k1", "kl2": "k2", "kl3": "k3"}
WORLDS = ("counter", "wordle", "generic_sandbox")  # environments among its tools
# Words of datasets' names, what rows have in their column `dataset`, type, settings, what differs.
VERIFIERS: tuple[tuple[str, list[str], str, dict[str, Any], str], ...] = (
    ("gsm", ["gsm8k"], "gsm8k", {"flexible": True}, "; numbers are compared as text there"),
    (
        "math mathsub dapo orz polaris omega",
        ["math", "MATH"],
        "math",
        {},
        "; there the last box, else a final answer",
    ),
    (
        "if ifeval",
        ["ifeval", "ifeval_old"],
        "ifeval",
        {"credit": "fraction", "instructions": "answer"},
        "; what is behind </think> is judged there, and some kinds have other rules: "
        "docs/rewards.md#instructions",
    ),
    (
        "code acecoder python stdio",
        ["code", "code_stdio"],
        "code",
        {},
        "; a text without a fenced block is no program here",
    ),
    (
        "general",
        ["general-quality", "general-quality_ref"],
        "judge",
        {},
        "; give base_url its server. The judge is asked by docs/rewards.md#a-judge, in words of "
        "its own there; what is behind </think> is graded there",
    ),
)
