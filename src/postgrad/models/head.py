"""The output head: from hidden states to logits and logprobs, never all of [T, V] at once.

The final soft-cap and logit scaling that some models have belong to the head. Logprobs and
entropies are computed in chunks of entries. With more than one chunk, logits are not kept for the
backward pass but computed again there, and their gradient overwrites them: memory is one chunk's
[chunk, V], whatever the batch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_VALUES = 2**24  # logits in one chunk: 64 MiB in float32
BLOCK_VALUES = 2**17  # of them in one elementwise step on a CPU: 512 KiB, half a second-level cache


def full_logits(lm: nn.Module, hidden: Tensor) -> Tensor:
    """hidden: [N, hidden]; returns [N, V] float32 as the model's own forward would."""
    config = lm.config
    logits = lm.get_output_embeddings()(hidden)  # pyright: ignore[reportCallIssue]
    scale = getattr(config, "logit_scale", None)  # Cohere
    if scale is not None:
        logits = logits * scale
    divisor = getattr(config, "logits_scaling", None)  # Granite
    if divisor is not None:
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits.float()


def scores(lm: nn.Module, hidden: Tensor) -> Tensor:
    """The outputs of the linear head `score` of a critic or reward model: [N, hidden] -> [N]
    float32, for the N rows that are read alone.
    """
    return lm.score(hidden)[:, 0]  # pyright: ignore[reportCallIssue]


class _TokenLogprobs(torch.autograd.Function):
    """Logprobs of targets, and entropies, from logits.

    The backward pass needs only the logits and log Z, where autograd's small steps would keep three
    copies of [N, V]. It writes the gradient over the logits: it can run only once, and no earlier
    function may have saved the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        log_z = logits.new_empty(len(logits))
        entropy = logits.new_zeros(len(logits) if with_entropy else 0)
        for rows in _blocks(logits):
            scaled = _scaled(logits[rows], temperature)
            log_z[rows] = torch.logsumexp(scaled, -1)
            if with_entropy:
                probs = torch.exp(scaled - log_z[rows, None])
                entropy[rows] = log_z[rows] - (probs * scaled).sum(-1)
        logprobs = _scaled(logits.gather(-1, targets[:, None])[:, 0], temperature) - log_z
        ctx.save_for_backward(logits, targets, log_z, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, log_z, entropy = ctx.saved_tensors
        of_logprob, of_entropy = (gradient / ctx.temperature for gradient in gradients)
        for rows in _blocks(logits):
            log_p = _scaled(logits[rows], ctx.temperature) - log_z[rows, None]  # log p
            factor = -of_logprob[rows, None]
            if ctx.with_entropy:
                factor = factor - of_entropy[rows, None] * (log_p + entropy[rows, None])
            torch.mul(log_p.exp_(), factor, out=logits[rows])
        places = targets[:, None]
        logits.scatter_(-1, places, logits.gather(-1, places) + of_logprob[:, None])
        return logits, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Runs of rows whose temporaries stay in a CPU's cache; one run on other devices."""
    if logits.device.type != "cpu":
        yield slice(None)
        return
    size = max(1, BLOCK_VALUES // logits.shape[1])
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


def _chunk(
    lm: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    logits = full_logits(lm, hidden)
    return _TokenLogprobs.apply(logits, targets, temperature, with_entropy)  # pyright: ignore[reportReturnType]


def target_logprobs(
    lm: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Logprobs of `targets` and, with_entropy, the entropies of the distributions over tokens.

    hidden: [E, hidden], one row for each loss entry; targets: [E] int64. Both results are [E]
    float32, at logits / temperature, whatever the model's dtype.
    """
    size = max(1, CHUNK_VALUES // lm.config.vocab_size)  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
    again = torch.is_grad_enabled() and len(targets) > size
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(targets), size):
        inputs = (lm, hidden[start : start + size], targets[start : start + size])
        if again:
            part = checkpoint(
                _chunk, *inputs, temperature, with_entropy,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
        else:
            part = _chunk(*inputs, temperature, with_entropy)
        parts.append(part)  # pyright: ignore[reportArgumentType]
    if not parts:
        empty = hidden.sum() * 0.0  # keeps the graph: all ranks take part in every collective
        return empty.expand(0), empty.expand(0) if with_entropy else None
    logprobs = torch.cat([logprob for logprob, _ in parts])
    return logprobs, torch.cat([entropy for _, entropy in parts]) if with_entropy else None
