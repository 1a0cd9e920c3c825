"""verl's loss of SFT, and its on-policy distillation."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peer_objectives.comparing import Case, Known, Lost
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.ours import Outcome, outcome_of
from benchmarks.peer_objectives.ours_texts import logits_outcome, sft_outcome
from benchmarks.peer_objectives.samples import Samples, drawn
from benchmarks.peer_objectives.texts import Texts, token_logprobs, written
from benchmarks.peer_objectives.verl import BASE, Verl, read

WORDS = ("sft_trainer", "model.path=m", "optim.lr=1e-5", "data.train_files=a.parquet",
         "data.train_batch_size=16", "data.max_length=64", "trainer.n_gpus_per_node=1",
         "trainer.total_epochs=1")  # fmt: skip
LOSS = "distillation.distillation_loss."
TAUGHT = (*BASE, "algorithm.adv_estimator=grpo", "distillation.enabled=True",
          "distillation.teacher_models.a.model_path=t", f"{LOSS}loss_mode=k1",
          f"{LOSS}use_policy_gradient=True")  # fmt: skip


def cases(checkout: Path) -> Iterator[Case | Lost]:
    """All that is compared, and what is lost."""
    yield Case("sft", WORDS, of_sft(checkout), written, ours=sft_outcome)
    peer = Distillation(checkout)
    for name, options, draw, known_difference in CASES:
        words = (*TAUGHT, *(f"{LOSS}{option}" for option in options))

        def taught(samples: Samples, words: tuple[str, ...] = words) -> Outcome:
            return peer.outcome(words, samples)

        yield Case(f"distillation, {name}", words, taught, draw, known_difference)
    for name, value in (("loss_mode", "k3"), ("loss_mode", "forward_kl_topk"),
                        ("use_policy_gradient", False)):  # fmt: skip
        words = (*TAUGHT, f"{LOSS}{name}={value}")
        yield Lost(f"distillation, {name} {value}", words, f"{LOSS}{name}")


def of_sft(checkout: Path) -> Any:
    """sft_loss of a batch without padding, over two micro-batches."""
    space: dict[str, Any] = {
        "torch": torch, "TensorDict": Any, "ActorConfig": Any,
        "DatasetPadMode": SimpleNamespace(NO_PADDING="none"),
        "tu": SimpleNamespace(get_non_tensor_data=lambda data, key, default: default),
    }  # fmt: skip
    statements(checkout / "verl" / "utils" / "torch_functional.py", "def masked_sum")(space)
    statements(checkout / "verl" / "workers" / "utils" / "losses.py", "def sft_loss")(space)

    def peer(texts: Texts) -> Outcome:
        leaf, total = texts.leaf(), torch.zeros((), dtype=torch.float64)
        logprobs = token_logprobs(leaf, texts.ids).roll(-1, 1)  # of the token after each
        inside = texts.attention.bool()
        for rows in np.split(np.arange(len(texts)), 2):
            flat = (column[rows][inside[rows]] for column in (logprobs, texts.answers))
            nested = [SimpleNamespace(values=lambda column=column: column) for column in flat]
            data = {"dp_size": 1, "batch_num_tokens": texts.answers.sum(), "loss_mask": nested[1]}
            total = total + space["sft_loss"](None, {"log_probs": nested[0]}, data)[0]
        return logits_outcome(total, leaf, texts)

    return peer


class Distillation:
    """distillation_ppo_loss, whose teacher is the reference of the samples."""

    def __init__(self, checkout: Path) -> None:
        self.verl = Verl(checkout)
        core = self.verl.core
        space: dict[str, Any] = {
            "Optional": Any, "Any": Any, "torch": torch, "TensorDict": Any, "ActorConfig": Any,
            "DistillationConfig": Any, "DistillationLossConfig": Any, "Metric": lambda *_, **__: 0,
            "AggregationType": SimpleNamespace(SUM=0, MEAN=0, MIN=0, MAX=0),
            "agg_loss": core.agg_loss, "kl_penalty": core.kl_penalty,
            "get_policy_loss_fn": core.get_policy_loss_fn, "ppo_loss": self._of_rewards,
            "no_padding_2_padding": lambda column, data: column,
            "register_distillation_loss": lambda settings: lambda function: function,
            "DistillationLossSettings": lambda **_: None,
        }  # fmt: skip
        space["Optional"] = {Any: Any}
        path = checkout / "verl" / "trainer" / "distillation" / "losses.py"
        for start in ("def compute_distillation_loss_range", "def distillation_ppo_loss",
                      "def distillation_loss", "@register_distillation_loss("
                      "DistillationLossSettings(names=['kl'"):  # fmt: skip
            statements(path, start)(space)
        name = "compute_distillation_loss_reverse_kl_estimator"
        space["get_distillation_loss_fn"] = lambda kind: space[name]
        self.loss: Any = space["distillation_ppo_loss"]

    def _of_rewards(self, config: Any, output: Any, data: Any, group: Any) -> tuple[Any, Any]:
        """The policy's loss of task rewards."""
        del group
        loss, metrics = self.verl.core.get_policy_loss_fn("vanilla")(
            old_log_prob=data["old_log_probs"], log_prob=output["log_probs"],
            advantages=data["advantages"], response_mask=data["response_mask"],
            loss_agg_mode=config.loss_agg_mode, config=config,
        )  # fmt: skip
        return loss, metrics

    def outcome(self, words: tuple[str, ...], samples: Samples) -> Outcome:
        """The loss of one update of all samples."""
        stated = dict(word.split("=", 1) for word in words[1:])
        options = {name: read(value) for name, value in stated.items()}
        config, mask = self.verl.config(options), samples.padded_mask
        kind = type("Loss", (dict,), {"__getattr__": dict.__getitem__})
        loss = kind({
            "loss_mode": "k3", "use_task_rewards": True, "distillation_loss_coef": 1.0,
            "loss_max_clamp": None, "use_policy_gradient": False, "policy_loss_mode": "vanilla",
            "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2,
            "global_batch_info": {},
        } | {name.removeprefix(LOSS): value for name, value in options.items()
             if name.startswith(LOSS)})  # fmt: skip
        advantages, _ = self.verl.advantages(options, samples, mask, samples.token_rewards)
        leaf = samples.padded(samples.logprobs).requires_grad_()
        data = kind({
            "response_mask": mask.bool(), "old_log_probs": samples.padded(samples.old),
            "teacher_logprobs": samples.padded(samples.ref)[..., None],
            "advantages": advantages, "dp_size": 1,
            "batch_num_tokens": mask.sum(), "global_batch_size": len(samples),
        })  # fmt: skip
        config.global_batch_info.update(
            dp_size=1, batch_num_tokens=mask.sum(), global_batch_size=len(samples),
            loss_scale_factor=config.loss_scale_factor)  # fmt: skip
        config_stub = SimpleNamespace(distillation_loss=loss)
        total, _ = self.loss(config, config_stub, {"log_probs": leaf}, data)
        zeros = torch.zeros_like(leaf)
        leaves = {"logprobs": leaf, "entropy": zeros, "values": zeros}
        return outcome_of(total, leaves, samples)


def first(seed: int) -> Samples:
    """Samples whose policy is as before the step."""
    samples = drawn(seed)
    return replace(samples, logprobs=samples.old)


LATER = Known("an advantage is of the policy in the update there, of the one before the step here",
              "there minus that of the policy in the update")  # fmt: skip
CASES: tuple[tuple[str, tuple[str, ...], Any, Known | None], ...] = (
    ("first update", ("use_task_rewards=False",), first, None),
    ("first update, a coefficient, which it does not read",
     ("use_task_rewards=False", "distillation_loss_coef=0.5"), first, None),
    ("first update, a bound of 0.5", ("use_task_rewards=False", "loss_max_clamp=0.5"), first, None),
    ("task rewards, first update", (), first, None),
    ("task rewards, coefficient 0.5, first update", ("distillation_loss_coef=0.5",), first, None),
    ("later updates", ("use_task_rewards=False",), drawn, LATER),
    ("clip 0.1 and 0.28, later updates",
     ("use_task_rewards=False", "clip_ratio_low=0.1", "clip_ratio_high=0.28"), drawn, LATER),
)  # fmt: skip
