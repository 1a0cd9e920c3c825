"""The output head: from hidden states to logits and logprobs, never the whole [T, V].

The final soft-cap and logit scaling that some models have belong to the head. Logprobs and
entropies are computed in chunks of entries, and each chunk's logits are computed again in the
backward pass instead of being kept: memory is one chunk's [chunk, V], whatever the batch.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_VALUES = 2**24  # logits in one chunk: 64 MiB in float32


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
    """What the linear head `score` of a critic or reward model says: [N, hidden] -> [N] float32.

    Only rows that are read come here: there is no [T, 1], and never a [T, V].
    """
    return lm.score(hidden)[:, 0]  # pyright: ignore[reportCallIssue]


def _chunk(
    lm: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    logits = full_logits(lm, hidden) / temperature
    log_z = torch.logsumexp(logits, -1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_z
    if not with_entropy:
        return logprobs, logprobs.new_zeros(0)
    probs = torch.exp(logits - log_z[:, None])
    return logprobs, log_z - (probs * logits).sum(-1)


def target_logprobs(
    lm: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Logprobs of `targets` and, if asked, the entropy of the distribution they came from.

    hidden: [E, hidden], one row for each loss entry; targets: [E] int64. Both results are [E]
    float32, at logits / temperature, whatever the model's dtype.
    """
    size = max(1, CHUNK_VALUES // lm.config.vocab_size)  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(targets), size):
        inputs = (lm, hidden[start : start + size], targets[start : start + size])
        if torch.is_grad_enabled():
            part = checkpoint(
                _chunk, *inputs, temperature, with_entropy,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
        else:
            part = _chunk(*inputs, temperature, with_entropy)
        parts.append(part)  # pyright: ignore[reportArgumentType]
    if not parts:
        empty = hidden.sum() * 0.0  # an empty micro-batch still reaches every collective
        return empty.expand(0), empty.expand(0) if with_entropy else None
    logprobs = torch.cat([logprob for logprob, _ in parts])
    return logprobs, torch.cat([entropy for _, entropy in parts]) if with_entropy else None
