"""TRL's losses of SFTTrainer, DistillationTrainer, GKDTrainer and RewardTrainer, and the trainers
that no recipe comes from.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer_objectives.comparing import Case, Known, Lost
from benchmarks.peer_objectives.ours import Outcome
from benchmarks.peer_objectives.ours_texts import (
    distilled_outcome,
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
        self.preferences = Preferences(checkout)
        for program, name in (("sft", "SFTTrainer"), ("reward", "RewardTrainer")):
            module = import_module(f"trl.trainer.{program}_trainer")
            self.preferences.kinds[program] = getattr(module, name)
        self.distillation: Any = import_module("trl.trainer.distillation_trainer")
        self.gkd: Any = import_module("trl.experimental.gkd.gkd_trainer").GKDTrainer

    def sft(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """SFTTrainer.compute_loss, with the tokens of the whole update in its denominator."""
        on_all_tokens = options.get("assistant_only_loss") == "all tokens"
        labels = (
            texts.ids.masked_fill(texts.attention == 0, -100) if on_all_tokens else texts.labels
        )
        leaf, total = texts.leaf(), torch.zeros((), dtype=torch.float64)
        trainer = self.preferences.trainer(
            "sft", options, compute_loss_func=None, label_smoother=None,
            get_tp_size=lambda: 1,
        )  # fmt: skip
        if trainer.args.loss_type == "chunked_nll":  # as SFTConfig replaces it
            trainer.args.loss_type = "nll"
        count = (labels[:, 1:] != -100).sum()
        for rows in np.split(np.arange(len(texts)), 2):
            trainer.model.logits = leaf[rows]
            inputs = {"labels": labels[rows], "attention_mask": texts.attention[rows]}
            total = total + trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count)
        return logits_outcome(total, leaf, texts)

    def distilled(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """The divergence of DistillationTrainer, with heads whose weight is 1, on the answers."""
        return self._taught(texts, lambda student, teacher, labels, count: (
            self.distillation._chunked_divergence_loss(
                student, teacher, torch.eye(student.shape[-1], dtype=student.dtype),
                torch.eye(student.shape[-1], dtype=student.dtype), labels != -100,
                options.get("beta", 1.0), count, temperature=options.get("temperature", 1.0),
            )[0]
        ))  # fmt: skip

    def mixed(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """The divergence of GKDTrainer, which has no temperature there."""
        return self._taught(texts, lambda student, teacher, labels, count: (
            self.gkd.generalized_jsd_loss(
                student, teacher, labels, options.get("beta", 0.5), num_items_in_batch=count
            )
        ))  # fmt: skip

    def _taught(self, texts: Texts, loss: Callable[..., Tensor]) -> Outcome:
        leaf, total = texts.leaf(), torch.zeros((), dtype=torch.float64)
        labels, teacher = texts.labels[:, 1:], texts.ref_logits()
        count = (labels != -100).sum()
        for rows in np.split(np.arange(len(texts)), 2):
            total = total + loss(leaf[rows, :-1], teacher[rows, :-1], labels[rows], count)
        return logits_outcome(total, leaf, texts)

    def reward(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """RewardTrainer.compute_loss, with a column of margins where the options have one."""
        leaf = torch.from_numpy(texts.scores.copy()).requires_grad_()
        trainer = self.preferences.trainer("reward", options)
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
    taught = partial(distilled_outcome, as_cross_entropy=False)
    functions: dict[str, Any] = {"sft": (peer.sft, sft_outcome),
                                 "reward": (peer.reward, reward_outcome),
                                 "distillation": (peer.distilled, taught),
                                 "gkd": (peer.mixed, taught)}  # fmt: skip
    for program, name, options, of_rows, known_difference in CASES:
        words = [program, *BASE, *(TEACHER if program in TAUGHT else ()), *flags(options)]
        if isinstance(known_difference, str):
            yield Lost(f"{program.upper()}, {name}", words, known_difference)
            continue
        theirs, ours = functions[program]

        def computed(
            texts: Texts, options: dict[str, Any] = options | of_rows, theirs: Any = theirs
        ) -> Outcome:
            return theirs(options, texts)

        samples = fully_learned if "completion_only_loss" in options else written
        yield Case(
            f"{program.upper()}, {name}", words, computed, samples, known_difference, ours=ours
        )
    for program, option in OTHERS.items():
        yield Lost(program.upper(), [program, *BASE], option)


EVERY = Known("all tokens of messages have a loss there", "there all tokens")
MARGIN = Known("a column of margins is read there, where rows have it", "with a column margin")
TURNS = {"assistant_only_loss": True}
TAUGHT = ("distillation", "gkd")
TEACHER = ("--teacher_model_name_or_path", "t", "--max_length", "1024")  # room for answers
# Program, name, options, what the rows are like, and what is known of it.
CASES: tuple[tuple[str, str, dict[str, Any], dict[str, Any], Known | str | None], ...] = (
    *(("sft", f"loss_type {kind}, assistant_only_loss", {**TURNS, "loss_type": kind}, {}, None)
      for kind in ("nll", "dft", "chunked_nll")),
    ("sft", "prompts and completions", {}, {}, None),
    ("sft", "messages", {}, {"assistant_only_loss": "all tokens"}, EVERY),
    ("sft", "assistant_only_loss false", {"assistant_only_loss": False},
     {"assistant_only_loss": "all tokens"}, EVERY),
    ("sft", "completion_only_loss false", {"completion_only_loss": False}, {}, None),
    ("sft", "neftune_noise_alpha 5, of the same logits", {"neftune_noise_alpha": 5}, {}, None),
    ("sft", "label_smoothing_factor 0.1", {"label_smoothing_factor": 0.1}, {},
     "label_smoothing_factor"),
    ("distillation", "defaults", {}, {}, None),
    *(("distillation", f"beta {beta}, temperature 2", {"beta": beta, "temperature": 2.0}, {}, None)
      for beta in (0.0, 0.3, 1.0)),
    ("gkd", "defaults", {}, {}, None),
    *(("gkd", f"beta {beta}", {"beta": beta, "lmbda": 0.0}, {}, None) for beta in (0.0, 0.3, 1.0)),
    ("gkd", "seq_kd", {"seq_kd": True}, {}, "seq_kd"),
    ("reward", "defaults", {}, {}, None),
    ("reward", "center_rewards_coefficient 0.01", {"center_rewards_coefficient": 0.01}, {}, None),
    ("reward", "rows with a margin", {}, {"margin": True}, MARGIN),
)  # fmt: skip
OTHERS = {"gold": "not here", "bco": "not here", "nash_md": "online_dpo", "xpo": "online_dpo"}
