"""What Python programs use: `from postgrad import ...` gives these names.

Nothing here imports torch before something is trained, evaluated or exported.
"""

from postgrad.algorithms.aot import AOT
from postgrad.algorithms.base import (
    PreferenceAlgorithm,
    RewardAlgorithm,
    RolloutAlgorithm,
)
from postgrad.algorithms.bradley_terry import BradleyTerry
from postgrad.algorithms.cispo import CISPO
from postgrad.algorithms.cpo import CPO
from postgrad.algorithms.dapo import DAPO
from postgrad.algorithms.distillation import Distillation
from postgrad.algorithms.dpo import DPO
from postgrad.algorithms.dr_grpo import DrGRPO
from postgrad.algorithms.gdpo import GDPO
from postgrad.algorithms.gmpo import GMPO
from postgrad.algorithms.gpg import GPG
from postgrad.algorithms.grpo import GRPO
from postgrad.algorithms.gspo import GSPO
from postgrad.algorithms.ipo import IPO
from postgrad.algorithms.kto import KTO
from postgrad.algorithms.maxrl import MaxRL
from postgrad.algorithms.on_policy_distillation import OnPolicyDistillation
from postgrad.algorithms.online_dpo import OnlineDPO
from postgrad.algorithms.opo import OPO
from postgrad.algorithms.orpo import ORPO
from postgrad.algorithms.pass_at_k import PassAtK
from postgrad.algorithms.ppo import PPO
from postgrad.algorithms.process_reward import ProcessReward
from postgrad.algorithms.reinforce_pp import ReinforcePP
from postgrad.algorithms.reinforce_pp_baseline import ReinforcePPBaseline
from postgrad.algorithms.remax import ReMax
from postgrad.algorithms.rloo import RLOO
from postgrad.algorithms.sapo import SAPO
from postgrad.algorithms.sft import SFT
from postgrad.algorithms.simpo import SimPO
from postgrad.algorithms.vespo import VESPO
from postgrad.algorithms.wpo import WPO
from postgrad.api.jobs import evaluate, resume, sweep, train
from postgrad.api.run import Run, RunsOfSweep
from postgrad.core.errors import PostgradError, RunError, UsageError
from postgrad.recipe.load import load_recipe
from postgrad.recipe.recipe import PreferenceRecipe, RewardRecipe, RLRecipe, SFTRecipe

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
