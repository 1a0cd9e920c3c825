"""verl's objectives: advantages, policy losses, KL, aggregation, corrections, the critic's loss."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer_objectives.comparing import Case, Known
from benchmarks.peer_objectives.loading import Checkout
from benchmarks.peer_objectives.ours import Outcome, outcome_of
from benchmarks.peer_objectives.samples import LONGEST, Samples, drawn

ACTOR = "actor_rollout_ref.actor."
CORRECTION = "algorithm.rollout_correction."
BASE = (
    "ppo", "actor_rollout_ref.model.path=Qwen/Qwen3-4B", "actor_rollout_ref.rollout.n=4",
    "data.train_files=gsm8k/train.parquet", f"data.max_response_length={LONGEST}",
    f"{ACTOR}ppo_micro_batch_size_per_gpu=8", "trainer.n_gpus_per_node=1",
)  # fmt: skip


class Verl:
    """The trainer's steps from rewards to a loss, with verl's own functions (trainer/ppo/v1)."""

    def __init__(self, checkout: Path) -> None:
        files = Checkout(checkout / "verl", ("omegaconf", "tensordict", "hydra", "codetiming"))
        files.module("verl.utils").__dict__.update(
            as_torch_index=files.module("verl.utils.groupwise").as_torch_index,
            group_mean_std=files.module("verl.utils.groupwise").group_mean_std,
        )
        self.core: Any = files.module("verl.trainer.ppo.core_algos")
        self.correcting: Any = files.module("verl.trainer.ppo.rollout_corr_helper")
        self.correcting.DataProto = SimpleNamespace(
            from_dict=lambda tensors: SimpleNamespace(batch=tensors)
        )
        self.actor: Any = files.module("verl.workers.config.actor").ActorConfig
        self.policy_loss: Any = files.module("verl.workers.config.actor").PolicyLossConfig

    def config(self, options: dict[str, Any]) -> Any:
        """ActorConfig with verl's own defaults, but for `clip_ratio_low` and `_high`, which its
        YAML has too.
        """
        read = {key.removeprefix(ACTOR): value for key, value in options.items()
                if key.startswith(ACTOR)}  # fmt: skip
        of_loss = {key.removeprefix("policy_loss."): read.pop(key) for key in list(read)
                   if key.startswith("policy_loss.")}  # fmt: skip
        of_loss["rollout_correction"] = {
            key.removeprefix(CORRECTION): value for key, value in options.items()
            if key.startswith(CORRECTION)}  # fmt: skip
        return self.actor(strategy="fsdp", rollout_n=4, policy_loss=self.policy_loss(**of_loss),
                          **read)  # fmt: skip

    def advantages(
        self, options: dict[str, Any], samples: Samples, mask: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """compute_advantage of ray_trainer.py, which hands `norm_adv_by_std_in_grpo` to "grpo"."""
        name = options["algorithm.adv_estimator"]
        gamma, lam = (options.get(f"algorithm.{key}", 1.0) for key in ("gamma", "lam"))
        if name == "gae":
            values = samples.padded(samples.old_values)
            return self.core.compute_gae_advantage_return(scores, values, mask, gamma, lam)
        function, more = self.core.get_adv_estimator_fn(name), {}
        if name == "grpo":
            key = "norm_adv_by_std_in_grpo"
            more[key] = options.get(f"algorithm.{key}", True)
        elif name == "remax":
            return self._remax(samples, mask, scores)
        if name == "gdpo":
            more = {
                "batch": {
                    "prompts": torch.zeros(len(samples), 0),
                    "attention_mask": mask_all(samples),
                },
                "non_tensor_batch": samples.components,
            }
        config = type("Algo", (dict,), {"__getattr__": dict.get})(
            gamma=gamma, gdpo_reward_keys=list(samples.components))  # fmt: skip
        return function(token_level_rewards=scores, response_mask=mask, index=samples.group,
                        config=config, **more)  # fmt: skip

    def _remax(self, samples: Samples, mask: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Here sample 0 is the greedy one, which verl samples apart and does not train on."""
        _, first = np.unique(samples.group, return_index=True)
        baselines = torch.from_numpy(samples.rewards[first][samples.group])
        return self.core.compute_remax_outcome_advantage(scores, baselines, mask)

    def loss(self, words: tuple[str, ...], samples: Samples) -> Outcome:
        """ppo_loss of workers/utils/losses.py, and value_loss, on one update of all samples."""
        options = {name: read(value) for name, value in (w.split("=", 1) for w in words[1:])}
        config, core = self.config(options), self.core
        mask, scores = samples.padded_mask, samples.token_rewards
        old, ref, sampled = map(samples.padded, (samples.old, samples.ref, samples.sampled))
        if options.get("algorithm.use_kl_in_reward"):
            kind = options.get("algorithm.kl_penalty", "kl")
            beta = options.get("algorithm.kl_ctrl.kl_coef", 0.001)
            scores = scores - beta * core.kl_penalty(old, ref, kl_penalty=kind) * mask
        weights, mask = self._corrected(options, old, sampled, mask)
        loss_mode = config.policy_loss.loss_mode
        if options.get(f"{CORRECTION}bypass_mode"):  # apply_bypass_mode
            old, loss_mode = sampled, "bypass_mode"
        rows = torch.ones(len(samples), dtype=torch.bool)
        advantages, returns = self.advantages(options, samples, mask, scores)
        if options["algorithm.adv_estimator"] == "remax":
            rows[np.unique(samples.group, return_index=True)[1]] = False
        trained = mask * rows[:, None]
        batch_info: dict[str, Any] = {
            "dp_size": 1, "batch_num_tokens": trained.sum(), "global_batch_size": int(rows.sum()),
            "loss_scale_factor": config.loss_scale_factor,
        }  # fmt: skip
        config.global_batch_info.update(batch_info)
        leaves = {name: samples.padded(getattr(samples, name)).requires_grad_()
                  for name in ("logprobs", "entropy", "values")}  # fmt: skip
        loss, _ = core.get_policy_loss_fn(loss_mode)(
            old_log_prob=old, log_prob=leaves["logprobs"], advantages=advantages,
            response_mask=trained.bool(), loss_agg_mode=config.loss_agg_mode, config=config,
            rollout_is_weights=weights,
        )  # fmt: skip
        same = {"loss_mask": trained.bool(), "loss_agg_mode": config.loss_agg_mode}
        same |= batch_info
        loss = loss - config.entropy_coeff * core.agg_loss(loss_mat=leaves["entropy"], **same)
        if config.use_kl_loss:
            kl = core.kl_penalty(leaves["logprobs"], ref, kl_penalty=config.kl_loss_type)
            loss = loss + config.kl_loss_coef * core.agg_loss(loss_mat=kl, **same)
        if options["algorithm.adv_estimator"] == "gae":
            clip = options.get("critic.cliprange_value", 0.5)
            loss = loss + core.compute_value_loss(
                leaves["values"], returns, samples.padded(samples.old_values), mask.bool(), clip,
                batch_num_tokens=mask.sum())[0]  # fmt: skip
        return outcome_of(loss, leaves, samples)

    def _corrected(
        self, options: dict[str, Any], old: Tensor, sampled: Tensor, mask: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Weights of the policy loss, and the mask without what is rejected."""
        read = {key.removeprefix(CORRECTION): value for key, value in options.items()}
        kinds = {key: read.get(key) for key in ("rollout_is", "rollout_rs", "rollout_rs_threshold")}
        if read.get("bypass_mode") or not any(kinds.values()):
            return None, mask
        bound = read.get("rollout_is_threshold", 2.0)
        their_weights, mask, _ = self.correcting.compute_rollout_correction_and_rejection_mask(
            old, sampled, mask, rollout_is_threshold=bound,
            rollout_is_batch_normalize=bool(read.get("rollout_is_batch_normalize")), **kinds,
        )  # fmt: skip
        return None if their_weights is None else their_weights.batch["rollout_is_weights"], mask


def read(value: str) -> Any:
    """A value of Hydra's."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def mask_all(samples: Samples) -> Tensor:
    """[S, LONGEST] 1 at every token of a response."""
    return samples.padded([np.ones(len(row)) for row in samples.mask]).long()


def cases(checkout: Path) -> Iterator[Case]:
    """All that is compared."""
    verl = Verl(checkout)

    def case(name: str, options: Sequence[str], difference: Known | None) -> Case:
        words = (*BASE, *options)
        if not any(word.startswith("algorithm.adv_estimator=") for word in words):
            words = (*words, "algorithm.adv_estimator=grpo")
        return Case(name, words, lambda samples: verl.loss(words, samples), drawn, difference)

    for name, *options, known_difference in CASES:
        yield case(name, options, known_difference)


BESSEL = Known(
    "the whitening's variance: of a sample (n - 1) there, of all tokens (n) here", within=6e-3
)  # of about a hundred tokens
THROUGH = Known("the loss has the value of k2 here, of the named estimator there",
                "its gradient is that of k2", within=1e-5)  # fmt: skip
TO_GO = Known("a KL in the reward is charged from each token on there, of the whole response here",
              "there from each token on")  # fmt: skip
BY_TOKEN = Known("the sum of components is whitened over tokens there, over samples here",
                 "whitened over tokens there")  # fmt: skip
GPG = Known("advantages are scaled by samples / rewards that are not 0 there, by samples / those "
            "whose group has a gradient here", "rewards that are not 0")  # fmt: skip
GPG_LOSS = Known("the type gpg has its own advantages here", "gpg has its own advantages here")
PG_SCALE = Known("GPG's scale of advantages is lost with PPO's clip", "not scaled with the share")
OTHERS = Known("a KL and an entropy are means of tokens there, of sequences here",
               "a KL or an entropy in the loss has token-mean there")  # fmt: skip
COVARIANCES = Known("tokens are selected in each micro-batch there, over the step before it here",
                    "selected in each micro-batch there")  # fmt: skip
GEOMETRIC = Known("a response has the geometric mean of its tokens' weights there",
                  "geo_mean takes the geometric mean")  # fmt: skip
REJECTED = Known("rejected tokens leave the denominators, KL and entropy there, and stay here",
                 "rejected tokens stay in denominators")  # fmt: skip
REJECTIONS = (  # kinds and bounds of rollout_rs
    ("token_k1", "0.9_1.2"), ("token_k1", "1.1"), ("token_k2", "0.01"), ("token_k3", "0.01"),
    ("seq_max_k2", "0.03"), ("seq_max_k3", "0.03"), ("seq_mean_k1", "0.95_1.2"),
    ("seq_sum_k1", "0.8_1.3"), ("seq_mean_k2", "0.01"), ("seq_mean_k3", "0.01"),
    ("seq_sum_k2", "0.06"), ("seq_sum_k3", "0.06"), ("token_k1,seq_max_k2", "0.85_1.6,0.03"),
    ("token_k3,seq_mean_k3", "0.012"),
)  # fmt: skip
SUMS = f"{ACTOR}loss_agg_mode=seq-mean-token-sum"
CASES: tuple[tuple[Any, ...], ...] = (
    ("grpo, dual clip 3 by default", None),
    (
        "grpo, clip 0.1 and 0.28, c = 1.5",
        f"{ACTOR}clip_ratio_low=0.1",
        f"{ACTOR}clip_ratio_high=0.28",
        f"{ACTOR}clip_ratio_c=1.5",
        None,
    ),
    ("grpo, clip_ratio alone", f"{ACTOR}clip_ratio=0.05", None),
    ("grpo without the deviation", "algorithm.norm_adv_by_std_in_grpo=False", None),
    (
        "grpo_vectorized without the deviation",
        "algorithm.adv_estimator=grpo_vectorized",
        "algorithm.norm_adv_by_std_in_grpo=False",
        None,
    ),
    ("grpo_vectorized", "algorithm.adv_estimator=grpo_vectorized", None),
    *(
        (
            f"aggregation {mode}",
            f"{ACTOR}loss_agg_mode={mode}",
            f"{ACTOR}entropy_coeff=0.01",
            f"{ACTOR}use_kl_loss=True",
            None,
        )
        for mode in (
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
        )
    ),
    (
        "aggregation seq-mean-token-sum-norm, scale 100",
        f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}loss_scale_factor=100",
        None,
    ),
    *(
        (name, f"algorithm.adv_estimator={name}", known_difference)
        for name, known_difference in (
            ("rloo", None),
            ("rloo_vectorized", None),
            ("opo", None),
            ("remax", None),
            ("reinforce_plus_plus", BESSEL),
            ("reinforce_plus_plus_baseline", BESSEL),
            ("gae", BESSEL),
            ("gdpo", BY_TOKEN),
            ("gpg", PG_SCALE),
        )
    ),
    (
        "gae, gamma 0.9, lam 0.8, clip 0.2",
        "algorithm.adv_estimator=gae",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.8",
        "critic.cliprange_value=0.2",
        BESSEL,
    ),
    *(
        (
            f"{name}, KL in the reward",
            f"algorithm.adv_estimator={name}",
            "algorithm.kl_ctrl.kl_coef=0.05",
            "algorithm.use_kl_in_reward=True",
            known_difference,
        )
        for name, known_difference in (
            ("grpo", None),
            ("rloo", None),
            ("opo", None),
            ("remax", TO_GO),
            ("gae", BESSEL),
            ("reinforce_plus_plus", BESSEL),
            ("reinforce_plus_plus_baseline", BESSEL),
        )
    ),
    *(
        (
            f"KL in the reward, {kind}",
            "algorithm.use_kl_in_reward=True",
            f"algorithm.kl_penalty={kind}",
            "algorithm.kl_ctrl.kl_coef=0.05",
            None,
        )
        for kind in ("kl", "mse", "low_var_kl", "k1+", "k3+")
    ),
    *(
        (
            f"KL in the loss, {kind}",
            f"{ACTOR}use_kl_loss=True",
            f"{ACTOR}kl_loss_type={kind}",
            f"{ACTOR}kl_loss_coef=0.05",
            THROUGH if "+" in kind else None,
        )
        for kind in ("kl", "mse", "low_var_kl", "k1+", "k3+")
    ),
    ("entropy bonus", f"{ACTOR}entropy_coeff=0.02", None),
    *(
        (f"loss {mode}", f"{ACTOR}policy_loss.loss_mode={mode}", known_difference)
        for mode, known_difference in (
            ("gspo", None),
            ("sapo", None),
            ("geo_mean", None),
            ("gpg", GPG_LOSS),
            ("kl_cov", COVARIANCES),
            ("clip_cov", COVARIANCES),
        )
    ),
    (
        "loss kl_cov of all tokens",
        f"{ACTOR}policy_loss.loss_mode=kl_cov",
        f"{ACTOR}policy_loss.kl_cov_ratio=1.0",
        None,
    ),
    (
        "loss clip_cov of no token",
        f"{ACTOR}policy_loss.loss_mode=clip_cov",
        f"{ACTOR}policy_loss.clip_cov_lb=1000.0",
        f"{ACTOR}policy_loss.clip_cov_ub=1001.0",
        f"{ACTOR}clip_ratio_high=0.5",
        None,
    ),
    (
        "loss gpg with its advantages",
        "algorithm.adv_estimator=gpg",
        f"{ACTOR}policy_loss.loss_mode=gpg",
        GPG,
    ),
    ("loss cispo", f"{ACTOR}policy_loss.loss_mode=cispo", None),
    (
        "loss cispo without a lower bound",
        f"{ACTOR}policy_loss.loss_mode=cispo",
        f"{ACTOR}clip_ratio_low=10.0",
        f"{ACTOR}clip_ratio_high=0.28",
        None,
    ),
    (
        "loss gspo, KL and entropy",
        f"{ACTOR}policy_loss.loss_mode=gspo",
        f"{ACTOR}use_kl_loss=True",
        f"{ACTOR}entropy_coeff=0.01",
        f"{ACTOR}kl_loss_coef=0.05",
        OTHERS,
    ),
    (
        "loss gspo, KL and entropy, means of sequences",
        f"{ACTOR}policy_loss.loss_mode=gspo",
        f"{ACTOR}use_kl_loss=True",
        f"{ACTOR}entropy_coeff=0.01",
        f"{ACTOR}kl_loss_coef=0.05",
        f"{ACTOR}loss_agg_mode=seq-mean-token-mean",
        None,
    ),
    (
        "loss sapo, gates 0.7 and 1.4",
        f"{ACTOR}policy_loss.loss_mode=sapo",
        f"{ACTOR}tau_pos=0.7",
        f"{ACTOR}tau_neg=1.4",
        None,
    ),
    (
        "loss kl_cov of a tenth, coefficient 0.5",
        f"{ACTOR}policy_loss.loss_mode=kl_cov",
        f"{ACTOR}policy_loss.kl_cov_ratio=0.1",
        f"{ACTOR}policy_loss.ppo_kl_coef=0.5",
        COVARIANCES,
    ),
    *(
        (
            f"{name}: rollout_is {level}, {bound}",
            *options,
            f"{CORRECTION}rollout_is={level}",
            f"{CORRECTION}rollout_is_threshold={bound}",
            known_difference,
        )
        for level in ("token", "sequence")
        for bound in ("1.1", "0.8_1.2")
        for name, known_difference, *options in (
            ("grpo", None, f"{ACTOR}use_kl_loss=True"),
            ("gspo", None, f"{ACTOR}policy_loss.loss_mode=gspo"),
            (
                "geo_mean",
                GEOMETRIC if level == "token" else None,
                f"{ACTOR}policy_loss.loss_mode=geo_mean",
            ),
        )
    ),
    *(
        (
            f"rollout_rs seq_mean_k1, {bound}, {mode}",
            f"{CORRECTION}rollout_rs=seq_mean_k1",
            f"{CORRECTION}rollout_rs_threshold={bound}",
            f"{ACTOR}loss_agg_mode={mode}",
            REJECTED if mode == "token-mean" else None,
        )
        for bound in ("0.95_1.2", "1.05")
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    ),
    *(
        (
            f"rollout_rs {kind}, {bound}; {name}",
            f"{CORRECTION}rollout_rs={kind}",
            f"{CORRECTION}rollout_rs_threshold={bound}",
            SUMS,
            *options,
            None,
        )
        for kind, bound in REJECTIONS
        for name, *options in (
            ("alone",),
            (
                "rollout_is token",
                f"{CORRECTION}rollout_is=token",
                f"{CORRECTION}rollout_is_threshold=1.1",
            ),
        )
    ),
    *(
        (
            f"rollout_is {level}, {bound}, batch_normalize; rollout_rs {kind}",
            f"{CORRECTION}rollout_is={level}",
            f"{CORRECTION}rollout_is_threshold={bound}",
            f"{CORRECTION}rollout_is_batch_normalize=True",
            f"{CORRECTION}rollout_rs={kind}",
            f"{CORRECTION}rollout_rs_threshold=0.9_1.2",
            SUMS,
            None,
        )
        for level in ("token", "sequence")
        for bound in ("1.1", "0.8_1.2")
        for kind in ("token_k1", "seq_mean_k1")
    ),
    (
        "rollout_is sequence, rollout_rs token_k1",
        f"{CORRECTION}rollout_is=sequence",
        f"{CORRECTION}rollout_rs=token_k1",
        f"{CORRECTION}rollout_rs_threshold=0.9_1.2",
        SUMS,
        None,
    ),
    (
        "rollout_is token 0.8_1.2, rollout_rs seq_mean_k1",
        f"{CORRECTION}rollout_is=token",
        f"{CORRECTION}rollout_is_threshold=0.8_1.2",
        f"{CORRECTION}rollout_rs=seq_mean_k1",
        f"{CORRECTION}rollout_rs_threshold=0.95_1.2",
        SUMS,
        None,
    ),
    (
        "rollout_is token, rollout_rs seq_mean_k1, token-mean",
        f"{CORRECTION}rollout_is=token",
        f"{CORRECTION}rollout_rs=seq_mean_k1",
        f"{CORRECTION}rollout_rs_threshold=0.95_1.2",
        REJECTED,
    ),
    (
        "rollout_rs seq_mean_k1, KL in the loss",
        f"{CORRECTION}rollout_rs=seq_mean_k1",
        f"{CORRECTION}rollout_rs_threshold=0.95_1.2",
        SUMS,
        f"{ACTOR}use_kl_loss=True",
        REJECTED,
    ),
    (
        "rollout_rs token_k1, means of sequences",
        f"{CORRECTION}rollout_rs=token_k1",
        f"{CORRECTION}rollout_rs_threshold=0.9_1.2",
        f"{ACTOR}loss_agg_mode=seq-mean-token-mean",
        REJECTED,
    ),
    ("bypass_mode", f"{CORRECTION}bypass_mode=True", None),
    *(
        (
            f"bypass_mode, rollout_rs {kind}, {bound}",
            f"{CORRECTION}bypass_mode=True",
            f"{CORRECTION}rollout_is=token",
            f"{CORRECTION}rollout_rs={kind}",
            f"{CORRECTION}rollout_rs_threshold={bound}",
            f"{ACTOR}use_kl_loss=True",
            None,
        )
        for kind, bound in (
            ("seq_mean_k3", "0.05"),
            ("token_k1", "0.8_1.3"),
            ("token_k1,seq_max_k2", "0.6_1.6,0.3"),
        )
    ),
)
