"""Runs a model of an untested type once packed and once plain, and refuses it where they differ.

A config and a model's code (models.supported) do not show everything: a mask of its own, a layer
that attends twice, a scale in the output head. A short forward does.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import Layout, lay_out
from postgrad.layout.tree import NO_SHARING
from postgrad.models.attention import (
    AttentionContext,
    ContextLost,
    carries_states,
    hidden_states,
    implementation_of,
    min_shared_of,
    text_config,
)
from postgrad.models.head import full_logits
from postgrad.models.supported import unsupported
from postgrad.models.tree import TreeAttention

SHARED, LENGTHS = 7, (15, 11, 13)  # tokens: two sequences of one prompt, and another
# Largest error, as a share of the outputs' standard deviation: above the rounding of a few dozen
# layers, below the difference that any other attention makes.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


def require_same_outputs(lm: Any, path: str) -> None:
    """lm: loaded with our attention, on its device, in eval mode; a causal model or a score model.

    Raises UsageError where its outputs over packed sequences with a common prompt are not those
    that transformers' own attention gives for each sequence alone.
    """
    kind, sequences = lm.config.model_type, probe_sequences(lm)
    watched = _Watched()
    try:
        packed = _packed(lm, sequences, watched)
        with own_attention(lm), torch.no_grad():
            plain = [_plain(lm, sequence) for sequence in sequences]
    except (ContextLost, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        detail = (
            "its layers do not pass the forward's arguments on"
            if isinstance(error, ContextLost)
            else f"a short packed forward ends with {type(error).__name__}: {error}"
        )
        raise unsupported(kind, path, "attention", detail) from error
    twice = [layer for layer in watched.layers if watched.layers.count(layer) > 1]
    if twice and not carries_states(lm):  # there layers are numbered by their calls
        detail = f"layer {twice[0]} attends {watched.layers.count(twice[0])} times"
        raise unsupported(kind, path, "layers", detail)
    if not all(bool(outputs.isfinite().all()) for outputs in plain):
        raise UsageError(
            f"{path} gives outputs that are no finite numbers for a short text: its weights are "
            "damaged, or too large for this dtype; try --model.dtype float32"
        )
    if not same(packed, plain, spread(plain), lm.dtype):
        raise unsupported(kind, path, "outputs")
    window = _window(text_config(lm))
    if window is not None and window not in watched.windows:
        raise unsupported(kind, path, "mask", f"a sliding window of {window}")


def probe_sequences(lm: Any) -> list[NDArray[np.int32]]:
    """Token ids of three short sequences, of which the first two share their opening."""
    rng = np.random.default_rng(0)
    padding = getattr(text_config(lm), "pad_token_id", None)
    usual_ids = [i for i in range(min(text_config(lm).vocab_size, 1000)) if i != padding]
    drawn = [rng.choice(np.array(usual_ids, np.int32), length) for length in LENGTHS]
    drawn[1][:SHARED] = drawn[0][:SHARED]
    return drawn


@contextmanager
def own_attention(lm: Any) -> Generator[None]:
    """Inside, the model uses transformers' own "eager" attention."""
    lm.set_attn_implementation("eager")
    try:
        yield
    finally:
        lm.set_attn_implementation(implementation_of(lm.config))


def spread(outputs: Sequence[Tensor]) -> Tensor:
    """The standard deviation of all outputs: a fresh model's are close together, and so are their
    errors.
    """
    return torch.cat([sequence_outputs.flatten() for sequence_outputs in outputs]).std()


def same(
    outputs: Sequence[Tensor], expected: Sequence[Tensor], scale: Tensor, dtype: torch.dtype
) -> bool:
    """Whether outputs [N, V] of each sequence agree, as rounding in `dtype` allows. scale: the
    deviation of the model's outputs.

    The median over a sequence's tokens: a router that rounding sends to another expert changes one
    token, wrong attention nearly all.
    """
    pairs = zip(outputs, expected, strict=True)
    errors = [(output - correct).abs().amax(-1).median() for output, correct in pairs]
    return bool(torch.stack(errors).max() <= TOLERANCE.get(dtype, 1e-3) * scale)


class _Watched:
    """Passes attention on to `inner`, and notes which layers attended, in order, and which window
    sizes they asked for.
    """

    def __init__(self) -> None:
        self.inner: AttentionContext | None = None
        self.layers: list[int] = []
        self.windows: set[int | None] = set()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        assert self.inner is not None
        self.layers.append(layer)
        self.windows.add(more["window"])
        return self.inner.attend(layer, query, key, value, **more)


def _packed(lm: Any, sequences: Sequence[NDArray[np.int32]], watched: _Watched) -> list[Tensor]:
    """Logits [N - 1, V] of each sequence (of a score model hidden states) from one packed forward.
    Its backward pass is run too: that has to work as well.
    """
    sharing = min_shared_of(lm) < NO_SHARING
    layout, offsets = _laid_out(sequences, SHARED if sharing else NO_SHARING)
    device = next(lm.parameters()).device
    embedded: list[Tensor] = []

    def watch(_: Any, __: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some types write over it

    ids, positions, rows = (
        torch.from_numpy(array).to(device)
        for array in (layout.token_ids, layout.positions, layout.hidden_row)
    )
    watched.inner = TreeAttention(plan_blocks(layout), device)
    context: Any = watched
    if carries_states(lm):
        from postgrad.models.mixing import SegmentMixing
        from postgrad.models.states import StateContext

        context = StateContext(watched, SegmentMixing(layout, device))
    with torch.enable_grad(), lm.get_input_embeddings().register_forward_hook(watch):
        hidden = hidden_states(lm, ids, positions, context).index_select(0, rows)
        out = hidden if hasattr(lm, "score") else full_logits(lm, hidden)
        torch.autograd.grad(out.sum(), embedded)  # leaves no gradient on the weights
    out = out.detach()
    order = torch.from_numpy(np.argsort(layout.column)).to(device)
    ends = (offsets - np.arange(len(offsets)))[1:-1].tolist()
    return [*out.index_select(0, order).float().cpu().tensor_split(ends)]


def _laid_out(
    sequences: Sequence[NDArray[np.int32]], min_shared: int
) -> tuple[Layout, NDArray[np.int64]]:
    tokens = Ragged.of(sequences, np.int32)
    mask = np.ones(len(tokens.values), np.bool_)
    mask[tokens.offsets[:-1]] = False
    group = np.array([0, 0, 1])
    columns = Sequences(tokens, tokens.like(mask), group)
    return lay_out(columns, np.arange(len(tokens)), min_shared=min_shared), tokens.offsets


def _plain(lm: Any, sequence: NDArray[np.int32]) -> Tensor:
    ids = torch.from_numpy(sequence.astype(np.int64))[None].to(next(lm.parameters()).device)
    if hasattr(lm, "score"):
        out = lm.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    else:
        out = lm(input_ids=ids, use_cache=False).logits
    return out[0, :-1].float().cpu()


def _window(config: Any) -> int | None:
    """The sliding window that some layer has to have; None where none has one."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    longest = getattr(config, "max_position_embeddings", None)
    if (
        not window
        or (longest and window >= longest)
        or getattr(config, "use_sliding_window", True) is False
    ):
        return None
    if kinds is not None and not any("sliding" in kind for kind in kinds):
        return None
    return window
