"""Token mixers that carry a state along the sequence: convolutions, delta rules, state spaces.

No mask keeps the samples of one packed forward apart in such a mixer, as one does in attention. It
runs over each segment of the layout by itself, on from the state behind the segment above
(models/mixing.py): the prompt of n samples once, then each sample. Where its code runs over several
tokens from an empty state alone, each sample has its own copy of the prompt (`continues`).

transformers' modules are not changed: `carry_states` puts a function around the forward of each
mixer, which asks the forward's context (`StateContext`) to cut the packed rows into segments.
Attention layers of the same model attend as all others do.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from postgrad.models.attention import CARRIER, AttentionContext, layers_of

# Where mixers take transformers' cache: `cache` from transformers 5.24 on.
STATE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
# What a mixer's code calls on that cache to keep its state.
KEEPS_STATE = re.compile(r"\.(update_conv_state|update_recurrent_state|set_linear_cache)\(")
# What it does where it goes on from that state over several tokens: a recurrence gets the state
# (Mamba's scan takes none, minimax goes token by token); a convolution sees the inputs before.
KEEPS_SUM = re.compile(r"\.(update_recurrent_state|set_linear_cache)\(")
CONTINUES_SUM = re.compile(r"\binitial_states?=recurrent_state\b")
# What it does where it passes over the forward of a layer.
READS_WEIGHT = re.compile(r"\bself\.(\w+)\.weight\b")

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

    def has_previous_state(self, layer_idx: int = 0, state_idx: int | None = None) -> bool:
        """Whether there was a token before; asked by transformers 5.17 to 5.23."""
        return bool(self.tensors)

    @property
    def layers(self) -> "_Layers":
        """As transformers 5.17 to 5.23 read states: cache.layers[layer_idx].conv_states[0]."""
        return _Layers(self)


class _Layers:
    """A MixerState as the layer of every number in transformers' cache."""

    record_past = False

    def __init__(self, state: MixerState) -> None:
        self._tensors = state.tensors

    def __getitem__(self, layer_idx: int) -> "_Layers":
        return self

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return self._numbered("conv ")

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return self._numbered("recurrent ")

    def _numbered(self, kind: str) -> dict[int, Tensor]:
        named = self._tensors.items()
        return {int(n.removeprefix(kind)): t for n, t in named if n.startswith(kind)}


class Mixing(Protocol):
    """How mixers run in one forward pass over T packed rows."""

    def mix(self, mixer: int, run: Run, hidden: Tensor) -> Tensor:
        """The outputs [T, hidden] of the mixer that is called as number `mixer` of the forward, for
        its inputs [T, hidden].
        """
        ...


class StateContext:
    """The context of a forward of a model with states: attention as `attention` computes it, and
    mixers as `mixing` runs them.

    It numbers attention layers, and mixers, by the order in which they are called: only some layers
    are of a kind, and some types share a module between layers.
    """

    def __init__(self, attention: AttentionContext, mixing: Mixing) -> None:
        self._attention = attention
        self._mixing = mixing
        self._attended = self._mixed = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        """As AttentionContext.attend. layer: not read."""
        number, self._attended = self._attended, self._attended + 1
        return self._attention.attend(number, query, key, value, **more)

    def mix(self, run: Run, hidden: Tensor) -> Tensor:
        """As Mixing.mix, for the next mixer."""
        number, self._mixed = self._mixed, self._mixed + 1
        return self._mixing.mix(number, run, hidden)


class StateCarrier:
    """Brings the context of a forward to the mixers of a model, and to its attention, whether its
    layers pass the forward's arguments on or not.
    """

    def __init__(self, lm: Any) -> None:
        self.mixers = state_mixers(lm)
        # Whether sequences can share a prompt: all mixers go on from the state behind it.
        self.continues = all(continues(type(mixer)) for mixer in self.mixers)
        self._context: StateContext | None = None
        for mixer in self.mixers:
            mixer.forward = partial(self._mix, mixer.forward)
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

    def _mix(self, forward: Any, *args: Any, **named: Any) -> Any:
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
            if state is not None and state.tensors and batch.shape[1] > 1 and not self.continues:
                raise ValueError("sequences share a prompt, and mixers do not go on from a state")
            out = forward(batch, attention_mask=None, **{state_name: state}, **arguments)
            single.append(isinstance(out, Tensor))
            return out if single[-1] else out[0]

        mixed = self._context.mix(run, hidden).unsqueeze(0)
        return mixed if single[-1] else (mixed, None)


def state_argument(forward: Any) -> str:
    """The name under which a mixer's forward takes its state."""
    parameters = inspect.signature(forward).parameters
    return next(name for name in STATE_ARGUMENTS if name in parameters)


def state_mixers(lm: Any) -> list[nn.Module]:
    """The modules of a model's layers that carry a state along the sequence, in its order."""
    modules = (module for layer in layers_of(lm) for module in layer.modules())
    return [module for module in dict.fromkeys(modules) if keeps_state(type(module))]


@cache
def continues(kind: type[nn.Module]) -> bool:
    """Whether modules of a class that keep a state go on from it over several tokens at once, so
    that gradients flow back through it.
    """
    forward = inspect.getsource(kind.forward)
    return KEEPS_SUM.search(forward) is None or CONTINUES_SUM.search(forward) is not None


@cache
def attends(kind: type[nn.Module]) -> bool:
    """Whether modules of a class attend through transformers' attention interface."""
    return "attention_interface(" in inspect.getsource(kind.forward)


@cache
def keeps_state(kind: type[nn.Module]) -> bool:
    """Whether modules of a class keep a state, in a way that is known here."""
    return KEEPS_STATE.search(inspect.getsource(kind.forward)) is not None


@cache
def weights_read_by(kind: type[nn.Module]) -> frozenset[str]:
    """The names of the linear layers with whose weights mixers of a class multiply themselves, at
    least where a kernel does it (mamba): an adapter beside such a layer would be passed over, and
    codes of four bits would be read as numbers.
    """
    if not keeps_state(kind):
        return frozenset()
    return frozenset(READS_WEIGHT.findall(inspect.getsource(kind.forward)))


def state_of_one_token(mixer: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    """The state of a mixer after hidden [1, 1, hidden]: on the meta device its shapes."""
    state = MixerState()
    parameters = inspect.signature(mixer.forward).parameters.values()
    others = {p.name: None for p in list(parameters)[1:] if p.kind is p.POSITIONAL_OR_KEYWORD}
    mixer.forward(hidden, **{**others, state_argument(mixer.forward): state})
    return state.tensors


def carry_states(lm: Any) -> None:
    """Lets a model's mixers run as the context of each forward says, if it has any."""
    if state_mixers(lm):
        setattr(lm, CARRIER, StateCarrier(lm))
