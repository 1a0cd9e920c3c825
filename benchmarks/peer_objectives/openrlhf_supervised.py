"""OpenRLHF's supervised losses: DPOLoss, SFTLoss and the losses of reward models."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peer_objectives.comparing import Case, Lost
from benchmarks.peer_objectives.openrlhf import OpenRLHF, flag
from benchmarks.peer_objectives.ours import Outcome
from benchmarks.peer_objectives.ours_texts import (
    logits_outcome,
    preference_outcome,
    reward_outcome,
    scores_outcome,
    sft_outcome,
)
from benchmarks.peer_objectives.texts import (
    Texts,
    fully_learned,
    micro_batches,
    token_logprobs,
    written,
)

BASE: dict[str, Any] = {
    "model.model_name_or_path": "m", "data.dataset": "d", "train.batch_size": 8,
    "train.micro_batch_size": 4,
}  # fmt: skip


class Supervised:
    """Updates of its trainers, of two micro-batches, whose losses DeepSpeed averages."""

    def __init__(self, checkout: Path) -> None:
        OpenRLHF(checkout)  # makes its files importable
        self.losses: Any = import_module("openrlhf.models.loss")
        kind: Any = import_module("openrlhf.trainer.dpo_trainer").DPOTrainer
        self.trainer: Any = kind.__new__(kind)

    def dpo(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """concatenated_forward's sums, DPOLoss and the NLL."""
        at = options.get
        function = self.losses.DPOLoss(
            at("model.beta", 0.1), at("model.label_smoothing", 0.0), at("model.ipo_enable", False)
        )
        leaf, ids = texts.leaf(), texts.ids
        prompts = (texts.attention - texts.answers).sum(1).tolist()
        sides = [
            self.trainer._get_batch_logps(token_logprobs(logits, ids)[:, 1:], texts.attention,
                                          prompts)
            for logits in (leaf, texts.ref_logits())
        ]  # fmt: skip
        (sums, means), (ref, _) = sides
        total = torch.zeros((), dtype=torch.float64)
        for rows in micro_batches(texts):
            good, bad = np.split(rows, 2)
            loss = function(sums[good], sums[bad], ref[good], ref[bad])[0]
            nll = -means[good].mean() * at("model.nll_loss_coef", 0.0)
            total = total + (loss + nll) / 2
        return logits_outcome(total, leaf, texts)

    def sft(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """SFTLoss with the count of the whole update's tokens, as iter_grad_accum_global_norm
        gives it, times the micro-batches, over which DeepSpeed averages.
        """
        del options
        leaf, function = texts.leaf(), self.losses.SFTLoss()
        logprobs = token_logprobs(leaf, texts.ids)[:, 1:]
        mask = texts.answers[:, 1:]
        total = torch.zeros((), dtype=torch.float64)
        for rows in np.split(np.arange(len(texts)), 2):
            total = total + function(logprobs[rows], mask[rows], batch_num_tokens=mask.sum())
        return logits_outcome(total, leaf, texts)

    def reward(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """PairWiseLoss or LogExpLoss."""
        kind = options.get("model.loss_type", "sigmoid")
        function = self.losses.PairWiseLoss() if kind == "sigmoid" else self.losses.LogExpLoss()
        leaf = torch.from_numpy(texts.scores.copy()).requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for rows in micro_batches(texts):
            good, bad = np.split(rows, 2)
            margin = texts.margins[good // 2] if options.get("model.margin_loss_enable") else None
            margins = None if margin is None else torch.from_numpy(margin)
            total = total + function(leaf[good], leaf[bad], margins) / 2
        return scores_outcome(total, leaf, texts)


def cases(checkout: Path) -> Iterator[Case | Lost]:
    """All that is compared."""
    peer = Supervised(checkout)
    kinds = SimpleNamespace(
        dpo=(peer.dpo, preference_outcome), sft=(peer.sft, sft_outcome),
        rm=(peer.reward, reward_outcome),
    )  # fmt: skip
    for program, name, options, lost in CASES:
        stated = BASE | options
        words = [program, *(word for key, value in stated.items() for word in flag(key, value))]
        if lost is not None:
            yield Lost(f"{program}, {name}", words, lost)
            continue
        theirs, ours = getattr(kinds, program)

        def computed(
            texts: Texts, options: dict[str, Any] = options, theirs: Any = theirs
        ) -> Outcome:
            return theirs(options, texts)

        samples = fully_learned if "model.pretrain_mode_enable" in options else written
        yield Case(f"{program}, {name}", words, computed, samples, ours=ours)


SMOOTHING = {"model.label_smoothing": 0.1}
CASES: tuple[tuple[str, str, dict[str, Any], str | None], ...] = (
    ("dpo", "defaults", {}, None),
    ("dpo", "beta 0.5", {"model.beta": 0.5}, None),
    ("dpo", "label_smoothing 0.1", SMOOTHING, None),
    ("dpo", "nll_loss_coef 0.2", {"model.nll_loss_coef": 0.2}, None),
    ("dpo", "ipo", {"model.ipo_enable": True}, None),
    ("dpo", "ipo, nll_loss_coef 0.2", {
        "model.ipo_enable": True, "model.nll_loss_coef": 0.2}, None),
    ("dpo", "ipo, label_smoothing 0.1, which it does not read", {
        "model.ipo_enable": True, **SMOOTHING}, None),
    ("sft", "defaults", {}, None),
    ("sft", "pretrain_mode", {"model.pretrain_mode_enable": True}, None),
    ("rm", "defaults", {}, None),
    ("rm", "loss_type sigmoid, margin", {"model.margin_loss_enable": True}, None),
    ("rm", "loss_type logexp", {"model.loss_type": "logexp"}, None),
    ("rm", "loss_type logexp, margin, which it does not read", {
        "model.loss_type": "logexp", "model.margin_loss_enable": True}, None),
)  # fmt: skip
