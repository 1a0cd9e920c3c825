# Two configs, the second laid over the first, and a flag that wins over both.
uv run rl @ configs/prime-rl-base.toml @ configs/prime-rl-over.toml \
    --max-steps 300 --trainer.model.ep 4 --no-clean
