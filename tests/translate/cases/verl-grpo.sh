#!/usr/bin/env bash
set -xeuo pipefail

DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
DATA_HOME=${DATA_HOME:-"${HOME}/verl"}
MODEL=${MODEL:-Qwen/Qwen3-8B}
GSM8K=${GSM8K:-${DATA_HOME}/data/gsm8k}
MATH=${MATH:-${DATA_HOME}/data/math}
NAME=${NAME:-qwen3_8b_$(date +%m%d)}

case "${DEVICE}" in
    gpu)
        gpus=${GPUS:-8}
        sp=${SP:-2}
        ;;
    npu)
        gpus=${GPUS:-16}
        sp=${SP:-4}
        ;;
esac

DATA=(
    data.train_files="['$GSM8K/train.parquet', '$MATH/train.parquet']"
    data.val_files="['$GSM8K/test.parquet', '$MATH/test.parquet']"
    data.train_batch_size=512
    data.max_prompt_length=1024
    data.max_response_length=$((1024 * 3))
    data.filter_overlong_prompts=True
    data.truncation='error'
    data.shuffle=False
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=2e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp}
    actor_rollout_ref.ref.fsdp_config.param_offload=True
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.max_num_seqs=128
    actor_rollout_ref.rollout.enable_chunked_prefill=False
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True
)
TRAINER=(
    trainer.logger='["console","wandb"]'
    trainer.project_name=verl_grpo
    trainer.experiment_name="${NAME}"
    trainer.default_local_dir=ckpts/qwen3_8b
    trainer.n_gpus_per_node=${gpus}
    trainer.nnodes=1
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
)
if [ "${DEVICE}" = npu ]; then
    ACTOR+=(actor_rollout_ref.actor.use_torch_compile=False)
fi

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    algorithm.use_kl_in_reward=False \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@"
