"""TRL's objectives of RL: advantages and losses of GRPOTrainer and RLOOTrainer."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peer_objectives.comparing import OF_SUM, Case, Known
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.ours import Outcome, outcome_of
from benchmarks.peer_objectives.samples import LONGEST, Samples, drawn

BASE = ("--model_name_or_path", "Qwen/Qwen3-0.6B", "--dataset_name", "openai/gsm8k",
        "--reward_funcs", "a.first", "b.second",
        "--num_generations", "4", "--max_completion_length", str(LONGEST))  # fmt: skip
ONE = SimpleNamespace(
    num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, sync_gradients=True,
    reduce=lambda x, reduction: x, pad_across_processes=lambda x, **_: x, device="cpu",
    parallelism_config=None,
)  # fmt: skip


class TRL:
    """Trainers that were never set up, with the attributes that their losses read."""

    def __init__(self, checkout: Path) -> None:
        sys.path.insert(0, str(checkout.resolve()))
        from trl.trainer import grpo_config, grpo_trainer, rloo_config, rloo_trainer

        if not Path(grpo_trainer.__file__).resolve().is_relative_to(checkout.resolve()):
            raise RuntimeError(f"{grpo_trainer.__file__} was loaded, which is not of {checkout}")
        self.grpo: Any = grpo_trainer
        self.rloo: Any = rloo_trainer
        self.defaults = {"grpo": defaults(grpo_config.GRPOConfig) | SET,
                         "rloo": defaults(rloo_config.RLOOConfig)}  # fmt: skip
        folder = checkout / "trl" / "trainer"
        self.of_grpo = statements(folder / "grpo_trainer.py",
                                  "if self.multi_objective_aggregation == 'sum_then")  # fmt: skip
        self.of_sampler = statements(
            folder / "grpo_trainer.py",
            "if self.use_vllm and self.vllm_importance_sampling_correction:\n    mask =",
        )
        self.of_rloo = statements(folder / "rloo_trainer.py", "if self.reward_clip_range",
                                  8)  # fmt: skip

    def trainer(self, kind: Any, config: Any, **more: Any) -> Any:
        """A trainer with all fields of its config as attributes."""
        trainer = kind.__new__(kind)
        attributes = dict(vars(config)) | {
            "args": config, "accelerator": ONE, "aux_loss_enabled": False,
            "epsilon_low": config.epsilon, "current_gradient_accumulation_steps": 1,
            "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
            "_metrics": {"train": defaultdict(list)}, "model": SimpleNamespace(training=True),
        } | more  # fmt: skip
        for name, value in attributes.items():
            object.__setattr__(trainer, name, value)
        return trainer

    def grpo_loss(self, options: dict[str, Any], samples: Samples) -> Outcome:
        """_generate_and_score_completions from rewards on, then _compute_loss."""
        components = options.pop("components", False)
        config = SimpleNamespace(**self.defaults["grpo"] | options)
        leaves = {name: samples.padded(getattr(samples, name)).requires_grad_()
                  for name in ("logprobs", "entropy", "values")}  # fmt: skip
        trainer = self.trainer(
            self.grpo.GRPOTrainer, config, reward_weights=torch.ones(2 if components else 1),
            reward_funcs=[0] * (2 if components else 1),
            _entropy_bonus_enabled=config.entropy_coef > 0,
            _get_per_token_logps_and_entropies=lambda *_, **__: (
                leaves["logprobs"], leaves["entropy"], None),
        )  # fmt: skip
        rewards = [samples.rewards]
        if components:
            rewards = list(samples.components.values())
        space = {**vars(self.grpo), "self": trainer, "num_generations": 4, "device": "cpu",
                 "rewards_per_func": torch.tensor(np.stack(rewards, 1)),
                 "unscorable_mask": torch.zeros(len(samples), dtype=torch.bool)}  # fmt: skip
        self.of_grpo(space)
        mask, response_mask = (
            samples.padded_mask,
            samples.padded([np.ones(len(row)) for row in samples.mask]),
        )
        old, sampled = samples.padded(samples.old), samples.padded(samples.sampled)
        ids = response_mask.long()
        if config.mask_truncated_completions:
            kept = torch.from_numpy(~samples.cut)[:, None].double()
            mask, response_mask = mask * kept, response_mask * kept
        space |= {"completion_mask": response_mask, "tool_mask": mask, "old_per_token_logps": old,
                  "sampling_per_token_logps": sampled}  # fmt: skip
        self.of_sampler(space)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
            "completion_mask": response_mask, "tool_mask": mask, "advantages": space["advantages"],
            "old_per_token_logps": old, "ref_per_token_logps": samples.padded(samples.ref),
            "num_items_in_batch": mask.sum(), "sampling_per_token_logps": sampled,
        }  # fmt: skip
        if config.use_vllm:
            inputs["importance_sampling_ratio"] = space["vllm_importance_sampling_ratio"]
        return outcome_of(trainer._compute_loss(trainer.model, inputs), leaves, samples)

    def rloo_loss(self, options: dict[str, Any], samples: Samples) -> Outcome:
        """The same of RLOOTrainer."""
        config = SimpleNamespace(**self.defaults["rloo"] | options)
        leaf = samples.padded(samples.logprobs).requires_grad_()
        entropy = torch.zeros_like(leaf)
        trainer = self.trainer(self.rloo.RLOOTrainer, config, _get_per_token_logps_and_entropies=(
            lambda *_, **__: (leaf, entropy, None)))  # fmt: skip
        mask, old = samples.padded_mask, samples.padded(samples.old)
        space = {**vars(self.rloo), "self": trainer, "num_generations": 4, "gather": lambda x: x,
                 "rewards": torch.from_numpy(samples.rewards), "completion_mask": mask,
                 "old_per_token_logps": old,
                 "ref_per_token_logps": samples.padded(samples.ref)}  # fmt: skip
        self.of_rloo(space)
        ids = mask.long()
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
            "completion_mask": mask, "advantages": space["advantages"],
            "old_logps": (old * mask).sum(1),
        }  # fmt: skip
        leaves = {"logprobs": leaf, "entropy": entropy, "values": torch.zeros_like(leaf)}
        return outcome_of(trainer._compute_loss(trainer.model, inputs), leaves, samples)


SET: dict[str, Any] = {  # of GRPOConfig, by its __post_init__ or by the samples
    "steps_per_generation": 1, "vllm_importance_sampling_clip_max": 3.0,
    "max_completion_length": LONGEST,
}  # fmt: skip


def defaults(config: type) -> dict[str, Any]:
    """What a config's fields have where nothing is said, so that a changed default shows."""
    return {field.name: field.default for field in fields(config) if field.default is not MISSING}


def on_policy(seed: int) -> Samples:
    """Samples of the policy in the update, without an environment."""
    from dataclasses import replace

    samples = drawn(seed, environment=False)
    return replace(samples, logprobs=samples.old)


def cases(checkout: Path) -> Iterator[Case]:
    """All that is compared."""
    trl = TRL(checkout)
    for name, options, known_difference in GRPO_CASES:
        words = ["grpo", *BASE, *flags(options)]

        def peer(samples: Samples, options: dict[str, Any] = options) -> Outcome:
            more = {"components": True} if "multi_objective_aggregation" in options else {}
            return trl.grpo_loss(options | more, samples)

        yield Case(f"GRPO, {name}", words, peer, drawn, known_difference)
    for name, options, samples_of, known_difference in RLOO_CASES:
        words = ["rloo", *BASE, *flags(options)]

        def rloo(samples: Samples, options: dict[str, Any] = options) -> Outcome:
            return trl.rloo_loss(options, samples)

        yield Case(f"RLOO, {name}", words, rloo, samples_of, known_difference)


def flags(options: dict[str, Any]) -> Iterator[str]:
    """--name value ..."""
    for name, value in options.items():
        yield f"--{name}"
        yield from map(str, value if isinstance(value, list) else [value])


def flat(seed: int) -> Samples:
    """Without an environment's tokens."""
    return drawn(seed, environment=False)


ENTROPY = Known("an entropy bonus is a mean over tokens there, and divided as the policy loss here",
                "a mean over tokens there")  # fmt: skip
MASKED = Known("masked responses stay in the denominator there", "masked responses leave the mean")
CORRECTED = Known("the KL is multiplied by the response's ratio there, by each token's here",
                  "by each token's ratio; there by the response's")  # fmt: skip
ROUNDED = Known("as many tokens as a quantile leaves there; the fraction is rounded down here",
                "rounded down here")  # fmt: skip
BOUND = Known("VESPO's ratio is to the sampler here, without a bound of the sampler's weights",
              "the weights in its ratio have no bound")  # fmt: skip
PER_RESPONSE = Known("the loss is of a response there, here a sum over its tokens: it has another "
                     "value and the same gradient", within=1e-5)  # fmt: skip
GRPO_CASES: tuple[tuple[str, dict[str, Any], Known | None], ...] = (
    ("defaults", {}, None),
    *((f"loss_type {kind}", {"loss_type": kind}, None)
      for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")),
    ("cispo, high 1.28", {"loss_type": "cispo", "epsilon_high": 1.28}, None),
    ("clip 0.1 and 0.28", {"epsilon": 0.1, "epsilon_high": 0.28}, None),
    ("delta 1.5", {"delta": 1.5, "loss_type": "grpo"}, None),
    ("luspo", {"loss_type": "luspo", "importance_sampling_level": "sequence"}, None),
    ("importance_sampling_level sequence",
     {"importance_sampling_level": "sequence", "loss_type": "grpo"}, None),
    ("importance_sampling_level sequence, dapo", {"importance_sampling_level": "sequence"}, None),
    ("importance_sampling_level sequence, delta 1.1",
     {"importance_sampling_level": "sequence", "delta": 1.1, "epsilon": 0.05}, None),
    *((f"scale_rewards none, {kind}", {"scale_rewards": "none", "loss_type": kind}, None)
      for kind in ("grpo", "dapo", "dr_grpo", "sapo")),
    *((f"scale_rewards batch, {kind}", {"scale_rewards": "batch", "loss_type": kind}, None)
      for kind in ("grpo", "dapo", "dr_grpo", "sapo")),
    *((f"beta 0.04, {kind}", {"beta": 0.04, "loss_type": kind}, None)
      for kind in ("grpo", "dapo", "dr_grpo", "sapo")),
    ("beta 0.04, use_bias_correction_kl false",
     {"beta": 0.04, "use_bias_correction_kl": False}, None),
    ("beta 0.04, sequences", {
        "beta": 0.04, "loss_type": "grpo", "importance_sampling_level": "sequence"}, CORRECTED),
    ("normalize_then_sum", {"multi_objective_aggregation": "normalize_then_sum"}, OF_SUM),
    ("entropy_coef 0.01, dapo", {"entropy_coef": 0.01}, None),
    *((f"entropy_coef 0.01, {kind}", {"entropy_coef": 0.01, "loss_type": kind}, known_difference)
      for kind, known_difference in (("grpo", ENTROPY), ("dr_grpo", ENTROPY), ("vespo", None))),
    ("top_entropy_quantile 0.2", {"top_entropy_quantile": 0.2}, ROUNDED),
    ("off_policy_mask_threshold 0.02", {"off_policy_mask_threshold": 0.02}, None),
    ("mask_truncated_completions, dapo", {"mask_truncated_completions": True}, None),
    *((f"mask_truncated_completions, {kind}",
       {"mask_truncated_completions": True, "loss_type": kind}, MASKED)
      for kind in ("grpo", "dr_grpo", "sapo")),
    ("vLLM, defaults", {"use_vllm": True}, None),
    ("vLLM and beta", {"use_vllm": True, "beta": 0.04}, None),
    *((f"vLLM, {mode}, {low} to {high}", {
        "use_vllm": True, "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": high,
        **({} if low is None else {"vllm_importance_sampling_clip_min": low})}, None)
      for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
      for low, high in ((None, 1.1), (0.8, 1.2))),
    ("vLLM, gspo, token_truncate", {
        "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.1, "importance_sampling_level": "sequence"}, None),
    ("vLLM, vespo", {"use_vllm": True, "loss_type": "vespo",
                     "vllm_importance_sampling_clip_max": 1.5}, BOUND),
    ("vLLM, vespo, no weight at a bound", {
        "use_vllm": True, "loss_type": "vespo",
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 1e6}, None),
)  # fmt: skip
RLOO_CASES: tuple[tuple[str, dict[str, Any], Any, Known], ...] = (
    ("defaults, first update", {}, on_policy, PER_RESPONSE),
    ("beta 0, first update", {"beta": 0.0}, on_policy, PER_RESPONSE),
    ("reward_clip_range, first update", {"reward_clip_range": [-0.5, 0.5], "beta": 0.0}, on_policy,
     PER_RESPONSE),
    ("num_iterations 2, later updates", {"num_iterations": 2}, flat, PER_RESPONSE),
    ("num_iterations 2, clip 0.02, later updates", {"num_iterations": 2, "epsilon": 0.02}, flat,
     PER_RESPONSE),
)  # fmt: skip
