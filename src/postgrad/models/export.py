"""Writes weights as a Hugging Face directory, and checks it by a reload with plain transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from postgrad.core.errors import RunError, UsageError
from postgrad.models.headers import require_room
from postgrad.models.load import (
    load_config,
    load_generation_config,
    load_tokenizer,
    read_plain,
    skeleton,
)
from postgrad.models.named_templates import with_template
from postgrad.models.rendering import Unrenderable, rendered
from postgrad.models.save import save_model
from postgrad.models.score import MEAN, STD, RewardScale, require_padding

PROBE = "The quick brown fox jumps over the lazy dog."
TOLERANCE = 1e-5  # largest difference of logits; the same weights in one dtype differ by less


def export_hf(
    weights: Mapping[str, Tensor],
    base: str,
    to: Path,
    *,
    dtype: torch.dtype,
    scale: RewardScale | None = None,
    overwrite: bool = False,
    chat_template: str = "",
    card: str | None = None,
) -> None:
    """Writes config, weights (safetensors), tokenizer, chat template and generation config.

    weights: by hub name, a tied one once. base: the directory or hub id of the model that they were
    trained from. scale: of a critic or reward model, which is written as a model for sequence
    classification with one label; None for a policy. chat_template: data.chat_template, which
    replaces the tokenizer's; "" keeps it. card: the text of the model card.

    `to` exists only after a reload has given the same logits and the same tokens. Raises UsageError
    where `to` exists already, RunError where it cannot be written or the reload differs; nothing is
    left then.
    """
    if to.exists() and not (overwrite and to.is_dir()):
        raise UsageError(f"{to} is there already: choose another --to")
    tokenizer = with_template(load_tokenizer(base), chat_template)
    config = load_config(base)
    kind = AutoModelForCausalLM if scale is None else AutoModelForSequenceClassification
    held = sum(weight.nbytes for weight in weights.values())
    require_room(skeleton(config, kind, base), held, base)
    if scale is None:
        lm: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        lm.generation_config = _generation_config(base, tokenizer)
    else:
        lm = _score_model(config, tokenizer, base, scale, dtype)
    _fill(lm, weights)
    lm.eval()
    save_model(
        lm,
        tokenizer,
        to,
        check=lambda folder: _compare(lm, tokenizer, folder),
        replace=overwrite,
        card=card,
    )


def _score_model(
    config: Any, tokenizer: Any, base: str, scale: RewardScale, dtype: torch.dtype
) -> Any:
    require_padding(tokenizer, base)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id  # what transformers finds the last token by
    setattr(config, MEAN, scale.mean)
    setattr(config, STD, scale.std)
    return AutoModelForSequenceClassification.from_config(config, dtype=dtype)


@torch.no_grad()
def _fill(lm: Any, weights: Mapping[str, Tensor]) -> None:
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    unknown = [name for name in weights if name not in parameters]
    present = [name for name in weights if name in parameters]
    shapes = [name for name in present if weights[name].shape != parameters[name].shape]
    filled = {parameters[name].data_ptr() for name in present}
    missing = [name for name, parameter in parameters.items() if parameter.data_ptr() not in filled]
    if unknown or missing or shapes:
        raise RunError(
            f"the weights are of another model: unknown {unknown[:3]}, missing {missing[:3]}, of "
            f"another shape {shapes[:3]}"
        )
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)


def _generation_config(base: str, tokenizer: Any) -> GenerationConfig:
    """The base's generation config, else one with the end-of-sequence and padding tokens alone."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return load_generation_config(base) or GenerationConfig(**ends)


@torch.no_grad()
def _compare(lm: Any, tokenizer: Any, written: Path) -> None:
    read_tokenizer: Any = AutoTokenizer.from_pretrained(written)
    kind: Any = AutoModelForSequenceClassification if hasattr(lm, "score") else AutoModelForCausalLM
    read = read_plain(str(written), kind, lm.dtype)
    text = _probe(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if read_tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
        raise RunError(f"export: the tokenizer read back from {written} gives other tokens")
    if read_tokenizer.chat_template != tokenizer.chat_template:
        raise RunError(f"export: the chat template read back from {written} is another")
    batch = torch.tensor([ids])
    difference = float((lm(batch).logits.float() - read(batch).logits.float()).abs().max())
    if not difference <= TOLERANCE:
        raise RunError(
            f"export: the model read back from {written} gives other logits (by {difference:.3g})"
        )


def _probe(tokenizer: Any) -> str:
    """PROBE as a user's message in the chat template; PROBE itself where the template fails."""
    messages = [{"role": "user", "content": PROBE}]
    (texts,) = rendered(tokenizer, [(messages, [(1, True)])], {})
    return PROBE if isinstance(texts, Unrenderable) else texts[0]
