"""The matrices of a decoder layer, those that an adapter changes, and how large an adapter is: from
shapes of models alone.
"""

from collections.abc import Mapping, Set

from postgrad.core.errors import UsageError
from postgrad.models.flops import MULTIPLY_ADD
from postgrad.models.settings import EXPERTS, ROUTER, SIBLINGS, LoraSettings, is_target
from postgrad.models.shapes import ModelShape


def linear_layers(shape: ModelShape) -> Mapping[str, tuple[int, int]]:
    """(inputs, outputs) of each linear layer of one decoder layer, by the name it has there."""
    if shape.counted is not None:
        return {name: (inputs, outputs) for name, inputs, outputs in shape.counted.linears}
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


def adapted_layers(shape: ModelShape, lora: LoraSettings) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one decoder layer that are adapted."""
    ends = tuple(f".{target}" for target in lora.targets) or ("",)
    return [size for name, size in linear_layers(shape).items() if f".{name}".endswith(ends)]


def adapter_inputs(shape: ModelShape, lora: LoraSettings, *, attended: bool = True) -> list[int]:
    """Widths of the inputs of one decoder layer that adapters read: one for all SIBLINGS. attended:
    with what attention gives.
    """
    ends = tuple(f".{target}" for target in lora.targets) or ("",)
    sibling = {name: names for names in SIBLINGS for name in names}
    widths: dict[object, int] = {}
    for name, (inputs, _) in linear_layers(shape).items():
        block, _, end = name.rpartition(".")
        if f".{name}".endswith(ends) and (attended or end != "o_proj"):
            widths[block, sibling.get(end, end)] = inputs
    return list(widths.values())


def adapted_stacks(shape: ModelShape, lora: LoraSettings) -> list[tuple[int, int, int]]:
    """(experts, inputs, outputs) of the weights of experts, and of routers, of 1 expert, of one
    decoder layer that are adapted.
    """
    return [(experts, inputs, outputs) for _, experts, inputs, outputs in named_stacks(shape, lora)]


def named_stacks(shape: ModelShape, lora: LoraSettings) -> list[tuple[str, int, int, int]]:
    """The same, with their names."""
    stacks = shape.counted.stacks if shape.counted is not None else ()
    return [
        stack
        for stack in stacks
        if any(is_target(target, stack[0], _kind(stack[0])) for target in lora.targets)
    ]


def _kind(name: str) -> str:
    return EXPERTS if f".{name}".rpartition(".")[0].endswith(f".{EXPERTS}") else ROUTER


def require_targets(shape: ModelShape, lora: LoraSettings) -> None:
    """Raises UsageError for a target that means no weight of any layer, as `add_adapter` does once
    the model is loaded. One that names a layer by its number is left to that.
    """
    counted = shape.counted
    names = tuple(linear_layers(shape)) if counted is None else counted.names
    wrapped = set[str]() if counted is None else set(counted.wrapped)
    for target in lora.targets:
        if not any(_means(target, name, name in wrapped) for name in names):
            available = ", ".join(dict.fromkeys(_shown(name, wrapped) for name in names))
            raise UsageError(
                f"model.lora.targets: {target!r} is no linear layer, and no weight of experts or "
                f"router, of this {shape.model_type} model, which has {available}"
            )


def _means(target: str, name: str, wrapped: bool) -> bool:
    """Whether a target means a weight, or names a layer by its number before the weight's name."""
    if f".{target}".endswith(f".{name}"):
        return True
    return is_target(target, name, _kind(name)) if wrapped else f".{name}".endswith(f".{target}")


def _shown(name: str, wrapped: Set[str]) -> str:
    """A weight as targets name it."""
    if name not in wrapped:
        return name.rpartition(".")[2]
    return f"{EXPERTS}.{name.rpartition('.')[2]}" if _kind(name) == EXPERTS else ROUTER


def merged_sizes(shape: ModelShape, lora: LoraSettings) -> list[int]:
    """How many numbers each weight of one decoder layer has that an adapter is merged into."""
    stacks = [experts * a * b for experts, a, b in adapted_stacks(shape, lora)]
    return [a * b for a, b in adapted_layers(shape, lora)] + stacks


def expert_parameters(shape: ModelShape, lora: LoraSettings) -> int:
    """How many weights an adapter has on experts: A and B of every expert."""
    stacks = [stack for stack in adapted_stacks(shape, lora) if stack[0] > 1]
    return shape.layers * lora.rank * sum(experts * (a + b) for experts, a, b in stacks)


def adapter_parameters(shape: ModelShape, lora: LoraSettings) -> int:
    """How many weights an adapter has: A [rank, inputs] and B [outputs, rank] of every adapted
    linear layer and router, with DoRA the lengths [outputs], and `expert_parameters`.
    """
    routers = [(a, b) for experts, a, b in adapted_stacks(shape, lora) if experts == 1]
    plain = sum(
        lora.rank * (a + b) + (b if lora.dora else 0)
        for a, b in adapted_layers(shape, lora) + routers
    )
    return shape.layers * plain + expert_parameters(shape, lora)


def adapter_flops(shape: ModelShape, lora: LoraSettings | None) -> int:
    """Operations of one forward pass of a token through the adapters of all layers."""
    if lora is None:
        return 0
    chosen = shape.counted.chosen if shape.counted is not None else 1
    each = [sum(size) for size in adapted_layers(shape, lora)]
    each += [(chosen if n > 1 else 1) * (a + b) for n, a, b in adapted_stacks(shape, lora)]
    return MULTIPLY_ADD * shape.layers * lora.rank * sum(each)
