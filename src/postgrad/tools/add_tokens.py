"""New tokens for a model: a tokenizer that knows them, and rows of the embeddings and the head."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor

from postgrad.core.errors import UsageError
from postgrad.models.config import stored_dtype
from postgrad.models.export import export_hf
from postgrad.models.load import LoadedModel, load_model
from postgrad.models.stored import real
from postgrad.observe.console import Console


def add_tokens(
    model: str, tokens: Sequence[str], special: Sequence[str], to: Path, console: Console
) -> dict[str, Any]:
    """Writes a model that has tokens more to `to`, as a Hugging Face directory in the dtype of its
    files. tokens: texts that are one token each from now on. special: those that decoded text does
    not show, like the marks of a chat template.

    A new row of the embeddings, and of a head of its own, is the mean of the rows of all tokens so
    far (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"), which
    leaves every text's probability as it was, but for what the new tokens take. Models with spare
    rows, as Qwen's, keep their size where these are enough.

    Returns the tokens with their ids. `to` exists only after plain transformers has read it and
    computed the same logits. Raises UsageError for a token that is there already or no text.
    """
    dtype = stored_dtype(model)
    loaded = load_model(model, dtype=dtype, in_files=True, images=True)
    tokenizer, size = loaded.tokenizer, len(loaded.tokenizer)
    ids = _extended(tokenizer, tokens, special)
    before = loaded.config.get_text_config().vocab_size
    after = max(before, len(tokenizer))
    weights = _Grown(loaded, _matrices(loaded), size, list(ids.values()), after)
    with console.phase("add tokens"):
        export_hf(weights, model, to, dtype=dtype, tokenizer=tokenizer)
    return {"model": str(to), "tokens": ids, "rows": {"before": before, "after": after}}


def _extended(tokenizer: Any, tokens: Sequence[str], special: Sequence[str]) -> dict[str, int]:
    """Adds tokens to a tokenizer. Returns their ids."""
    texts = [*tokens, *special]
    if not texts:
        raise UsageError("no token is named: --token TEXT, or --special TEXT")
    vocabulary = tokenizer.get_vocab()
    for place, text in enumerate(texts):
        if not text.strip() or text != text.strip():
            raise UsageError(f"token {text!r} is empty, or has white space at its ends")
        if text in vocabulary or text in texts[:place]:
            raise UsageError(f"token {text!r} is there already: leave it out")
    for group, hidden in ((tokens, False), (special, True)):
        added = [AddedToken(text, normalized=False, special=hidden) for text in group]
        if added:
            tokenizer.add_tokens(added, special_tokens=hidden)
    return {text: tokenizer.convert_tokens_to_ids(text) for text in texts}


def _matrices(loaded: LoadedModel) -> list[str]:
    """The names of parameters with a row for each token. Raises UsageError where a model has some
    beside its embeddings and its head.
    """
    lm: Any = loaded.lm
    modules = (lm.get_input_embeddings(), lm.get_output_embeddings())
    owned = {id(p) for module in modules if module is not None for p in module.parameters()}
    named = dict(lm.named_parameters())  # a tied head is the embeddings
    size = loaded.config.get_text_config().vocab_size
    others = [name for name, p in named.items() if size in p.shape and id(p) not in owned]
    if others:
        raise UsageError(
            f"{loaded.source} has another matrix with a row for each token: {others[0]}; tokens "
            "can be added to models that have embeddings and a head alone"
        )
    return [name for name, p in named.items() if id(p) in owned]


@dataclass(frozen=True, slots=True)
class _Grown(Mapping[str, Tensor]):
    """The model's weights, with the rows of new tokens; each is read when it is asked for."""

    loaded: LoadedModel
    grown: Sequence[str]  # parameters that get the rows
    tokens: int  # of the tokenizer so far
    new: Sequence[int]  # ids of the others
    rows: int  # of the result

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.loaded.lm.named_parameters())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        weight = self.loaded.lm.get_parameter(name)
        if name not in self.grown:
            return weight
        old = real(weight)
        grown = old.new_zeros(self.rows, *old.shape[1:])
        grown[: len(old)] = old
        grown[list(self.new)] = old[: self.tokens].double().mean(0).to(old.dtype)
        return grown
