set -x
if [ "$#" -lt 2 ]; then
    echo "Usage: run.sh <nproc_per_node> <save_path>"
fi
save_path=${2:-sft-ckpt}
torchrun --standalone --nnodes=1 --nproc_per_node=4 \
    -m verl.trainer.sft_trainer \
    data.train_files=$HOME/data/multiturn/train.parquet \
    data.val_files=$HOME/data/multiturn/test.parquet \
    data.messages_key=messages \
    data.max_length=4096 \
    data.truncation=error \
    data.train_batch_size=96 \
    data.use_dynamic_bsz=False \
    data.micro_batch_size_per_gpu=2 \
    optim.lr=2e-5 \
    optim.lr_warmup_steps_ratio=0.1 \
    optim.lr_scheduler_type=cosine \
    optim.betas="[0.9,0.95]" \
    optim.clip_grad=1.0 \
    engine=fsdp \
    engine.ulysses_sequence_parallel_size=2 \
    engine.model_dtype=bf16 \
    model.path=Qwen/Qwen2.5-1.5B-Instruct \
    model.use_liger=True \
    trainer.default_local_dir=$save_path \
    trainer.test_freq=after_each_epoch \
    trainer.save_freq=after_each_epoch \
    trainer.logger='["console"]' \
    trainer.total_epochs=2
