"""TRL's preference losses: DPOTrainer, KTOTrainer, CPOTrainer, ORPOTrainer.

An update has two micro-batches, whose losses are averaged as transformers' Trainer does.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer_objectives.comparing import Case, Known, Lost
from benchmarks.peer_objectives.ours import Outcome
from benchmarks.peer_objectives.ours_texts import logits_outcome, preference_outcome
from benchmarks.peer_objectives.texts import (
    Texts,
    alike,
    likely,
    micro_batches,
    token_logprobs,
    unlikely,
    written,
)
from benchmarks.peer_objectives.trl import ONE as PROCESS
from benchmarks.peer_objectives.trl import TRL, defaults, flags

BASE = ("--model_name_or_path", "m", "--dataset_name", "d", "--per_device_train_batch_size", "4",
        "--gradient_accumulation_steps", "2", "--max_length", "64")  # fmt: skip


class Model(SimpleNamespace):
    """A model with given logits; `logits` is replaced before every call."""

    logits: Tensor
    training = True

    def __call__(self, *args: Any, fused_lm_head: bool = False, **knobs: Any) -> Any:
        return fused(self.logits, knobs["labels"]) if fused_lm_head else SimpleNamespace(
            logits=self.logits)  # fmt: skip


def fused(logits: Tensor, labels: Tensor) -> Any:
    """What TRL's fused head returns and losses read, [S, T - 1] each: logprobs, and of WPO the log
    of the sum of squared probabilities. The others are read for metrics alone.
    """
    mask = labels[:, 1:] != -100
    logprobs = token_logprobs(logits, labels.clamp(min=0))[:, 1:] * mask
    squares = (2 * logits[:, :-1].detach().log_softmax(-1)).logsumexp(-1) * mask
    zeros = torch.zeros_like(squares)
    return SimpleNamespace(log_probs=logprobs, log_sum_sq_probs=squares, label_mask=mask,
                           entropy=zeros, mean_logits=zeros, is_top1=mask)  # fmt: skip


def _parts(options: dict[str, Any]) -> int:
    return options.get("gradient_accumulation_steps", 2)


class Preferences:
    """Trainers that were never set up, with the attributes that their losses read."""

    def __init__(self, checkout: Path) -> None:
        TRL(checkout)  # puts the checkout on the path
        from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig
        from trl.experimental.cpo import CPOConfig
        from trl.experimental.cpo.cpo_trainer import CPOTrainer
        from trl.experimental.orpo import ORPOConfig
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer
        from trl.trainer import dpo_trainer, kto_trainer

        self.kinds: Any = {"dpo": dpo_trainer.DPOTrainer, "kto": kto_trainer.KTOTrainer,
                           "cpo": CPOTrainer, "orpo": ORPOTrainer}  # fmt: skip
        configs: dict[str, type] = {"dpo": DPOConfig, "kto": KTOConfig, "cpo": CPOConfig,
                                    "orpo": ORPOConfig, "reward": RewardConfig,
                                    "sft": SFTConfig}  # fmt: skip
        self.defaults = {name: defaults(config) for name, config in configs.items()}

    def trainer(self, program: str, options: dict[str, Any], **more: Any) -> Any:
        """A trainer of the program with its defaults and `options`."""
        config = SimpleNamespace(**self.defaults[program] | options)
        trainer = self.kinds[program].__new__(self.kinds[program])
        attributes = dict(vars(config)) | {
            "args": config, "accelerator": PROCESS, "aux_loss_enabled": False, "model": Model(),
            "_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0,
            "is_encoder_decoder": False, "pad_token_id": 0, "padding_value": 0, "_tp_size": 1,
        } | more  # fmt: skip
        for name, value in attributes.items():
            object.__setattr__(trainer, name, value)
        return trainer

    def dpo(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """_compute_loss, with the reference's logprobs computed before."""
        losses = options.get("loss_type", ["sigmoid"])
        losses = [losses] if isinstance(losses, str) else losses
        weights = options.get("loss_weights") or [1.0] * len(losses)
        trainer = self.trainer("dpo", options, loss_types=losses, loss_weights=weights,
                               precompute_ref_logps=True)  # fmt: skip
        leaf, total = texts.leaf(), torch.zeros((), dtype=torch.float64)
        ref = (token_logprobs(texts.ref_logits(), texts.ids) * texts.answers).sum(1)
        single = options.get("f_divergence_type") == "alpha_divergence"  # has no clamp for float64
        for rows in micro_batches(texts, _parts(options)):
            leaf_rows = leaf[rows].float() if single else leaf[rows]
            trainer.model.logits = leaf_rows
            before = ref[rows].to(leaf_rows.dtype)
            inputs = {"input_ids": texts.ids[rows], "attention_mask": texts.attention[rows],
                      "completion_mask": texts.answers[rows],
                      "ref_chosen_logps": before[: len(rows) // 2],
                      "ref_rejected_logps": before[len(rows) // 2 :]}  # fmt: skip
            total = total + trainer._compute_loss(trainer.model, inputs, False) / _parts(options)
        return logits_outcome(total, leaf, texts)

    def kto(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """_compute_loss of labelled answers, with given logprobs of mismatched ones."""
        leaf, total = texts.leaf(), torch.zeros((), dtype=torch.float64)
        ref = (token_logprobs(texts.ref_logits(), texts.ids) * texts.answers).sum(1)
        needs_kl = options.get("loss_type", "kto") == "kto"
        for rows in np.split(np.arange(len(texts)), _parts(options)):
            crossed = torch.from_numpy(texts.crossed[rows])
            trainer = self.trainer(
                "kto", options, calculate_KL=needs_kl, precompute_ref_logps=True,
                _compute_kl_logps=lambda *_, crossed=crossed: crossed if needs_kl else None,
            )  # fmt: skip
            trainer.model.logits = leaf[rows]
            inputs = {"input_ids": texts.ids[rows], "attention_mask": texts.attention[rows],
                      "completion_mask": texts.answers[rows], "ref_logps": ref[rows],
                      "label": torch.from_numpy(texts.desirable[rows]),
                      "ref_KL_logps": torch.zeros_like(crossed)}  # fmt: skip
            total = total + trainer._compute_loss(trainer.model, inputs, False) / _parts(options)
        return logits_outcome(total, leaf, texts)

    def of_batches(self, program: str, options: dict[str, Any], texts: Texts) -> Outcome:
        """get_batch_loss_metrics of CPO and ORPO."""
        if options.get("loss_type") == "alphapo":  # as CPOConfig replaces it
            options = options | {"loss_type": "simpo", "cpo_alpha": 0.0}
        trainer = self.trainer(program, options)
        leaf, total = texts.leaf(), torch.zeros((), dtype=torch.float64)
        for rows in micro_batches(texts, _parts(options)):
            trainer.model.logits = leaf[rows]
            batch = {
                f"{side}_{name}": column[half] for name, column in {
                    "input_ids": texts.ids, "attention_mask": texts.attention,
                    "labels": texts.labels}.items()
                for side, half in zip(("chosen", "rejected"), np.split(rows, 2), strict=True)
            }  # fmt: skip
            loss, _ = trainer.get_batch_loss_metrics(trainer.model, batch)
            total = total + loss / _parts(options)
        return logits_outcome(total, leaf, texts)


def cases(checkout: Path) -> Iterator[Case | Lost]:
    """All that is compared, and what is lost."""
    peer = Preferences(checkout)
    for program, listed in CASES.items():
        for name, options, known_difference in listed:
            words = [program, *BASE, *flags(options)]
            if isinstance(known_difference, str):
                yield Lost(f"{program.upper()}, {name}", words, known_difference)
                continue

            def computed(
                texts: Texts, options: dict[str, Any] = options, program: str = program
            ) -> Outcome:
                functions: dict[str, Callable[..., Outcome]] = {"dpo": peer.dpo, "kto": peer.kto}
                if program in functions:
                    return functions[program](options, texts)
                return peer.of_batches(program, options, texts)

            draw = next((draw for part, draw in DRAWS.items() if part in name), written)
            yield Case(f"{program.upper()}, {name}", words, computed, draw, known_difference,
                       ours=preference_outcome)  # fmt: skip


WHOLE_BATCH = {"gradient_accumulation_steps": 1}
DRAWS = {"unlikely": unlikely, "likely": likely, "equal length": alike}  # in a case's name
Listed = tuple[tuple[str, dict[str, Any], Known | str | None], ...]
SORTED = Known("pairs of a micro-batch are sorted there, of the update here",
               "there those of a micro-batch")  # fmt: skip
TOKENS = Known("the NLL is a mean over the chosen tokens of a micro-batch there, of each answer's "
               "mean here", "over all chosen tokens")  # fmt: skip
WHOLE = Known("ORPO's NLL is over prompts too there", "there over prompts too")
ONE = Known("a single loss of an algorithm of its own has weight 1 here", "has weight 1 here")
SMOOTHED = Known("sigmoid reads label_smoothing here, and not there",
                 "the loss sigmoid reads it here too")  # fmt: skip
UNWEIGHTED = Known("IPO's pairs are not weighed here", "wpo weighs losses of dpo")
BOUND = Known(
    "weights of pairs have no bound there, and are at most 1 here", "there without a bound"
)
POINT = Known(
    "z is a mean over a micro-batch there, over the update here", "there over a micro-batch"
)
DPO: Listed = (
    ("defaults", {}, None),
    ("beta 0.5", {"beta": 0.5}, None),
    *(
        (f"loss_type {kind}", {"loss_type": kind}, None)
        for kind in (
            "hinge",
            "ipo",
            "nca_pair",
            "robust",
            "bco_pair",
            "sppo_hard",
            "apo_zero",
            "apo_down",
            "discopop",
            "sigmoid_norm",
        )
    ),
    *(
        (
            f"loss_type {kind}, label_smoothing 0.1",
            {"loss_type": kind, "label_smoothing": 0.1},
            None,
        )
        for kind in ("robust", "exo_pair")
    ),
    *((f"loss_type {kind}", {"loss_type": kind}, SORTED) for kind in ("aot", "aot_unpaired")),
    *(
        (
            f"loss_type {kind}, label_smoothing 0.1",
            {"loss_type": kind, "label_smoothing": 0.1},
            SORTED,
        )
        for kind in ("aot", "aot_unpaired")
    ),
    *(
        (
            f"loss_type {kind}, label_smoothing 0.1, which it does not read",
            {"loss_type": kind, "label_smoothing": 0.1},
            None,
        )
        for kind in ("sigmoid", "ipo", "discopop")
    ),
    ("loss_type discopop, tau 0.2", {"loss_type": "discopop", "discopop_tau": 0.2}, None),
    ("sigmoid, discopop_tau stated", {"discopop_tau": 0.2}, None),
    (
        "loss_type sigmoid bco_pair sft, weights",
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        TOKENS,
    ),
    ("loss_type sigmoid hinge", {"loss_type": ["sigmoid", "hinge"]}, None),
    ("loss_type sigmoid, weight 0.5", {"loss_type": ["sigmoid"], "loss_weights": [0.5]}, None),
    *(
        (f"loss_type {kind}, one micro-batch", {"loss_type": kind, **WHOLE_BATCH}, None)
        for kind in ("aot", "aot_unpaired")
    ),
    ("loss_type sigmoid sft, answers of equal length", {"loss_type": ["sigmoid", "sft"]}, None),
    (
        "loss_type aot sft, answers of equal length, one micro-batch",
        {"loss_type": ["aot", "sft"], **WHOLE_BATCH},
        None,
    ),
    ("loss_type ipo, weight 0.5", {"loss_type": ["ipo"], "loss_weights": [0.5]}, ONE),
    ("loss_type ipo sft", {"loss_type": ["ipo", "sft"]}, TOKENS),
    ("loss_type aot sft", {"loss_type": ["aot", "sft"]}, SORTED),
    (
        "loss_type robust hinge, label_smoothing 0.1",
        {"loss_type": ["robust", "hinge"], "label_smoothing": 0.1},
        None,
    ),
    (
        "loss_type sigmoid robust, label_smoothing 0.1",
        {"loss_type": ["sigmoid", "robust"], "label_smoothing": 0.1},
        SMOOTHED,
    ),
    *(
        (f"f_divergence_type {kind}", {"f_divergence_type": kind}, None)
        for kind in ("forward_kl", "js_divergence", "alpha_divergence")
    ),
    *(
        (
            f"alpha_divergence, {share}",
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": share},
            None,
        )
        for share in (0.0, 0.3, 1.0)
    ),
    ("f_alpha_divergence_coef without it", {"f_alpha_divergence_coef": 0.3}, None),
    *(
        (
            f"js_divergence, {kind}",
            {"f_divergence_type": "js_divergence", "loss_type": kind},
            known_difference,
        )
        for kind, known_difference in (
            ("hinge", None),
            ("discopop", None),
            ("apo_zero", None),
            ("aot", SORTED),
        )
    ),
    ("use_weighting, unlikely answers", {"use_weighting": True}, None),
    ("use_weighting, likely answers", {"use_weighting": True}, BOUND),
    (
        "use_weighting, unlikely answers, sigmoid_norm",
        {"use_weighting": True, "loss_type": "sigmoid_norm"},
        None,
    ),
    ("use_weighting, ipo", {"use_weighting": True, "loss_type": "ipo"}, UNWEIGHTED),
    *(
        (f"loss_type {kinds}", {"loss_type": kinds.split()}, "loss_type")
        for kinds in ("sft", "sigmoid ipo", "sigmoid aot", "sigmoid sigmoid_norm")
    ),
    *(
        (
            f"js_divergence, {kind}",
            {"f_divergence_type": "js_divergence", "loss_type": kind},
            "f_divergence_type",
        )
        for kind in ("nca_pair", "bco_pair", "sppo_hard", "ipo", "apo_down", "sigmoid_norm")
    ),
    (
        "alpha_divergence, 1.5",
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.5},
        "f_divergence_type",
    ),
    *(
        (f"{name} {value}", {name: value}, name)
        for name, value in (("ld_alpha", 0.5), ("rpo_alpha", 1.0), ("reference_free", True))
    ),
)
KTO: Listed = (
    ("defaults", {}, POINT),
    ("beta 0.3, weights", {"beta": 0.3, "desirable_weight": 0.8, "undesirable_weight": 1.3}, POINT),
    ("one micro-batch", {"beta": 0.3, "undesirable_weight": 1.3, **WHOLE_BATCH}, None),
    ("apo_zero_unpaired", {"loss_type": "apo_zero_unpaired"}, None),
    ("apo_zero_unpaired, weights", {
        "loss_type": "apo_zero_unpaired", "undesirable_weight": 1.3}, None),
)  # fmt: skip
CPO: Listed = (
    ("defaults", {}, TOKENS),
    ("answers of equal length", {}, None),
    ("simpo, answers of equal length", {"loss_type": "simpo"}, None),
    ("cpo_alpha 0", {"cpo_alpha": 0.0}, None),
    ("label_smoothing 0.1, cpo_alpha 0", {"label_smoothing": 0.1, "cpo_alpha": 0.0}, None),
    ("simpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0}, TOKENS),
    ("simpo, cpo_alpha 0", {"loss_type": "simpo", "cpo_alpha": 0.0}, None),
    ("simpo, label_smoothing 0.1, cpo_alpha 0", {
        "loss_type": "simpo", "label_smoothing": 0.1, "cpo_alpha": 0.0}, None),
    ("alphapo, alpha 0", {"loss_type": "alphapo"}, None),
    *((f"{kind}, alpha 0.2", {"loss_type": kind, "alpha": 0.2}, "alpha")
      for kind in ("sigmoid", "simpo", "alphapo")),
    *((kind, {"loss_type": kind}, "loss_type") for kind in ("hinge", "ipo")),
)  # fmt: skip
ORPO: Listed = (
    ("defaults", {}, WHOLE),
    ("beta 0.5", {"beta": 0.5}, WHOLE),
    ("prompts of one token, answers of equal length", {"beta": 0.5}, None),
)
CASES: dict[str, Listed] = {"dpo": DPO, "kto": KTO, "cpo": CPO, "orpo": ORPO}
