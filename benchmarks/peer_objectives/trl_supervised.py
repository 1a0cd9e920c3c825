"""TRL's losses of SFTTrainer and RewardTrainer, and the trainers that no recipe comes from."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peer_objectives.comparing import Case, Known, Lost
from benchmarks.peer_objectives.ours import Outcome
from benchmarks.peer_objectives.ours_texts import (
    logits_outcome,
    reward_outcome,
    scores_outcome,
    sft_outcome,
)
from benchmarks.peer_objectives.texts import Texts, fully_learned, micro_batches, written
from benchmarks.peer_objectives.trl import TRL, flags
from benchmarks.peer_objectives.trl_pairs import BASE, Preferences


class Supervised:
    """Updates of two micro-batches. SFT's are summed, as its losses divide by the whole update's
    tokens; those of reward models are averaged.
    """

    def __init__(self, checkout: Path) -> None:
        TRL(checkout)  # puts the checkout on the path
        self.sft_trainer: Any = import_module("trl.trainer.sft_trainer")
        self.preferences = Preferences(checkout)
        kind = import_module("trl.trainer.reward_trainer").RewardTrainer
        self.preferences.kinds["reward"] = kind

    def sft(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """transformers' loss, dft_loss or the one in chunks, of whose head the weight is 1."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        kind = options.get("loss_type", "nll")
        whole = options.get("assistant_only_loss") == "all tokens"
        labels = texts.ids.masked_fill(texts.attention == 0, -100) if whole else texts.labels
        leaf, total = texts.leaf(), torch.zeros((), dtype=torch.float64)
        count = (labels[:, 1:] != -100).sum()
        for rows in np.split(np.arange(len(texts)), 2):
            logits, given = leaf[rows], labels[rows]
            if kind == "dft":
                loss = self.sft_trainer.dft_loss(SimpleNamespace(logits=logits), given, count)
            elif kind == "chunked_nll":
                weight = torch.eye(logits.shape[-1], dtype=logits.dtype)
                loss = self.sft_trainer._chunked_cross_entropy_loss(
                    logits, weight, 5, given, num_items_in_batch=count
                )[0]
            else:
                loss = ForCausalLMLoss(logits, given, logits.shape[-1], num_items_in_batch=count)
            total = total + loss
        return logits_outcome(total, leaf, texts)

    def reward(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """RewardTrainer.compute_loss, with a column of margins where the options have one."""
        leaf = torch.from_numpy(texts.scores.copy()).requires_grad_()
        trainer = self.preferences.trainer(
            "reward", {"center_rewards_coefficient": None} | options
        )  # fmt: skip
        total = torch.zeros((), dtype=torch.float64)
        for rows in micro_batches(texts):
            trainer.model.logits = leaf[rows][:, None]
            inputs = {"attention_mask": texts.attention[rows]}
            if options.get("margin"):
                inputs["margin"] = torch.from_numpy(texts.margins[rows[: len(rows) // 2] // 2])
            total = total + trainer.compute_loss(trainer.model, inputs) / 2
        return scores_outcome(total, leaf, texts)


def cases(checkout: Path) -> Iterator[Case | Lost]:
    """All that is compared, and what is lost."""
    peer = Supervised(checkout)
    functions: dict[str, Any] = {"sft": (peer.sft, sft_outcome),
                                 "reward": (peer.reward, reward_outcome)}  # fmt: skip
    for program, name, options, of_rows, known in CASES:
        words = [program, *BASE, *flags(options)]
        if isinstance(known, str):
            yield Lost(f"{program.upper()}, {name}", words, known)
            continue
        theirs, ours = functions[program]

        def computed(
            texts: Texts, options: dict[str, Any] = options | of_rows, theirs: Any = theirs
        ) -> Outcome:
            return theirs(options, texts)

        samples = fully_learned if "completion_only_loss" in options else written
        yield Case(f"{program.upper()}, {name}", words, computed, samples, known, ours=ours)
    for program, told in OTHERS.items():
        yield Lost(program.upper(), [program, *BASE], told)


EVERY = Known("all tokens of messages have a loss there", "there all tokens")
MARGIN = Known("a column of margins is read there, where rows have it", "with a column margin")
TURNS = {"assistant_only_loss": True}
# Program, name, options, what the rows are like, and what is known of it.
CASES: tuple[tuple[str, str, dict[str, Any], dict[str, Any], Known | str | None], ...] = (
    *(("sft", f"loss_type {kind}, assistant_only_loss", {**TURNS, "loss_type": kind}, {}, None)
      for kind in ("nll", "dft", "chunked_nll")),
    ("sft", "prompts and completions", {}, {}, None),
    ("sft", "messages", {}, {"assistant_only_loss": "all tokens"}, EVERY),
    ("sft", "assistant_only_loss false", {"assistant_only_loss": False},
     {"assistant_only_loss": "all tokens"}, EVERY),
    ("sft", "completion_only_loss false", {"completion_only_loss": False}, {}, None),
    ("sft", "neftune_noise_alpha 5", {"neftune_noise_alpha": 5}, {}, "neftune_noise_alpha"),
    ("sft", "label_smoothing_factor 0.1", {"label_smoothing_factor": 0.1}, {},
     "label_smoothing_factor"),
    ("reward", "defaults", {}, {}, None),
    ("reward", "center_rewards_coefficient 0.01", {"center_rewards_coefficient": 0.01}, {}, None),
    ("reward", "rows with a margin", {}, {"margin": True}, MARGIN),
)  # fmt: skip
OTHERS = {"gkd": "on_policy", "minillm": "distillation", "gold": "not here",
          "prm": "process_reward", "bco": "not here", "nash_md": "online_dpo",
          "xpo": "online_dpo"}  # fmt: skip
