"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on the linear layers of one frozen model.

PEFT puts them in: the model's own layers stay where they are, once, and each linear one gets a
small neighbour for every adapter, by name. Which adapter acts is state of the model; one at a time.
"""

import re
import warnings
from collections.abc import Generator, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from postgrad.core.errors import RunError
from postgrad.models.adapter_dropout import RowMasks
from postgrad.models.adapter_merge import changed_matrix
from postgrad.models.adapter_mixtures import AdaptedWeight, attach, frozen_name, names_in_files
from postgrad.models.adapter_reader import HEAD, PREFIX
from postgrad.models.adapter_targets import saved_modules, target_layers, target_weights
from postgrad.models.four_bits import FourBitLinear, base_weight
from postgrad.models.settings import LoraSettings, longest_first
from postgrad.models.stored import StoredTensor, realise

LENGTHS = "lora_magnitude_vector"  # PEFT's name of DoRA's lengths of rows
# The layers with adapters of each model: finding them takes longer than switching them.
_adapted: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def add_adapter(
    lm: nn.Module, settings: LoraSettings, *, seed: int, name: str = "policy"
) -> "Adapter":
    """A new adapter on `lm`, a transformers decoder with an output head or a `score` head.

    Every weight that was there is frozen. A is drawn from (seed, name of the adapter, name of the
    layer) as PEFT draws it, B is zero and DoRA's lengths are W's, so that nothing changes yet; of
    PiSSA, but for rounding. A `score` head is copied and the copy trained. All of it is float32;
    copies of embeddings and output head (`modules_to_save`) have the model's dtype. The first
    adapter acts from now on, a later one only while it is `active`. Raises UsageError for unknown
    targets and modules; ValueError for a name that is taken, and a later one with other modules.
    """
    import peft  # five seconds

    from postgrad.models import adapter_layers

    targets, saved = target_layers(lm, settings), saved_modules(lm, settings)
    weights, layers = target_weights(lm, settings), _layers(lm)
    _require_new(lm, name, saved)
    acting = _acting(layers) if layers else name
    trained = [(p, bool(layers) and p.requires_grad) for p in lm.parameters()]
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        use_rslora=settings.rslora,
        rank_pattern=longest_first(settings.rank_pattern),
        alpha_pattern=longest_first(settings.alpha_pattern),
        target_modules=targets or peft.utils.constants.DUMMY_TARGET_MODULES,
        modules_to_save=saved or None,
    )
    with warnings.catch_warnings():
        # several adapters are meant; patterns name experts and routers too, which PEFT does not see
        warnings.filterwarnings("ignore", "Already found a `peft_config`|.*keys did not match any")
        with _without_type(lm):  # low_cpu_mem_usage: PEFT draws no weights, touches no generator
            peft.inject_adapter_in_model(config, lm, name, low_cpu_mem_usage=True)
    attach(lm, weights, name, settings)
    adapter_layers.own_layers(lm)
    adapter_layers.give_weights(lm, _adapted_layers(lm, name), name, settings.init, seed)
    if settings.dora:
        adapter_layers.give_lengths(_adapted_layers(lm, name), name)
    _adapted.pop(lm)
    _act(_layers(lm), acting)
    masks = adapter_layers.give_dropout(_adapted_layers(lm, name), name, settings.dropout, seed)
    adapter = Adapter(lm, settings, name, masks)
    for parameter, flag in trained:
        parameter.requires_grad_(flag)
    for parameter in adapter.parameters().values():
        parameter.requires_grad_(True)
    return adapter


def _require_new(lm: nn.Module, name: str, saved: list[str]) -> None:
    """Raises ValueError where a model cannot have another adapter `name` with these modules."""
    layers = _layers(lm)
    if not name.isidentifier() or name == HEAD or any(name in _names(layer) for layer in layers):
        raise ValueError(f"{name!r} cannot name another adapter of this model")
    copied = [n for n, m in lm.named_modules() if _has_copies(m)]
    if layers and saved != copied:
        raise ValueError(f"the adapters of a model train the same modules: {copied}")


def _has_copies(module: nn.Module) -> bool:
    """Whether it is PEFT's wrapper of a module that trains whole."""
    return isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)


@contextmanager
def _without_type(lm: Any) -> Generator[None]:
    """Inside, PEFT does not know the model's type. Of a mixture it would take the names of a dense
    layer's matrices for those of experts as transformers 4 had them, and adapt the experts.
    """
    kind = lm.config.model_type
    lm.config.model_type = ""
    try:
        yield
    finally:
        lm.config.model_type = kind


class Adapter:
    """One adapter of a model; made by `add_adapter`."""

    def __init__(
        self, lm: nn.Module, settings: LoraSettings, name: str, masks: RowMasks | None
    ) -> None:
        self.lm = lm
        self.settings = settings
        self.name = name
        self._masks = masks
        pattern = re.compile(rf"\.(lora_[AB]|modules_to_save)\.{name}\.|\.({LENGTHS})\.{name}\..*")
        renamed = names_in_files(lm, name)
        self._parameter_names = {
            PREFIX
            + pattern.sub(_in_file, renamed.get(parameter_name, parameter_name)): parameter_name
            for parameter_name, _ in lm.named_parameters()
            if pattern.search(parameter_name)
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters, float32 but for copies of embeddings and output head, by their
        names in PEFT's file: "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.score.weight".
        """
        parameters = dict(self.lm.named_parameters())  # every time: sharding replaces parameters
        return {in_file: parameters[name] for in_file, name in self._parameter_names.items()}

    @torch.no_grad()
    def plain_weights(self) -> dict[str, Tensor]:
        """The weights of an adapter without a start of its own that changes the base as this one of
        PiSSA: A over the first A, B beside minus the first B, times the scale (`plain_settings`).
        By the names of `parameters`.
        """
        weights: dict[str, Tensor] = {n: p.detach() for n, p in self.parameters().items()}
        for layer_name, layer in _adapted_layers(self.lm, self.name):
            if self.name in getattr(layer, "lora_start", ()):
                a, b = layer.matrices(self.name)
                weights[f"{PREFIX}{layer_name}.lora_A.weight"] = a
                weights[f"{PREFIX}{layer_name}.lora_B.weight"] = layer.scaling[self.name] * b
        return weights

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, in float32."""
        return sum(parameter.nbytes for parameter in self.parameters().values())

    @contextmanager
    def active(self) -> Generator[None]:
        """This adapter acts, instead of any other. With activation checkpointing the backward pass
        has to lie inside too: it runs the forward again.
        """
        with _acts(self.lm, self.name):
            yield

    @contextmanager
    def disabled(self) -> Generator[None]:
        """No adapter acts: the forward gives the frozen model's bits."""
        with _acts(self.lm, None):
            yield

    def join_frozen(self) -> None:
        """Frozen matrices that read the same input become one product (adapter_layers)."""
        from postgrad.models.adapter_layers import join_siblings

        join_siblings(self.lm)

    @property
    def dropout_acts(self) -> bool:
        """Whether dropout acts now."""
        return self._masks is not None and self._masks.rows is not None

    def dropping(self, keys: Tensor, update: int) -> AbstractContextManager[None]:
        """Inside, dropout acts, with masks drawn from each row's key (layout/layout.py) and the
        update's number. keys: [T] int64, on the model's device. With activation checkpointing the
        backward pass has to lie inside too.
        """
        return nullcontext() if self._masks is None else self._masks.of(keys, update)

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """(hub name, W + (alpha / rank) B A in float32) of every target layer, with DoRA's lengths
        of its rows, and the trained copies of whole modules, which are not copied again. One matrix
        at a time, so that no second model is held in memory.
        """
        for layer_name, layer in _adapted_layers(self.lm, self.name):
            if isinstance(layer, AdaptedWeight):
                yield frozen_name(layer_name, layer), self._merged_stack(layer_name, layer)
            elif hasattr(layer, "lora_A"):
                a, b = layer.lora_A[self.name].weight, layer.lora_B[self.name].weight
                matrices = base_weight(layer).float(), a, b
                base, a, b = (_full_tensor(matrix) for matrix in matrices)
                a, b = layer.beside_start(self.name, a, b)
                lengths = layer.lora_magnitude_vector
                lengths = _full_tensor(lengths[self.name].weight) if self.settings.dora else None
                merge = partial(changed_matrix, (b, a), layer.scaling[self.name], lengths, 1.0)
                stored = isinstance(base, StoredTensor)
                yield f"{layer_name}.weight", base.mapped(merge) if stored else merge(base)
            else:
                for end, tensor in layer.modules_to_save[self.name].named_parameters():
                    yield f"{layer_name}.{end}", tensor.detach()

    def _merged_stack(self, layer_name: str, layer: AdaptedWeight) -> Tensor:
        """A weight of experts or of a router with its adapter, as the matrices of `merged`."""
        a, b = layer.lora_A[self.name].weight, layer.lora_B[self.name].weight
        base = self.lm.get_parameter(frozen_name(layer_name, layer)).float()
        base, a, b = (_full_tensor(tensor) for tensor in (base, a, b))  # pyright: ignore[reportArgumentType]
        merge = layer.merge(a, b, layer.scaling[self.name])
        return base.mapped(merge) if isinstance(base, StoredTensor) else merge(base)

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """The frozen model's weights by hub name, without modules that train whole; a tied weight
        once.
        Those in four bits are expanded, one at a time.
        """
        yield from self._frozen(frozenset())

    def _frozen(self, without: Set[str]) -> Iterator[tuple[str, Tensor]]:
        pattern = re.compile(rf"\.(lora_[AB]|{LENGTHS}|original_module|modules_to_save)\.")
        for parameter_name, parameter in self.lm.named_parameters():
            name = parameter_name.replace(".base_layer.", ".")
            if not pattern.search(parameter_name) and name not in without:
                layer = self.lm.get_submodule(parameter_name.rpartition(".")[0])
                packed = isinstance(layer, FourBitLinear) and parameter is layer.weight
                yield name, base_weight(layer) if packed else parameter.detach()

    def hub_weights(self) -> Iterator[tuple[str, Tensor]]:
        """A whole model by hub name: `frozen` weights of other layers, then `merged` ones."""
        yield from self._frozen(
            {frozen_name(name, layer) for name, layer in _adapted_layers(self.lm, self.name)}
        )
        yield from self.merged()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies weights into `parameters`, whose names they have. Missing or unknown names and
        other shapes are RunErrors; nothing is changed then.
        """
        parameters = self.parameters()
        if weights.keys() != parameters.keys():
            raise RunError(
                f"the weights are of another adapter than {self.name!r}: "
                f"missing {sorted(parameters.keys() - weights.keys())[:3]}, "
                f"unknown {sorted(weights.keys() - parameters.keys())[:3]}"
            )
        for name, tensor in weights.items():
            if tensor.shape != parameters[name].shape:
                raise RunError(
                    f"{name} has shape {tuple(tensor.shape)}, adapter {self.name!r} has "
                    f"{tuple(parameters[name].shape)}: is it of this model and rank?"
                )
        for _, layer in _adapted_layers(self.lm, self.name):
            for kind in ("lora_A", "lora_B", LENGTHS, "modules_to_save"):
                realise(getattr(layer, kind, nn.Module()))  # nothing is written into a file
        parameters = self.parameters()
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)


def _full_tensor(tensor: Tensor) -> Tensor:
    """A tensor that FSDP2 may have divided over ranks, whole. Of a matrix and its adapter one may
    be divided and the other not.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _in_file(match: re.Match[str]) -> str:
    """The part of a parameter's name in PEFT's files, where the adapter's name is left out, and
    that a head is a copy: ".lora_A.policy." -> ".lora_A.", ".modules_to_save.policy." -> ".",
    ".lora_magnitude_vector.policy.weight" -> ".lora_magnitude_vector".
    """
    if match[2]:
        return f".{match[2]}"
    return "." if match[1] == "modules_to_save" else f".{match[1]}."


def _names(layer: nn.Module) -> set[str]:
    """The names of the adapters on a layer; empty where PEFT made none."""
    adapters = getattr(layer, "lora_A", None) or getattr(layer, "modules_to_save", None)
    return set(adapters) if isinstance(adapters, nn.ModuleDict) else set()


def _adapted_layers(lm: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    """The layers with the adapter `name`, by their names."""
    for layer_name, layer in lm.named_modules():
        if name in _names(layer):
            yield layer_name, layer


def _layers(lm: nn.Module) -> list[Any]:
    if lm not in _adapted:
        _adapted[lm] = [layer for layer in lm.modules() if _names(layer)]
    return _adapted[lm]


def acting(lm: nn.Module) -> str | None:
    """The name of the adapter that acts on a model; None without one."""
    layers = _layers(lm)
    return _acting(layers) if layers else None


def _acting(layers: list[Any]) -> str | None:
    return None if layers[0].disable_adapters else layers[0].active_adapters[0]


def _act(layers: list[Any], name: str | None) -> None:
    """Lets the adapter `name` act, or none. PEFT would also freeze the others, so what requires a
    gradient is put back as it was.
    """
    for layer in layers:
        flags = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
        if name is not None:
            layer.set_adapter([name])
        layer.enable_adapters(name is not None)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def _acts(lm: nn.Module, name: str | None) -> Generator[None]:
    layers = _layers(lm)
    before = _acting(layers)
    if name != before:
        _act(layers, name)
    try:
        yield
    finally:
        if name != before:
            _act(layers, before)
