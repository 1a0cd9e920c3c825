"""What Python programs use: `from postgrad import ...` gives these names.

Nothing here imports torch before something is trained, evaluated or exported.
"""

from postgrad.algorithms.aot import AOT as AOT
from postgrad.algorithms.base import PreferenceAlgorithm as PreferenceAlgorithm
from postgrad.algorithms.base import RewardAlgorithm as RewardAlgorithm
from postgrad.algorithms.base import RolloutAlgorithm as RolloutAlgorithm
from postgrad.algorithms.bradley_terry import BradleyTerry as BradleyTerry
from postgrad.algorithms.cispo import CISPO as CISPO
from postgrad.algorithms.cpo import CPO as CPO
from postgrad.algorithms.dapo import DAPO as DAPO
from postgrad.algorithms.distillation import Distillation as Distillation
from postgrad.algorithms.dpo import DPO as DPO
from postgrad.algorithms.dr_grpo import DrGRPO as DrGRPO
from postgrad.algorithms.gdpo import GDPO as GDPO
from postgrad.algorithms.gigpo import GiGPO as GiGPO
from postgrad.algorithms.gmpo import GMPO as GMPO
from postgrad.algorithms.gpg import GPG as GPG
from postgrad.algorithms.grpo import GRPO as GRPO
from postgrad.algorithms.gspo import GSPO as GSPO
from postgrad.algorithms.ipo import IPO as IPO
from postgrad.algorithms.kto import KTO as KTO
from postgrad.algorithms.maxrl import MaxRL as MaxRL
from postgrad.algorithms.on_policy_distillation import OnPolicyDistillation as OnPolicyDistillation
from postgrad.algorithms.online_dpo import OnlineDPO as OnlineDPO
from postgrad.algorithms.opo import OPO as OPO
from postgrad.algorithms.orpo import ORPO as ORPO
from postgrad.algorithms.pass_at_k import PassAtK as PassAtK
from postgrad.algorithms.ppo import PPO as PPO
from postgrad.algorithms.process_reward import ProcessReward as ProcessReward
from postgrad.algorithms.reinforce_pp import ReinforcePP as ReinforcePP
from postgrad.algorithms.reinforce_pp_baseline import ReinforcePPBaseline as ReinforcePPBaseline
from postgrad.algorithms.remax import ReMax as ReMax
from postgrad.algorithms.rloo import RLOO as RLOO
from postgrad.algorithms.sapo import SAPO as SAPO
from postgrad.algorithms.sft import SFT as SFT
from postgrad.algorithms.simpo import SimPO as SimPO
from postgrad.algorithms.vespo import VESPO as VESPO
from postgrad.algorithms.wpo import WPO as WPO
from postgrad.api.jobs import evaluate as evaluate
from postgrad.api.jobs import resume as resume
from postgrad.api.jobs import sweep as sweep
from postgrad.api.jobs import train as train
from postgrad.api.run import Run as Run
from postgrad.api.run import RunsOfSweep as RunsOfSweep
from postgrad.core.errors import PostgradError as PostgradError
from postgrad.core.errors import RunError as RunError
from postgrad.core.errors import UsageError as UsageError
from postgrad.recipe.load import load_recipe as load_recipe
from postgrad.recipe.recipe import PreferenceRecipe as PreferenceRecipe
from postgrad.recipe.recipe import RewardRecipe as RewardRecipe
from postgrad.recipe.recipe import RLRecipe as RLRecipe
from postgrad.recipe.recipe import SFTRecipe as SFTRecipe
