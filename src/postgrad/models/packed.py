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

    input_ids, positions: [T] int64. What a token attends to is the context's business; `lm` must
    have been loaded with our attention (models.load). Where ranks share its matrices, positions are
    those of the rows of all of them: only attention reads them.
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
    """The decoder's layers, whatever the type calls them (layers, h). Raises UsageError where it
    has none in one list: nothing could be cut, divided or given an adapter then.
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
    """Raises UsageError for a token that a model has no embedding for: its tokenizer knows more
    tokens than the model, or is of another one. On a GPU the kernel would end the process.
    """
    vocab_size: int = lm.config.vocab_size  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
    if len(token_ids) and (int(token_ids.max()) >= vocab_size or int(token_ids.min()) < 0):
        raise UsageError(
            f"token id {int(token_ids.max())} has no embedding: the model has {vocab_size} "
            "(vocab_size), and its tokenizer is of another model, or tokens were added to it "
            "without rows for them (resize_token_embeddings)"
        )
