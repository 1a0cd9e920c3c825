"""Decoder layers compiled by torch: norms, rotary positions, activations and what lies between the
products become a few kernels, and flex attention a part of the same graph.

One graph serves all layers of a model and every number of tokens. There are others for what changes
the code of a layer: gradients on or off, another window, an adapter that acts or not.

What is left beside the products is adding up gradients over micro-batches (`LayerSums`): a kernel
for each layer instead of one for each weight.
"""

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from postgrad.models.attention import AttentionContext, layers_of

_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
GRAPHS = 64  # most graphs of one kind of layer, for all roles together


@cache
def settle() -> None:
    """Sets torch's compiler up, once a process, before its first graph."""
    settings: Any = torch._dynamo.config
    # Gemma 2's soft-cap as a symbol fails in flex attention; scales and epsilons are constants too.
    settings.specialize_float = True
    settings.recompile_limit = GRAPHS
    # Beyond the limit torch would go on without compiling, with other bits.
    settings.fail_on_recompile_limit_hit = True


class OutsideGraph:
    """An attention context that is called between two graphs, as it is."""

    def __init__(self, inner: AttentionContext) -> None:
        self._inner = inner

    @torch.compiler.disable
    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        return self._inner.attend(
            layer, query, key, value, scale=scale, window=window, softcap=softcap
        )


def compile_layers(lm: nn.Module, backend: str = "inductor") -> None:
    """From now on the decoder layers of `lm` run compiled, at their first call. Their modules and
    parameters stay as they are.

    Gradient checkpointing stays outside of the graph: its second forward runs the same one as the
    first. Adapters may be added later.
    """
    settle()
    compiled: dict[type[nn.Module], Any] = {}
    for layer in layers_of(lm):
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, dynamic=True, backend=backend)
        checkpointed = bool(getattr(layer, "gradient_checkpointing", False))
        layer.gradient_checkpointing = False  # pyright: ignore[reportArgumentType]
        layer.forward = partial(_forward, compiled[kind], layer, checkpointed)


def _forward(
    compiled: Any, layer: nn.Module, checkpointed: bool, hidden: Tensor, *args: Any, **named: Any
) -> Any:
    """hidden: [1, T, hidden], the argument that the layer passes gradients to."""
    run = partial(compiled, layer, **named)
    if checkpointed and layer.training:
        return checkpoint(run, hidden, *args, use_reentrant=False, preserve_rng_state=False)
    return run(hidden, *args)


class LayerSums:
    """Adds up the gradients of an update's micro-batches in float32, those of a layer together.

    weights: by name, as an optimizer is going to take them; those outside of layers and those that
    FSDP2 divides are left to it. Create this before the optimizer, whose own hooks find no gradient
    at the weights of layers then, and call `hand_over` before it steps.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], backend: str) -> None:
        settle()
        self._add = torch.compile(_add, dynamic=False, backend=backend)
        self._names: dict[str, list[str]] = {}  # of the weights of each layer
        self._arrived: dict[str, dict[str, Tensor]] = {}  # by layer and name: not added yet
        self._sums: dict[str, Tensor] = {}
        for name, weight in weights.items():
            layer = _LAYER.search(name)
            if layer is not None and weight.requires_grad and not isinstance(weight, DTensor):
                prefix = name[: layer.end()]
                self._names.setdefault(prefix, []).append(name)
                weight.register_post_accumulate_grad_hook(partial(self._take, prefix, name))

    def _take(self, layer: str, name: str, weight: Tensor) -> None:
        if name in self._arrived.get(layer, ()):
            self._add_layer(layer)
        assert weight.grad is not None
        arrived = self._arrived.setdefault(layer, {})
        arrived[name], weight.grad = weight.grad, None
        if len(arrived) == len(self._names[layer]):
            self._add_layer(layer)

    @torch.no_grad()
    def _add_layer(self, layer: str) -> None:
        arrived = self._arrived.pop(layer)
        names = [name for name in self._names[layer] if name in arrived and name in self._sums]
        if names:
            add = self._add if len(names) == len(self._names[layer]) else _add  # a graph for all
            add([self._sums[name] for name in names], [arrived[name] for name in names])
        for name in arrived.keys() - set(names):
            self._sums[name] = arrived[name].float()

    def hand_over(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Makes the sums the gradients of the master weights, by name, and begins anew."""
        for layer in list(self._arrived):
            self._add_layer(layer)
        for name, total in self._sums.items():
            masters[name].grad = total
        self._sums.clear()


def _add(sums: list[Tensor], gradients: list[Tensor]) -> None:
    torch._foreach_add_(sums, gradients)  # pyright: ignore[reportPrivateImportUsage]
