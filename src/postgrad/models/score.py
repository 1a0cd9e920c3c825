"""Decoders with a linear head `score` in place of the output head: critics and reward models.

They are transformers' models for sequence classification with one label: plain transformers reads a
reward model that was trained here, and the other way round. A process reward model is written as
one for token classification with two labels, wrong and right, as TRL's is: the softmax of two
scores is the logistic function of their difference, so that here its head is one row all the same.
"""

import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from postgrad.core.errors import UsageError
from postgrad.core.seeds import integer
from postgrad.models.config import SCALE_KEYS, load_config
from postgrad.models.files import weights_source
from postgrad.models.four_bits import Quantize
from postgrad.models.headers import require_whole
from postgrad.models.load import LoadedModel, Loading, place, read_weights, skeleton
from postgrad.models.settings import Recompute
from postgrad.models.stored import real, realise
from postgrad.models.supported import require_text_model
from postgrad.models.tokenizer import load_tokenizer
from postgrad.parallel.ranks import ALONE, Ranks

HEAD = "score.weight"
BIAS = "score.bias"
STEP_LABELS = ("wrong", "right")  # of a process reward model, by index
SEPARATOR = "step_separator"  # in its config.json: what stands between two steps
MEAN, STD = SCALE_KEYS


@dataclass(frozen=True, slots=True)
class RewardScale:
    """The scale of a reward model's scores on data like its training data; kept in config.json."""

    mean: float = 0.0
    std: float = 1.0  # standard deviation


def load_score_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    gradient_checkpointing: Recompute = False,
    seed: int = 0,
    fresh_head: bool = True,
    quantize: Quantize = "none",
    together: bool = False,
    ranks: Ranks = ALONE,
    in_files: bool = False,
    images: bool = False,
) -> LoadedModel:
    """The body of a causal model or of a reward model, with a `score` head; see load_model.

    A causal model has no such head: it is drawn from `seed` with a standard deviation of
    1 / sqrt(hidden + 1), without a bias (Stiennon et al. 2020, arXiv:2009.01325), or, where
    `fresh_head` is False, its absence is a UsageError. The head is float32 whatever the body
    computes in: a bfloat16 score has two digits, and differences of scores are what is learned.
    """
    config = load_config(path)
    require_text_model(config, path, images=images)
    of_steps, auto = judges_steps(config), _class_of(config, path)
    tokenizer = load_tokenizer(path)
    how = Loading(dtype, device or torch.device("cpu"), quantize, ranks, in_files, together)
    lm, missing = read_weights(path, config, auto, how)
    if not hasattr(lm, "score"):
        raise UsageError(
            f"{path} cannot be a critic or reward model: transformers' model for sequence "
            f"classification of type {config.model_type} has no linear head named score"
        )
    require_whole(path, missing=[name for name in missing if name != HEAD])
    if missing and not fresh_head:
        raise UsageError(
            f'{path} has no {HEAD}: it is no reward model; train one with job = "reward"'
        )
    if missing:
        _draw(lm.score, seed)
    realise(lm.score)  # small, and changed here
    if of_steps:
        lm.score = _one_row(lm.score, path, trained=fresh_head)
    in_float32(lm.score.to(how.device))
    place(lm, path, how, gradient_checkpointing=gradient_checkpointing)
    return LoadedModel(lm, tokenizer, config, path, drawn_head=bool(missing))


def judges_steps(config: Any) -> bool:
    """Whether a config is of a process reward model: one with labels for tokens."""
    return "TokenClassification" in (config.architectures or [""])[0]


def require_step_labels(path: str) -> None:
    """Raises UsageError where a process reward model from this model could not be written: where
    transformers' own class for token classification calls its head otherwise (GPT-2, Falcon).
    """
    config = load_config(path)
    config.num_labels = len(STEP_LABELS)
    lm = skeleton(config, AutoModelForTokenClassification, weights_source(path))
    if not isinstance(getattr(lm, "score", None), nn.Linear):
        raise UsageError(
            f"{path} cannot be a process reward model: transformers' model for token "
            f"classification of type {config.model_type} has no linear head named score"
        )


def separator_of(config: Any) -> str:
    """What stands between two steps, as a process reward model's config says; else an empty
    line.
    """
    stated = getattr(config, SEPARATOR, None)
    return stated if isinstance(stated, str) and stated else "\n\n"


@torch.no_grad()
def _one_row(head: nn.Linear, path: str, *, trained: bool) -> nn.Linear:
    """The head whose only output is that of "right" less that of "wrong". Raises UsageError where
    that has a bias, which heads that are trained here do not have.
    """
    difference = head.weight[1] - head.weight[0]
    bias = None if head.bias is None else head.bias[1] - head.bias[0]
    biased = bias is not None and float(bias) != 0.0
    if biased and trained:
        raise UsageError(
            f"the head of {path} has a bias (score.bias), and a head that is trained here has "
            "none: train from the model that it came from, or use it as it is"
        )
    row = nn.Linear(head.in_features, 1, bias=biased, device=head.weight.device)
    row.weight.copy_(difference[None])
    if bias is not None and biased:
        row.bias.copy_(bias[None])
    return row


def two_labels(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights of a process reward model as they are written, by name: the head has a row of
    zeros for "wrong" and its own row for "right", and a bias of zeros, which transformers' class
    for token classification has.
    """
    row = real(weights[HEAD]).detach().cpu()
    zeros = torch.zeros(len(STEP_LABELS), dtype=row.dtype)
    others: Any = weights  # left as it is: it may read or gather them one by one
    return ChainMap({HEAD: torch.cat([torch.zeros_like(row), row]), BIAS: zeros}, others)


def _class_of(config: Any, path: str) -> Any:
    """The Auto class that reads the files of a config, whose number of labels is made that class's.
    Raises UsageError where a reward model has another number.
    """
    kind, of_steps = (config.architectures or [""])[0], judges_steps(config)
    if "SequenceClassification" in kind and config.num_labels != 1:
        raise UsageError(
            f"{path} gives {config.num_labels} labels: a reward model has one "
            "(num_labels in config.json)"
        )
    if of_steps and config.num_labels != len(STEP_LABELS):
        raise UsageError(
            f"{path} gives {config.num_labels} labels to a token: a process reward model has two, "
            "wrong and right (num_labels in config.json)"
        )
    config.num_labels = len(STEP_LABELS) if of_steps else 1
    return AutoModelForTokenClassification if of_steps else AutoModelForSequenceClassification


def in_float32(head: nn.Module) -> None:
    """Converts a head to float32, and its input at every forward."""
    head.float().register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))


def require_padding(tokenizer: Any, path: str) -> None:
    """Raises UsageError where a tokenizer has no padding token, or pads with end-of-sequence.

    transformers scores the last token that is not padding. Padded with end-of-sequence, it would
    silently score the token before the end.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise UsageError(
            f"the tokenizer at {path} has no padding token of its own, so a reward model could not "
            "tell padding from the end of an answer: set pad_token in tokenizer_config.json to a "
            "token that no text uses"
        )


def scale_of(config: Any) -> RewardScale | None:
    """The scale that a reward model's config states; None where it states none."""
    mean, std = getattr(config, MEAN, None), getattr(config, STD, None)
    return None if mean is None or std is None else RewardScale(float(mean), float(std))


@torch.no_grad()
def _draw(head: nn.Linear, seed: int) -> None:
    generator = torch.Generator().manual_seed(integer(seed, "score head"))
    drawn = torch.randn(head.weight.shape, generator=generator) / math.sqrt(head.in_features + 1)
    head.weight.copy_(drawn)


def scale_of_state(state: Mapping[str, Any]) -> RewardScale:
    """The scale of a reward model's scores, from a checkpoint's algorithm state."""
    if not state:
        return RewardScale()
    mean, square = state["sum"] / state["weight"], state["squares"] / state["weight"]
    return RewardScale(mean, float(np.sqrt(max(0.0, square - mean * mean))) or 1.0)
