"""A check of the engine on models of untested types: its logprobs against transformers' own."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from postgrad.models.probe import own_attention, probe_sequences, same, spread, unsupported
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.settings import SamplingSettings

if TYPE_CHECKING:
    from postgrad.rollout.local.engine import LocalEngine

NEW = 5  # tokens of each sample
SAMPLES = (0, 1)  # of each prompt: they share it in the cache


@torch.no_grad()
def require_same_samples(engine: "LocalEngine", lm: Any) -> None:
    """Samples a few tokens. Raises UsageError where their logprobs are not those of transformers
    with its own attention and without a cache. lm: the model that `engine` samples from.
    """
    prompts = [sequence[:6] for sequence in probe_sequences(lm)]
    path = str(lm.config.name_or_path or "the model")
    done: list[Completion] = []
    try:
        for ticket, prompt in enumerate(prompts):
            sampling = SamplingSettings(max_new_tokens=NEW)
            engine.submit(Request(ticket, SAMPLES, prompt, sampling))
        while len(done) < len(prompts) * len(SAMPLES):
            done += engine.completed()
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        problem = f"the built-in engine cannot decode it: {type(error).__name__}: {error}"
        raise unsupported(lm, path, problem) from error
    with own_attention(lm):
        logits = [_logits(lm, prompts[completion.ticket], completion) for completion in done]
    expected = [
        table.log_softmax(-1).gather(
            1, torch.from_numpy(completion.token_ids.astype(np.int64))[:, None]
        )
        for completion, table in zip(done, logits, strict=True)
    ]
    sampled = [torch.from_numpy(completion.logprobs)[:, None] for completion in done]
    if not same(sampled, expected, spread(logits), lm.dtype):
        problem = (
            "the built-in engine's samples are not drawn from what transformers gives for them"
        )
        raise unsupported(lm, path, problem)


def _logits(lm: Any, prompt: Any, completion: Completion) -> torch.Tensor:
    """[tokens, V] float32: transformers' logits for each token of a completion."""
    ids = np.concatenate([prompt, completion.token_ids]).astype(np.int64)
    device = next(lm.parameters()).device
    logits = lm(input_ids=torch.from_numpy(ids)[None].to(device), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float().cpu()
