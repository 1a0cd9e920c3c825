# Samples up to two steps older than the policy, with engines on GPUs of their own.
uv run examples/run_grpo.py --config configs/nemo-rl-own-data.yaml \
    grpo.async_grpo.enabled=true grpo.async_grpo.max_trajectory_age_steps=2 \
    ++grpo.async_grpo.in_flight_weight_updates=True \
    loss_fn.use_importance_sampling_correction=true \
    policy.generation.colocated.enabled=false \
    policy.generation.colocated.resources.gpus_per_node=4 \
    +policy.generation.vllm_kwargs.max_num_seqs=64 ~loss_fn.kl_input_clamp_value
