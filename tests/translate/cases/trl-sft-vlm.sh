# Its rows are made by code of the script, and none is cut.
accelerate launch --num_processes 2 \
    examples/scripts/sft_vlm_gemma3.py \
    --dataset_name FanqingM/MMIU-Benchmark \
    --dataset_train_split test \
    --model_name_or_path google/gemma-3-4b-it \
    --per_device_train_batch_size 1 \
    --max_length 512 \
    --output_dir Gemma-3-4B-SFT-MMIU \
    --use_peft \
    --lora_target_modules all-linear \
    --attn_implementation eager
