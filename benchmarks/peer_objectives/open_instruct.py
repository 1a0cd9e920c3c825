"""Open-Instruct's objectives: advantages of its data loader, the loss and rho of grpo_utils."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peer_objectives.comparing import Case, Known
from benchmarks.peer_objectives.loading import Checkout, statements
from benchmarks.peer_objectives.ours import Outcome, outcome_of
from benchmarks.peer_objectives.samples import LONGEST, Samples, drawn

BASE: dict[str, Any] = {
    "model_name_or_path": "m", "dataset_mixer_list": ["d", "1.0"], "response_length": LONGEST,
    "num_samples_per_prompt_rollout": 4, "num_unique_prompts_rollout": 5, "beta": 0.0,
    "use_rho_correction": False, "filter_zero_std_samples": False, "async_steps": 0,
}  # fmt: skip


class OpenInstruct:
    """A step of grpo_fast, with Open-Instruct's own functions."""

    def __init__(self, checkout: Path) -> None:
        modules = ["actor_manager", "data_loader", "data_types", "dataset_transformation",
                   "logger_utils", "olmo_core_utils", "olmo_core_train_modules",
                   "padding_free_collator", "utils", "vllm_utils", "launch_utils",
                   "ground_truth_utils", "judge_utils", "environments", "model_utils", "rubrics",
                   "tensor_utils"]  # fmt: skip
        files = Checkout(checkout / "open_instruct", [
            "vllm", "deepspeed", "olmo_core", "liger_kernel", "wandb",
            *(f"open_instruct.{name}" for name in modules)])  # fmt: skip
        self.losses: Any = files.module("open_instruct.grpo_utils")
        self.rl: Any = files.module("open_instruct.rl_utils")
        folder = checkout / "open_instruct"
        space: dict[str, Any] = {"torch": torch}
        statements(folder / "model_utils.py", "def estimate_kl")(space)
        self.losses.model_utils = SimpleNamespace(estimate_kl=space["estimate_kl"])
        self.of_groups = statements(folder / "data_loader.py",
                                    "scores = np.array(batch.scores)", 7)  # fmt: skip

    def outcome(self, options: dict[str, Any], samples: Samples) -> Outcome:
        """Scores to a loss, on one update of all samples."""
        fields = {
            "clip_lower": 0.2, "clip_higher": 0.272, "loss_fn": "dapo", "kl_estimator": 2,
            "rho_clamp_lower_bound": 0.0, "rho_clamp_upper_bound": 2.0,
            "rho_mask_lower_bound": 0.0, "rho_mask_upper_bound": 0.0,
            "rho_mask_sequence_level": False, "rho_mask_tv_divergence": False,
        } | options  # fmt: skip
        config = SimpleNamespace(**fields)
        space: dict[str, Any] = {
            "np": np, "batch": SimpleNamespace(scores=samples.rewards),
            "self": SimpleNamespace(config=SimpleNamespace(
                num_samples_per_prompt_rollout=4, save_traces=False, advantage_normalization_type=(
                    options.get("advantage_normalization_type", "centered")))),
        }  # fmt: skip
        self.of_groups(space)
        mask = samples.padded_mask
        if options.get("filter_zero_std_samples"):
            for group in np.unique(samples.group):
                rows = samples.group == group
                mask[torch.from_numpy(rows)] *= float(np.std(samples.rewards[rows]) > 0)
        advantages = torch.from_numpy(space["advantages"])[:, None].expand(mask.shape)
        leaf = samples.padded(samples.logprobs).requires_grad_()
        old, sampled = samples.padded(samples.old), samples.padded(samples.sampled)
        rho = self.losses.compute_rho_correction(old, sampled, mask.bool(), advantages, config)
        beta = options["beta"]
        policy, _, kl = self.losses.compute_grpo_loss(
            leaf, torch.exp(leaf - old), advantages, samples.padded(samples.ref) if beta else None,
            config, rho.weights)  # fmt: skip
        loss = self.rl.masked_mean(policy + beta * kl, mask, None, mask.sum())
        zeros = torch.zeros_like(leaf)
        return outcome_of(loss, {"logprobs": leaf, "entropy": zeros, "values": zeros}, samples)


def words_of(data: str) -> list[str]:
    """A command with a data set."""
    stated = BASE | {"dataset_mixer_list": [data, "1.0"]}
    return ["grpo", *(word for key, value in stated.items() for word in flag(key, value))]


def cases(checkout: Path) -> Iterator[Case]:
    """All that is compared."""
    peer = OpenInstruct(checkout)
    for name, options, known_difference in CASES:
        stated = BASE | options
        words = ["grpo", *(word for key, value in stated.items() for word in flag(key, value))]

        def outcome(samples: Samples, stated: dict[str, Any] = stated) -> Outcome:
            return peer.outcome(stated, samples)

        yield Case(name, words, outcome, drawn, known_difference)


def flag(name: str, value: Any) -> Iterator[str]:
    """--name value ..."""
    yield f"--{name}"
    yield from map(str, value if isinstance(value, list) else [value])


OF_GROUP = Known(
    "the deviation is of the group (n) there, of a sample (n - 1) here",
    "the deviation is of a sample here",
    within=0.14,
)  # of groups of four
KEPT = Known("the tokens of a response that stays have its mean ratio there, and 1 here",
             "there its mean ratio")  # fmt: skip
FILTERED = Known("groups of equal scores leave the denominator there, and stay here",
                 "which filter_zero_std_samples leaves out there")  # fmt: skip
AHEAD = Known("without rho the ratio of samples from older weights is to the policy before the "
              "step there, to the sampler here",
              "older samples need one of two corrections")  # fmt: skip
ON = {"use_rho_correction": True}
CASES: tuple[tuple[str, dict[str, Any], Known | None], ...] = (
    ("centered", {}, None),
    ("centered, filter_zero_std_samples, the default", {"filter_zero_std_samples": True}, FILTERED),
    ("centered, async_steps 8, the default", {"async_steps": 8}, AHEAD),
    ("standard", {"advantage_normalization_type": "standard"}, OF_GROUP),
    ("clip 0.1 and 0.4", {"clip_lower": 0.1, "clip_higher": 0.4}, None),
    ("cispo", {"loss_fn": "cispo"}, None),
    *((f"beta, kl_estimator {kind}", {"beta": 0.05, "kl_estimator": kind}, None)
      for kind in range(4)),
    *((f"rho to {high}, from {low}", {
        **ON, "rho_clamp_upper_bound": high, "rho_clamp_lower_bound": low}, None)
      for low, high in ((0.0, 1.1), (0.9, 1.1), (0.0, 0))),
    *((f"rho within {low} and {high}, clamped to {floor} and {cap}", {
        **ON, "rho_mask_lower_bound": low, "rho_mask_upper_bound": high,
        "rho_clamp_upper_bound": cap, "rho_clamp_lower_bound": floor}, None)
      for low, high in ((0.9, 1.1), (0.0, 1.1), (0.9, 0.0))
      for floor, cap in ((0.0, 1.2), (0.95, 1.05))),
    ("rho of sequences within 0.95 and 1.05", {
        **ON, "rho_mask_lower_bound": 0.95, "rho_mask_upper_bound": 1.05,
        "rho_mask_sequence_level": True}, KEPT),
    ("rho and beta, cispo", {
        **ON, "rho_clamp_upper_bound": 1.1, "beta": 0.05, "loss_fn": "cispo"}, None),
)  # fmt: skip
