"""How transformers' models call our attention.

transformers calls one registered function for every layer and passes on keyword arguments of the
model's forward. So the forward is given an `AttentionContext`, and the registered function passes
each layer's queries, keys and values to it: the learner's context attends over trees of segments,
the rollout engine's over its key-value cache. The models' code is not changed.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "postgrad"


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
    ) -> Tensor:
        """query: [H, T, D]; key, value: [KV, T, D], rotated; returns [T, H, D].

        A token sees itself and at most `window - 1` positions before it (None: all of them).
        `softcap` bounds scores to `softcap * tanh(score / softcap)`, after scaling.
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
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' calling convention: query [1, H, T, D]; returns [1, T, H, D]."""
    if attention_context is None:
        raise ContextLost
    out = attention_context.attend(
        int(module.layer_idx),  # pyright: ignore[reportArgumentType]
        query[0],
        key[0],
        value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, _attention)


def attend_folded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float, softcap: float | None
) -> Tensor:
    """Attention over a batch of equal shapes, grouped queries as extra query rows.

    query: [B, KV, G * Q, D], the Q rows of the first of a key head's G query heads first; key,
    value: [B, KV, K, D]; mask: [B, 1, G * Q, K] what is added to the scores, in the query's dtype,
    with at least one finite value a row. Returns [B, KV, G * Q, D]. It avoids repeating keys, which
    costs 3 to 20 times as much on CPUs.
    """
    if softcap is None:
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap)) * softcap + mask
    return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value
