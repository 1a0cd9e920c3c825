"""postgrad post-trains language models: SFT and reinforcement learning from verifiable rewards."""

__version__ = "0.1.0"
