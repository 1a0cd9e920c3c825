"""The loops: SFT, RL, evaluation, and pipelines of them."""
