"""A transformers model run over packed tokens: no batch dimension, no padding."""

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
