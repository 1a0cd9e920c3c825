"""postgrad post-trains language models: SFT, reward models, preferences, PPO, RL from verifiable
rewards.

The public names are those of `postgrad.api`, imported when they are asked for: `import postgrad`
alone costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from postgrad._version import __version__ as __version__

if TYPE_CHECKING:
    from postgrad.api import *  # noqa: F403
# ruff: noqa: F405

# Stated here too: libraries ask modules for names of all kinds (pickle does), and the answer "no"
# must need no import, least of all in vLLM's processes, which lack postgrad's dependencies.
__all__ = [
    "AOT",
    "CISPO",
    "CPO",
    "DAPO",
    "DPO",
    "GDPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "IPO",
    "KTO",
    "OPO",
    "ORPO",
    "PPO",
    "RLOO",
    "SAPO",
    "SFT",
    "VESPO",
    "WPO",
    "BradleyTerry",
    "Distillation",
    "DrGRPO",
    "GiGPO",
    "MaxRL",
    "OnPolicyDistillation",
    "OnlineDPO",
    "PassAtK",
    "PostgradError",
    "PreferenceAlgorithm",
    "PreferenceRecipe",
    "ProcessReward",
    "RLRecipe",
    "ReMax",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "RewardAlgorithm",
    "RewardRecipe",
    "RolloutAlgorithm",
    "Run",
    "RunError",
    "RunsOfSweep",
    "SFTRecipe",
    "SimPO",
    "UsageError",
    "evaluate",
    "load_recipe",
    "resume",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("postgrad.api"), name)
    raise AttributeError(f"module 'postgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
