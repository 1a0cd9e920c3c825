"""NeMo RL's objectives: advantage estimators and ClippedPGLossFn."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import torch

from benchmarks.peer_objectives.comparing import OF_SUM, Case, Known, Lost
from benchmarks.peer_objectives.loading import Checkout, statements
from benchmarks.peer_objectives.ours import Outcome, outcome_of
from benchmarks.peer_objectives.samples import LONGEST, Samples, drawn

BASE: dict[str, Any] = {
    "policy.model_name": "Qwen/Qwen3-0.6B", "data.default.dataset_name": "gsm8k",
    "grpo.num_generations_per_prompt": 4, "grpo.num_prompts_per_step": 5,
    "policy.train_global_batch_size": 20, "policy.max_total_sequence_length": 4 * LONGEST,
    "policy.generation.max_new_tokens": LONGEST, "policy.train_micro_batch_size": 4,
    "grpo.max_num_steps": 10,
}  # fmt: skip
LOSS, ESTIMATOR = "loss_fn.", "grpo.adv_estimator."


class NeMoRL:
    """An update of grpo_train, with NeMo RL's own functions."""

    def __init__(self, checkout: Path) -> None:
        files = Checkout(checkout / "nemo_rl", [
            f"nemo_rl.{name}" for name in ("models", "data", "utils", "distributed")
        ])  # fmt: skip
        self.losses: Any = files.module("nemo_rl.algorithms.loss.loss_functions")
        self.estimators: Any = files.module("nemo_rl.algorithms.advantage_estimator")
        self.masking: dict[str, Any] = {
            "torch": torch, "Optional": Optional, "BatchedDataDict": dict, "print": _silent,
        }  # fmt: skip
        statements(checkout / "nemo_rl" / "algorithms" / "grpo.py",
                   "def compute_and_apply_seq_logprob_error_masking")(self.masking)  # fmt: skip

    def loss(self, options: dict[str, Any], samples: Samples, *, over_all: bool) -> Outcome:
        """Advantages, then the loss of one update of all samples. whole: denominators count what
        was rejected, too.
        """
        config = self.losses.ClippedPGLossConfig(**{
            name.removeprefix(LOSS): value for name, value in options.items()
            if name.startswith(LOSS)})  # fmt: skip
        estimator = self.estimators.AdvEstimatorConfig(**{
            name.removeprefix(ESTIMATOR): value for name, value in options.items()
            if name.startswith(ESTIMATOR)})  # fmt: skip
        kind = {"grpo": "GRPO", "gdpo": "GDPO", "reinforce_plus_plus": "ReinforcePlusPlus"}
        advantages = getattr(self.estimators, f"{kind[estimator.name]}AdvantageEstimator")(
            estimator, config)  # fmt: skip
        mask, old, ref = (samples.padded_mask, *map(samples.padded, (samples.old, samples.ref)))
        parts = {f"reward/{k}": torch.from_numpy(v) for k, v in samples.components.items()}
        torch.set_default_dtype(torch.float64)  # of what it makes itself
        their_advantages = advantages.compute_advantage(
            prompt_ids=torch.from_numpy(samples.group)[:, None], mask=mask, repeated_batch=parts,
            rewards=torch.from_numpy(samples.rewards), logprobs_policy=old,
            logprobs_reference=ref)  # fmt: skip
        torch.set_default_dtype(torch.float32)
        leaf = samples.padded(samples.logprobs).requires_grad_()
        first = torch.zeros(len(samples), 1, dtype=torch.float64)
        data = {name: torch.cat([first, column], 1) for name, column in {
            "token_mask": mask, "advantages": their_advantages, "prev_logprobs": old,
            "generation_logprobs": samples.padded(samples.sampled),
            "reference_policy_logprobs": ref}.items()}  # fmt: skip
        data["sample_mask"] = torch.ones(len(samples), dtype=torch.float64)
        self.masking["compute_and_apply_seq_logprob_error_masking"](
            data, torch.from_numpy(samples.rewards), options.get(ERROR)
        )
        kept = torch.ones_like(data["sample_mask"]) if over_all else data["sample_mask"]
        function = self.losses.ClippedPGLossFn(config)
        loss, _ = function(leaf, data, kept.sum(), (mask * kept[:, None]).sum())
        zeros = torch.zeros_like(leaf)
        return outcome_of(loss, {"logprobs": leaf, "entropy": zeros, "values": zeros}, samples)


def cases(checkout: Path) -> Iterator[Case | Lost]:
    """All that is compared, and the programs that no recipe comes from."""
    for program, option in OTHERS.items():
        yield Lost(program, [program, "policy.model_name=m"], option)
    nemo = NeMoRL(checkout)
    for name, options, known_difference in CASES:
        stated = {**BASE, **options}
        words = ["grpo", *(f"{key}={value}" for key, value in stated.items())]

        def peer(samples: Samples, options: dict[str, Any] = options, name: str = name) -> Outcome:
            return nemo.loss(options, samples, over_all="over all" in name)

        yield Case(name, words, peer, samples_of(name), known_difference)


def _silent(*words: object, **how: object) -> None:
    """In place of print."""


def samples_of(name: str) -> Any:
    """The first update of a step, or a sampler far away, where a case's name says so."""
    return first if "first update" in name else far if "far" in name else drawn


def far(seed: int) -> Samples:
    """Samples whose sampler was far from the policy: weights of 2 and more."""
    samples = drawn(seed)
    pairs = zip(samples.old, samples.sampled, strict=True)
    return replace(samples, sampled=[old + 8 * (sampled - old) for old, sampled in pairs])


def first(seed: int) -> Samples:
    """Samples whose policy is as before the step."""
    samples = drawn(seed)
    return replace(samples, logprobs=samples.old)


OWN = Known("a token is charged its own KL alone there, and all that follow here",
            "there a token is charged its own KL alone")  # fmt: skip
FACTOR = Known("the KL's factor is 1 there in later updates too, and the ratio of the update here",
               "the ratio to the policy before the step")  # fmt: skip
SAMPLER = Known("the KL's factor is the ratio to the sampler there, to the policy before here",
                "there to the sampler")  # fmt: skip
ERROR = "grpo.seq_logprob_error_threshold"
REJECTED = Known("rejected responses leave the denominators there, and stay here",
                 "rejected responses stay in denominators")  # fmt: skip
UNBOUNDED = Known("weights have no bound there, and tis's 2 here", "there without a bound")
OTHERS = {"sft": 'job = "sft"', "dpo": "docs/preferences.md", "rm": "docs/preferences.md",
          "distillation": "on_policy_distillation.md"}  # fmt: skip
NO_KL = {f"{LOSS}reference_policy_kl_penalty": 0.0}
IS = {**NO_KL, f"{LOSS}use_importance_sampling_correction": True}
TIS = f"{LOSS}truncated_importance_sampling_"
CASES: tuple[tuple[str, dict[str, Any], Known | None], ...] = (
    ("grpo, leave one out", NO_KL, None),
    ("grpo, whole group", {**NO_KL, f"{ESTIMATOR}use_leave_one_out_baseline": False}, None),
    ("grpo, not divided, leave one out", {**NO_KL, f"{ESTIMATOR}normalize_rewards": False}, None),
    ("grpo, not divided, whole group", {**NO_KL, f"{ESTIMATOR}normalize_rewards": False,
                                       f"{ESTIMATOR}use_leave_one_out_baseline": False}, None),
    ("gdpo", {**NO_KL, f"{ESTIMATOR}name": "gdpo"}, OF_SUM),
    ("reinforce_plus_plus", {**NO_KL, f"{ESTIMATOR}name": "reinforce_plus_plus",
                             f"{ESTIMATOR}minus_baseline": False}, None),
    ("reinforce_plus_plus, minus baseline", {
        **NO_KL, f"{ESTIMATOR}name": "reinforce_plus_plus"}, None),
    ("reinforce_plus_plus, KL in the reward", {
        f"{ESTIMATOR}name": "reinforce_plus_plus", f"{ESTIMATOR}minus_baseline": False,
        f"{LOSS}use_kl_in_reward": True, f"{LOSS}reference_policy_kl_penalty": 0.05}, OWN),
    ("grpo, KL in the reward", {f"{LOSS}use_kl_in_reward": True,
                                f"{LOSS}reference_policy_kl_penalty": 0.05}, None),
    ("clip 0.1 and 0.28, c = 1.5", {
        **NO_KL, f"{LOSS}ratio_clip_min": 0.1, f"{LOSS}ratio_clip_max": 0.28,
        f"{LOSS}ratio_clip_c": 1.5}, None),
    ("token_level_loss off", {**NO_KL, f"{LOSS}token_level_loss": False}, None),
    ("cispo", {**NO_KL, f"{LOSS}use_cispo": True}, None),
    ("cispo, 0.1 and 0.3", {**NO_KL, f"{LOSS}use_cispo": True, f"{LOSS}ratio_clip_min": 0.1,
                            f"{LOSS}ratio_clip_max": 0.3}, None),
    ("sequence_level_importance_ratios", {
        **NO_KL, f"{LOSS}sequence_level_importance_ratios": True, f"{LOSS}token_level_loss": False},
     None),
    *((f"KL in the loss, {kind}, first update", {
        f"{LOSS}reference_policy_kl_penalty": 0.05, f"{LOSS}reference_policy_kl_type": kind}, None)
      for kind in ("k1", "k2", "k3")),
    ("KL in the loss, sequences, first update", {
        f"{LOSS}reference_policy_kl_penalty": 0.05, f"{LOSS}token_level_loss": False}, None),
    ("KL in the loss, later updates", {f"{LOSS}reference_policy_kl_penalty": 0.05}, FACTOR),
    ("KL in the loss, use_on_policy_kl_approximation", {
        f"{LOSS}reference_policy_kl_penalty": 0.05, f"{LOSS}use_on_policy_kl_approximation": True},
     SAMPLER),
    ("importance sampling without a bound", IS, None),
    ("importance sampling without a bound, sampler far away", IS, UNBOUNDED),
    *((f"importance sampling, {kind}, 0.9 to 1.1", {
        **IS, f"{TIS}type": kind, f"{TIS}ratio": 1.1, f"{TIS}ratio_min": 0.9}, None)
      for kind in ("tis", "icepop", "seq-mask-tis")),
    *((f"importance sampling, {kind}, sequence ratios", {
        **IS, f"{TIS}type": kind, f"{TIS}ratio": 1.1, f"{TIS}ratio_min": 0.9,
        f"{LOSS}sequence_level_importance_ratios": True, f"{LOSS}token_level_loss": False}, None)
      for kind in ("tis", "icepop")),
    ("seq_logprob_error_threshold 1.15", {**NO_KL, ERROR: 1.15}, REJECTED),
    ("seq_logprob_error_threshold 1.15, over all", {**NO_KL, ERROR: 1.15}, None),
    ("seq_logprob_error_threshold 1.15, tis 0.2 to 1.1, over all", {
        **IS, ERROR: 1.15, f"{TIS}type": "tis", f"{TIS}ratio": 1.1, f"{TIS}ratio_min": 0.2}, None),
    ("seq_logprob_error_threshold 1.15, seq-mask-tis, over all", {
        **IS, ERROR: 1.15, f"{TIS}type": "seq-mask-tis", f"{TIS}ratio": 1.1,
        f"{TIS}ratio_min": 0.95}, None),
)  # fmt: skip
