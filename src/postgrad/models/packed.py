"""A transformers model run over packed tokens: no batch dimension, no padding."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.models.attention import AttentionContext


def hidden_states(
    lm: nn.Module, input_ids: Tensor, positions: Tensor, context: AttentionContext
) -> Tensor:
    """The last hidden states [T, hidden] of T packed tokens.

    input_ids, positions: [T] int64. `context` decides which tokens a token attends to; `lm` must
    have been loaded with our attention (models.load). Where several ranks share its matrices,
    `positions` are those of the rows of all these ranks: only attention reads them.
    """
    decoder = lm.get_decoder()  # pyright: ignore[reportCallIssue]
    out = decoder(
        input_ids=input_ids[None],
        position_ids=positions[None],
        use_cache=False,
        attention_context=context,
    )
    return out.last_hidden_state[0]


def layers_of(lm: nn.Module) -> nn.ModuleList:
    """The decoder's layers, whatever the model type calls them (layers, h). Raises UsageError where
    they are not in one list: tensor parallelism, sharding and adapters need it.
    """
    decoder = lm.get_decoder()  # pyright: ignore[reportCallIssue]
    count = lm.config.num_hidden_layers  # pyright: ignore[reportAttributeAccessIssue]
    for _, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise UsageError(
        f"a {lm.config.model_type} model is not supported because its decoder has no list of "  # pyright: ignore[reportAttributeAccessIssue]
        f"{count} layers"
    )


def require_embedded(lm: nn.Module, token_ids: NDArray[np.integer]) -> None:
    """Raises UsageError for a token id that a model has no embedding for. On a GPU the embedding
    kernel would abort the process instead.
    """
    vocab_size: int = lm.config.vocab_size  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
    if len(token_ids) and (int(token_ids.max()) >= vocab_size or int(token_ids.min()) < 0):
        raise UsageError(no_embedding(int(token_ids.max()), vocab_size))


def no_embedding(token_id: int, vocab_size: int) -> str:
    """The message for a token id outside of a model's `vocab_size` embeddings."""
    return (
        f"token id {token_id} has no embedding: the model has {vocab_size} (vocab_size), and its "
        "tokenizer is of another model, or tokens were added to it without rows for them "
        "(resize_token_embeddings)"
    )
