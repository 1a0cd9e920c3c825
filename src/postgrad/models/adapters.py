"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on the linear layers of one frozen model.

PEFT puts them in: the model's own layers stay where they are, once, and each linear one gets a
small neighbour for every adapter, by name. Which adapter acts is state of the model; one at a time.
"""

import re
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from postgrad.core import seeds
from postgrad.core.errors import RunError, UsageError
from postgrad.models.adapter_dropout import CounterDropout, RowMasks
from postgrad.models.adapter_reader import HEAD, PREFIX, linear_layers
from postgrad.models.score import in_float32
from postgrad.models.settings import LoraSettings

# Every layer of a model that holds adapters: looking for them takes longer than switching them.
_adapted: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def add_adapter(
    lm: nn.Module, settings: LoraSettings, *, seed: int, name: str = "policy"
) -> "Adapter":
    """A new adapter on `lm`, a transformers decoder with an output head or a `score` head.

    Every weight that was there is frozen. A is drawn from (seed, name of the adapter, name of the
    layer) as PEFT draws it and B is zero, so that nothing changes yet; a `score` head is copied and
    the copy trained. All of it is float32, whatever the model computes in. The first adapter acts
    from now on, a later one only while it is `active`. Raises UsageError for a target that names no
    linear layer of the decoder, ValueError for a name that is taken.
    """
    import peft  # five seconds

    targets = target_layers(lm, settings)
    layers = _layers(lm)
    if not name.isidentifier() or name == HEAD or any(name in _names(layer) for layer in layers):
        raise ValueError(f"{name!r} cannot name another adapter of this model")
    acting = _acting(layers) if layers else name
    trained = [(p, bool(layers) and p.requires_grad) for p in lm.parameters()]
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets,
        modules_to_save=[HEAD] if hasattr(lm, HEAD) else None,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are meant
        # low_cpu_mem_usage: PEFT draws no weights, and so touches no generator
        peft.inject_adapter_in_model(config, lm, name, low_cpu_mem_usage=True)
    _give_weights(lm, name, settings.rank, seed)
    _adapted.pop(lm)
    _act(_layers(lm), acting)
    adapter = Adapter(lm, settings, name, _give_dropout(lm, name, settings.dropout, seed))
    for parameter, flag in trained:
        parameter.requires_grad_(flag)
    for parameter in adapter.parameters().values():
        parameter.requires_grad_(True)
    return adapter


def target_layers(lm: nn.Module, settings: LoraSettings) -> list[str]:
    """Names of the linear layers that an adapter of these settings stands on, in the model's order.

    Raises UsageError for a target that names none.
    """
    linear = [
        name.removesuffix(".base_layer") for name in linear_layers(lm) if ".lora_" not in name
    ]
    if not linear:
        raise UsageError(
            f"[model.lora]: this {lm.config.model_type} decoder has no linear layers that an "  # pyright: ignore[reportAttributeAccessIssue]
            "adapter could stand on: train it whole"
        )
    for target in settings.targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise UsageError(
                f"model.lora.targets: {target!r} is no linear layer of this {lm.config.model_type} "  # pyright: ignore[reportAttributeAccessIssue]
                f"decoder, which has {known}"
            )
    ends = tuple(f".{target}" for target in settings.targets) or ("",)
    return [name for name in linear if f".{name}".endswith(ends)]


class Adapter:
    """One adapter of a model; made by `add_adapter`."""

    def __init__(
        self, lm: nn.Module, settings: LoraSettings, name: str, masks: RowMasks | None
    ) -> None:
        self.lm = lm
        self.settings = settings
        self.name = name
        self._masks = masks
        mine = re.compile(rf"\.(lora_[AB]|modules_to_save)\.{name}\.")
        self._own_names = {
            PREFIX + mine.sub(_in_file, own): own
            for own, _ in lm.named_parameters()
            if mine.search(own)
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """What trains, float32, by its name in PEFT's file:
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.score.weight".
        """
        parameters = dict(self.lm.named_parameters())  # looked up: sharding puts others in place
        return {name: parameters[own] for name, own in self._own_names.items()}

    @property
    def nbytes(self) -> int:
        """Of the parameters."""
        return sum(parameter.nbytes for parameter in self.parameters().values())

    @contextmanager
    def active(self) -> Generator[None]:
        """This adapter acts instead of the one that did. Where activations are checkpointed the
        backward pass has to lie inside too: it runs the forward again.
        """
        with _acts(self.lm, self.name):
            yield

    @contextmanager
    def disabled(self) -> Generator[None]:
        """No adapter acts: the forward gives the frozen model's bits."""
        with _acts(self.lm, None):
            yield

    def dropping(self, keys: Tensor, update: int) -> AbstractContextManager[None]:
        """Dropout acts, with masks drawn from each row's key (layout/keys.py) and the update's
        number; outside it is off. keys: [T] int64, on the model's device. Where activations are
        checkpointed the backward pass has to lie inside too.
        """
        return nullcontext() if self._masks is None else self._masks.of(keys, update)

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Hub name and W + (alpha / rank) B A in float32 of every target, and of a `score` head the
        trained copy: one matrix at a time, so that publishing holds no second model.
        """
        for own, layer in self._own_layers():
            if hasattr(layer, "lora_A"):
                a, b = layer.lora_A[self.name].weight, layer.lora_B[self.name].weight
                base, a, b = (_whole(one) for one in (layer.get_base_weight().float(), a, b))
                yield f"{own}.weight", torch.addmm(base, b, a, alpha=layer.scaling[self.name])
            else:
                for end, tensor in layer.modules_to_save[self.name].named_parameters():
                    yield f"{own}.{end}", tensor.detach().clone()

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """The frozen model's own weights by hub name, a tied one once, without its `score` head."""
        ours = re.compile(r"\.(lora_[AB]|original_module|modules_to_save)\.")
        for own, parameter in self.lm.named_parameters():
            if not ours.search(own):
                yield own.replace(".base_layer.", "."), parameter.detach()

    def hub_weights(self) -> Iterator[tuple[str, Tensor]]:
        """A whole model by hub name: what is `frozen` beside the targets, then `merged`."""
        targets = {f"{own}.weight" for own, _ in self._own_layers()}
        yield from ((own, weight) for own, weight in self.frozen() if own not in targets)
        yield from self.merged()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes weights by the names of `parameters`. Missing or unknown names and other shapes are
        RunErrors, and change nothing.
        """
        own = self.parameters()
        if weights.keys() != own.keys():
            raise RunError(
                f"the weights are of another adapter than {self.name!r}: "
                f"missing {sorted(own.keys() - weights.keys())[:3]}, "
                f"unknown {sorted(weights.keys() - own.keys())[:3]}"
            )
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                raise RunError(
                    f"{name} has shape {tuple(tensor.shape)}, adapter {self.name!r} has "
                    f"{tuple(own[name].shape)}: is it of this model and rank?"
                )
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    def _own_layers(self) -> Iterator[tuple[str, Any]]:
        for own, layer in self.lm.named_modules():
            if self.name in _names(layer):
                yield own, layer


def _whole(tensor: Tensor) -> Tensor:
    """Of what is divided over ranks; of a matrix and its adapter both may be, or one of them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _in_file(own: re.Match[str]) -> str:
    """PEFT's files leave out which adapter it is, and that a head is a copy."""
    return "." if own[1] == "modules_to_save" else f".{own[1]}."


def _names(layer: nn.Module) -> set[str]:
    """The adapters of a layer that PEFT made."""
    found = getattr(layer, "lora_A", None) or getattr(layer, "modules_to_save", None)
    return set(found) if isinstance(found, nn.ModuleDict) else set()


def _layers(lm: nn.Module) -> list[Any]:
    if lm not in _adapted:
        _adapted[lm] = [layer for layer in lm.modules() if _names(layer)]
    return _adapted[lm]


def _acting(layers: list[Any]) -> str | None:
    return None if layers[0].disable_adapters else layers[0].active_adapters[0]


def _act(layers: list[Any], name: str | None) -> None:
    """Lets one adapter act, or none. PEFT would freeze the others too; who trains what is not its
    business here.
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


@torch.no_grad()
def _give_weights(lm: nn.Module, name: str, rank: int, seed: int) -> None:
    """Kaiming-uniform A with a = sqrt(5), which is +-1 / sqrt(inputs); zero B; the head's copy."""
    for own, layer in lm.named_modules():
        if name not in _names(layer):
            continue
        if isinstance(head := getattr(layer, "modules_to_save", None), nn.ModuleDict):
            in_float32(head[name])
            continue
        layer: Any = layer
        device = layer.get_base_layer().weight.device
        width = layer.in_features
        drawn = seeds.uniform(seed, f"lora {name} {own}", torch.arange(rank * width).numpy())
        a = torch.from_numpy((2.0 * drawn - 1.0) * width**-0.5).float().view(rank, width)
        b = torch.zeros(layer.out_features, rank)
        layer.lora_A[name].weight = nn.Parameter(a.to(device))
        layer.lora_B[name].weight = nn.Parameter(b.to(device))


def _give_dropout(lm: nn.Module, name: str, p: float, seed: int) -> RowMasks | None:
    if p == 0.0:
        return None
    masks = RowMasks(seed, p)
    for own, layer in lm.named_modules():
        if name in _names(layer) and hasattr(layer, "lora_dropout"):
            layer: Any = layer
            device = layer.get_base_layer().weight.device
            layer.lora_dropout[name] = CounterDropout(
                masks, f"{name} {own}", layer.in_features, device
            )
    return masks
