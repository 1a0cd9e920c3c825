"""How transformers' models call our attention, and how hidden states come out of them.

transformers calls one registered function for every layer and passes on keyword arguments of the
model's forward. So the forward is given an `AttentionContext`, and the registered function passes
each layer's queries, keys and values to it: the learner's context attends over trees of segments,
the rollout engine's over its key-value cache. The models' code is not changed.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from postgrad.core.errors import UsageError
from postgrad.layout.tree import MIN_CONTINUED, MIN_SHARED, NO_SHARING

Out = TypeVar("Out")
ATTENTION_NAME = "postgrad"
CARRIER = "state_carrier"  # the attribute of a model with states (models/states.py)


class ContextLost(Exception):
    """A model did not pass its forward's keyword arguments on to the attention function."""


class AttentionContext(Protocol):
    """Attention for one forward pass over T packed tokens."""

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
        """query: [H, T, D]; key, value: [KV, T, D], rotated; returns [T, H, D].

        A token sees itself and at most `window - 1` positions before it (None: all of them).
        `softcap` bounds scores to `softcap * tanh(score / softcap)`, after scaling. `sinks`: [H],
        the score of one more key of each head, whose value is zero (learned sinks, as gpt_oss has
        them; Xiao et al. 2023, arXiv:2309.17453, section 3.3): a part of each softmax goes nowhere.
        """
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_context: AttentionContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' calling convention: query [1, H, T, D]; returns [1, T, H, D]."""
    if attention_context is None:
        raise ContextLost
    out = attention_context.attend(
        module.layer_idx,  # pyright: ignore[reportArgumentType]  # unread, it splits no graph
        query.view(query.shape[1:]),  # the backward of query[0] fills a tensor with zeros first
        key.view(key.shape[1:]),
        value.view(value.shape[1:]),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)


def implementation_of(config: Any) -> Any:
    """What transformers is told of a model's attention: ours in its decoder, torch's in the tower
    of one that reads images, whose tokens are not packed.
    """
    if config.get_text_config() is config:
        return ATTENTION_NAME
    return {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}


def carry_context(lm: nn.Module) -> None:
    """Hands the attention context to every attention module of a model whose layers get it and do
    not pass it on (stablelm, nemotron).

    A layer keeps it while it runs. Gradient checkpointing runs a layer again, and its hooks with
    it.
    """
    for layer in layers_of(lm):
        kept: list[AttentionContext | None] = [None]
        layer.register_forward_pre_hook(partial(_keep, kept), with_kwargs=True)
        for module in layer.modules():
            if hasattr(module, "layer_idx") and _takes_any_name(module.forward):
                module.register_forward_pre_hook(partial(_give, kept), with_kwargs=True)


def _takes_any_name(function: Any) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _keep(
    kept: list[AttentionContext | None], _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    kept[0] = named.get("attention_context")


def _give(
    kept: list[AttentionContext | None], _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if kept[0] is None or "attention_context" in named:
        return None
    return args, {**named, "attention_context": kept[0]}


def attend_folded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over a batch of equal shapes, grouped queries as extra query rows.

    query: [B, KV, G * Q, D], the Q rows of the first of a key head's G query heads first; key,
    value: [B, KV, K, D]; mask: [B, 1, G * Q, K] what is added to the scores, in the query's dtype,
    with at least one finite value a row; sinks: [KV * G]. Returns [B, KV, G * Q, D]. It avoids
    repeating keys, which costs 3 to 20 times as much on CPUs.
    """
    if softcap is None and sinks is None:
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = query @ key.transpose(-1, -2)
    scores = scores * scale if softcap is None else torch.tanh(scores * (scale / softcap)) * softcap
    scores = scores + mask
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value
    batch, kv_heads, rows, _ = scores.shape
    groups = len(sinks) // kv_heads
    column = sinks.view(kv_heads, groups, 1).expand(batch, kv_heads, groups, rows // groups)
    scores = torch.cat([scores, column.reshape(batch, kv_heads, rows, 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., :-1].to(value.dtype) @ value


@dataclass(frozen=True, slots=True)
class Pictures:
    """What a forward pass gets of the images in it, N tokens in all."""

    rows: Tensor  # [N] int64: the packed tokens that are theirs
    features: Tensor  # [N, hidden] in place of the embeddings of these tokens
    deeper: tuple[Tensor, ...] = ()  # [N, hidden] each: added behind the first layers (Qwen3-VL)


def hidden_states(
    lm: nn.Module,
    input_ids: Tensor,
    positions: Tensor,
    context: AttentionContext,
    pictures: Pictures | None = None,
) -> Tensor:
    """The last hidden states [T, hidden] of T packed tokens.

    input_ids: [T] int64; positions: [T], or [3, T] where rotary positions have three components.
    `context` decides which tokens a token attends to; `lm` must have been loaded with our attention
    (models.load). Where several ranks share its matrices, `positions` are those of the rows of all
    these ranks: only attention reads them. pictures: of the images among the tokens.
    """
    decoder = lm.get_decoder()  # pyright: ignore[reportCallIssue]
    tokens = {"input_ids": input_ids[None]} if pictures is None else _with(lm, input_ids, pictures)
    out = decoder(
        **tokens,
        position_ids=positions.unsqueeze(-2),
        use_cache=False,
        attention_context=context,
    )
    return out.last_hidden_state[0]


def _with(lm: nn.Module, input_ids: Tensor, pictures: Pictures) -> dict[str, Any]:
    """The arguments of a decoder for tokens among which are images."""
    # a placeholder's id may lie behind the embeddings (Gemma 3)
    ids = input_ids.index_fill(0, pictures.rows, 0)
    embedded = lm.get_input_embeddings()(ids)  # pyright: ignore[reportCallIssue]
    features = pictures.features.to(embedded.dtype)
    named = {"inputs_embeds": embedded.index_copy(0, pictures.rows, features)[None]}
    if not pictures.deeper:
        return named
    mask = torch.zeros_like(ids, dtype=torch.bool).index_fill(0, pictures.rows, True)
    order = pictures.rows.argsort()
    deeper = [features.to(embedded.dtype).index_select(0, order) for features in pictures.deeper]
    return {**named, "visual_pos_masks": mask[None], "deepstack_visual_embeds": deeper}


class PackedForward(nn.Module):
    """Body and head in one forward: FSDP2 gathers weights in the wrapped module's forward, so all
    that uses a weight has to run inside it.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden_row: Tensor,
        context: AttentionContext,
        read: Callable[[nn.Module, Tensor], Out],
        encode: Callable[[], Pictures | None] | None,
    ) -> Out:
        """The result of read(lm, hidden states [E, hidden] of the loss entries). encode: computes
        the features of the images.
        """
        pictures = None if encode is None else encode()
        hidden = hidden_states(self.lm, token_ids, positions, context, pictures)
        return read(self.lm, hidden.index_select(0, hidden_row))


def text_config(lm: nn.Module) -> Any:
    """The config of a model's decoder: a part of the config of one that reads images too."""
    return lm.config.get_text_config()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def layers_of(lm: nn.Module) -> nn.ModuleList:
    """The decoder's layers, whatever the model type calls them (layers, h). Raises LookupError
    where they are not in one list: tensor parallelism, sharding and adapters need it.
    """
    decoder = lm.get_decoder()  # pyright: ignore[reportCallIssue]
    count = text_config(lm).num_hidden_layers
    for _, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise LookupError(f"its decoder has no list of {count} layers")


def carries_states(lm: nn.Module) -> bool:
    """Whether some layers of a loaded model carry a state along the sequence (models/states.py):
    then its forward needs a StateContext.
    """
    return hasattr(lm, CARRIER)


def min_shared_of(lm: nn.Module) -> int:
    """The tokens of the shortest prefix that sequences of a loaded model share in the learner's
    layouts; NO_SHARING where it cannot go on from the state behind one.
    """
    if not carries_states(lm):
        return MIN_SHARED
    return MIN_CONTINUED if getattr(lm, CARRIER).continues else NO_SHARING


def windows_of(lm: nn.Module) -> tuple[int | None, ...]:
    """The windows that a model's layers ask their attention for, each once."""
    default = getattr(text_config(lm), "sliding_window", None)
    windows = {
        getattr(module, "sliding_window", default)
        for module in layers_of(lm).modules()
        if hasattr(module, "layer_idx") and hasattr(module, "scaling")
    }
    return tuple(sorted(windows, key=lambda window: window or 0))


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """An array as a tensor on `device`: on a CPU in the same memory. To a GPU it is copied from
    pinned memory, and nothing waits: torch keeps that memory until the copy has ended, and uses it
    again for a later array.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def require_embedded(lm: nn.Module, token_ids: NDArray[np.integer]) -> None:
    """Raises UsageError for a token id that a model has no embedding for. On a GPU the embedding
    kernel would abort the process instead.
    """
    vocab_size: int = text_config(lm).vocab_size
    if len(token_ids) and (int(token_ids.max()) >= vocab_size or int(token_ids.min()) < 0):
        raise UsageError(no_embedding(int(token_ids.max()), vocab_size))


def no_embedding(token_id: int, vocab_size: int) -> str:
    """The message for a token id outside of a model's `vocab_size` embeddings."""
    return (
        f"token id {token_id} has no embedding: the model has {vocab_size} (vocab_size), and its "
        "tokenizer is of another model, or tokens were added to it without rows for them "
        "(resize_token_embeddings)"
    )
