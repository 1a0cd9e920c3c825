"""OpenRLHF's objectives: the experience maker's advantages, PolicyLoss, ValueLoss."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peer_objectives.comparing import Case, Known
from benchmarks.peer_objectives.loading import Checkout
from benchmarks.peer_objectives.ours import Outcome, outcome_of
from benchmarks.peer_objectives.samples import LONGEST, Samples, drawn

BASE: dict[str, Any] = {
    "actor.model_name_or_path": "m", "data.prompt_dataset": "d", "rollout.n_samples_per_prompt": 4,
    "rollout.max_new_tokens": LONGEST, "train.batch_size": 20, "rollout.batch_size": 5,
    "reward.model_name_or_path": "r", "algo.kl.init_coef": 0.0, "actor.num_gpus_per_node": 1,
}  # fmt: skip
ADVANTAGE, ACTOR, KL = "algo.advantage.", "actor.", "algo.kl."


class OpenRLHF:
    """A step of the PPO trainer, with OpenRLHF's own functions."""

    def __init__(self, checkout: Path) -> None:
        files = Checkout(checkout / "openrlhf", [
            "deepspeed", "flash_attn", "openrlhf.trainer.ray", "openrlhf.utils",
            "openrlhf.trainer.ppo_utils.experience"])  # fmt: skip
        self.loss: Any = files.module("openrlhf.models.loss")
        self.utils: Any = files.module("openrlhf.models.utils")
        self.maker: Any = files.module("openrlhf.trainer.ppo_utils.experience_maker")

    def outcome(self, options: dict[str, Any], samples: Samples) -> Outcome:
        """Rewards to a loss, on one update of all samples."""
        at = options.get
        estimator, beta = at(f"{ADVANTAGE}estimator", "gae"), at(f"{KL}init_coef", 0.0)
        kind, in_loss = at(f"{KL}estimator", "k1"), at(f"{KL}use_loss", False)
        mask, old, ref = (samples.padded_mask, *map(samples.padded, (samples.old, samples.ref)))
        kl = self.utils.compute_approx_kl(old, ref, kind).double() * mask
        experience = SimpleNamespace(
            index=list(range(len(samples))), info={},
            rewards=torch.from_numpy(samples.rewards.copy()),
            kl=torch.zeros_like(kl) if in_loss else kl, action_mask=mask.bool(),
            values=samples.padded(samples.old_values),
        )  # fmt: skip
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=4),
            algo=SimpleNamespace(advantage=SimpleNamespace(
                estimator=estimator, gamma=at(f"{ADVANTAGE}gamma", 1.0),
                lambd=at(f"{ADVANTAGE}lambd", 1.0),
                no_std_norm=at(f"{ADVANTAGE}no_std_norm", False))),
            reward=SimpleNamespace(clip_range=at("reward.clip_range", (-10, 10)),
                                   overlong_buffer_len=None, stop_properly_penalty_coef=None),
        )  # fmt: skip
        maker = self.maker.RemoteExperienceMaker.__new__(self.maker.RemoteExperienceMaker)
        maker.strategy, maker.advantage_estimator = SimpleNamespace(args=args), estimator
        maker.kl_ctl = SimpleNamespace(value=0.0 if in_loss else beta)
        maker.compute_advantages_and_returns([experience])
        leaves = {name: samples.padded(getattr(samples, name)).requires_grad_()
                  for name in ("logprobs", "entropy", "values")}  # fmt: skip
        denominators = {"batch_num_tokens": mask.sum(), "global_batch_size": float(len(samples))}
        low, high = at(f"{ACTOR}eps_clip_low_high", [0.2, 0.2])
        policy = self.loss.PolicyLoss(
            low, high, at(f"{ACTOR}dual_clip"),
            policy_loss_type=at(f"{ACTOR}policy_loss_type", "ppo"),
            enable_vllm_is_correction=at(f"{ADVANTAGE}is_correction_enable", False),
            vllm_is_truncated_threshold=at(f"{ADVANTAGE}is_correction_threshold", [0.5, 5.0]),
            vllm_is_correction_type=at(f"{ADVANTAGE}is_correction_type", "tis"))  # fmt: skip
        loss = policy(leaves["logprobs"], old, experience.advantages, mask,
                      samples.padded(samples.sampled), **denominators)[0]  # fmt: skip
        if in_loss:
            token_kl = self.utils.compute_approx_kl(leaves["logprobs"], ref, kind)
            loss = loss + beta * self.loss.aggregate_loss(token_kl, mask, **denominators)
        if coefficient := at(f"{ACTOR}entropy_coef"):
            loss = loss - coefficient * self.loss.aggregate_loss(
                leaves["entropy"], mask, **denominators
            )
        if estimator == "gae":
            value = self.loss.ValueLoss(at("critic.value_clip", 0.5))
            loss = loss + value(leaves["values"], samples.padded(samples.old_values),
                                experience.returns, mask, **denominators)  # fmt: skip
        return outcome_of(loss, leaves, samples)


def flat(seed: int) -> Samples:
    """Without an environment's tokens."""
    return drawn(seed, environment=False)


def cases(checkout: Path) -> Iterator[Case]:
    """All that is compared."""
    peer = OpenRLHF(checkout)
    for name, options, known_difference in CASES:
        stated = BASE | options
        words = ["ppo_ray", *(word for key, value in stated.items() for word in flag(key, value))]

        def outcome(samples: Samples, stated: dict[str, Any] = stated) -> Outcome:
            return peer.outcome(stated, samples)

        draw = drawn if "several turns" in name else flat
        yield Case(name, words, outcome, draw, known_difference)


def flag(name: str, value: Any) -> Iterator[str]:
    """--name value ..."""
    yield f"--{name}"
    if value is not True:
        yield from map(str, value if isinstance(value, list | tuple) else [value])


LATE = Known("the KL is taken after the baseline and from each token on there, before it here",
             "there after it, token by token")  # fmt: skip
TURNS = Known("values of an environment's tokens are 0 there, and skipped here")
OTHERS = Known("a KL and an entropy are means of tokens there, of sequences here, as GSPO's loss",
               "a mean over tokens there")  # fmt: skip
IS = f"{ADVANTAGE}is_correction_"
CASES: tuple[tuple[str, dict[str, Any], Known | None], ...] = (
    *((estimator, {f"{ADVANTAGE}estimator": estimator}, None)
      for estimator in ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo")),
    *((f"{estimator}, no_std_norm", {
        f"{ADVANTAGE}estimator": estimator, f"{ADVANTAGE}no_std_norm": True}, None)
      for estimator in ("gae", "reinforce", "reinforce_baseline")),
    ("gae, gamma 0.9, lambd 0.8, value_clip 0.2", {
        f"{ADVANTAGE}estimator": "gae", f"{ADVANTAGE}gamma": 0.9, f"{ADVANTAGE}lambd": 0.8,
        "critic.value_clip": 0.2}, None),
    ("gae, several turns", {f"{ADVANTAGE}estimator": "gae", f"{ADVANTAGE}lambd": 0.8}, TURNS),
    *((f"{estimator}, KL in the reward, {kind}", {
        f"{ADVANTAGE}estimator": estimator, f"{KL}init_coef": 0.05,
        f"{KL}estimator": kind}, known_difference)
      for estimator, kind, known_difference in (
          ("gae", "k1", None), ("reinforce", "k1", None), ("reinforce", "k2", None),
          ("reinforce", "k3", None), ("group_norm", "k1", LATE), ("rloo", "k1", LATE),
          ("reinforce_baseline", "k1", LATE))),
    *((f"KL in the loss, {kind}", {
        f"{ADVANTAGE}estimator": "group_norm", f"{KL}init_coef": 0.05, f"{KL}use_loss": True,
        f"{KL}estimator": kind}, None) for kind in ("k1", "k2", "k3")),
    ("reward.clip_range", {f"{ADVANTAGE}estimator": "reinforce", "reward.clip_range": [-0.5, 0.5]},
     None),
    ("clip 0.1 and 0.28, dual_clip 1.5", {
        f"{ADVANTAGE}estimator": "group_norm", f"{ACTOR}eps_clip_low_high": [0.1, 0.28],
        f"{ACTOR}dual_clip": 1.5}, None),
    ("entropy_coef 0.01", {
        f"{ADVANTAGE}estimator": "group_norm", f"{ACTOR}entropy_coef": 0.01}, None),
    *((f"gspo, {estimator}", {
        f"{ADVANTAGE}estimator": estimator, f"{ACTOR}policy_loss_type": "gspo"}, None)
      for estimator in ("group_norm", "dr_grpo")),
    ("gspo, KL and entropy", {
        f"{ADVANTAGE}estimator": "group_norm", f"{ACTOR}policy_loss_type": "gspo",
        f"{KL}init_coef": 0.05, f"{KL}use_loss": True, f"{ACTOR}entropy_coef": 0.01}, OTHERS),
    ("gspo, is_correction", {
        f"{ADVANTAGE}estimator": "group_norm", f"{ACTOR}policy_loss_type": "gspo",
        f"{IS}enable": True}, None),
    *((f"is_correction {kind}, 0.9 to 1.1", {
        f"{ADVANTAGE}estimator": "group_norm", f"{IS}enable": True, f"{IS}type": kind,
        f"{IS}threshold": [0.9, 1.1]}, None)
      for kind in ("tis", "icepop", "seq-mask-tis")),
)  # fmt: skip
