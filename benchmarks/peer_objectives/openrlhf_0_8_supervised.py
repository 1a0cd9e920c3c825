"""OpenRLHF 0.8.4's losses of pairs, of labels, of a teacher, of steps, and of SFT."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer_objectives.comparing import Case, Known
from benchmarks.peer_objectives.learning import words_of
from benchmarks.peer_objectives.openrlhf_supervised import Supervised
from benchmarks.peer_objectives.ours import Outcome
from benchmarks.peer_objectives.ours_texts import (
    distilled_outcome,
    logits_outcome,
    preference_outcome,
    reward_outcome,
    sft_outcome,
    steps_outcome,
)
from benchmarks.peer_objectives.texts import Texts, token_logprobs, written

BASE: dict[str, Any] = {"pretrain": "m", "dataset": "d", "train_batch_size": 16,
                        "micro_train_batch_size": 8}  # fmt: skip
NAMES = {"beta": "model.beta", "label_smoothing": "model.label_smoothing",
         "nll_loss_coef": "model.nll_loss_coef", "ipo": "model.ipo_enable",
         "loss": "model.loss_type", "margin_loss": "model.margin_loss_enable"}  # fmt: skip
MARK, TOKENS = 6, (2, 4)  # a step's end, and the labels + and - as tokens


class Before(Supervised):
    """Updates of micro-batches, whose losses DeepSpeed averages."""

    def __init__(self, checkout: Path) -> None:
        super().__init__(checkout)
        self.losses.dist = SimpleNamespace(
            all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(SUM=None)
        )
        module: Any = import_module("openrlhf.trainer.kto_trainer")
        module.log_probs_from_logits = _logprobs  # without flash_attn
        self.of_labels: Any = module.KTOTrainer.__new__(module.KTOTrainer)

    def pairs(self, options: Mapping[str, Any], texts: Texts) -> Outcome:
        """dpo, whose functions are those of 0.11."""
        arguments = {NAMES[name]: value for name, value in options.items() if name in NAMES}
        return self.dpo(arguments, texts)

    def scores(self, options: Mapping[str, Any], texts: Texts) -> Outcome:
        """rm, whose functions are those of 0.11."""
        return self.reward({NAMES[k]: v for k, v in options.items() if k in NAMES}, texts)

    def kto(self, options: Mapping[str, Any], texts: Texts) -> Outcome:
        """_get_batch_logps and KTOLoss, with given logprobs of the unmatched answers."""
        at = options.get
        function = self.losses.KTOLoss(at("beta", 0.01), at("desirable_loss_weight", 1.0),
                                       at("undesirable_loss_weight", 1.0), 1, "cpu")  # fmt: skip
        leaf = texts.leaf()
        prompts = (texts.attention - texts.answers).sum(1).tolist()
        policy, ref = (
            self.of_labels._get_batch_logps(logits, texts.ids, texts.attention, False, prompts)
            for logits in (leaf, texts.ref_logits())
        )
        parts: list[Tensor] = []
        for rows in _split(texts, options):
            good, bad = rows[texts.desirable[rows]], rows[~texts.desirable[rows]]
            crossed = torch.from_numpy(texts.crossed[rows])
            parts.append(function(policy[good], policy[bad], crossed, ref[good], ref[bad],
                                  torch.zeros_like(crossed))[0])  # fmt: skip
        return logits_outcome(torch.stack(parts).mean(), leaf, texts)

    def kd(self, options: Mapping[str, Any], texts: Texts) -> Outcome:
        """GPTLMLoss and KDLoss by kd_coef."""
        share, leaf, teacher = options.get("kd_coef", 0.4), texts.leaf(), texts.ref_logits()
        nll, apart = self.losses.GPTLMLoss(), self.losses.KDLoss()
        parts: list[Tensor] = []
        for rows in _split(texts, options):
            labels = texts.labels[rows]
            loss = nll(leaf[rows], labels) * (1 - share)
            parts.append(loss + apart(leaf[rows], teacher[rows], labels) * share)
        return logits_outcome(torch.stack(parts).mean(), leaf, texts)

    def sft(self, options: Mapping[str, Any], texts: Texts) -> Outcome:
        """SFTLoss of each micro-batch."""
        leaf, function = texts.leaf(), self.losses.SFTLoss()
        logprobs, mask = token_logprobs(leaf, texts.ids)[:, 1:], texts.answers[:, 1:]
        parts = [function(logprobs[rows], mask[rows]) for rows in _split(texts, options)]
        return logits_outcome(torch.stack(parts).mean(), leaf, texts)

    def prm(self, options: Mapping[str, Any], texts: Texts) -> Outcome:
        """PRMLoss, with labels that are tokens or numbers."""
        tokens = TOKENS if "reward_tokens" in options else None
        function, leaf = self.losses.PRMLoss(MARK, tokens and [*tokens]), texts.leaf()
        steps, chosen = _steps(texts), torch.tensor(TOKENS)
        label_row = torch.from_numpy(_labels(options, texts))
        if "soft" not in str(options["label_key"]):
            label_row = torch.where(label_row > 0.5, chosen[0], chosen[1])
        labels = torch.where(steps, label_row, -100)
        parts = [function(texts.ids[rows].where(steps[rows], 0), leaf[rows], labels[rows])
                 for rows in _split(texts, options)]  # fmt: skip
        return logits_outcome(torch.stack(parts).mean(), leaf, texts)


def _logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def _split(texts: Texts, options: Mapping[str, Any]) -> list[Any]:
    """The rows of each micro-batch."""
    return np.split(np.arange(len(texts)), len(texts) // options["micro_train_batch_size"])


def _steps(texts: Texts) -> Tensor:
    """[S, longest] whether a token ends a step."""
    return (texts.ids == MARK) & (texts.attention > 0)


def _labels(options: Mapping[str, Any], texts: Texts) -> Any:
    """[S, longest] float32 of each step: from 0 to 1, or one of them."""
    drawn = np.random.default_rng(len(texts.tokens[0])).random(texts.ids.shape).astype(np.float32)
    return drawn if "soft" in str(options["label_key"]) else (drawn > 0.4).astype(np.float32)


def judged(options: Mapping[str, Any], table: Mapping[str, Any], texts: Texts) -> Outcome:
    """Our loss of steps, a score being the difference of the logits of the labels' tokens."""
    return steps_outcome(table, texts, _steps(texts), _labels(options, texts), TOKENS)


def marked(seed: int) -> Texts:
    """Texts in which every row ends a step somewhere."""
    texts = written(seed)
    tokens = [row.copy() for row in texts.tokens]
    for row in tokens:
        row[-1] = MARK
    return replace(texts, tokens=tokens)


def cases(checkout: Path) -> Iterator[Case]:
    """All that is compared."""
    peer = Before(checkout)
    kinds = {"dpo": (peer.pairs, preference_outcome, written),
             "rm": (peer.scores, reward_outcome, written),
             "kto": (peer.kto, preference_outcome, written),
             "kd": (peer.kd, distilled_outcome, written), "sft": (peer.sft, sft_outcome, written),
             "prm": (peer.prm, None, marked)}  # fmt: skip
    for program, name, options, known_difference in CASES:
        stated = BASE | options
        theirs, ours, samples = kinds[program]
        yield Case(f"{program}, {name}", words_of(program, stated), partial(theirs, stated),
                   samples, known_difference, ours=ours or partial(judged, stated))  # fmt: skip


ONE = {"micro_train_batch_size": 16}  # an update of one micro-batch
Z = Known("the reference point z is a mean over each micro-batch there, over the update here",
          "its reference point z is a mean over an update")  # fmt: skip
TOKENS_OF = Known("tokens are averaged within each micro-batch there, over the update here",
                  "over each micro-batch's")  # fmt: skip
WHOLE = Known("the whole vocabulary competes for the label there, two labels here",
              "of all tokens where no data.reward_tokens are named")  # fmt: skip
LATER = Known("the teacher is followed one token later there: at the answer's tokens, not at those "
              "that predict them", "there one token later")  # fmt: skip
KD = {"teacher_model": "t", "input_key": "i", "output_key": "o"}
PRM = {"input_key": "i", "label_key": "hard", "placeholder_token": "ки"}
NAMED = {**PRM, "reward_tokens": ["+", "-"]}
SOFT = {**NAMED, "label_key": "soft"}
CASES: tuple[tuple[str, str, dict[str, Any], Known | None], ...] = (
    ("dpo", "defaults", {}, None),
    ("dpo", "beta 0.5", {"beta": 0.5}, None),
    ("dpo", "label_smoothing 0.1", {"label_smoothing": 0.1}, None),
    ("dpo", "nll_loss_coef 0.2", {"nll_loss_coef": 0.2}, None),
    ("dpo", "ipo", {"ipo": True}, None),
    ("dpo", "ipo, nll_loss_coef 0.2", {"ipo": True, "nll_loss_coef": 0.2}, None),
    ("rm", "defaults", {}, None),
    ("rm", "margin_loss", {"margin_loss": True}, None),
    ("rm", "loss logexp", {"loss": "logexp"}, None),
    ("kto", "one micro-batch", ONE, None),
    ("kto", "one micro-batch, beta 0.5, weights 2 and 0.5", ONE | {
        "beta": 0.5, "desirable_loss_weight": 2.0, "undesirable_loss_weight": 0.5}, None),
    ("kto", "two micro-batches", {"beta": 0.5}, Z),
    ("kd", "one micro-batch", ONE | KD, LATER),
    ("kd", "one micro-batch, kd_coef 0.9", ONE | KD | {"kd_coef": 0.9}, LATER),
    ("kd", "one micro-batch, kd_coef 1", ONE | KD | {"kd_coef": 1.0}, LATER),
    ("kd", "two micro-batches", KD, TOKENS_OF),
    ("sft", "one micro-batch", ONE, None),
    ("sft", "two micro-batches", {}, TOKENS_OF),
    ("prm", "one micro-batch, reward_tokens", ONE | NAMED, None),
    ("prm", "one micro-batch, reward_tokens, soft labels", ONE | SOFT, None),
    ("prm", "one micro-batch", ONE | PRM, WHOLE),
    ("prm", "two micro-batches, reward_tokens", NAMED, TOKENS_OF),
    ("prm", "two micro-batches, reward_tokens, soft labels", SOFT, TOKENS_OF),
)  # fmt: skip
