"""What a forward and backward pass keeps, in bytes: formulas held to measurements by tests.

Everything is linear in the tokens of a micro-batch: attention keeps no scores, and logits exist one
chunk at a time. `width` is bytes of one number of the format that the model computes in.
"""

from postgrad.models.settings import LoraSettings
from postgrad.models.shapes import ModelShape
from postgrad.plan.roles import adapted_layers

FLOAT32 = 4
HEAD_CHUNK = 2**24  # logits of one chunk, models.head.CHUNK_VALUES
HEAD_COPIES = 4  # logits, shifted and exponentiated, and their gradient


def kept_by_layer(shape: ModelShape, width: int, lora: LoraSettings | None) -> int:
    """Bytes a token that one decoder layer keeps for its backward pass."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear = (2 * hidden + queries) * width  # the inputs of q/k/v, of gate/up and of o
    feedforward = 4 * inner * width  # gate, up, the activated gate, and their product
    attention = (2 * queries + 2 * keys) * width  # rotated q, k, v and what comes out
    normed = 2 * hidden + (queries + keys if shape.qk_norm else 0)
    # A norm computes in float32: its input and the scaled input; narrow formats keep both twice.
    norms = normed * (2 * FLOAT32 if width == FLOAT32 else FLOAT32 + width)
    return linear + feedforward + attention + norms + _kept_by_adapter(shape, width, lora)


def _kept_by_adapter(shape: ModelShape, width: int, lora: LoraSettings | None) -> int:
    """An adapter is float32: what it reads is converted, once for every layer that it stands on."""
    if lora is None:
        return 0
    layers = adapted_layers(shape, lora)
    converted = sum(a for a, _ in layers) * FLOAT32 if width != FLOAT32 else 0
    dropped = sum(a for a, _ in layers) * (FLOAT32 + 1) if lora.dropout else 0
    return converted + dropped + len(layers) * lora.rank * FLOAT32


def kept(shape: ModelShape, width: int, lora: LoraSettings | None, *, checkpointing: bool) -> int:
    """Bytes a token of a whole forward pass. With checkpointing every layer keeps its input, and
    the one whose backward pass runs everything.
    """
    layer = kept_by_layer(shape, width, lora)
    if not checkpointing:
        return shape.layers * layer
    return shape.layers * shape.hidden_size * width + layer


def working(shape: ModelShape, width: int) -> int:
    """Bytes a token that the backward pass of one layer takes beside what was kept."""
    return (3 * shape.intermediate_size + 4 * shape.hidden_size) * width


def forward_only(shape: ModelShape, width: int) -> int:
    """Bytes a token of a forward pass that keeps nothing."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inside = max(3 * shape.intermediate_size, queries + 2 * keys)
    return (inside + 2 * shape.hidden_size) * width + 2 * shape.hidden_size * FLOAT32


def head_bytes(shape: ModelShape, width: int, *, backward: bool, trains: bool) -> int:
    """Of the output head: one chunk of logits, and the gradient of its matrix where it trains."""
    copies = HEAD_COPIES if backward else 2
    matrix = shape.vocab_size * shape.hidden_size * width if backward and trains else 0
    return copies * max(HEAD_CHUNK, shape.vocab_size) * FLOAT32 + matrix


def full_logits(shape: ModelShape, tokens: int) -> int:
    """What a trainer holds that makes all logits in float32, with their gradient: never here."""
    return 2 * tokens * shape.vocab_size * FLOAT32
