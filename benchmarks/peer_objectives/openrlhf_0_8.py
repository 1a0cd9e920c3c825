"""OpenRLHF's objectives of before 0.11, as 0.8.4 has them: RL, and its programs kto, kd and prm."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer_objectives.comparing import Case, Known, Lost
from benchmarks.peer_objectives.learning import words_of
from benchmarks.peer_objectives.openrlhf import OpenRLHF, flat
from benchmarks.peer_objectives.ours import Outcome, outcome_of
from benchmarks.peer_objectives.samples import LONGEST, Samples

BASE: dict[str, Any] = {
    "pretrain": "m", "prompt_data": "d", "n_samples_per_prompt": 4, "generate_max_len": LONGEST,
    "train_batch_size": 20, "rollout_batch_size": 5, "micro_train_batch_size": 20,
    "reward_pretrain": "r", "init_kl_coef": 0.0, "actor_num_gpus_per_node": 1,
}  # fmt: skip


class Before:
    """A step of 0.8.4's PPO trainer. micro: samples of a micro-batch, whose losses are averaged."""

    def __init__(self, checkout: Path) -> None:
        peer = OpenRLHF(checkout)
        self.loss, self.utils, self.maker = peer.loss, peer.utils, peer.maker

    def outcome(self, options: Mapping[str, Any], samples: Samples) -> Outcome:
        """Rewards to the mean loss of micro-batches."""
        at = options.get
        estimator, beta = at("advantage_estimator", "gae"), at("init_kl_coef", 0.0)
        kind, in_loss = at("kl_estimator", "k1"), at("use_kl_loss", False)
        mask, old, ref = (samples.padded_mask, *map(samples.padded, (samples.old, samples.ref)))
        kl = self.utils.compute_approx_kl(old, ref, kind).double() * mask
        experience = SimpleNamespace(
            info={}, rewards=torch.from_numpy(samples.rewards.copy()), action_mask=mask.bool(),
            kl=torch.zeros_like(kl) if in_loss else kl, values=samples.padded(samples.old_values),
        )  # fmt: skip
        maker = self.maker.RemoteExperienceMaker.__new__(self.maker.RemoteExperienceMaker)
        maker.args = SimpleNamespace(
            n_samples_per_prompt=4, advantage_estimator=estimator, gamma=at("gamma", 1.0),
            lambd=at("lambd", 1.0), reward_clip_range=at("reward_clip_range", (-10, 10)),
            no_advantage_std_norm=at("no_advantage_std_norm", False),
        )  # fmt: skip
        maker.strategy, maker.advantage_estimator = SimpleNamespace(args=maker.args), estimator
        maker.kl_ctl = SimpleNamespace(value=0.0 if in_loss else beta)
        maker.compute_advantages_and_returns([experience])
        leaves = {name: samples.padded(getattr(samples, name)).requires_grad_()
                  for name in ("logprobs", "entropy", "values")}  # fmt: skip
        low, high = at("eps_clip_low_high", [at("eps_clip", 0.2)] * 2)
        policy = self.loss.PolicyLoss(low, high)
        value = self.loss.ValueLoss(at("value_clip", 0.5))
        total, micro = torch.zeros((), dtype=torch.float64), at("micro_train_batch_size", 20)
        for rows in np.split(np.arange(len(samples)), len(samples) // micro):
            part, their_logprobs = mask[rows], leaves["logprobs"][rows]
            loss = policy(their_logprobs, old[rows], experience.advantages[rows], part)[0]
            if in_loss:
                token_kl = self.utils.compute_approx_kl(their_logprobs, ref[rows], kind)
                loss = loss + beta * self.utils.masked_mean(token_kl, part)
            if coefficient := at("entropy_loss_coef"):
                entropy = self.utils.masked_mean(leaves["entropy"][rows], part)
                loss = loss - coefficient * entropy
            if estimator == "gae":
                before = samples.padded(samples.old_values)[rows]
                loss = loss + value(leaves["values"][rows], before, experience.returns[rows], part)
            total = total + loss * len(rows) / len(samples)
        return outcome_of(total, leaves, samples)


def cases(checkout: Path) -> Iterator[Case | Lost]:
    """All that is compared of train_ppo_ray."""
    peer = Before(checkout)
    for name, options, known_difference in CASES:
        stated = BASE | options
        yield Case(f"ppo_ray, {name}", words_of("ppo", stated), partial(peer.outcome, stated), flat,
                   known_difference)  # fmt: skip


def halves(texts: Any) -> list[Any]:
    """The rows of two micro-batches, one by one."""
    return np.split(np.arange(len(texts)), 2)


def joined(parts: list[Tensor]) -> Tensor:
    """The mean of micro-batches' losses."""
    return torch.stack(parts).mean()


LATE = Known("the KL is taken after the baseline and from each token on there, before it here",
             "there after it, token by token")  # fmt: skip
MICRO = Known("tokens are averaged within each micro-batch there, over the update here",
              "before 0.11 within each micro-batch")  # fmt: skip
CLAMPED = Known("the KL of a token has no bound in 0.8.4, and one of 10 here and in later versions",
                "as there since 0.8.6")  # fmt: skip
WHITENED = Known("advantages are whitened too there", "before 0.8.5 whitened too")
KL = {"init_kl_coef": 0.05}
CASES: tuple[tuple[str, dict[str, Any], Known | None], ...] = (
    *((estimator, {"advantage_estimator": estimator}, WHITENED if estimator == "rloo" else None)
      for estimator in ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo")),
    *((f"{estimator}, no_advantage_std_norm", {
        "advantage_estimator": estimator, "no_advantage_std_norm": True}, None)
      for estimator in ("gae", "reinforce", "reinforce_baseline")),
    *((f"{estimator}, micro-batches of 4", {
        "advantage_estimator": estimator, "micro_train_batch_size": 4}, MICRO)
      for estimator in ("gae", "group_norm", "reinforce_baseline")),
    ("gae, gamma 0.9, lambd 0.8, value_clip 0.2", {
        "advantage_estimator": "gae", "gamma": 0.9, "lambd": 0.8, "value_clip": 0.2}, None),
    *((f"{estimator}, KL in the reward, {kind}", {
        "advantage_estimator": estimator, **KL, "kl_estimator": kind}, known_difference)
      for estimator, kind, known_difference in (
          ("gae", "k1", None), ("reinforce", "k1", None), ("reinforce", "k2", CLAMPED),
          ("reinforce", "k3", CLAMPED), ("group_norm", "k1", LATE), ("rloo", "k1", LATE),
          ("reinforce_baseline", "k1", LATE), ("dr_grpo", "k1", LATE))),
    *((f"KL in the loss, {kind}", {
        "advantage_estimator": "group_norm", **KL, "use_kl_loss": True, "kl_estimator": kind},
       CLAMPED if kind == "k3" else None) for kind in ("k1", "k2", "k3")),
    ("reward_clip_range", {"advantage_estimator": "reinforce", "reward_clip_range": [-0.5, 0.5]},
     None),
    ("reward_clip_range, group_norm", {
        "advantage_estimator": "group_norm", "reward_clip_range": [-0.5, 0.5]},
     Known("rewards are bounded behind the baseline there, before it here",
           "there of what the baseline leaves of them")),
    ("eps_clip 0.1", {"advantage_estimator": "group_norm", "eps_clip": 0.1}, None),
    ("eps_clip_low_high 0.1 0.28", {
        "advantage_estimator": "group_norm", "eps_clip_low_high": [0.1, 0.28]}, None),
    ("entropy_loss_coef 0.01", {
        "advantage_estimator": "group_norm", "entropy_loss_coef": 0.01}, None),
)  # fmt: skip
