"""Several models of one architecture merged into a new one, tensor by tensor: the memory needed is
that of one tensor of each, and a file of the result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad._version import __version__
from postgrad.core.errors import UsageError
from postgrad.core.hub import split_revision
from postgrad.core.progress import report
from postgrad.models.adapter_merge import merge_adapter
from postgrad.models.adapter_reader import read_adapter
from postgrad.models.config import load_config, stored_dtype
from postgrad.models.export import export_hf
from postgrad.models.files import is_adapter
from postgrad.models.load import LoadedModel, load_model
from postgrad.models.save import model_hash
from postgrad.models.score import RewardScale, load_score_model, scale_of
from postgrad.models.settings import looks_local
from postgrad.models.stored import real
from postgrad.models.tokenizer import require_same_tokens
from postgrad.observe.console import Console
from postgrad.ops import merging
from postgrad.tools.merge_settings import OF_DELTAS, Merge


def merge(asked: Merge, to: Path, console: Console) -> dict[str, Any]:
    """Writes the merged model as a Hugging Face directory to `to`, with the config and tokenizer of
    the base, or else of the first model. Sums are float32, rounded once to the written dtype.

    Returns what was merged: paths with hashes. `to` exists only after plain transformers has read
    it and computed the same logits. Raises UsageError where the models are not of one shape and
    tokenizer or `to` exists, RunError where it cannot be written.
    """
    if to.exists():
        raise UsageError(f"{to} is there already: choose another --to")
    if asked.method == "adapter":
        weights, first = _with_adapters(asked)
    else:
        weights, first = _merged(asked)
    model = first.source
    dtype = stored_dtype(model) if asked.dtype is None else getattr(torch, asked.dtype)
    merged_of = {path: _provenance(path) for path in (asked.base, *asked.models) if path}
    with console.phase("merge"):
        export_hf(
            weights,
            model,
            to,
            dtype=dtype,
            scale=_scale(asked, model),
            card=_card(asked, to, merged_of),
        )
    return {"model": str(to), "method": asked.method, "merged": merged_of}


@dataclass(frozen=True, slots=True)
class _Merged(Mapping[str, Tensor]):
    """The merged weights by name; each is computed when it is asked for, and not kept."""

    asked: Merge
    names: tuple[str, ...]
    models: tuple[Mapping[str, Tensor], ...]
    base: Mapping[str, Tensor] | None
    layers: int

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        report("tensors merged", self.names.index(name), len(self.names))
        asked = self.asked
        at = partial(self._at, name)
        tensors = [real(model[name]).float() for model in self.models]
        weights = [at(weight) for weight in asked.weights]
        if asked.method == "slerp":
            return merging.slerp(tensors[0], tensors[1], at(asked.t))
        if asked.normalize and sum(weights) == 0:
            raise UsageError(f"the weights of {name} sum to zero, and a mean divides by their sum")
        if self.base is None:
            return merging.linear(tensors, weights, normalize=asked.normalize)
        base = real(self.base[name]).float()
        deltas = [self._delta(name, n, tensor - base) for n, tensor in enumerate(tensors)]
        combine = merging.elected if asked.method.endswith("ties") else merging.linear
        return base + at(asked.scale) * combine(deltas, weights, normalize=asked.normalize)

    def _delta(self, name: str, model: int, delta: Tensor) -> Tensor:
        density = self._at(name, self.asked.densities[model])
        if self.asked.method == "ties":
            return merging.trimmed(delta, density)
        if self.asked.method.startswith("dare"):
            return merging.dropped(delta, density, self.asked.seed, name, model)
        return delta

    def _at(self, name: str, parameter: Any) -> float:
        return parameter.at(name, self.layers)


def _merged(asked: Merge) -> tuple[_Merged, LoadedModel]:
    """The weights, and the model whose config and tokenizer the merged one gets."""
    paths = [asked.base, *asked.models] if asked.base is not None else list(asked.models)
    first = _load(paths[0])
    names = tuple(name for name, _ in first.lm.named_parameters())  # a tied one once
    read = [_named(first)]
    for path in paths[1:]:
        require_same_tokens(path, "merge", first.tokenizer, remedy="only models of one tokenizer "
                            "can be merged")  # fmt: skip
        other = _named(_load(path))
        _require_like(read[0], other, names, paths[0], path)
        read.append(other)
    layers = first.config.get_text_config().num_hidden_layers
    if asked.layers not in (None, layers):
        raise UsageError(
            f"layer_range ends at {asked.layers}, and {paths[0]} has {layers} layers: only whole "
            "models are merged"
        )
    base, models = (read[0], read[1:]) if asked.base is not None else (None, read)
    return _Merged(asked, names, tuple(models), base, layers), first


def _with_adapters(asked: Merge) -> tuple[dict[str, Tensor], LoadedModel]:
    """The weights of the base with the adapters added, whichever base their files name."""
    assert asked.base is not None  # Merge demands it
    model = _load(asked.base)
    for path, weight in zip(asked.models, asked.weights, strict=True):
        if not is_adapter(path):
            raise UsageError(f"{path} is no adapter (it has no adapter_config.json)")
        (number,) = weight.numbers()
        merge_adapter(model.lm, read_adapter(path), path, weight=number)
    return dict(model.lm.named_parameters()), model


def _load(path: str) -> LoadedModel:
    """A model whose weights stay in their files, and read as float32."""
    if _scores(path):
        return load_score_model(
            path, dtype=torch.float32, fresh_head=False, in_files=True, images=True
        )
    return load_model(path, dtype=torch.float32, in_files=True, images=True)


def _scores(path: str) -> bool:
    """Whether a model is a reward model."""
    if is_adapter(path) and read_adapter(path).scores:
        return True
    return "SequenceClassification" in (load_config(path).architectures or [""])[0]


def _named(model: LoadedModel) -> dict[str, Tensor]:
    return dict(model.lm.named_parameters(remove_duplicate=False))


def _require_like(
    first: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    names: tuple[str, ...],
    first_path: str,
    path: str,
) -> None:
    """Raises UsageError where `other` has other weights, or ties fewer of them."""
    kept = dict.fromkeys(names)
    for name in {**first, **other}:
        shapes = [tuple(model[name].shape) if name in model else None for model in (first, other)]
        if shapes[0] != shapes[1]:
            described = [f"is of shape {shape}" if shape else "is missing" for shape in shapes]
            raise UsageError(
                f"{name} {described[0]} in {first_path} and {described[1]} in {path}: only models "
                "of one architecture and size can be merged"
            )
        if name not in kept and not any(other[name] is other[twin] for twin in kept):
            raise UsageError(
                f"{first_path} ties {name} to its embeddings and {path} does not: its own would be "
                "lost; name the model that has both first (or as the base)"
            )


def _scale(asked: Merge, model: str) -> RewardScale | None:
    """Of reward models the scale that all of them state; else mean 0, standard deviation 1."""
    if not _scores(model):
        return None
    scales = {scale_of(load_config(path)) for path in asked.models}
    (scale, *others) = scales
    return RewardScale() if others or scale is None else scale


def _provenance(path: str) -> str:
    """The hash of a directory's files; of a hub id the revision that was asked for."""
    if Path(path).is_dir():
        return f"sha256:{model_hash(Path(path))}"
    return split_revision(path)[1] or "main"


def _card(asked: Merge, to: Path, merged_of: Mapping[str, str]) -> str:
    """README.md: what was merged, and how to merge it again."""
    from huggingface_hub import ModelCardData

    hub_ids = [split_revision(path)[0] for path in merged_of if not looks_local(path)]
    metadata: Any = ModelCardData(
        library_name="transformers",
        tags=["postgrad", "merge"],
        base_model=hub_ids or None,
        base_model_relation="merge" if hub_ids else None,
    )
    names = {path: path if not looks_local(path) else Path(path).name for path in merged_of}
    rows = [f"| base | {names[asked.base]} | {merged_of[asked.base]} | | |"] if asked.base else []
    for path, weight, density in zip(asked.models, asked.weights, asked.densities, strict=True):
        rows.append(
            f"| model | {names[path]} | {merged_of[path]} | {_words(weight)} | {_words(density)} |"
        )
    settings = f"normalize {str(asked.normalize).lower()}, seed {asked.seed}"
    if asked.method == "slerp":
        settings = f"t {_words(asked.t)}"
    elif asked.method in OF_DELTAS:
        settings = f"lambda {_words(asked.scale)}, {settings}"
    table = "\n".join(["| | name | content | weight | density |", "|---|---|---|---|---|", *rows])
    return (
        f"---\n{metadata.to_yaml()}\n---\n\n# {to.name}\n\n"
        f"Merged by [postgrad](https://pypi.org/project/postgrad/) {__version__}: "
        f"`{asked.method}`, {settings}.\n\n{table}\n"
    )


def _words(parameter: Any) -> str:
    """A parameter for the card: "0.5", or "self_attn: 0 0.5 1; else: 0.5"."""
    texts = [
        f"{text or 'else'}: {' '.join(f'{value:g}' for value in values)}"
        for text, values in parameter.parts
    ]
    return texts[0].removeprefix("else: ") if len(texts) == 1 else "; ".join(texts)
