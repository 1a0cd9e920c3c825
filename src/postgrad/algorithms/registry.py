"""Algorithms by the name a recipe uses; your own is "package.module:Class"."""

from postgrad.algorithms.base import Algorithm
from postgrad.core.errors import UsageError
from postgrad.core.text import resolve

ALGORITHMS = {
    "sft": "postgrad.algorithms.sft:SFT",
    "distillation": "postgrad.algorithms.distillation:Distillation",
    "grpo": "postgrad.algorithms.grpo:GRPO",
    "dr_grpo": "postgrad.algorithms.dr_grpo:DrGRPO",
    "dapo": "postgrad.algorithms.dapo:DAPO",
    "gspo": "postgrad.algorithms.gspo:GSPO",
    "cispo": "postgrad.algorithms.cispo:CISPO",
    "reinforce_pp": "postgrad.algorithms.reinforce_pp:ReinforcePP",
    "reinforce_pp_baseline": "postgrad.algorithms.reinforce_pp_baseline:ReinforcePPBaseline",
    "rloo": "postgrad.algorithms.rloo:RLOO",
    "sapo": "postgrad.algorithms.sapo:SAPO",
    "gmpo": "postgrad.algorithms.gmpo:GMPO",
    "vespo": "postgrad.algorithms.vespo:VESPO",
    "gpg": "postgrad.algorithms.gpg:GPG",
    "opo": "postgrad.algorithms.opo:OPO",
    "maxrl": "postgrad.algorithms.maxrl:MaxRL",
    "pass_at_k": "postgrad.algorithms.pass_at_k:PassAtK",
    "gdpo": "postgrad.algorithms.gdpo:GDPO",
    "gigpo": "postgrad.algorithms.gigpo:GiGPO",
    "remax": "postgrad.algorithms.remax:ReMax",
    "on_policy_distillation": "postgrad.algorithms.on_policy_distillation:OnPolicyDistillation",
    "ppo": "postgrad.algorithms.ppo:PPO",
    "online_dpo": "postgrad.algorithms.online_dpo:OnlineDPO",
    "bradley_terry": "postgrad.algorithms.bradley_terry:BradleyTerry",
    "process_reward": "postgrad.algorithms.process_reward:ProcessReward",
    "dpo": "postgrad.algorithms.dpo:DPO",
    "ipo": "postgrad.algorithms.ipo:IPO",
    "simpo": "postgrad.algorithms.simpo:SimPO",
    "cpo": "postgrad.algorithms.cpo:CPO",
    "wpo": "postgrad.algorithms.wpo:WPO",
    "aot": "postgrad.algorithms.aot:AOT",
    "kto": "postgrad.algorithms.kto:KTO",
    "orpo": "postgrad.algorithms.orpo:ORPO",
}


def algorithm_class(name: str) -> type[Algorithm]:
    """The class that `name` stands for. Raises UsageError when there is none."""
    algorithm = resolve(name, ALGORITHMS, "algorithm")
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise UsageError(
            f"algorithm {name!r} is not a subclass of postgrad.algorithms.base.Algorithm"
        )
    if algorithm.__abstractmethods__:
        missing = ", ".join(sorted(algorithm.__abstractmethods__))
        raise UsageError(f"algorithm {name!r} has no method {missing}")
    return algorithm
