#!/bin/bash
WORK_DIR=$(cd "$(dirname "$0")/../.." && pwd)
MODEL_PATH="Qwen/Qwen3-4B-Thinking-2507"
SAVE_PATH="${WORK_DIR}/exp/Qwen3-4B-Thinking"
CKPT_ARGS=(
   --actor.model_name_or_path ${MODEL_PATH}
   # --reward.model_name_or_path ${REWARD_MODEL} (isn't used)
   --ckpt.output_dir ${SAVE_PATH}
   --ckpt.path "${SAVE_PATH}/ckpt"
   --ckpt.max_num 3
   --ckpt.save_steps 10
)
ROLLOUT_ARGS=(
   --reward.remote_url http://10.0.0.1:5000/get_reward
   --data.prompt_dataset zhuzilin/dapo-math-17k
   --data.input_key prompt
   --data.label_key label
   --data.max_len 74240
   --rollout.max_new_tokens 64000
   --data.apply_chat_template
   --rollout.batch_size 128
   --rollout.n_samples_per_prompt 8
   --train.batch_size 1024
   --algo.dynamic_filtering_enable
   --algo.dynamic_filtering_range 0.0 1.0
   --train.dynamic_batch_enable
   --train.max_tokens_per_gpu 16192
   --data.max_samples 128000
   --train.num_episodes 1
)
OPTIMIZER_ARGS=(
   --algo.advantage.estimator reinforce_baseline
   --actor.adam.lr 5e-7
   --actor.eps_clip_low_high 0.2 0.27
   --algo.kl.init_coef 1e-5
   --algo.kl.use_loss
   --algo.kl.estimator k2
   --algo.advantage.is_correction_enable
   --algo.advantage.is_correction_type icepop
)
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \
   ${CKPT_ARGS[@]} \
   "${ROLLOUT_ARGS[@]}" \
   --actor.num_gpus_per_node 1 \
   ${OPTIMIZER_ARGS[@]}
