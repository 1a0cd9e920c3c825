"""The matrices of a decoder layer, those that an adapter changes, and how large an adapter is: from
shapes of models alone.
"""

from collections.abc import Mapping

from postgrad.core.errors import UsageError
from postgrad.models.flops import MULTIPLY_ADD
from postgrad.models.refusals import no_linear_layers, require_effect
from postgrad.models.settings import EXPERTS, LINEAR, ROUTER, SIBLINGS, LoraSettings, is_target
from postgrad.models.shapes import OUTSIDE, AdaptableLayers, ModelShape

FLOAT64 = 8  # bytes of a number


def linear_layers(shape: ModelShape, layer: int = 0) -> Mapping[str, tuple[int, int]]:
    """(inputs, outputs) of each linear layer of one decoder layer, by the name it has there.

    layer: its number here and below, or OUTSIDE.
    """
    if shape.counted is not None:
        return {name: (m, n) for name, m, n in _adaptable(shape, layer).linears}
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def _adaptable(shape: ModelShape, layer: int) -> AdaptableLayers:
    assert shape.counted is not None
    return next(kind for kind in shape.counted.adaptable if layer in kind.numbers)


def alike(shape: ModelShape, lora: LoraSettings | None) -> dict[int, int]:
    """Numbers of decoder layers, the first of each kind that differs in its matrices or in what an
    adapter makes of them, and how many there are of it; OUTSIDE where there are matrices.
    """
    kinds = _layers_by_kind(shape)
    if lora is not None and _tells_layers_apart(lora):
        return {number: 1 for numbers in kinds for number in numbers}
    return {numbers[0]: len(numbers) for numbers in kinds if numbers}


def _layers_by_kind(shape: ModelShape) -> list[tuple[int, ...]]:
    """Numbers of the decoder layers that have the same matrices, OUTSIDE last."""
    if shape.counted is None:
        return [tuple(range(shape.layers))]
    return [kind.numbers for kind in shape.counted.adaptable]


def _tells_layers_apart(lora: LoraSettings) -> bool:
    ends = (*lora.targets, *lora.exclude_modules, *lora.rank_pattern, *lora.alpha_pattern)
    numbered = any(part.isdecimal() for end in ends for part in end.split("."))
    return bool(lora.layers_to_transform) or numbered


def _name(shape: ModelShape, layer: int, name: str) -> str:
    """The name that most models have for a weight of one decoder layer."""
    place = "" if layer == OUTSIDE else f"layers.{layer}."
    return f"model.{'language_model.' if shape.tower else ''}{place}{name}"


def adapted_layers(
    shape: ModelShape, lora: LoraSettings, layer: int = 0
) -> list[tuple[int, int, int]]:
    """(rank, inputs, outputs) of the linear layers that are adapted in one decoder layer."""
    named = [
        (_name(shape, layer, name), size) for name, size in linear_layers(shape, layer).items()
    ]
    return [(lora.rank_of(name), *size) for name, size in named if lora.adapts(name)]


def adapter_inputs(
    shape: ModelShape, lora: LoraSettings, layer: int = 0, *, attended: bool = True
) -> list[int]:
    """Widths of the inputs of one decoder layer that adapters read: one for all SIBLINGS. attended:
    with what attention gives.
    """
    sibling = {name: names for names in SIBLINGS for name in names}
    widths: dict[object, int] = {}
    for name, (inputs, _) in linear_layers(shape, layer).items():
        block, _, end = name.rpartition(".")
        if lora.adapts(_name(shape, layer, name)) and (attended or end != "o_proj"):
            widths[block, sibling.get(end, end)] = inputs
    return list(widths.values())


def adapted_stacks(
    shape: ModelShape, lora: LoraSettings, layer: int = 0
) -> list[tuple[int, int, int, int]]:
    """(experts, rank, inputs, outputs) of the weights of experts, and of routers, of 1 expert, of
    one decoder layer that are adapted.
    """
    return [
        (experts, lora.rank_of(_name(shape, layer, name), _kind(name)), inputs, outputs)
        for name, experts, inputs, outputs in named_stacks(shape, lora, layer)
    ]


def named_stacks(
    shape: ModelShape, lora: LoraSettings, layer: int = 0
) -> list[tuple[str, int, int, int]]:
    """(name, experts, inputs, outputs) of the same."""
    stacks = _adaptable(shape, layer).stacks if shape.counted is not None else ()
    return [s for s in stacks if lora.adapts(_name(shape, layer, s[0]), _kind(s[0]))]


def _kind(name: str) -> str:
    return EXPERTS if f".{name}".rpartition(".")[0].endswith(f".{EXPERTS}") else ROUTER


def require_targets(shape: ModelShape, lora: LoraSettings) -> None:
    """Raises UsageError for a target, or another key of [model.lora], that means no weight of any
    layer, as `add_adapter` does once the model is loaded. A name with the number of a layer is left
    to that.
    """
    kinds: dict[str, str] = {}
    for layer in alike(shape, None):
        kinds |= _kinds(shape, layer)
    if not kinds:
        raise no_linear_layers(shape.model_type)
    for target in lora.targets:
        if not any(_means(target, name, kind) for name, kind in kinds.items()):
            available = ", ".join(dict.fromkeys(map(_shown, kinds, kinds.values())))
            raise UsageError(
                f"model.lora.targets: {target!r} is no linear layer, and no weight of experts or "
                f"router, of this {shape.model_type} model, which has {available}"
            )
    every = {
        _name(shape, layer, name): kind
        for numbers in _layers_by_kind(shape)
        for layer in numbers
        for name, kind in _kinds(shape, numbers[0]).items()
    }
    require_effect(lora, every, shape.layers, numbered=False)


def _kinds(shape: ModelShape, layer: int) -> dict[str, str]:
    """The kind of all that adapters may stand on in one decoder layer, by name."""
    stacks = _adaptable(shape, layer).stacks if shape.counted is not None else ()
    linears = dict.fromkeys(linear_layers(shape, layer), LINEAR)
    return linears | {name: _kind(name) for name, *_ in stacks}


def _means(target: str, name: str, kind: str) -> bool:
    """Whether a target means a weight, or names a layer by its number before the weight's name."""
    return f".{target}".endswith(f".{name}") or is_target(target, name, kind)


def _shown(name: str, kind: str) -> str:
    """A weight as targets name it."""
    if kind == LINEAR:
        return name.rpartition(".")[2]
    return f"{EXPERTS}.{name.rpartition('.')[2]}" if kind == EXPERTS else ROUTER


def merged_sizes(shape: ModelShape, lora: LoraSettings, layer: int = 0) -> list[int]:
    """How many numbers each weight of one decoder layer has that an adapter is merged into."""
    stacks = [experts * a * b for experts, _, a, b in adapted_stacks(shape, lora, layer)]
    return [a * b for _, a, b in adapted_layers(shape, lora, layer)] + stacks


def _expert_parameters(shape: ModelShape, lora: LoraSettings) -> int:
    """How many weights an adapter has on experts: A and B of every expert."""
    return sum(
        count * experts * rank * (a + b)
        for layer, count in alike(shape, lora).items()
        for experts, rank, a, b in adapted_stacks(shape, lora, layer)
        if experts > 1
    )


def adapter_parameters(shape: ModelShape, lora: LoraSettings) -> int:
    """How many weights an adapter has: A [rank, inputs] and B [outputs, rank] of every adapted
    linear layer and router, with DoRA the lengths [outputs], and `_expert_parameters`.
    """
    total = 0
    for layer, count in alike(shape, lora).items():
        routers = [each for experts, *each in adapted_stacks(shape, lora, layer) if experts == 1]
        total += count * sum(
            rank * (a + b) + (b if lora.dora else 0)
            for rank, a, b in (*adapted_layers(shape, lora, layer), *routers)
        )
    return total + _expert_parameters(shape, lora)


def start_numbers(shape: ModelShape, lora: LoraSettings) -> int:
    """How many numbers an adapter keeps of its first A and B, whole on every rank."""
    return adapter_parameters(shape, lora.model_copy(update={"dora": False}))


# Operations in float64 a second that the start of PiSSA gets of a CPU, as a share of the float32
# peak in the table of hardware: 29e9 exactly and 9.8e9 by subspace iteration of one core of an AMD
# EPYC (Zen 5), matrices from 1024 x 1024 to 4096 x 4096, December 2026.
EXACT, ITERATED = 29 / 180, 9.8 / 180


def start_seconds(shape: ModelShape, lora: LoraSettings, float32_flops: float) -> float:
    """Seconds in which a CPU computes where an adapter of PiSSA begins; 0 without PiSSA."""
    total = 0.0
    for layer, count in alike(shape, lora).items() if lora.keeps_start else ():
        for rank, inputs, outputs in adapted_layers(shape, lora, layer):
            short, long = sorted((inputs, outputs))
            if (rounds := lora.start_rounds) is None:
                total += count * (6 * long * short**2 + 20 * short**3) / EXACT
            else:
                total += count * MULTIPLY_ADD * long * short * rank * (2 * rounds + 2) / ITERATED
    return total / float32_flops


def start_scratch(shape: ModelShape, lora: LoraSettings) -> int:
    """Most bytes that the start of PiSSA takes beside the weights, for one matrix after the other:
    of LAPACK, measured with one core.
    """
    sizes = [0]
    for layer in alike(shape, lora) if lora.keeps_start else ():
        for rank, inputs, outputs in adapted_layers(shape, lora, layer):
            short, long = sorted((inputs, outputs))
            if lora.start_rounds is None:
                numbers = 3.4 * long * short + 4 * short**2
            else:
                numbers = long * short + 8 * (long + short) * rank
            sizes.append(int(FLOAT64 * numbers))
    return max(sizes)


def adapter_flops(shape: ModelShape, lora: LoraSettings | None) -> int:
    """Operations of one forward pass of a token through the adapters of all layers."""
    if lora is None:
        return 0
    chosen = shape.counted.chosen if shape.counted is not None else 1
    total = 0
    for layer, count in alike(shape, lora).items():
        each = [r * (a + b) for r, a, b in adapted_layers(shape, lora, layer)]
        stacks = adapted_stacks(shape, lora, layer)
        each += [(chosen if n > 1 else 1) * r * (a + b) for n, r, a, b in stacks]
        total += count * sum(each)
    return MULTIPLY_ADD * lora.product_ranks * total
