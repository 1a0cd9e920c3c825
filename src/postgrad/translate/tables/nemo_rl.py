"""NeMo RL's options of run_grpo.py: their defaults, and what they are in a recipe."""

from typing import Any

from postgrad.translate import common, learning, places
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
    on,
    texts,
    to,
)

_PROGRAMS = ("grpo", "vlm_grpo", "grpo_nemo_gym", "grpo_single_controller")
JOBS = dict.fromkeys(_PROGRAMS, ("rl", "grpo"))
OTHERS = {
    "sft": 'write a recipe of job = "sft" (docs/recipes.md)',
    "dpo|rm": 'write a recipe of job = "preference" or "reward" (docs/preferences.md)',
    "ppo": 'write a recipe of algorithm.type = "ppo" (docs/algorithms/ppo.md)',
    ".*distillation.*": "docs/algorithms/on_policy_distillation.md, and distillation.md for SFT",
    "eval": "postgrad eval RUN_DIR (docs/evaluation.md)",
    "grpo_sliding_puzzle": "its game is an environment: docs/environments.md",
}
DEFAULTS: dict[str, Any] = {
    "grpo.num_prompts_per_step": 32,
    "grpo.num_generations_per_prompt": 16,
    "grpo.max_num_steps": 1_000_000,
    "grpo.max_num_epochs": 1,
    "grpo.val_period": 10,
    "grpo.max_val_samples": 256,
    "grpo.seed": 42,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k3",
    "policy.generation.temperature": 1.0,
}
ESTIMATORS = {"grpo": "grpo", "reinforce_plus_plus": "reinforce_pp", "gdpo": "gdpo"}

# dataset_name -> keys of [data]
DATASETS: dict[str, dict[str, Any]] = {
    "OpenMathInstruct-2": {"path": "nvidia/OpenMathInstruct-2", "split": "train_1M",
                           "prompt": "problem", "answer": "expected_answer"},
    "gsm8k": {"path": "openai/gsm8k", "name": "main"},
    "GSM8K": {"path": "openai/gsm8k", "name": "main"},
    "DeepScaler": {"path": "agentica-org/DeepScaleR-Preview-Dataset", "prompt": "problem"},
    "NuminaMath-1.5": {"path": "AI-MO/NuminaMath-1.5", "prompt": "problem"},
    "OpenR1-Math-220k": {"path": "open-r1/OpenR1-Math-220k", "prompt": "problem"},
    "AIME2024": {"path": "HuggingFaceH4/aime_2024", "prompt": "problem"},
    "AIME2026": {"path": "MathArena/aime_2026", "prompt": "problem"},
    "DAPOMath17K": {"path": "BytedTsinghua-SIA/DAPO-Math-17k", "messages": "prompt",
                    "answer": "reward_model.ground_truth"},
    "DAPOMathAIME2024": {"path": "BytedTsinghua-SIA/AIME-2024", "messages": "prompt",
                         "answer": "reward_model.ground_truth"},
    "clevr-cogent": {"path": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex", "prompt": "problem",
                     "answer": "solution", "images": "image", "map": "my_rows:clevr_cogent"},
    "geometry3k": {"path": "hiyouga/geometry3k", "prompt": "problem", "answer": "answer",
                   "images": "images", "map": "my_rows:geometry3k"},
}  # fmt: skip
# Datasets of which no rows are held out there, whatever split_validation_size says.
UNSPLIT = ("gsm8k", "GSM8K", "DeepScaler", "AIME2024", "AIME2026", "DAPOMath17K",
           "DAPOMathAIME2024", "clevr-cogent", "geometry3k")  # fmt: skip
SPLITS = {  # (dataset_name, split) -> a dataset of its own, with the split train
    ("clevr-cogent", "train"): "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
    ("clevr-cogent", "valA"): "MMInstruction/Clevr_CoGenT_ValA",
    ("clevr-cogent", "valB"): "MMInstruction/Clevr_CoGenT_ValB",
}
SWITCHED = (  # sections with a switch `enabled`, whose other settings say nothing where it is off
    "policy.draft",
    "policy.megatron_cfg.fp8_cfg",
    "grpo.async_grpo",
    "grpo.reward_shaping",
    "grpo.reward_scaling",
    "on_policy_distillation",
    "data_plane",
)
VERIFIERS = {"math": "math", "dapo": "math", "reward_model": "reward_model"}
# Reward functions of environments with images -> type, share of their weight, settings
FUNCTIONS: dict[str, tuple[tuple[str, float, dict[str, Any]], ...]] = {
    "format": (
        ("regex", 0.25, {"name": "thoughts", "pattern": "<think>[\\s\\S]*</think>"}),
        ("regex", 0.75, {"name": "tags", "pattern": "<answer>[\\s\\S]*</answer>"}),
    ),
    "exact_alnum": (
        ("exact_match", 1.0, {"pattern": "<answer>(.*)</answer>", "ignore_case": True,
                              "ignore_punctuation": True}),
    ),
}  # fmt: skip

_FP8 = "weights are in model.dtype, here and in the engine"
_GYM = "NeMo Gym's servers are not here: write an environment (docs/environments.md)"
_VLLM = "[rollout.vllm] has no such key: vLLM's default holds"


def _rollout_turns(draft: Draft, name: str, value: Any, _: str) -> None:
    if decimal(value) > 1:
        draft.miss(name, value, "environment.max_turns bounds the turns of an environment")
    else:
        draft.skip(name, value, "an answer is one turn")


def _filtered(draft: Draft, _: str, value: Any, __: str) -> None:
    """Whether groups of equal scores are replaced."""
    alone = "; there a sample whose siblings have equal scores is left out too, alone"
    comment = "by the first reward's score"
    if flag(value):
        if draft.get("algorithm.leave_one_out"):
            comment += alone
        draft.put("rollout.dynamic_sampling", True, comment)


_AS_MANY = "a round samples as many prompts as are missing"
RULES: dict[str, Rule] = {
    "grpo.seed": to("seed"),
    "grpo.max_rollout_turns": _rollout_turns,
    "grpo.overlong_filtering": to("algorithm.mask_truncated_completions", read=on),
    "grpo.use_dynamic_sampling": _filtered,
    "grpo.batch_multiplier": missing_above_1(
        f"{_AS_MANY}; there more, of which those behind a full step are thrown away. With "
        "rollout.max_staleness the next prompts are sampled beside them, and none is thrown away"
    ),
    "grpo.dynamic_sampling_oversample_ratio": missing_above_1(_AS_MANY),
    **family(
        "grpo.",
        "invalid_tool_call_advantage malformed_thinking_advantage invalid_tool_call_strategy "
        "penalize_invalid_tool_call penalize_malformed_thinking",
        missing("a reward of your own: docs/rewards.md"),
    ),
    **family(
        "grpo.",
        "use_best_at_k best_at_k_k best_at_k_m use_combined_training "
        "combined_training_best_at_k_weight combined_training_pass_at_1_weight "
        "combined_training_weight_mode",
        missing('algorithm.type = "pass_at_k" is near'),
    ),
    **family(
        "grpo.",
        "stop_at_validation_metric stop_at_validation_threshold",
        missing("checkpoint.early_stop ends a run that no longer improves"),
    ),
    "grpo.val_start_at": missing_but(("-1", "0"), "evaluations begin at eval.every"),
    "grpo.zero_variance_prompt_filtering": missing_but(
        OFF, "groups without gradient stay in the denominator"
    ),
    **family(
        "grpo.",
        "val_batch_size calculate_advantages_on_gpu deduplicate_multimodal_data "
        "debug_payload_metrics skip_reference_policy_logprobs_calculation",
        needless(common.SO_HERE),
    ),
    "grpo.adv_estimator.minus_baseline": needless("of reinforce_plus_plus"),
    "grpo.adv_estimator.reward_weights": missing("each of [[rewards]] has a weight"),
    "grpo.adv_estimator.*": missing("of an estimator that is not here"),
    "grpo.async_grpo.max_generation_failures": needless(
        "an engine that dies is replaced, and its samples go on"
    ),
    "grpo.async_grpo.*": missing("rollout.max_staleness paces what starts"),
    "loss_fn.ratio_clip_c": to("algorithm.dual_clip", read=decimal),
    "loss_fn.disable_ppo_ratio": missing(
        "the ratio is 1 in the first update of a step; later updates have one"
    ),
    "loss_fn.force_on_policy_ratio": needless("with one update a step the ratio is 1"),
    "loss_fn.positive_example_nll_weight": missing("the loss has no such term"),
    **family(
        "",
        "reward_penalties.* env.nemo_gym.* env.should_use_nemo_gym env.should_mask_flagged_samples",
        missing(_GYM),
    ),
    "env.should_log_nemo_gym_responses": needless(common.LOGGING),
    **family(
        "",
        "on_policy_distillation on_policy_distillation.* _teachers.*",
        missing('algorithm.type = "on_policy_distillation" with [teacher]'),
    ),
    **family(
        "",
        "data_plane data_plane.*",
        needless("the loop's process has the batch, without its tensors"),
    ),
    **family(
        "async_rl.",
        "max_inflight_prompts max_buffered_rollouts",
        needless("rollout.max_staleness paces what starts, and rollout.slots what is decoded"),
    ),
    **family(
        "async_rl.",
        "rollout_failure.* stall_watchdog.* generation_fleet_health.* generation_router.* "
        "diagnostics",
        needless("failures and stalls are events, and an engine that dies is replaced"),
    ),
    "async_rl.*": missing("rollout.max_staleness paces what starts"),
    "policy.max_grad_norm": to("learner.max_grad_norm", read=decimal),
    **family(
        "policy.",
        "generation_batch_size logprob_batch_size logprob_chunk_size",
        needless(common.CUT_BY_TOKENS),
    ),
    "policy.offload_optimizer_for_logprob": learning.offload_while_sampling,
    "policy.make_sequence_length_divisible_by": needless(common.PACKED),
    "policy.refit_buffer_size_gb": needless(places.WAY),
    **family(
        "policy.",
        "hf_config_overrides hf_config_overrides.*",
        missing(common.CONFIG),
    ),
    "policy.hf_config_overrides.max_position_embeddings": needless(common.POSITIONS),
    "policy.hf_config_overrides.router_aux_loss_coef": to(
        "model.router_aux_loss_coef", read=decimal
    ),
    **family("policy.", "draft.* draft", missing("the engine decodes without a draft model")),
    **family(
        "policy.",
        "quant_cfg quant_calib_data quant_calib_size quant_batch_size quant_sequence_length "
        "disable_modelopt_layer_spec activation_checkpointing_enabled",
        missing(_FP8),
    ),
    "policy.router_replay.enabled": common.router_replay,
    "policy.is_vlm": needless("rows with images say so"),
    "policy.tokenizer.use_fastokens": needless(common.SO_HERE),
    "policy.tokenizer.*": missing("the tokenizer is read from model.path"),
    **family("policy.", "sequence_packing.* dynamic_batching.*", needless(common.PACKED)),
    "policy.optimizer.kwargs.weight_decay": to("learner.weight_decay", learning.ALL_DECAY, decimal),
    "policy.optimizer.kwargs.eps": to("learner.eps", read=decimal),
    **family("policy.optimizer.kwargs.", "foreach fused", needless(common.SO_HERE)),
    "policy.optimizer.kwargs.*": missing(
        "learner.optimizer_state has float32 and 8bit; master weights are float32"
    ),
    "policy.generation.stop_strings": to("rollout.stop", read=texts),
    "policy.generation.stop_token_ids": missing(
        "answers end at the model's own end tokens, and at rollout.stop"
    ),
    **family(
        "policy.generation.",
        "port_range_low port_range_high use_async_rollouts refit_transport refit_cfg.* "
        "http_refit_server_port zmq_refit_server_port",
        needless(places.WAY),
    ),
    **family(
        "policy.generation.",
        "quant_cfg real_quant real_quant_ignore bad_words",
        missing(_VLLM),
    ),
    "policy.generation.real_quant_export_cpu_offload": needless(
        "of an export in few bits, which is lost where it is on"
    ),
    **family(
        "policy.generation.",
        "mcore_generation_config.* sglang_cfg.* dynamo_cfg.* trtllm_cfg.* trtllm_kwargs.*",
        needless("of an engine that does not sample here"),
    ),
    **family(
        "policy.generation.vllm_cfg.",
        "precision kv_cache_dtype use_deep_gemm num_first_layers_in_bf16 "
        "num_last_layers_in_bf16 is_mx quantization_ignored_layer_kws",
        missing_but(("auto", "bfloat16", "0", "False"), _FP8),
    ),
    **family(
        "policy.generation.vllm_cfg.",
        "pipeline_parallel_size expert_parallel_size",
        missing_above_1("engines are divided by tensor parallelism"),
    ),
    "policy.generation.vllm_cfg.enable_prefix_caching": missing_but(
        ON, "it is always on with vLLM"
    ),
    "policy.generation.vllm_cfg.logprobs_mode": missing_but(
        ("processed_logprobs",), "logprobs are those of the distribution that is sampled"
    ),
    "policy.generation.vllm_cfg.max_model_len": needless("data.max_len bounds prompt and answer"),
    **family(
        "policy.generation.vllm_cfg.",
        "async_engine use_tqdm skip_tokenizer_init enable_vllm_metrics_logger "
        "vllm_metrics_logger_interval load_format http_refit_api_key_env_var "
        "http_refit_server_port zmq_refit_server_port reset_encoder_cache_after_weight_update "
        "cap_max_tokens_to_context",
        needless(common.SO_HERE),
    ),
    "policy.generation.vllm_cfg.*": missing(_VLLM),
    "policy.generation.vllm_kwargs": missing(_VLLM),
    "policy.generation.vllm_kwargs.*": common.engine_argument("policy.generation.vllm_kwargs."),
    "data.shuffle": common.shuffle,
    **family(
        "data.",
        "max_input_seq_length",
        needless("data.max_len bounds prompt and answer; longer prompts are dropped and counted"),
    ),
    **family(
        "data.",
        "use_multiple_dataloader num_prompts_per_dataloader custom_dataloader _override_",
        missing_but(OFF, "data.sets mixes datasets by weight"),
    ),
    "data.num_workers": needless(common.SO_HERE),
    "data.*": missing("[data] has no such key: docs/data.md"),
    "env.math.math_verify_impl": missing_but(
        ("hf_math_verify",), "math is the package math-verify: docs/rewards.md"
    ),
    "env.*": missing(
        "an environment or verifier of its own: docs/rewards.md, docs/environments.md"
    ),
    "logger.*": needless(common.LOGGING),
    **family(
        "checkpointing.",
        "model_save_format save_consolidated",
        needless("checkpoints are safetensors, each complete"),
    ),
    "checkpointing.save_optimizer": missing_but(ON, "a checkpoint has all of the state"),
    "checkpointing.checkpoint_must_save_by": missing("checkpoint.save_minutes saves by the clock"),
    **family(
        "cluster.",
        "master_port_range_low master_port_range_high segment_size",
        needless(common.LAUNCH),
    ),
    "sif_dir": missing(_GYM),
}
