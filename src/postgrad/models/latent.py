"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434) while sampling.

Keys and values of all heads are computed from one short vector of each token, its latent, by the
layer's `kv_b_proj`; one rotated part of the key is common to all heads. A cache that keeps latents
and rotated parts is up to 70 times smaller than one of keys and values.

Attention reads them as one key head and computes no keys and values again: with W_K and W_V the
head's parts of `kv_b_proj`, q (W_K c) = (W_K' q) c, and the weighted mean of values is W_V times
the weighted mean of latents (section 2.1.2 of the paper). transformers' modules are not changed: a
hook sees what `kv_b_proj` gets, and the attention function what came of it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.models.attention import AttentionContext
from postgrad.models.linear import OneDNNLinear

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")  # of an attention module with latents


@dataclass(frozen=True, slots=True)
class Latent:
    """The latents of T tokens in one layer, of rank R, and the matrices of its H heads."""

    latents: Tensor  # [T, R]
    to_keys: Tensor  # [H, Dn, R]: of the part of a key that is not rotated
    to_values: Tensor  # [H, Dv, R]

    @property
    def rank(self) -> int:
        """Numbers of a latent."""
        return self.latents.shape[-1]

    def stored(self, key: Tensor) -> Tensor:
        """[1, T, R + Dr], what a cache keeps of keys [H, T, Dn + Dr]: the latents, and the rotated
        part, which is the same in all heads.
        """
        rotated = key[0, :, self.to_keys.shape[1] :]
        return torch.cat([self.latents, rotated], -1)[None]

    def spread(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """The keys [H, T, Dn + Dr] and values [H, T, Dv] of what a cache keeps [1, T, R + Dr]."""
        latents, rotated = stored[0].split([self.rank, stored.shape[-1] - self.rank], -1)
        plain = latents @ self.to_keys.transpose(1, 2)
        keys = torch.cat([plain, rotated.expand(len(plain), -1, -1)], -1)
        return keys, latents @ self.to_values.transpose(1, 2)

    def asked(self, query: Tensor) -> Tensor:
        """Queries [H, T, Dn + Dr] as [H, T, R + Dr], for keys as `stored`."""
        plain = self.to_keys.shape[1]
        return torch.cat([query[..., :plain] @ self.to_keys, query[..., plain:]], -1)

    def values(self, attended: Tensor) -> Tensor:
        """Means of latents [T, H, R] as means of values [T, H, Dv]."""
        return torch.einsum("thr,hvr->thv", attended, self.to_values)


class Latents:
    """What the layers of a model compute from latents, in the order in which they attend."""

    def __init__(self, modules: list[Any]) -> None:
        """modules: the attention modules that have latents."""
        self._modules = modules
        self._last: tuple[Any, Tensor] | None = None  # what goes through a `kv_b_proj` now
        self._products: dict[int, Tensor] = {}  # of layers that are more than a weight, by id

    @contextmanager
    def watched(self) -> Generator[None]:
        """Forward passes inside keep their latents for `take`."""
        handles = [
            module.kv_b_proj.register_forward_pre_hook(partial(self._keep, module))
            for module in self._modules
        ]
        try:
            yield
        finally:
            self._last = None
            for handle in handles:
                handle.remove()

    def take(self) -> Latent | None:
        """The latents of the layer that attends now; None where it has none."""
        if self._last is None:
            return None
        module, latents = self._last
        rank, plain, values = (getattr(module, name) for name in SIZES)
        weight = self._weight(module.kv_b_proj).view(-1, plain + values, rank)
        self._last = None
        return Latent(latents.reshape(-1, rank), *weight.split([plain, values], 1))

    def forget(self) -> None:
        """The weights have changed."""
        self._products.clear()

    def _keep(self, module: Any, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._last = module, args[0]

    def _weight(self, layer: Any) -> Tensor:
        """[outputs, R]: what a linear layer multiplies by. One with an adapter, or in four bits,
        gives it as its product with the identity.
        """
        if type(layer) in (nn.Linear, OneDNNLinear):
            return layer.weight
        if id(layer) not in self._products:
            assert self._last is not None  # only `take` asks
            latents = self._last[1]
            identity = torch.eye(latents.shape[-1], dtype=latents.dtype, device=latents.device)
            self._products[id(layer)] = layer(identity).t().contiguous()
        return self._products[id(layer)]


def latents_of(lm: nn.Module) -> Latents | None:
    """The latents of a model; None of one whose layers have keys and values of their own."""
    modules = [
        module
        for module in lm.modules()
        if all(isinstance(getattr(module, name, None), int) for name in SIZES)
        and getattr(getattr(module, "kv_b_proj", None), "bias", module) is None
    ]
    return Latents(modules) if modules else None


class LatentDecoding:
    """Attention over a cache that keeps latents in the layers that have them."""

    def __init__(self, inner: AttentionContext, latents: Latents) -> None:
        """inner: attends over the cache."""
        self._inner, self._latents = inner, latents

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        """query [H, N, D], key [KV, N, D], value [KV, N, Dv]; returns [N, H, Dv]."""
        latent = self._latents.take()
        if latent is None:
            return self._inner.attend(layer, query, key, value, **more)
        stored = latent.stored(key)
        values = stored[..., : latent.rank]
        return latent.values(self._inner.attend(layer, latent.asked(query), stored, values, **more))
