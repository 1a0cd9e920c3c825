"""Activation memory of forward and backward passes of a decoder's layers, in bytes a token.

The counts follow the operations of a layer and of its backward pass; tests and benchmarks compare
them with torch's memory events. Of a type without formulas they are what autograd keeps of its
layers (models.kept), beside attention, which is postgrad's. `width` is the bytes of one number in
the dtype that the model computes in. The output head is `Head`, attention's geometry `Blocks`.
"""

from dataclasses import dataclass

from postgrad.models.settings import LLAMA_TYPES, LoraSettings, Recompute
from postgrad.models.shapes import KeptByLayers, ModelShape
from postgrad.plan.adapters import adapted_layers, adapted_stacks, adapter_inputs, alike
from postgrad.plan.lengths import RowLengths

STACKED = 1.1  # runs are padded to the longest of their stack: up to 1.3, a tenth as measured
QUERY_RUN = 128  # layout.blocks.QUERY_RUN, which a test holds it to

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """Means for each computed token. The defaults are those of attention that gathers nothing."""

    keys: float = 1.0  # keys gathered
    scores: float = 0.0  # entries of the mask

    @classmethod
    def of(cls, lengths: RowLengths, answers: int) -> "Blocks":
        """The geometry of a prompt with `answers` answers, which share it where `lengths` says."""
        prompt, answer = lengths.prompt, lengths.answer
        answers = answers if lengths.shared else 1
        tokens = prompt + answers * answer
        if answers == 1:  # one segment
            prompt, answer, answers = 0.0, tokens, 1
        prompt_keys, prompt_scores = _segment(prompt, 0.0)
        answer_keys, answer_scores = _segment(answer, prompt)
        keys = prompt_keys + answers * answer_keys
        scores = prompt_scores + answers * answer_scores
        return cls(STACKED * keys / tokens, STACKED * scores / tokens)


def _segment(length: float, before: float) -> tuple[float, float]:
    """Keys and scores of all query runs of a segment of `length` tokens, with `before` tokens
    before it.
    """
    keys = scores = start = 0.0
    while start < length:
        end = min(start + QUERY_RUN, length)
        keys += before + end
        scores += (end - start) * (before + end)
        start = end
    return keys, scores


def kept_by_layer(
    shape: ModelShape,
    width: int,
    lora: LoraSettings | None,
    blocks: Blocks,
    *,
    cpu: bool,
    compiled: bool = False,
) -> int:
    """Bytes a token that one decoder layer keeps for its backward pass; of layers that differ, the
    one that keeps most.
    """
    adapters = max(_kept_by_adapters(shape, width, lora, cpu=cpu and not compiled), default=0)
    if compiled:
        return adapters + _kept_by_compiled(shape, width, lora)
    if (counted := _counted(shape, width, lora)) is not None:
        keeps = counted.largest + (counted.attended // shape.layers if cpu else 0)
        attention = _kept_by_attention(shape, width, blocks, cpu=cpu) if shape.attending else 0
        return keeps + attention + adapters
    return adapters + _kept_by_plain(shape, width, lora, blocks, cpu=cpu)


def _kept_by_plain(
    shape: ModelShape, width: int, lora: LoraSettings | None, blocks: Blocks, *, cpu: bool
) -> int:
    """Those of a layer of a type that has formulas, without its adapters."""
    hidden, inner, queries = shape.hidden_size, shape.intermediate_size, shape.query_size
    linear = 2 * hidden * width  # the inputs of q/k/v and of gate/up
    if cpu:  # and of o: on a GPU these are attention's own numbers, which it keeps
        linear += queries * width
    feedforward = 4 * inner * width  # gate, up, the activated gate, and their product
    if lora is not None:  # frozen matrices keep no inputs, adapters those that they read
        linear = 0
        feedforward = 3 * inner * width
    attention = _kept_by_attention(shape, width, blocks, cpu=cpu)
    normed = shape.norms * hidden + (queries + shape.key_size if shape.qk_norm else 0)
    norms = normed * _kept_by_norm(shape, width, lora, cpu=cpu)
    return linear + feedforward + attention + norms


def _kept_by_layers(
    shape: ModelShape, width: int, lora: LoraSettings | None, blocks: Blocks, *, cpu: bool
) -> int:
    """Bytes a token that all layers keep together, as `kept_by_layer`."""
    counted = _counted(shape, width, lora)
    adapters = sum(_kept_by_adapters(shape, width, lora, cpu=cpu))
    if counted is None:
        return adapters + shape.layers * _kept_by_plain(shape, width, lora, blocks, cpu=cpu)
    attention = shape.attending * _kept_by_attention(shape, width, blocks, cpu=cpu)
    return counted.all + (counted.attended if cpu else 0) + attention + adapters


def _counted(shape: ModelShape, width: int, lora: LoraSettings | None) -> KeptByLayers | None:
    """What autograd keeps of the layers; None: the type has formulas, or could not be counted."""
    rows = () if shape.counted is None else shape.counted.kept
    return next((row for row in rows if (row.width, row.trains) == (width, lora is None)), None)


def _kept_by_attention(shape: ModelShape, width: int, blocks: Blocks, *, cpu: bool) -> int:
    """Bytes a token of q, k, v, and out; on a CPU, which attends in float32, also of the scores
    where they are no matter of torch's own attention.
    """
    each = FLOAT32 if cpu else width
    numbers = 2 * shape.query_size + 2 * shape.key_size * blocks.keys
    scores = shape.scores * shape.heads * blocks.scores if cpu else 0
    return int((numbers + scores) * each)


def _kept_by_compiled(shape: ModelShape, width: int, lora: LoraSettings | None) -> int:
    """Those of a compiled layer without its adapters, of which torch computes again what needs no
    product: the inputs of norms and of products, gate and up, and of attention q, k, v and out; in
    float32 its log sums and the scales of norms. With adapters v is a part of the product that q
    and k were in too.
    """
    inner, queries, keys = shape.intermediate_size, shape.query_size, shape.key_size
    block, counted = 0, _counted(shape, width, lora)
    if counted is not None and counted.mixtures:  # it is not compiled
        block, inner = counted.mixtures // shape.layers, 0
    read = 2 * shape.hidden_size + inner if lora is None else 0  # o's input is attention's out
    # Of four norms the third reads a sum that is computed again.
    normed, scales = (1 + shape.norms // 2) * shape.hidden_size, shape.norms
    if shape.qk_norm:
        normed, scales = normed + queries + keys, scales + shape.heads + shape.kv_heads
    elif lora is not None:
        normed += queries + keys
    numbers = read + normed + 2 * inner + 2 * queries + 2 * keys
    return numbers * width + (scales + shape.heads) * FLOAT32 + block


def _kept_by_norm(shape: ModelShape, width: int, lora: LoraSettings | None, *, cpu: bool) -> int:
    """Bytes that a norm keeps for each number of its input. A fused norm keeps its input. Any other
    norm keeps it in float32 (where the residual stream is float32, that is the stream itself) and,
    where its weight trains, also the numbers that the weight scales, which are float32 in Gemma's.
    """
    if cpu and shape.model_type in LLAMA_TYPES:
        return width
    scaled = FLOAT32 if shape.model_type.startswith("gemma") else width
    return FLOAT32 + (0 if lora else scaled)


def _kept_by_adapters(
    shape: ModelShape, width: int, lora: LoraSettings | None, *, cpu: bool
) -> list[int]:
    """Bytes a token that the adapters of each layer keep: each input that they read, and their
    rows. With DoRA a layer keeps its result and its adapter's, for the gradient of the lengths.
    """
    if lora is None:
        return []
    chosen = shape.counted.chosen if shape.counted is not None else 1
    every: list[int] = []
    for number, count in alike(shape, lora).items():
        layers = adapted_layers(shape, lora, number)
        read = adapter_inputs(shape, lora, number, attended=cpu)
        kept = (sum(read) + lora.product_ranks * sum(rank for rank, _, _ in layers)) * width
        kept += sum(a for _, a, _ in layers) * (width + 1) if lora.dropout else 0
        kept += sum(b for _, _, b in layers) * width if lora.dora else 0
        for experts, rank, inputs, _ in adapted_stacks(shape, lora, number):
            rows = chosen if experts > 1 else 1  # each token is there once for each of its experts
            kept += rows * (inputs + rank) * width
        every += [kept] * count
    return every


def kept(
    shape: ModelShape,
    width: int,
    lora: LoraSettings | None,
    blocks: Blocks,
    *,
    checkpointing: Recompute,
    cpu: bool,
    compiled: bool = False,
) -> int:
    """Bytes a token that a forward pass keeps until its backward pass: all that every layer keeps,
    or with checkpointing only its input, which a GPU may have of the last layer alone; attention's
    masks, once; the last norm; the head's input.
    """
    if checkpointing:
        inputs = 1 if in_host_memory(checkpointing, cpu=cpu) else shape.layers
        layers = inputs * shape.hidden_size * width
    elif compiled:
        layers = shape.layers * _kept_by_compiled(shape, width, lora)
        layers += sum(_kept_by_adapters(shape, width, lora, cpu=False))
    else:
        layers = _kept_by_layers(shape, width, lora, blocks, cpu=cpu)
    read = width if lora is None else 0  # by the head, for its gradient
    last = shape.hidden_size * (_kept_by_norm(shape, width, lora, cpu=cpu) + read)
    return layers + _masks(shape, FLOAT32 if cpu else width, blocks) + last


def backward_of_layer(
    shape: ModelShape,
    width: int,
    lora: LoraSettings | None,
    blocks: Blocks,
    *,
    checkpointing: Recompute,
    cpu: bool,
    compiled: bool = False,
) -> int:
    """Bytes a token of the backward pass of one layer beside what was kept: gradients, and with
    checkpointing all that the layer computes and keeps anew; and the input of the layer before,
    where it comes back from the host's memory.
    """
    rows = _rows_of_experts(shape)
    gradients = (2 * shape.intermediate_size + 2 * shape.hidden_size + rows) * width
    if not checkpointing:
        return gradients
    if in_host_memory(checkpointing, cpu=cpu):
        gradients += shape.hidden_size * width
    # around experts compiled parts hold as much as plain ones, as measured
    compiled = compiled and not rows
    return gradients + kept_by_layer(shape, width, lora, blocks, cpu=cpu, compiled=compiled)


def _rows_of_experts(shape: ModelShape) -> int:
    """Numbers of a token's hidden states, once for each of its experts; 0 of a dense model."""
    counted = shape.counted
    return 0 if counted is None or not counted.choices else counted.chosen * shape.hidden_size


def in_host_memory(checkpointing: Recompute, *, cpu: bool) -> bool:
    """Whether the inputs of layers are elsewhere than on the device between the passes."""
    return checkpointing == "offload" and not cpu


def forward_only(shape: ModelShape, width: int, blocks: Blocks, *, cpu: bool) -> int:
    """Bytes a token of a forward pass that keeps nothing: the products of the feed-forward or those
    of attention, whichever are more, beside the residual stream. Experts have the rows that they
    read beside their products, and at their end their output as it is, weighted, and in order.
    """
    queries = shape.query_size
    each = FLOAT32 if cpu else width
    attention = int((3 * queries + 2 * shape.key_size * (1 + blocks.keys)) * each)
    rows = _rows_of_experts(shape)
    products = (4 if rows else 3) * shape.intermediate_size  # gate and up of experts are one tensor
    inside = max((rows + products) * width, 4 * rows * width, attention)
    return inside + 4 * shape.hidden_size * width + _masks(shape, each, blocks)


def _masks(shape: ModelShape, width: int, blocks: Blocks) -> int:
    """Bytes a token of the mask that is added to attention's scores: one for all layers, for every
    query head of a key head.
    """
    return int(blocks.scores * (shape.heads // shape.kv_heads) * width)
