read -r -d '' training_commands <<EOT
openrlhf.cli.train_kto \
   --save_path ./checkpoint/llama3-8b-kto \
   --train_batch_size 64 \
   --micro_train_batch_size 1 \
   --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
   --bf16 \
   --max_epochs 1 \
   --max_len 8192 \
   --zero_stage 3 \
   --learning_rate 5e-7 \
   --dataset Dylan2048/ultrafeedback-unpaired-preferences \
   --apply_chat_template \
   --input_key instruction \
   --output_key response \
   --label_key score \
   --beta 0.1 \
   --max_samples 1024
EOT
    # --use_wandb [WANDB_TOKENS] don't forget
deepspeed --module $training_commands
