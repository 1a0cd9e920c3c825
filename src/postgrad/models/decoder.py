"""The forward pass of rollout: a model's layers one after the other, without gradients.

`decoder_of` takes a model whose layers are Llama's (with or without biases, norms of queries and
keys, and windows) apart and runs it with few operations: queries, keys and values are one product,
so are gate and up. The parameters of such a product become views into one tensor: weights that are
copied into the model's parameters arrive there too. Where oneDNN multiplies faster with weights in
an order of its own, products read a reordered copy, which `forget` drops. Every other model runs
through its own modules. A test requires the same logits of both.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from postgrad.models.attention import (
    AttentionContext,
    Pictures,
    carries_states,
    hidden_states,
)
from postgrad.models.head import full_logits
from postgrad.models.latent import Latents, latents_of
from postgrad.models.linear import OneDNNLinear, in_order, product_for
from postgrad.models.settings import LLAMA_TYPES

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALIGNED = 16  # bytes: kernels read rows that begin at a multiple of them at their full width


class Decoder(Protocol):
    """A model without gradients over T packed tokens."""

    @property
    def static(self) -> bool:
        """Whether `hidden_states` and `logits` call the same operations for every input of a shape
        and never wait for the device: then a CUDA graph can stand for them.
        """
        ...

    @property
    def stateful(self) -> bool:
        """Whether layers carry a state along the sequence: then every context is a StateContext."""
        ...

    @property
    def latents(self) -> Latents | None:
        """What its layers compute keys and values from, where a cache can keep that instead."""
        ...

    def prepare(self) -> None:
        """Reads changed weights now, as the products read them, and not with the next product."""
        ...

    def addresses(self) -> tuple[int, ...]:
        """Where the weights lie, after `prepare`. As long as these numbers stay, a CUDA graph of
        this decoder reads the weights that it has now.
        """
        ...

    def hidden_states(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        pictures: Pictures | None = None,
    ) -> Tensor:
        """The last hidden states [T, hidden] of input_ids [T] at positions [T] or [3, T], as the
        function models.attention.hidden_states gives them.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32, as models.head.full_logits gives them."""
        ...

    def forget(self) -> None:
        """Drops copies of the weights: because the weights have changed, or to free memory."""
        ...


class ModuleDecoder:
    """Any model that was loaded with our attention, through its own modules."""

    static = False  # transformers' modules decide by values in places

    def __init__(self, lm: nn.Module) -> None:
        self._lm = lm
        self.stateful = carries_states(lm)
        self.latents = latents_of(lm)

    def prepare(self) -> None:
        """Nothing to do: the modules read the parameters themselves."""

    def addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._lm.parameters())

    def hidden_states(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        pictures: Pictures | None = None,
    ) -> Tensor:
        with nullcontext() if self.latents is None else self.latents.watched():
            return hidden_states(self._lm, input_ids, positions, context, pictures)

    def logits(self, hidden: Tensor) -> Tensor:
        return full_logits(self._lm, hidden)

    def forget(self) -> None:
        if self.latents is not None:
            self.latents.forget()


@dataclass(frozen=True, slots=True)
class _RMSNorm:
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class _Linear:
    """Linear layers that read the same input, as one product [T, inputs] -> [T, sum of outputs]."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._weights: list[nn.Parameter] = [module.weight for module in modules]
        biases = [module.bias for module in modules]
        self._biases: list[nn.Parameter] | None = None if biases[0] is None else biases
        self._read: tuple[Tensor, Tensor | None] | None = None  # weight (reordered) and bias
        self._multiply = product_for(self._weights[0])
        self._join()

    def forget(self) -> None:
        self._read = None

    def prepare(self) -> None:
        if self._read is None:  # parameters may have been replaced since they were joined
            weight, bias = self._join()
            self._read, self._multiply = (in_order(weight), bias), product_for(weight)

    def __call__(self, x: Tensor) -> Tensor:
        self.prepare()
        assert self._read is not None
        return self._multiply(x, *self._read)

    def _join(self) -> tuple[Tensor, Tensor | None]:
        """Weight [M, K] and bias [M]: the parameters are views into them."""
        return joined(self._weights), None if self._biases is None else joined(self._biases)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer, taken apart; query and key norms and window: None where it has none."""

    before_attention: _RMSNorm
    queries_keys_values: _Linear
    query_norm: _RMSNorm | None
    key_norm: _RMSNorm | None
    attention_out: _Linear
    before_mlp: _RMSNorm
    gate_up: _Linear
    down: _Linear
    window: int | None  # tokens that a query sees at most, itself included
    scale: float  # of query-key products


class LayeredDecoder:
    """A model of LLAMA_TYPES as plain products. It shares the memory of `lm`'s parameters, until
    `lm` is moved to another device or dtype.
    """

    stateful = False
    latents = None

    def __init__(self, lm: Any) -> None:
        model, config = lm.model, lm.config
        self._parameters: list[nn.Parameter] = list(lm.parameters())
        self._embedding: nn.Parameter = model.embed_tokens.weight
        self._rotary = model.rotary_emb
        self._dim: int = model.layers[0].self_attn.head_dim
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._layers = [_read(layer, config) for layer in model.layers]
        self._norm = _norm(model.norm)
        self._head = _Linear([lm.lm_head])
        self._products = [
            product
            for layer in self._layers
            for product in (
                layer.queries_keys_values, layer.attention_out, layer.gate_up, layer.down
            )
        ]  # fmt: skip
        self._products.append(self._head)

    @property
    def static(self) -> bool:
        """Types of rotary positions that depend on the longest position read it from the device."""
        return getattr(self._rotary, "rope_type", "default") not in ("dynamic", "longrope")

    def forget(self) -> None:
        for product in self._products:
            product.forget()

    def prepare(self) -> None:
        for product in self._products:
            product.prepare()

    def addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._parameters)

    def hidden_states(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        pictures: Pictures | None = None,
    ) -> Tensor:
        assert pictures is None  # none of LLAMA_TYPES reads images
        x = functional.embedding(input_ids, self._embedding)
        cosine, sine = self._rotary(x, positions[None])
        half = self._dim // 2  # the second half repeats the first
        angles = cosine[0, :, None, :half].contiguous(), sine[0, :, None, :half].contiguous()
        for number, layer in enumerate(self._layers):
            query, key, value = self._heads_of(layer, layer.before_attention(x), angles)
            attended = context.attend(
                number,
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                scale=layer.scale,
                window=layer.window,
                softcap=None,
            )
            x.add_(layer.attention_out(attended.flatten(1)))
            gate, up = layer.gate_up(layer.before_mlp(x)).chunk(2, -1)
            x.add_(layer.down(functional.silu(gate).mul_(up)))
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden).float()

    def _heads_of(
        self, layer: _Layer, x: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, KV, D] of a layer, rotated."""
        heads, kv_heads = self._heads, self._kv_heads
        every = layer.queries_keys_values(x).view(len(x), heads + 2 * kv_heads, self._dim)
        value = every[:, heads + kv_heads :]
        if layer.query_norm is None or layer.key_norm is None:
            turned = _rotate(every[:, : heads + kv_heads], angles)
            return turned[:, :heads], turned[:, heads:], value
        query = layer.query_norm(every[:, :heads])
        key = layer.key_norm(every[:, heads : heads + kv_heads])
        return _rotate(query, angles), _rotate(key, angles), value


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions (arXiv:2104.09864). x: [T, heads, D], cosines and sines: [T, 1, D / 2]."""
    cosine, sine = angles
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    turned = (  # torch.compile takes addcmul_ apart, which rounds once more
        torch.addcmul(left * cosine, right, sine, value=-1.0),
        torch.addcmul(right * cosine, left, sine),
    )
    return torch.cat(turned, -1)


def _norm(module: Any) -> _RMSNorm:
    return _RMSNorm(module.weight, float(module.variance_epsilon))


@torch.no_grad()
def joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The parameters concatenated along dimension 0. They become views into the result, where they
    are not yet.
    """
    storage = parameters[0].untyped_storage().data_ptr()
    starts = [p.storage_offset() for p in parameters]
    ends = [start + p.numel() for start, p in zip(starts, parameters, strict=True)]
    together = all(p.untyped_storage().data_ptr() == storage for p in parameters)
    if not together or starts[1:] != ends[:-1]:
        concatenated = torch.cat([p.detach() for p in parameters])
        for parameter, part in zip(
            parameters, concatenated.split([len(p) for p in parameters]), strict=True
        ):
            parameter.data = part
    first = parameters[0].detach()
    shape = (sum(len(p) for p in parameters), *first.shape[1:])
    return first.as_strided(shape, first.stride())


@torch.no_grad()
def move_together(lm: nn.Module, device: torch.device) -> None:
    """Moves a model to `device`, all weights of a dtype into one piece of memory.

    Matrices come first, in the order of the modules, so that those of one product lie side by side
    and need no joining. Joined on a GPU they would leave holes between the weights that stay, and
    pages (20 MiB, 2 MiB for small weights) with holes are not given back.
    """
    of_dtype: defaultdict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    for parameter in sorted(lm.parameters(), key=lambda p: p.ndim < 2):
        of_dtype[parameter.dtype].append(parameter)
    for dtype, parameters in of_dtype.items():
        step = ALIGNED // dtype.itemsize
        sizes = [-(-p.numel() // step) * step for p in parameters]
        buffer = torch.empty(sum(sizes), dtype=dtype, device=device)
        for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
            parameter.data = part[: parameter.numel()].view_as(parameter).copy_(parameter)
    lm.to(device)  # buffers


def _read(layer: Any, config: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    normed = hasattr(attention, "q_norm")
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return _Layer(
        before_attention=_norm(layer.input_layernorm),
        queries_keys_values=_Linear([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=_norm(attention.q_norm) if normed else None,
        key_norm=_norm(attention.k_norm) if normed else None,
        attention_out=_Linear([attention.o_proj]),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=_Linear([mlp.gate_proj, mlp.up_proj]),
        down=_Linear([mlp.down_proj]),
        window=window,
        scale=float(attention.scaling),
    )


def _has_llama_layers(lm: Any) -> bool:
    """Whether a model is transformers' own class of LLAMA_TYPES, with plain linear layers."""
    config = lm.config
    ours = type(lm).__module__.startswith("transformers.models.")
    if not ours or config.model_type not in LLAMA_TYPES or config.hidden_act != "silu":
        return False
    first = lm.model.layers[0].self_attn
    if 2 * len(lm.model.rotary_emb.inv_freq) != first.head_dim:
        return False  # only a part of each head is rotated
    linear = [lm.lm_head]
    for layer in lm.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linear += [getattr(attention, name) for name in PROJECTIONS]
        linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        without_bias = [getattr(attention, name).bias is None for name in PROJECTIONS[:3]]
        if any(without_bias) and not all(without_bias):
            return False
    return all(type(module) in (nn.Linear, OneDNNLinear) for module in linear)


def decoder_of(lm: nn.Module) -> Decoder:
    """The fastest decoder of a model that was loaded with our attention."""
    return LayeredDecoder(lm) if _has_llama_layers(lm) else ModuleDecoder(lm)
