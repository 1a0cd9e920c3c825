"""Decoder layers compiled by torch: norms, rotary positions, activations and what lies between the
products become a few kernels, and flex attention a part of the same graph.

One graph serves all layers of a model and every number of tokens. There are others for what changes
the code of a layer: gradients on or off, another window, an adapter that acts or not.

What is left beside the products is the output head between its two products (`HeadKernels`: two or
three kernels in place of fifty), and adding up gradients over micro-batches (`LayerSums`: a kernel
for each layer instead of one for each weight).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from postgrad.models.attention import AttentionContext, layers_of
from postgrad.models.recompute import HOST_INPUTS, HostInputs
from postgrad.models.routers import mixtures_of
from postgrad.models.sampling_mask import TAKEN_AWAY

Shaped = tuple[float | None, float | None, float | None]  # what models.head.shaped_by gives

_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
GRAPHS = 64  # most graphs of one kind of layer, for all roles together
# Rows of logits that the head's kernels are compiled for, whatever number of them comes first:
# torch chooses kernels for the size that it sees, and a resumed run sees another one.
COMPILED_ROWS = 1024


@cache
def settle() -> None:
    """Sets torch's compiler up, once a process, before its first graph."""
    settings: Any = torch._dynamo.config
    # Gemma 2's soft-cap as a symbol fails in flex attention; scales and epsilons are constants too.
    settings.specialize_float = True
    settings.recompile_limit = GRAPHS
    # Beyond the limit torch would go on without compiling, with other bits.
    settings.fail_on_recompile_limit_hit = True
    # What adapters that read the same input note for each other is for one forward pass alone:
    # where activations are computed again within a graph, it is not to be noted again.
    settings.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def _options(backend: str) -> dict[str, Any] | None:
    """Kernels that do not need each other, as those of queries and of keys, are launched as one."""
    return {"combo_kernels": True} if backend == "inductor" else None


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
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._inner.attend(
            layer, query, key, value, scale=scale, window=window, softcap=softcap, sinks=sinks
        )


@torch.compiler.disable
def _outside(run: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Runs between two graphs, as it is. A function for each layer would need a graph for each."""
    return run(*args, **named)


def compile_layers(lm: nn.Module, backend: str = "inductor") -> None:
    """From now on the decoder layers of `lm` run compiled, at their first call. Their modules and
    parameters stay as they are.

    Where activations are computed again, that is a part of a layer's backward graph, without the
    product that no gradient needs: the last, a fifth of those of Qwen3-0.6B. Around a call that
    stays outside (`OutsideGraph`) torch runs the checkpoint itself, and compiles what lies in it.

    So do mixtures of experts: their routers are watched, their choices replayed, and experts that
    ranks divide get other numbers of rows each time.
    """
    settle()
    mixtures: list[Any] = mixtures_of(lm)
    for mixture in mixtures:
        mixture.forward = partial(_outside, mixture.forward)
    compiled: dict[tuple[type[nn.Module], bool], Any] = {}
    for layer in layers_of(lm):
        checkpointed = bool(getattr(layer, "gradient_checkpointing", False))
        layer.gradient_checkpointing = False  # pyright: ignore[reportArgumentType]
        kind = type(layer), checkpointed
        if kind not in compiled:
            forward = type(layer).forward
            compiled[kind] = torch.compile(
                _checkpointing(forward) if checkpointed else forward,
                dynamic=True,
                backend=backend,
                options=_options(backend),
            )
        inputs: HostInputs | None = getattr(layer, HOST_INPUTS, None)
        run = compiled[kind] if inputs is None else inputs.keeping(compiled[kind])
        layer.forward = partial(run, layer)


def _checkpointing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer whose activations are computed again while it trains."""

    def run(layer: nn.Module, *args: Any, **named: Any) -> Any:
        if not layer.training:
            return forward(layer, *args, **named)
        return checkpoint(
            forward, layer, *args, use_reentrant=False, preserve_rng_state=False, **named
        )

    return run


class HeadKernels:
    """What an output head does between the product that gives its logits and those that take their
    gradient. products: [N, V] in the head's dtype, without soft-cap and scaling, which `shaped` is.

    Logits are float32 within a kernel, and nowhere in memory: the gradient is written over the
    products. Its sums are those of models.head up to rounding.
    """

    def __init__(self, backend: str) -> None:
        settle()
        self._ready: set[Any] = set()
        self._read = torch.compile(_read_products, backend=backend)
        self._write = torch.compile(_write_gradient, backend=backend)

    def read(
        self,
        products: Tensor,
        targets: Tensor,
        gone: Tensor | None,
        shaped: Shaped,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs of targets [N], log Z [N], and entropies: [N], or [0] without; all float32.
        gone: [N, V] True at tokens without probability (LogitMask.taken_away).
        """
        self._prepare(products, (shaped, temperature, with_entropy, gone is not None))
        _any_rows(products, targets, *(() if gone is None else (gone,)))
        return self._read(products, targets, gone, shaped, temperature, with_entropy)

    def write_gradient(
        self,
        products: Tensor,
        columns: Sequence[Tensor],
        gone: Tensor | None,
        shaped: Shaped,
        temperature: float,
    ) -> Tensor:
        """The gradient of the products, written over them. columns: targets, log Z and entropies as
        `read` gives them, and the gradients of logprobs and entropies. gone: as `read` had it.
        """
        with_entropy = len(columns[2]) > 0
        self._prepare(products, (shaped, temperature, with_entropy, gone is not None))
        kept = columns if with_entropy else (columns[0], columns[1], columns[3])
        _any_rows(products, *kept, *(() if gone is None else (gone,)))
        self._write(products, *kept, gone=gone, shaped=shaped, temperature=temperature)
        return products

    def _prepare(self, like: Tensor, settings: tuple[Shaped, float, bool, bool]) -> None:
        """Compiles both kernels of this kind for COMPILED_ROWS rows, once."""
        kind = like.shape[1], like.dtype, like.device, settings
        if kind in self._ready:
            return
        self._ready.add(kind)
        shaped, temperature, with_entropy, masked = settings
        products = like.new_zeros(COMPILED_ROWS, like.shape[1])
        gone = torch.zeros_like(products, dtype=torch.bool) if masked else None
        targets = torch.zeros(COMPILED_ROWS, dtype=torch.int64, device=like.device)
        inputs = products, targets, gone, shaped
        logprobs, log_z, entropy = self.read(*inputs, temperature, with_entropy)
        columns = targets, log_z, entropy, logprobs, entropy
        self.write_gradient(products, columns, gone, shaped, temperature)


@cache
def head_kernels(backend: str) -> HeadKernels:
    """Those of this process: heads of one width share their graphs."""
    return HeadKernels(backend)


def _any_rows(*tensors: Tensor) -> None:
    """Tells torch's compiler that the number of rows changes from call to call."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _logits(products: Tensor, shaped: Shaped) -> Tensor:
    scale, divisor, cap = shaped
    logits = products.float()
    if scale is not None:
        logits = logits * scale
    if divisor is not None:
        logits = logits / divisor
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _read_products(
    products: Tensor,
    targets: Tensor,
    gone: Tensor | None,
    shaped: Shaped,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = _logits(products, shaped) / temperature
    if gone is not None:
        scaled = scaled.masked_fill(gone, TAKEN_AWAY)
    log_z = torch.logsumexp(scaled, -1)
    # Of the products at the targets alone: logits are not kept for it.
    of_targets = _logits(products.gather(-1, targets[:, None])[:, 0], shaped) / temperature
    if not with_entropy:
        return of_targets - log_z, log_z, log_z.new_zeros(0)
    probs = torch.exp(scaled - log_z[:, None])
    return of_targets - log_z, log_z, log_z - (probs * scaled).sum(-1)


def _write_gradient(
    products: Tensor,
    targets: Tensor,
    log_z: Tensor,
    *more: Tensor,
    gone: Tensor | None,
    shaped: Shaped,
    temperature: float,
) -> None:
    """more: the gradients of logprobs; or entropies, and the gradients of logprobs and of them."""
    scale, divisor, cap = shaped
    logits = _logits(products, shaped)
    log_p = logits / temperature - log_z[:, None]
    if gone is not None:
        log_p = log_p.masked_fill(gone, TAKEN_AWAY)
    if len(more) == 1:
        of_logprob = more[0] / temperature
        factor = -of_logprob[:, None]
    else:
        entropy, of_logprob, of_entropy = more[0], more[1] / temperature, more[2] / temperature
        factor = -of_entropy[:, None] * (log_p + entropy[:, None]) - of_logprob[:, None]
    columns = torch.arange(products.shape[1], device=products.device)
    at_target = torch.where(columns == targets[:, None], of_logprob[:, None], 0.0)
    gradient = log_p.exp() * factor + at_target
    if cap is not None:
        gradient = gradient * (1.0 - (logits / cap).square())
    if divisor is not None:
        gradient = gradient / divisor
    products.copy_(gradient if scale is None else gradient * scale)


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
