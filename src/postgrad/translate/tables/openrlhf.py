"""OpenRLHF's options: their names, their defaults, and what they are in a recipe.

Names are those of version 0.11, with dots; `canonical` renames older ones. Options of the policy
(`actor.adam.lr`) are listed as its other trainers name them (`adam.lr`), so that one table serves
all trainers.
"""

from collections.abc import Mapping
from typing import Any

from postgrad.translate import common, images, learning, places
from postgrad.translate.draft import Draft
from postgrad.translate.rules import (
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
    "train_sft": ("sft", "sft"),
    "train_rm": ("reward", "bradley_terry"),
    "train_prm": ("reward", "process_reward"),
    "train_dpo": ("preference", "dpo"),
    "train_kto": ("preference", "kto"),
    "train_kd": ("sft", "distillation"),
    "train_ppo_ray": ("rl", "ppo"),
}
OTHERS = {
    "batch_inference": "it writes answers or scores to a file for the next command: postgrad "
    "generate RECIPE.toml --to DIR --select best|pairs (docs/generate.md). A run of job = "
    '"rl" samples, scores and trains in one loop',
    "serve_rm": "postgrad serve-reward answers over HTTP (docs/serve-reward.md)",
    "interactive_chat": "postgrad chat RUN_DIR",
    "lora_combiner": "postgrad merge adapter ADAPTER --base MODEL --to DIR",
}
SHORT = {
    "sft": "train_sft",
    "rm": "train_rm",
    "prm": "train_prm",
    "dpo": "train_dpo",
    "kto": "train_kto",
    "kd": "train_kd",
    "ppo": "train_ppo_ray",
}

# section -> "name_before[=name_since]", the same name where no new one follows
_BEFORE = {
    "": "max_norm lr_scheduler lr_warmup_ratio min_lr_ratio use_ms local_rank prompt_max_len "
    "ref_reward_offload",
    "model": "pretrain=model_name_or_path gradient_checkpointing=gradient_checkpointing_enable "
    "gradient_checkpointing_use_reentrant=gradient_checkpointing_reentrant aux_loss_coef beta "
    "ipo=ipo_enable label_smoothing nll_loss_coef loss=loss_type margin_loss=margin_loss_enable "
    "compute_fp32_loss=compute_fp32_loss_enable pretrain_mode=pretrain_mode_enable "
    "desirable_loss_weight undesirable_loss_weight vanilla_loss packing",
    "ref": "ref_pretrain=model_name_or_path ref_offload=offload "
    "ref_num_nodes=num_nodes ref_num_gpus_per_node=num_gpus_per_node",
    "kd": "teacher_model kd_coef=coef teacher_offload",
    "adam": "learning_rate=lr actor_learning_rate=lr l2=weight_decay adam_betas=betas",
    "critic": "critic_learning_rate=adam.lr critic_pretrain=model_name_or_path value_clip "
    "save_value_network critic_num_nodes=num_nodes critic_num_gpus_per_node=num_gpus_per_node",
    "actor": "eps_clip eps_clip_low_high dual_clip entropy_loss_coef=entropy_coef "
    "policy_loss_type actor_num_nodes=num_nodes actor_num_gpus_per_node=num_gpus_per_node "
    "freezing_actor_steps=freezing_steps actor_init_on_gpu=init_on_gpu freeze_visual_encoder",
    "reward": "reward_pretrain=model_name_or_path remote_rm_url=remote_url "
    "normalize_reward=normalize_enable reward_clip_range=clip_range overlong_buffer_len "
    "overlong_penalty_factor stop_properly_penalty_coef reward_num_nodes=num_nodes "
    "reward_num_gpus_per_node=num_gpus_per_node",
    "data": "dataset dataset_probs dataset_split train_split=dataset_split "
    "prompt_data=prompt_dataset prompt_data_probs prompt_split max_samples max_len multiturn "
    "input_key output_key label_key prompt_key chosen_key rejected_key input_template "
    "placeholder_token reward_tokens image_key max_images_per_prompt "
    "apply_chat_template tokenizer_chat_template disable_fast_tokenizer",
    "eval": "eval_dataset=dataset eval_split=split eval_steps=steps eval_temperature=temperature "
    "eval_n_samples_per_prompt=n_samples_per_prompt",
    "train": "train_batch_size=batch_size micro_train_batch_size=micro_batch_size max_epochs seed "
    "num_episodes full_determinism=full_determinism_enable enable_ema ema_beta "
    "use_dynamic_batch=dynamic_batch_enable train_max_tokens_per_gpu=max_tokens_per_gpu "
    "async_train=async_enable async_queue_size partial_rollout=partial_rollout_enable "
    "agent_func_path colocate_all_models=colocate_all colocate_actor_ref colocate_critic_reward",
    "rollout": "rollout_batch_size=batch_size micro_rollout_batch_size=micro_batch_size "
    "n_samples_per_prompt max_new_tokens generate_max_len=max_new_tokens temperature top_p "
    "rollout_max_tokens_per_gpu=max_tokens_per_gpu vllm_generate_batch_size",
    "algo.kl": "init_kl_coef=init_coef kl_target=target kl_horizon=horizon use_kl_loss=use_loss "
    "kl_estimator=estimator",
    "algo.advantage": "advantage_estimator=estimator gamma lambd no_advantage_std_norm=no_std_norm "
    "enable_vllm_is_correction=is_correction_enable vllm_is_correction_type=is_correction_type "
    "vllm_is_truncated_threshold=is_correction_threshold",
    "algo": "dynamic_filtering=dynamic_filtering_enable "
    "dynamic_filtering_reward_range=dynamic_filtering_range",
    "ckpt": "save_path=output_dir ckpt_path=path save_steps save_hf_ckpt=save_hf "
    "disable_ds_ckpt=disable_ds max_ckpt_num=max_num max_ckpt_mem=max_mem best_metric_key "
    "load_checkpoint=load_enable",
    "logger": "logging_steps use_wandb=wandb.key wandb_org=wandb.org wandb_group=wandb.group "
    "wandb_project=wandb.project wandb_run_name=wandb.run_name use_tensorboard=tensorboard_dir "
    "perf",
    "ds": "zero_stage param_dtype zpg adam_offload attn_implementation flash_attn "
    "use_liger_kernel grad_accum_dtype overlap_comm deepcompile use_ds_universal_ckpt "
    "ds_tensor_parallel_size=tensor_parallel_size ring_attn_size "
    "ring_head_stride=ring_attn_head_stride load_in_4bit lora_rank=lora.rank "
    "lora_alpha=lora.alpha lora_dropout=lora.dropout target_modules=lora.target_modules "
    "packing_samples value_head_prefix deepspeed_enable_sleep=enable_sleep",
    "vllm": "vllm_num_engines=num_engines vllm_tensor_parallel_size=tensor_parallel_size "
    "vllm_sync_backend=sync_backend vllm_sync_with_ray=sync_with_ray enable_prefix_caching "
    "enforce_eager vllm_enable_sleep=enable_sleep vllm_gpu_memory_utilization="
    "gpu_memory_utilization",
}  # fmt: skip
_OF_POLICY = (
    "adam.", "muon.", "optim", "max_norm", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio",
)  # fmt: skip

SHARED: dict[str, Any] = {
    "lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.1, "lr_warmup_ratio": 0.03,
    "adam.betas": [0.9, 0.95], "train.seed": 42, "train.batch_size": 128,
    "ds.param_dtype": "bf16", "ds.zero_stage": 2,
}  # fmt: skip
_TEMPLATE = {"data.input_key": "input", "data.input_template": "User: {}\nAssistant: "}
DEFAULTS: dict[str, dict[str, Any]] = {  # where OpenRLHF does something else than we do
    "train_sft": {"adam.lr": 5e-6, "train.max_epochs": 2, "train.micro_batch_size": 8,
                  "data.max_len": 2048, **_TEMPLATE},
    "train_rm": {"adam.lr": 9e-6, "train.max_epochs": 1, "train.micro_batch_size": 1,
                 "data.max_len": 512},
    "train_prm": {"adam.lr": 1e-6, "train.max_epochs": 1, "train.micro_batch_size": 1,
                  "data.max_len": 2048, "data.input_key": "input", "data.label_key": "label",
                  "eval.split": "test"},
    "train_dpo": {"adam.lr": 1e-5, "train.max_epochs": 1, "train.micro_batch_size": 8,
                  "data.max_len": 512, "eval.split": "test"},
    "train_kto": {"adam.lr": 1e-5, "train.max_epochs": 1, "train.micro_batch_size": 8,
                  "data.max_len": 2048, "model.beta": 0.01, **_TEMPLATE},
    "train_kd": {"adam.lr": 5e-6, "train.max_epochs": 1, "train.micro_batch_size": 8,
                 "data.max_len": 2048, "data.output_key": "output", "kd.coef": 0.4, **_TEMPLATE},
    "train_ppo_ray": {"adam.lr": 1e-6, "critic.adam.lr": 9e-6, "train.max_epochs": 1,
                      "train.micro_batch_size": 4, "data.max_len": 2048, "data.input_key": "input",
                      "actor.num_gpus_per_node": 8, "vllm.gpu_memory_utilization": 0.95,
                      "rollout.batch_size": 1024, "rollout.n_samples_per_prompt": 1,
                      "algo.advantage.estimator": "gae", "algo.advantage.lambd": 1.0,
                      "algo.kl.init_coef": 0.01, "algo.kl.estimator": "k1",
                      "critic.value_clip": 0.5, "train.num_episodes": 1,
                      "reward.clip_range": [-10.0, 10.0]},
}  # fmt: skip


def _encoder(draft: Draft, name: str, value: Any, _: str) -> None:
    """All but the language part stays as it is there."""
    if flag(value):
        images.freeze(draft, "vision", "projector")
    else:
        draft.skip(name, value, images.ALL_TRAINED)


RULES: dict[str, Rule] = {
    "model.model_name_or_path": to("model.path"),
    "model.gradient_checkpointing_enable": to("model.gradient_checkpointing", read=flag),
    "model.aux_loss_coef": to("model.router_aux_loss_coef", read=decimal),
    "model.beta": to("algorithm.beta", read=decimal),
    "model.label_smoothing": to("algorithm.label_smoothing", read=decimal),
    "model.nll_loss_coef": to("algorithm.nll_coef", read=decimal),
    "model.desirable_loss_weight": to("algorithm.desirable_weight", read=decimal),
    "model.undesirable_loss_weight": to("algorithm.undesirable_weight", read=decimal),
    "model.loss_type": choice("algorithm.loss", {"sigmoid": "log_sigmoid", "logexp": "log_exp"}),
    "model.margin_loss_enable": to("algorithm.margin", "name its column in data.margin", on),
    "ref.model_name_or_path": to("reference.model.path"),
    "kd.teacher_model": to("teacher.model.path"),
    "kd.teacher_offload": missing("the teacher computes in each micro-batch and stays on its GPU; "
                                  'learner.sharding = "zero3" divides it, and with teacher.top_k '
                                  "it reads the rows once and is freed"),
    "ds.param_dtype": choice("model.dtype", {"bf16": "bfloat16", "fp16": "float16"}),
    "adam.lr": to("learner.lr", read=decimal),
    "adam.betas": to("learner.betas", read=list),
    "adam.eps": to("learner.eps", read=decimal),
    "adam.weight_decay": to("learner.weight_decay", read=decimal),
    "max_norm": to("learner.max_grad_norm", read=decimal),
    "optim": choice("learner.optimizer", {"adam": "adamw", "muon": "muon"}),
    "muon.lr": missing("learner.muon_lr is Muon's rate, of longer steps: 0.2 * sqrt(width of the "
                       "matrix) times those there; divide this rate by as much"),
    "muon.nesterov": to("learner.muon_nesterov", read=flag),
    "muon.momentum": to("learner.muon_momentum", read=decimal),
    "muon.ns_steps": to("learner.muon_ns_steps", read=non_negative),
    "critic.adam.lr": to("critic.learner.lr", read=decimal),
    "data.chosen_key": to("data.chosen"),
    "data.rejected_key": to("data.rejected"),
    "data.prompt_key": to("data.prompt"),
    "data.image_key": to("data.images"),
    "data.max_images_per_prompt": needless("a prompt has as many images as its row"),
    "actor.freeze_visual_encoder": _encoder,
    "data.reward_tokens": missing("a head with two labels judges steps here, not the logits of "
                                  "these tokens; labels that are text are + and -"),
    "data.tokenizer_chat_template": to("data.chat_template"),
    "train.seed": to("seed", read=non_negative),
    "ckpt.path": to("checkpoint.ckpt_path"),
    "ckpt.save_steps": to("checkpoint.save_steps", read=lambda n: max(0, int(n)) or None),
    "ckpt.max_num": to("checkpoint.max_ckpt_num", read=non_negative),
    "ckpt.save_hf": to("checkpoint.save_hf", "there at every checkpoint",
                       lambda switch: "each" if flag(switch) else None),
    "ckpt.load_enable": to("checkpoint.load_checkpoint", read=flag),
    "rollout.temperature": to("rollout.temperature", read=decimal),
    "rollout.top_p": to("rollout.top_p", read=decimal),
    "actor.dual_clip": to("algorithm.dual_clip", read=decimal),
    "actor.entropy_coef": to("algorithm.entropy_coef", read=decimal),
    "train.partial_rollout_enable": missing("answers under way are kept for the next step where "
                                            "train.async_enable says that they may be older"),
    "train.full_determinism_enable": to("learner.deterministic",
                                        read=lambda value: None if flag(value) else False),
    "train.async_queue_size": needless("train.async_enable is off"),
    "ckpt.best_metric_key": missing('say checkpoint.best_metric, such as "eval/accuracy"'),
    "data.dataset_probs": missing("say how much of an epoch a set is: weight in [[data.sets]]"),
    "data.prompt_data_probs": missing("say how much of an epoch a set is: weight in [[data.sets]]"),
    "ds.adam_offload": learning.offload,
    "ds.deepcompile": learning.compiled,
    **family("", "ref.offload reward.offload ref_reward_offload",
             needless("its logprobs are computed once, before the first update; then it is freed")),
    **family("ds.", "packing_samples", needless(common.PACKED)),
    **family("ds.", "attn_implementation flash_attn experts_implementation",
             missing(common.ATTENTION)),
    "ds.use_liger_kernel": missing(common.KERNELS),
    "ds.zpg": missing_above_1(common.HPZ),
    "ds.overlap_comm": missing("torch's FSDP decides which transfers overlap with computing"),
    "ds.grad_accum_dtype": missing("gradients are summed in float32"),
    "ds.enable_sleep": learning.offload_while_sampling,
    "ds.ring_attn_head_stride": missing("ranks of learner.context_parallel exchange keys and "
                                        "values in one way"),
    **family("ds.", "use_universal_ckpt value_head_prefix", needless("DeepSpeed's own")),
    **family("vllm.", "sync_backend sync_with_ray", needless(places.WAY)),
    "vllm.enable_prefix_caching": missing_but(ON, "it is always on with vLLM"),
    **family("vllm.", "num_engines tensor_parallel_size enforce_eager enable_sleep "
             "gpu_memory_utilization", missing("vLLM samples where vllm.num_engines is above 0")),
    **family("", "local_rank actor.init_on_gpu", needless("how processes start")),
    **family("rollout.", "micro_batch_size max_tokens_per_gpu", needless(common.CUT_BY_TOKENS)),
    "rollout.vllm_generate_batch_size": missing("a round asks for the prompts that a step misses"),
    "ptx_coef": needless("its loss is of pretrain_data, which no version since 0.8 reads"),
    "use_ms": missing("models and data come from the Hugging Face hub"),
    "critic.save_value_network": missing("postgrad export --role critic writes it"),
    **family("logger.", "logging_steps wandb.key wandb.org wandb.group wandb.project "
             "wandb.run_name tensorboard_dir perf", needless(common.LOGGING)),
    **family("", "ckpt.disable_ds ckpt.max_mem", missing("checkpoint.max_ckpt_num says how many")),
    **family("", "data.multiturn data.disable_fast_tokenizer data.dataloader_num_workers "
             "model.gradient_checkpointing_reentrant model.compute_fp32_loss_enable "
             "model.packing",
             needless(common.SO_HERE)),
}  # fmt: skip
_OF_MODEL = {f"model.{entry.partition('=')[2] or entry}" for entry in _BEFORE["model"].split()}


def _renamed() -> dict[str, str]:
    names: dict[str, str] = {}
    for section, entries in _BEFORE.items():
        for entry in entries.split():
            before, _, since = entry.partition("=")
            names[before] = f"{section}.{since or before}".lstrip(".")
    return names


RENAMED = _renamed()  # former name -> today's name


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under the names that RULES has: today's names, without "actor." for the policy's."""
    renamed: dict[str, Any] = {}
    for name, value in options.items():
        if name in ("bf16", "fp16"):
            renamed["ds.param_dtype"] = name
            continue
        since = RENAMED.get(name, name)
        bare = since.removeprefix("actor.")
        if since.startswith("actor.") and bare.startswith(_OF_POLICY):
            since = bare
        elif since.startswith("actor.") and f"model.{bare}" in _OF_MODEL:
            since = f"model.{bare}"
        renamed[since] = value
    return renamed


ESTIMATORS: dict[str, tuple[str, str | None]] = {  # -> type, what the loss is divided by
    "gae": ("ppo", None),
    "reinforce": ("reinforce_pp", None),
    "reinforce_baseline": ("reinforce_pp_baseline", None),
    "rloo": ("rloo", "token"),
    "group_norm": ("grpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
}
