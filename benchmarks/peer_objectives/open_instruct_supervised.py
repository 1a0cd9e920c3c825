"""Open-Instruct's supervised losses: dpo_utils, the language model's loss of finetune, and the loss
of reward_modeling.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peer_objectives.comparing import Case, Known, Lost
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.open_instruct import OpenInstruct, flag
from benchmarks.peer_objectives.ours import Outcome
from benchmarks.peer_objectives.ours_texts import (
    logits_outcome,
    preference_outcome,
    reward_outcome,
    scores_outcome,
    sft_outcome,
)
from benchmarks.peer_objectives.texts import Texts, alike, micro_batches, token_logprobs, written

BASE: dict[str, Any] = {
    "model_name_or_path": "m", "dataset_mixer_list": ["d", "1.0"], "max_seq_length": 64,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
}  # fmt: skip


class Supervised:
    """Updates of two micro-batches, whose losses accelerate averages."""

    def __init__(self, checkout: Path) -> None:
        OpenInstruct(checkout)  # makes its files importable
        self.utils: Any = import_module("open_instruct.dpo_utils")
        self.of_reward = statements(checkout / "open_instruct" / "reward_modeling.py",
                                    "loss = -F.logsigmoid(")  # fmt: skip

    def dpo(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """_get_batch_logps, then compute_loss."""
        kind = self.utils.DPOLossType(options.get("loss_type", "dpo_norm"))
        args = SimpleNamespace(
            loss_type=kind, beta=options.get("beta", 5.0),
            gamma_beta_ratio=options.get("gamma_beta_ratio", 0.3),
            label_smoothing=options.get("label_smoothing", 0.0),
        )  # fmt: skip
        leaf, ids = texts.leaf(), texts.ids
        sums, ref = (
            self.utils._get_batch_logps(
                torch.nn.functional.pad(token_logprobs(logits, ids)[:, 1:], (0, 1)), texts.labels,
                average_log_prob=kind.is_average_loss)
            for logits in (leaf, texts.ref_logits())
        )  # fmt: skip
        total = torch.zeros((), dtype=torch.float64)
        for rows in micro_batches(texts):
            good, bad = np.split(rows, 2)
            cache = {0: {"chosen_logps": ref[good], "rejected_logps": ref[bad]}}
            losses = self.utils.compute_loss(args, {"index": 0}, sums[good], sums[bad], cache)[0]
            total = total + losses.mean() / 2
        return logits_outcome(total, leaf, texts)

    def sft(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """The loss that a causal model of transformers returns with labels and no count."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        del options
        leaf, total = texts.leaf(), torch.zeros((), dtype=torch.float64)
        for rows in np.split(np.arange(len(texts)), 2):
            loss: Any = ForCausalLMLoss(leaf[rows], texts.labels[rows], vocab_size=leaf.shape[-1])
            total = total + loss / 2
        return logits_outcome(total, leaf, texts)

    def reward(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """The loss of reward_modeling."""
        del options
        leaf = torch.from_numpy(texts.scores.copy()).requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for rows in micro_batches(texts):
            good, bad = np.split(rows, 2)
            space = {"F": torch.nn.functional, "chosen_reward": leaf[good],
                     "rejected_reward": leaf[bad]}  # fmt: skip
            self.of_reward(space)
            total = total + space["loss"] / 2
        return scores_outcome(total, leaf, texts)


def cases(checkout: Path) -> Iterator[Case | Lost]:
    """All that is compared."""
    peer = Supervised(checkout)
    kinds = {"dpo": (peer.dpo, preference_outcome), "sft": (peer.sft, sft_outcome),
             "reward": (peer.reward, reward_outcome)}  # fmt: skip
    for program, name, options, known_difference in CASES:
        stated = BASE | options
        words = [program, *(word for key, value in stated.items() for word in flag(key, value))]
        if isinstance(known_difference, str):
            yield Lost(f"{program}, {name}", words, known_difference)
            continue
        theirs, ours = kinds[program]

        def computed(
            texts: Texts, options: dict[str, Any] = options, theirs: Any = theirs
        ) -> Outcome:
            return theirs(options, texts)

        draw = alike if "equal length" in name else written
        yield Case(f"{program}, {name}", words, computed, draw, known_difference, ours=ours)


MEANS = Known("a micro-batch's loss is a mean over its tokens there, and micro-batches count alike",
              "of each micro-batch, which count alike there")  # fmt: skip
CASES: tuple[tuple[str, str, dict[str, Any], Known | str | None], ...] = (
    ("dpo", "defaults", {}, None),
    ("dpo", "beta 0.5", {"beta": 0.5}, None),
    *(("dpo", f"{kind}, label_smoothing {share}", {
        "loss_type": kind, "beta": beta, "label_smoothing": share}, None)
      for kind, beta in (("dpo", 0.1), ("dpo_norm", 5.0), ("simpo", 2.0)) for share in (0.0, 0.1)),
    ("dpo", "simpo, gamma_beta_ratio 0.5", {
        "loss_type": "simpo", "beta": 10.0, "gamma_beta_ratio": 0.5}, None),
    ("dpo", "gamma_beta_ratio, which dpo does not read", {"gamma_beta_ratio": 0.5}, None),
    ("dpo", "wpo", {"loss_type": "wpo"}, "loss_type"),
    ("sft", "defaults", {}, MEANS),
    ("sft", "answers of equal length", {}, None),
    ("sft", "reduce_loss sum", {"reduce_loss": "sum"}, "reduce_loss"),
    ("reward", "defaults", {}, None),
)  # fmt: skip
