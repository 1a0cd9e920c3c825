"""Decoder layers compiled by torch: norms, rotary positions, activations and what lies between the
products become a few kernels, and flex attention a part of the same graph.

One graph serves all layers of a model and every number of tokens. There are others for what changes
the code of a layer: gradients on or off, another window, an adapter that acts or not.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from postgrad.models.attention import AttentionContext, layers_of

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
