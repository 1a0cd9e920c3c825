python mason.py --num_nodes 2 --gpus 8 -- accelerate launch \
    --mixed_precision bf16 --num_processes 8 --use_deepspeed \
    open_instruct/reward_modeling.py \
    --exp_name tulu3_8b_rm \
    --model_name_or_path allenai/Llama-3.1-Tulu-3-8B-SFT \
    --dataset_mixer_list allenai/llama-3.1-tulu-3-8b-preference-mixture 1.0 allenai/extra-preferences 400 \
    --max_token_length 4096 \
    --max_prompt_token_length 2048 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --learning_rate 3e-6 \
    --lr_scheduler_type linear \
    --num_train_epochs 1 \
    --gradient_checkpointing \
    --with_tracking \
    --seed 8
