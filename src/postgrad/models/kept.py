"""What the layers of a decoder keep of each token for the backward pass, as autograd itself says.

A forward pass on torch's meta device runs every layer of a model of any type and size, without a
number being computed. What autograd saves of it is counted, but for weights, and for what attention
saves: that is postgrad's, and depends on the lengths of rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from postgrad.models.attention import ATTENTION_NAME, carry_context, hidden_states, layers_of
from postgrad.models.routers import mixtures_of
from postgrad.models.shapes import KeptByLayers

LENGTHS = (512, 1024)  # tokens: whole chunks of every mixer; what does not grow is no token's
WIDTHS = {2: torch.bfloat16, 4: torch.float32}
META = torch.device("meta")


def kept_by_layers(lm: Any) -> tuple[KeptByLayers, ...]:
    """Of a model on the meta device: for each dtype that it may compute in, once with weights that
    train, and once with frozen ones, whose layers keep what the gradient of their input needs. ():
    a forward of this type looks at numbers, which the meta device does not have. The model is left
    in another dtype, its weights frozen, and good for nothing else.
    """
    lm.config.get_text_config()._attn_implementation = ATTENTION_NAME
    carry_context(lm)
    lm.get_input_embeddings().register_forward_hook(_begins_the_gradient)
    kept: list[KeptByLayers] = []
    for width, dtype in WIDTHS.items():
        lm.to(dtype)
        for trains in (True, False):
            lm.requires_grad_(trains)
            try:
                short, long = (_count(lm, length) for length in LENGTHS)
            except (RuntimeError, ValueError):  # of torch, of kernels
                return ()
            kept.append(_by_token(width, trains, short, long))
    return tuple(kept)


@dataclass(slots=True)
class _Saved:
    """The bytes that autograd saves in one layer."""

    all: int = 0
    mixture: int = 0  # of them, those of its block with experts
    attended: int = 0  # and what attention returned


def _by_token(
    width: int, trains: bool, short: Sequence[_Saved], long: Sequence[_Saved]
) -> KeptByLayers:
    tokens = LENGTHS[1] - LENGTHS[0]

    def more(name: str) -> list[int]:
        pairs = zip(short, long, strict=True)
        return [(getattr(after, name) - getattr(before, name)) // tokens for before, after in pairs]

    return KeptByLayers(
        width=width,
        trains=trains,
        all=sum(more("all")),
        largest=max(more("all")),
        mixtures=sum(more("mixture")),
        attended=sum(more("attended")),
    )


class _Apart(torch.autograd.Function):
    """Attention that saves nothing: [H, T, D], [KV, T, D] -> [T, H, D of values]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return value.new_empty(query.shape[1], query.shape[0], value.shape[-1])


class _AnyDtype(TorchDispatchMode):
    """torch's grouped products on the meta device refuse all but bfloat16, which GPUs and CPUs do
    not.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        return func(*args, **kwargs or {})


class _Context:
    """The attention context of a forward pass in which attention is left out."""

    def __init__(self) -> None:
        self.attended: list[Tensor] = []  # what it returned

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        self.attended.append(_Apart.apply(query, key, value))  # pyright: ignore[reportArgumentType]
        return self.attended[-1]


def _begins_the_gradient(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
    return embedded if embedded.requires_grad else embedded.requires_grad_().clone()


def _count(lm: Any, tokens: int) -> list[_Saved]:
    """By layer what autograd saves of a forward pass over one sequence. Of layers that are alike
    the first runs alone: recurrent layers take a second each, and a model has up to a hundred.
    """
    layers = list(layers_of(lm))
    alike = _alike(layers)
    saved: list[tuple[ReferenceType[Tensor], int, bool]] = []
    here, inside = list[int](), list[bool]()
    rotations: list[Tensor] = []  # of all layers alike, and of the size of a head

    def save(tensor: Tensor) -> Tensor:
        if here:
            saved.append((ref(tensor), here[-1], bool(inside)))
        return tensor

    ids, context = torch.zeros(tokens, dtype=torch.int64, device=META), _Context()
    with ExitStack() as stack:
        for first, layer in zip(alike, layers, strict=True):
            if layer is layers[first]:
                stack.enter_context(_within(layer, here, first))
                stack.enter_context(_remembered(layer, rotations))
            else:
                stack.enter_context(_skipped(layer, layers[first]))
        for block in mixtures_of(lm):
            stack.enter_context(_within(block, inside, True))
        stack.enter_context(saved_tensors_hooks(save, lambda tensor: tensor))
        stack.enter_context(_AnyDtype())
        hidden = hidden_states(lm, ids, torch.arange(tokens, device=META), context)
    attended = {_storage(tensor) for tensor in context.attended}
    seen = {_storage(tensor) for tensor in chain(lm.parameters(), lm.buffers(), rotations)}
    counts = {first: _Saved() for first in alike}
    for reference, first, in_mixture in saved:
        # what no gradient of the hidden states needs is gone by now
        if (tensor := reference()) is not None and _storage(tensor) not in seen:
            seen.add(_storage(tensor))
            size = tensor.untyped_storage().nbytes()
            if _storage(tensor) in attended:
                counts[first].attended += size
                continue
            counts[first].all += size
            counts[first].mixture += size if in_mixture else 0
    del hidden  # until here it holds what is saved
    return [counts[first] for first in alike]


def _alike(layers: Sequence[nn.Module]) -> list[int]:
    """For each layer the number of the first that has the same modules, weights and settings."""
    firsts: dict[tuple[Any, ...], int] = {}
    return [firsts.setdefault(_traits(layer), number) for number, layer in enumerate(layers)]


def _traits(layer: nn.Module) -> tuple[Any, ...]:
    weights = tuple((name, weight.shape) for name, weight in layer.named_parameters())
    settings = tuple(
        (name, type(module), key, value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if key != "layer_idx" and isinstance(value, bool | int | float | str)
    )
    return (weights, settings)


@contextmanager
def _remembered(layer: nn.Module, rotations: list[Tensor]) -> Iterator[None]:
    """Meanwhile `rotations` gets what `layer` is given of them."""

    def remember(_: nn.Module, __: Any, named: dict[str, Any]) -> None:
        stated = tree_leaves(named.get("position_embeddings"))
        rotations.extend(each for each in stated if isinstance(each, Tensor))

    handle = layer.register_forward_pre_hook(remember, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _skipped(layer: nn.Module, first: nn.Module) -> Iterator[None]:
    """Meanwhile `layer` returns its input, and beside it what `first` did."""
    outputs: list[Any] = []

    def remember(_: nn.Module, __: Any, output: Any) -> None:
        outputs[:] = [output]

    def passed_on(*args: Any, **named: Any) -> Any:
        hidden = args[0] if args else named["hidden_states"]
        (output,) = outputs
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    handle, layer.forward = first.register_forward_hook(remember), passed_on
    try:
        yield
    finally:
        handle.remove()
        del layer.forward


def _storage(tensor: Tensor) -> int:
    """What names a storage: those of the meta device all begin at address 0."""
    return tensor.untyped_storage()._cdata


@contextmanager
def _within(module: nn.Module, stack: list[Any], value: Any) -> Iterator[None]:
    """While `module` runs, `value` is the last of `stack`."""
    enter: Callable[..., None] = partial(_push, stack, value)
    handles = [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(partial(_pop, stack), always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _push(stack: list[Any], value: Any, *_: Any) -> None:
    stack.append(value)


def _pop(stack: list[Any], *_: Any) -> None:
    stack.pop()
