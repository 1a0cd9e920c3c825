"""What forward and backward passes of a decoder's layers hold, in bytes a token.

Counted from the operations that models and autograd make of a layer, and held to what torch's
memory events say by benchmarks and tests. `width` is bytes of one number of the format that the
model computes in. The output head is in plan.head, attention's geometry in plan.blocks.
"""

from postgrad.models.settings import LLAMA_TYPES, LoraSettings
from postgrad.models.shapes import ModelShape
from postgrad.plan.blocks import Blocks
from postgrad.plan.roles import adapted_layers

FLOAT32 = 4


def kept_by_layer(
    shape: ModelShape, width: int, lora: LoraSettings | None, blocks: Blocks, *, cpu: bool
) -> int:
    """What one decoder layer keeps for its backward pass."""
    hidden, inner, queries = shape.hidden_size, shape.intermediate_size, shape.query_size
    linear = (2 * hidden + queries) * width  # the inputs of q/k/v, of gate/up and of o
    feedforward = 4 * inner * width  # gate, up, the activated gate, and their product
    if lora is not None and width != FLOAT32:  # only the adapter's own copies of inputs are kept
        linear, feedforward = 0, 3 * inner * width
    each = FLOAT32 if cpu else width  # a CPU attends in float32
    attention = int((2 * queries + 2 * shape.key_size * blocks.keys) * each)  # q, k, v, and out
    normed = 2 * hidden + (queries + shape.key_size if shape.qk_norm else 0)
    norms = normed * _kept_by_norm(shape, width, lora, cpu=cpu)
    return linear + feedforward + attention + norms + _kept_by_adapter(shape, width, lora)


def _kept_by_norm(shape: ModelShape, width: int, lora: LoraSettings | None, *, cpu: bool) -> int:
    """Of each number that it reads. One that is fused keeps what it reads; another computes in
    float32 and keeps its input there, which is the stream itself where that is float32, and where
    its weight trains what that scales.
    """
    if cpu and shape.model_type in LLAMA_TYPES:
        return width
    return FLOAT32 + (0 if lora else width)


def _kept_by_adapter(shape: ModelShape, width: int, lora: LoraSettings | None) -> int:
    """An adapter is float32: what it reads is converted, once for every layer that it stands on."""
    if lora is None:
        return 0
    layers = adapted_layers(shape, lora)
    converted = sum(a for a, _ in layers) * FLOAT32 if width != FLOAT32 else 0
    dropped = sum(a for a, _ in layers) * (FLOAT32 + 1) if lora.dropout else 0
    return converted + dropped + len(layers) * lora.rank * FLOAT32


def kept(
    shape: ModelShape,
    width: int,
    lora: LoraSettings | None,
    blocks: Blocks,
    *,
    checkpointing: bool,
    cpu: bool,
) -> int:
    """What a whole forward pass keeps until its backward pass: of every layer all, or with
    checkpointing its input; attention's masks, once; the last norm; what the head reads.
    """
    layer = shape.hidden_size * width
    if not checkpointing:
        layer = kept_by_layer(shape, width, lora, blocks, cpu=cpu)
    read = width if lora is None or width == FLOAT32 else 0  # by the head
    last = shape.hidden_size * (_kept_by_norm(shape, width, lora, cpu=cpu) + read)
    return shape.layers * layer + _masks(shape, FLOAT32 if cpu else width, blocks) + last


def backward_of_layer(
    shape: ModelShape,
    width: int,
    lora: LoraSettings | None,
    blocks: Blocks,
    *,
    checkpointing: bool,
    cpu: bool,
) -> int:
    """What the backward pass of one layer holds beside what was kept: gradients, and with
    checkpointing all that the layer would have kept.
    """
    gradients = (2 * shape.intermediate_size + 2 * shape.hidden_size) * width
    if not checkpointing:
        return gradients
    return gradients + kept_by_layer(shape, width, lora, blocks, cpu=cpu)


def forward_only(shape: ModelShape, width: int, blocks: Blocks, *, cpu: bool) -> int:
    """What a forward pass that keeps nothing holds: of the feed-forward three products, or
    attention's, beside the stream.
    """
    queries = shape.query_size
    each = FLOAT32 if cpu else width
    attention = int((3 * queries + 2 * shape.key_size * (1 + blocks.keys)) * each)
    inside = max(3 * shape.intermediate_size * width, attention)
    return inside + 4 * shape.hidden_size * width + _masks(shape, each, blocks)


def _masks(shape: ModelShape, width: int, blocks: Blocks) -> int:
    """What is added to scores, once for all layers, for every query head of a key head."""
    return int(blocks.scores * (shape.heads // shape.kv_heads) * width)
