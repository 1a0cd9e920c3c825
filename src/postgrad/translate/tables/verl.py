"""verl's options of main_ppo and sft_trainer: their names, their defaults, and what they are in a
recipe.

Names are those of version 0.10; `canonical` renames older ones. What the backends of the policy are
asked is in verl_backends.py.
"""

from collections.abc import Mapping
from typing import Any

from postgrad.translate import common, images, learning
from postgrad.translate.rules import (
    OFF,
    ON,
    Rule,
    family,
    flag,
    missing,
    missing_but,
    needless,
    to,
)
from postgrad.translate.tables import verl_backends as backends

JOBS = {
    "main_ppo": ("rl", "ppo"),
    "main_ppo_sync": ("rl", "ppo"),
    "main_ppo_v0": ("rl", "ppo"),
    "main_dapo": ("rl", "grpo"),
    "fully_async_main": ("rl", "ppo"),
    "one_step_off": ("rl", "ppo"),
    "sft_trainer": ("sft", "sft"),
    "sft_trainer_ray": ("sft", "sft"),
    "fsdp_sft_trainer": ("sft", "sft"),
}
OTHERS = {
    "main_generation(_server)?": "it writes answers to a file: postgrad generate RECIPE.toml --to "
    "DIR (docs/generate.md)",
    "main_eval": "postgrad eval RECIPE.toml --model DIR scores answers (docs/evaluation.md)",
    "model_merger": "checkpoints here are complete: postgrad export RUN_DIR --to DIR",
}
SHORT = {"ppo": "main_ppo", "sft": "sft_trainer"}

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model"))
# older names -> those of 0.10, by their beginnings
_BEFORE = {
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward_manager.name": "reward.reward_manager.name",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.sandbox_fusion.": "reward.sandbox_fusion.",
    "sandbox_fusion.": "reward.sandbox_fusion.",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.": "reward.reward_model.",
    "critic.model.fsdp_config.": "critic.fsdp.",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    f"{ACTOR}optim.warmup_style": f"{ACTOR}optim.lr_scheduler_type",
    f"{ACTOR}grad_clip": f"{ACTOR}optim.clip_grad",
    f"{ACTOR}ulysses_sequence_parallel_size": f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size",
    "rollout.total_epochs": "trainer.total_epochs",
    "rollout.test_freq": "trainer.test_freq",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    "trainer.checkpoint.": "checkpoint.",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "model.partial_pretrain": "model.path",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
}


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the names that they have since verl 0.10."""
    renamed: dict[str, Any] = {}
    for name, value in options.items():
        before = next((old for old in _BEFORE if _named(name, old)), None)
        renamed[name if before is None else _BEFORE[before] + name[len(before) :]] = value
    return renamed


def _named(name: str, before: str) -> bool:
    return name.startswith(before) if before.endswith(".") else name == before


DEFAULTS: dict[str, Any] = {
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ACTOR}ppo_mini_batch_size": 256,
    f"{ACTOR}optim.lr": 1e-6,
    f"{ACTOR}optim.weight_decay": 0.01,
    f"{MODEL}enable_gradient_checkpointing": True,
    f"{ROLLOUT}gpu_memory_utilization": 0.5,
    f"{ROLLOUT}tensor_model_parallel_size": 2,
    "algorithm.adv_estimator": "gae",
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.cliprange_value": 0.5,
}
SFT_DEFAULTS: dict[str, Any] = {
    "trainer.total_epochs": 4,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.seed": 1,
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_token_len_per_gpu": 8192,
    "data.max_length": 1024,
    "data.truncation": "error",
    "data.messages_key": "messages",
    "optim.lr": 1e-3,
    "optim.weight_decay": 0.01,
    "model.enable_gradient_checkpointing": True,
}
ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "gdpo": "gdpo",
}
LOSSES = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo", "gpg": "gpg"}
AGGREGATIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}
KLS = {
    "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip
# What rows are, by the names of their files: the values of their column data_source, and how
# verl scores them: type, settings and comment of each entry of [[rewards]].
SOURCES: tuple[tuple[str, str, tuple[tuple[str, dict[str, Any], str], ...]], ...] = (
    (r"gsm8k", "openai/gsm8k", (("gsm8k", {}, "the number behind ####; there in the last 300 "
      "characters, and written as the reference is"),)),
    (
        r"geo3k|geometry3k",
        "hiyouga/geometry3k",
        (
            ("math", {"weight": 0.9, "boxed_only": True}, ""),
            ("regex", {"weight": 0.1, "dot_all": True,
                       "pattern": r"^<think>.*</think>.*\\boxed\{.*\}.*$"}, "thoughts and a box"),
        ),
    ),
    (r"dapo|aime", "math_dapo", (("math", {"weight": 2.0}, "2 or 0, there 1 or -1; there the text "
      "behind Answer: or in the last box, compared as text"),)),
    (r"math", "DigitalLearningGmbH/MATH-lighteval",
     (("math", {"boxed_only": True}, "boxes as formulas; there the last box, compared as text"),)),
)  # fmt: skip

_TOOLS = 'write tools as Python functions, and [environment] type = "tools" (docs/environments.md)'
_PROFILE = "profiles are not of a recipe: docs/profile.md"
_TEACHER = 'algorithm.type = "on_policy_distillation" has no such setting'


RULES: dict[str, Rule] = {
    "data.seed": to("seed"),
    "data.shuffle": common.shuffle,
    "data.image_key": to("data.images"),
    "data.reward_fn_key": missing_but(("data_source",), "`when` of [[rewards]] names the column"),
    **family(
        "data.",
        "filter_overlong_prompts_workers val_batch_size gen_batch_size return_raw_input_ids "
        "return_raw_chat return_full_prompt "
        "dataloader_num_workers num_workers use_shm validation_shuffle image_patch_size "
        "return_multi_modal_inputs balance_dp_token pad_mode tools_key cache_dir",
        needless(common.SO_HERE),
    ),
    "data.trust_remote_code": missing("code of a model's repository is never run"),
    **family("data.", "video_key audio_key", needless("rows have text and images alone")),
    **family("data.", "tool_config_path function_tool_path", missing(_TOOLS)),
    **family("data.", "mm_processor_kwargs mm_processor_kwargs.*",
             missing("the model's image processor is taken as it is")),
    **family("data.", "tokenizer custom_cls.* sampler.* datagen.* collate_fn.*",
             missing("[data] reads rows: data.map and data.filter change them (docs/data.md)")),
    f"{MODEL}trust_remote_code": missing("code of a model's repository is never run"),
    **family(
        MODEL,
        "use_remove_padding use_shm external_lib",
        needless(common.PACKED),
    ),
    f"{MODEL}tiled_mlp.enabled": missing("a layer computes all rows of a micro-batch at once"),
    f"{MODEL}tiled_mlp.num_shards": needless("of tiles, which are lost where they are on"),
    **family(
        MODEL,
        "use_liger use_fused_kernels fused_kernel_options fused_kernel_options.*",
        missing(common.KERNELS),
    ),
    **family(
        MODEL,
        "hf_config_path override_config override_config.*",
        missing(common.CONFIG),
    ),
    f"{MODEL}custom_chat_template": to("data.chat_template"),
    **family(
        f"{MODEL}override_config.",
        "max_position_embeddings model_config.max_position_embeddings",
        needless(common.POSITIONS),
    ),
    "model.trust_remote_code": missing("code of a model's repository is never run"),
    **family("model.", "use_remove_padding use_shm external_lib strategy", needless(common.PACKED)),
    **family("model.", "use_liger use_fused_kernels", missing(common.KERNELS)),
    f"{MODEL}tokenizer_path": missing(common.OTHER_TOKENIZER),
    f"{MODEL}enable_activation_offload": learning.host_inputs,
    f"{MODEL}exclude_modules": learning.by_name("model.lora.exclude_modules"),
    f"{MODEL}lora_adapter_path": missing(
        "model.path reads a folder that PEFT has written, and model.lora trains on from there"
    ),
    **family(
        MODEL,
        "lora.lora_A_init_method lora.lora_B_init_method lora.dropout_position lora.type "
        "lora.exclude_modules lora.adapter_path",
        missing_but(("lora", "zero", "pre"), "an adapter begins and is placed as PEFT's is"),
    ),
    **family(
        MODEL,
        "lora.merge lora.dtype lora.a2a_experimental lora.freeze_vision_model "
        "lora.freeze_vision_projection lora.freeze_language_model lora.fully_sharded_loras",
        needless("all but the adapter is frozen, and engines get merged weights"),
    ),
    **family("", f"{MODEL}mtp {MODEL}mtp.* model.mtp model.mtp.*",
             missing("heads that predict further tokens are not trained")),
    **family(
        ACTOR,
        "calculate_entropy calculate_sum_pi_squared sum_pi_squared_checkpointing "
        "entropy_checkpointing entropy_from_logits_with_chunking entropy_from_logits_chunk_size "
        "use_remove_padding use_rollout_log_probs use_dynamic_bsz rollout_n shuffle "
        "data_loader_seed load_weight pad_to_length",
        needless("entropy and logprobs are computed in chunks of rows, without padding"),
    ),
    f"{ACTOR}use_prefix_grouper": needless("a prompt is computed once for all of its samples"),
    f"{ACTOR}use_torch_compile": needless(
        "it compiles the entropy there; model.compile compiles layers"
    ),
    f"{ACTOR}freeze_vision_tower": images.freezes()["freeze_vision_tower"],
    f"{ACTOR}router_replay.mode": backends.router_replay,
    **family(ACTOR, "router_replay.record_file router_replay.replay_file", needless("of a replay")),
    **family(
        ACTOR,
        "checkpoint.save_contents checkpoint.load_contents checkpoint.async_save checkpoint.strict "
        "checkpoint.mbridge_config.* checkpoint.*",
        needless("checkpoints are safetensors, each complete"),
    ),
    **family(ACTOR, "profiler profiler.* profile.*", needless(_PROFILE)),
    f"{ACTOR}policy_loss.dro_beta": missing("dro is not an algorithm here"),
    "actor_rollout_ref.hybrid_engine": needless("cluster.policy.colocate says it"),
    "actor_rollout_ref.nccl_timeout": needless("cluster.limit_seconds (600) is one"),
    **family("actor_rollout_ref.ref.", "profiler.* profile.*", needless(_PROFILE)),
    "actor_rollout_ref.ref.*": needless(
        "the reference's passes have the policy's layout, and are cut by tokens"
    ),
    **{f"{ROLLOUT}{name}": rule for name, rule in backends.ROLLOUT.items()},
    f"{ROLLOUT}max_num_batched_tokens": common.engine_argument(ROLLOUT),
    f"{ROLLOUT}engine_kwargs.vllm.*": common.engine_argument(f"{ROLLOUT}engine_kwargs.vllm."),
    "algorithm.use_pf_ppo": missing("no algorithm here weighs samples so"),
    "algorithm.pf_ppo.*": needless("of pf_ppo, which is lost where it is on"),
    "algorithm.gdpo_reward_keys": missing("each of [[rewards]] is a reward of gdpo"),
    "algorithm.filter_groups.metric": missing_but(
        ("acc", "score", "seq_reward", "seq_final_reward", "None"),
        "rollout.filter_on names the reward that is looked at",
    ),
    "algorithm.filter_groups.max_inflight_gen_batches": needless(
        "as many prompts are sampled again as groups were filtered"
    ),
    "algorithm.rollout_correction.loss_type": missing_but(
        ("ppo_clip",), "the ratio is clipped; cispo is near a REINFORCE with weights"
    ),
    **family(
        "critic.optim.",
        "override_optimizer_config override_optimizer_config.*",
        missing("learner.optimizer knows adamw and muon; critic.learner.offload moves its state"),
    ),
    "critic.model.lora.*": missing("[critic.model.lora] is an adapter of the critic"),
    **family("critic.optim.", "total_training_steps num_cycles zero_indexed_step optimizer_impl",
             needless(common.SO_HERE)),
    **family(
        "critic.",
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu forward_micro_batch_size "
        "forward_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu "
        "forward_max_token_len_per_gpu shuffle strategy rollout_n enable "
        "data_loader_seed ulysses_sequence_parallel_size fsdp fsdp.* megatron.* profiler.* "
        "checkpoint.* model_engine load_weight",
        needless("the critic learns in the policy's batches and on its ranks"),
    ),
    **family(
        "critic.model.",
        "use_remove_padding tokenizer_path use_shm external_lib override_config override_config.* "
        "trust_remote_code",
        needless("the critic is computed as the policy is"),
    ),
    "critic.loss_agg_mode": missing_but(("token-mean",), "a critic's loss is a mean of tokens"),
    "critic.model.enable_activation_offload": to(
        "critic.model.gradient_checkpointing", read=lambda value: "offload" if flag(value) else None
    ),
    "reward.num_workers": to("scoring.workers", read=int),
    **family("reward.sandbox_fusion.", "url max_concurrent memory_limit_mb",
             needless("programs run in a sandbox of this machine: docs/sandbox.md")),
    **family(
        "reward.reward_model.",
        "rollout.* enable_resource_pool n_gpus_per_node nnodes strategy micro_batch_size "
        "micro_batch_size_per_gpu max_length use_dynamic_bsz forward_max_token_len_per_gpu "
        "launch_reward_fn_async use_reward_loop model.* profiler.* "
        "ulysses_sequence_parallel_size",
        needless("the reward model scores on the ranks; cluster.reward_model places it"),
    ),
    "reward.reward_manager.*": missing("a verifier of your own: docs/rewards.md"),
    "reward.custom_reward_function.*": missing("settings of a verifier stand in its [[rewards]]"),
    "reward.reward_kwargs.*": missing("settings of a verifier stand in its [[rewards]]"),
    "reward.*": missing("[[rewards]] has no such key: docs/rewards.md"),
    **family(
        "distillation.",
        "n_gpus_per_node nnodes teacher_key distillation_loss.topk "
        "distillation_loss.policy_loss_mode distillation_loss.clip_ratio",
        needless("the teacher reads samples on the ranks; cluster.teacher places it"),
    ),
    "distillation.teacher_models.*": needless(
        "the teacher reads samples on the ranks; cluster.teacher places it"
    ),
    "distillation.distillation_loss.use_policy_gradient": missing_but(
        ON, "the teacher's logprobs are advantages of tokens"
    ),
    "distillation.distillation_loss.log_prob_min_clamp": needless(
        "it bounds the most likely tokens of forward_kl_topk, which is lost, and not k1"
    ),
    "distillation.distillation_loss.*": missing(_TEACHER),
    "distillation.*": missing(_TEACHER),
    **family("trainer.", "logger project_name experiment_name log_val_generations "
             "rollout_data_dir validation_data_dir tensorboard_dir rl_logging_board_dir",
             needless(common.LOGGING)),
    **family(
        "trainer.",
        "balance_batch del_local_ckpt_after_load resume_from_path device "
        "ray_wait_register_center_timeout esi_redundant_time use_legacy_worker_impl "
        "profile_steps worker_env.* v1.* use_v1 profile_interval max_critic_ckpt_to_keep nnodes "
        "n_gpus_per_node",
        needless(common.SO_HERE),
    ),
    "trainer.seed": to("seed"),
    "trainer.default_hdfs_dir": common.mirror,
    "trainer.val_only": missing_but(OFF, "postgrad eval evaluates without training"),
    **family(
        "async_training.",
        "use_trainer_do_validate concurrent_samples_per_replica checkpoint_engine.*",
        needless(common.SO_HERE),
    ),
    "async_training.use_dynamic_resource_scheduling": missing_but(
        OFF, "engines have devices of their own, or share the ranks'"
    ),
    "async_training.*": needless("of scheduling that is lost where it is on"),
    **family("", "global_profiler.* skip.* profiler profiler.*", needless(_PROFILE)),
    **family("", "ray_kwargs.* ray_init.* transfer_queue.* hydra.* config_path config_name "
             "config-path config-name model_engine rollout.name", needless(common.LAUNCH)),
    **family("", "enable_thinking_key data.enable_thinking_key data.enable_thinking_default",
             missing("data.chat_template_kwargs holds for all rows")),
    "data.ignore_input_ids_mismatch": needless("a conversation is rendered as a whole"),
    "data.multiturn.enable": needless("data.messages names a column of conversations"),
    **family(
        "data.",
        "prompt_dict_keys response_dict_keys",
        missing('a column within another: data.prompt = "extra_info.question" (docs/data.md)'),
    ),
    **family("checkpoint.", "save_contents load_contents async_save",
             needless("checkpoints are safetensors, each complete")),
    "use_remove_padding": needless(common.PACKED),
    "_target_": needless(common.SO_HERE),
}  # fmt: skip
