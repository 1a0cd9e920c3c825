"""Token mixers that carry a state along the sequence: convolutions, delta rules, state spaces.

Samples of one packed forward must not share a state as they share keys, so the layouts of such a
model repeat a prompt for each of its samples (layout/tree.py, NO_SHARING), and a mixer runs over
each sequence from an empty state on. transformers' modules are not changed: `carry_states` puts a
function around the forward of each mixer, which asks the forward's context (`StateContext`) to cut
the packed rows into sequences. Attention layers of the same model attend as all others do.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.layout.blocks import stacks
from postgrad.layout.layout import Layout
from postgrad.models.attention import AttentionContext, layers_of, to_device

STATE_ARGUMENTS = ("cache_params", "past_key_values")  # where mixers take transformers' cache
# What a mixer's code calls on that cache to keep its state.
KEEPS_STATE = re.compile(r"\.(update_conv_state|update_recurrent_state|set_linear_cache)\(")
CARRIER = "state_carrier"  # the attribute of a model that says who carries its states

# Runs a mixer over [B, L, hidden], from a state on that it changes; None: from an empty state.
Run = Callable[[Tensor, "MixerState | None"], Tensor]


class MixerState:
    """The state of one mixer for B sequences: the part of transformers' cache that a mixer calls.

    tensors: by name, [B, ...] each; none before the first token. A call replaces them, or with
    single tokens some types write over them.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.tensors = dict(tensors or {})

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The newest inputs of a convolution, [B, channels, width]."""
        return self.tensors.get(f"conv {state_idx}")

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Takes the inputs [B, channels, L] of more tokens. Returns them behind those before."""
        width = conv_kernel_size or conv_states.shape[-1]
        before = self.get_conv_state(layer_idx, state_idx)
        if before is not None:
            conv_states = torch.cat([before, conv_states], -1)
        elif conv_states.shape[-1] < width:
            conv_states = nn.functional.pad(conv_states, (width - conv_states.shape[-1], 0))
        self.tensors[f"conv {state_idx}"] = conv_states[..., -width:]
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """What a recurrence has summed up so far."""
        return self.tensors.get(f"recurrent {state_idx}")

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Takes the sum after more tokens."""
        self.tensors[f"recurrent {state_idx}"] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """As minimax calls get_recurrent_state."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """As minimax calls update_recurrent_state."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: nothing is taken back here."""
        return False


class Mixing(Protocol):
    """How mixers run in one forward pass over T packed rows."""

    def mix(self, mixer: int, run: Run, hidden: Tensor) -> Tensor:
        """The outputs [T, hidden] of mixer number `mixer` for its inputs [T, hidden]."""
        ...


class StateContext:
    """The context of a forward of a model with states: attention as `attention` computes it, and
    mixers as `mixing` runs them.

    It numbers layers by the order in which they attend, since only some of them do.
    """

    def __init__(self, attention: AttentionContext, mixing: Mixing) -> None:
        self._attention = attention
        self.mixing = mixing
        self._attended = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        """As AttentionContext.attend. layer: not read."""
        number, self._attended = self._attended, self._attended + 1
        return self._attention.attend(number, query, key, value, **more)


class SequenceMixing:
    """Runs mixers over the sequences of a layout without sharing, from empty states on.

    Sequences of similar lengths are one batch, padded behind their last token: a mixer's output
    does not depend on what follows, and nothing reads the padding's.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Raises ValueError for a layout whose sequences share a prompt."""
        if np.any(layout.parent >= 0):
            raise ValueError("sequences that share a prompt would share the states behind it")
        self._shapes: list[tuple[int, int]] = []
        gathered: list[NDArray[np.int64]] = []
        starts, done = layout.segment_start, 0
        source_row = np.empty(layout.n_tokens, np.int64)
        sequences = sorted(np.split(np.arange(layout.n_tokens), starts[1:-1]), key=len, reverse=True)
        for stack in stacks([(rows, rows[:1]) for rows in sequences]):
            width = len(stack[0][0])
            for rows, _ in stack:
                source_row[rows] = done + np.arange(len(rows))
                gathered.append(np.pad(rows, (0, width - len(rows)), mode="edge"))
                done += width
            self._shapes.append((len(stack), width))
        self._rows = to_device(np.concatenate(gathered), device)
        self._source_row = to_device(source_row, device)

    def mix(self, mixer: int, run: Run, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        sizes = [count * width for count, width in self._shapes]
        batches = hidden.index_select(0, self._rows).split(sizes)
        outputs = [
            run(batch.view(*shape, -1), None).flatten(0, 1)
            for batch, shape in zip(batches, self._shapes, strict=True)
        ]
        return torch.cat(outputs).index_select(0, self._source_row)


class StateCarrier:
    """Brings the context of a forward to the mixers of a model, and to its attention, whether its
    layers pass the forward's arguments on or not.
    """

    def __init__(self, lm: Any) -> None:
        self.mixers = state_mixers(lm)
        self._context: StateContext | None = None
        for number, mixer in enumerate(self.mixers):
            mixer.forward = partial(self._mix, number, mixer, mixer.forward)
        for layer in layers_of(lm):
            for module in layer.modules():
                if hasattr(module, "layer_idx") and module not in self.mixers:
                    module.register_forward_pre_hook(self._give, with_kwargs=True)
        decoder = lm.get_decoder()
        decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
        decoder.register_forward_hook(self._end, always_call=True)

    def keep_when_recomputed(self, lm: nn.Module) -> None:
        """Gradient checkpointing computes a layer again in the backward pass, when no forward runs:
        with the context of the first time. To be called when it is on.
        """
        for module in lm.modules():
            if (checkpoint := getattr(module, "_gradient_checkpointing_func", None)) is not None:
                module._gradient_checkpointing_func = partial(self._checkpoint, checkpoint)  # pyright: ignore[reportArgumentType]

    def _checkpoint(self, checkpoint: Any, function: Any, *args: Any) -> Any:
        return checkpoint(partial(self._within, self._context, function), *args)

    def _within(self, context: StateContext | None, function: Any, *args: Any) -> Any:
        before, self._context = self._context, context
        try:
            return function(*args)
        finally:
            self._context = before

    def _begin(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        context = named.get("attention_context")
        self._context = context if isinstance(context, StateContext) else None

    def _end(self, *_: Any) -> None:
        self._context = None

    def _give(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        takes_any = any(
            parameter.kind is parameter.VAR_KEYWORD
            for parameter in inspect.signature(module.forward).parameters.values()
        )
        if self._context is None or "attention_context" in named or not takes_any:
            return None
        return args, {**named, "attention_context": self._context}

    def _mix(self, number: int, mixer: nn.Module, forward: Any, *args: Any, **named: Any) -> Any:
        """The forward of a mixer, [1, T, hidden] -> [1, T, hidden] packed, else as it is."""
        if self._context is None:
            return forward(*args, **named)
        arguments = inspect.signature(forward).bind(*args, **named).arguments
        first, *_ = arguments
        hidden = arguments.pop(first)[0]
        for more in ("attention_mask", "kwargs", *STATE_ARGUMENTS):
            arguments.pop(more, None)
        state_name = state_argument(forward)
        single: list[bool] = []

        def run(batch: Tensor, state: MixerState | None) -> Tensor:
            out = forward(batch, attention_mask=None, **{state_name: state}, **arguments)
            single.append(isinstance(out, Tensor))
            return out if single[-1] else out[0]

        mixed = self._context.mixing.mix(number, run, hidden).unsqueeze(0)
        return mixed if single[-1] else (mixed, None)


def state_argument(forward: Any) -> str:
    """The name under which a mixer's forward takes its state."""
    parameters = inspect.signature(forward).parameters
    return next(name for name in STATE_ARGUMENTS if name in parameters)


def state_mixers(lm: Any) -> list[nn.Module]:
    """The modules of a model's layers that carry a state along the sequence, in its order."""
    return [
        module
        for layer in layers_of(lm)
        for module in layer.modules()
        if KEEPS_STATE.search(inspect.getsource(type(module).forward))
    ]


def carry_states(lm: Any) -> None:
    """Lets a model's mixers run as the context of each forward says, if it has any."""
    if state_mixers(lm):
        setattr(lm, CARRIER, StateCarrier(lm))
