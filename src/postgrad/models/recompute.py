"""Activations that are computed again in the backward pass (gradient checkpointing), by layers.

What is kept of a layer then is its input. `HostInputs` keeps it in the host's memory, so that on
the device nothing grows with the number of layers: what unsloth's offloaded checkpoints, Megatron
and torchtune do, by the hooks of torch.autograd.graph.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from postgrad.core.errors import UsageError
from postgrad.models.attention import CARRIER, carries_states
from postgrad.models.settings import Recompute

HOST_INPUTS = "host_inputs"  # the attribute of a layer whose inputs a HostInputs keeps
_FUNCTION = "_gradient_checkpointing_func"  # what transformers' layers compute themselves with


def recompute_activations(lm: Any, how: Recompute) -> None:
    """Turns gradient checkpointing on as model.gradient_checkpointing says, False excepted. Raises
    UsageError where a type has none in transformers.
    """
    # transformers 5.23 renamed it; the old name goes on to work in the versions before
    enable = (
        getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
    )
    if not lm.supports_gradient_checkpointing:
        raise UsageError(
            f"model.gradient_checkpointing: transformers does not support it for a "
            f"{lm.config.model_type} model; leave it out"
        )
    try:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except TypeError:
        enable()
    if carries_states(lm):
        getattr(lm, CARRIER).keep_when_recomputed(lm)
    if how == "offload":
        inputs = HostInputs()
        for module in lm.modules():
            if (function := getattr(module, _FUNCTION, None)) is not None:
                setattr(module, _FUNCTION, inputs.keeping(function))
                setattr(module, HOST_INPUTS, inputs)


class _KeptInput:
    """The input of a layer between forward and backward pass. before: that of the layer before."""

    def __init__(self, tensor: Tensor, before: "_KeptInput | None") -> None:
        self.here: Tensor | None = tensor  # on the device; None: it is not there
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.device = tensor.device
        self.before = None if before is None else weakref.ref(before)  # none once it has come back
        self.copied: torch.cuda.Event | None = None  # the end of the newest copy, of a GPU


class HostInputs:
    """Keeps what the layers of a model read in pinned memory of the host, from the forward to the
    backward pass.

    Copies have a stream of their own, and the host waits for none. In the forward pass the input of
    a layer leaves while the layer computes, and its memory is free when the next layer begins. In
    the backward pass the input of the layer before comes back while a layer computes. So the device
    has two of them at a time, and waits only where a copy takes longer than a layer.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None  # of a GPU
        self._newest: weakref.ref[_KeptInput] | None = None

    def keeping(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """`compute`, called as compute(layer, input, ...), which saves the input for its backward
        pass: the same with the input in the host's memory.
        """

        def run(layer: Any, *args: Any, **named: Any) -> Any:
            read = args[0] if args and torch.is_grad_enabled() else None
            if not isinstance(read, Tensor):
                return compute(layer, *args, **named)
            kept = read.data_ptr(), read.shape
            with saved_tensors_hooks(partial(self._leave, kept), self._return):
                return compute(layer, *args, **named)

        return run

    def _leave(self, kept: tuple[int, torch.Size], tensor: Tensor) -> Any:
        """What autograd keeps in place of a tensor: a _KeptInput of the layer's input, which has
        that address and shape; other tensors (weights, positions) as they are.
        """
        if (tensor.data_ptr(), tensor.shape) != kept:
            return tensor
        before = None if self._newest is None else self._newest()
        if before is not None:
            self._wait_for(before)
            before.here = None
        held = _KeptInput(tensor, before)
        self._copy(held, held.host, tensor)
        self._newest = weakref.ref(held)
        return held

    def _return(self, kept: Any) -> Tensor:
        if not isinstance(kept, _KeptInput):
            return kept
        tensor = self._fetched(kept)
        self._wait_for(kept)
        kept.here = None
        before = None if kept.before is None else kept.before()
        if before is not None:
            self._fetched(before)
        return tensor

    def _fetched(self, held: _KeptInput) -> Tensor:
        if held.here is None:
            held.here = torch.empty_like(held.host, device=held.device)
            self._copy(held, held.here, held.host)
        return held.here

    def _copy(self, held: _KeptInput, to: Tensor, source: Tensor) -> None:
        """Copies behind all that the current stream was asked for: memory that is written to may
        have been in use until then.
        """
        if held.device.type != "cuda":
            to.copy_(source)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(held.device)
        self._stream.wait_stream(torch.cuda.current_stream(held.device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            held.copied = torch.cuda.Event()
            held.copied.record(self._stream)

    def _wait_for(self, held: _KeptInput) -> None:
        if held.copied is not None:
            torch.cuda.current_stream(held.device).wait_event(held.copied)
