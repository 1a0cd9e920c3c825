"""Along which dimension a decoder's matrices are cut for tensor parallelism, by their names.

As in Megatron (arXiv:1909.08053): matrices whose outputs are heads or inner features are cut by
outputs, those that read them by inputs, so that ranks exchange nothing in between. Adapters are cut
with their matrix: B with its outputs, A with its inputs.
"""

import re

BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_INPUTS = ("o_proj", "down_proj")
_MATRIX = re.compile(
    r"(?:^|\.)layers\.\d+\.(?:self_attn|mlp)\.(\w+_proj)\.(?:base_layer\.)?(lora_[AB])?.*(weight|bias)$"
)


def cut_dim(name: str) -> int | None:
    """The dimension along which the parameter `name` (the hub's, PEFT's or a module's) is cut; None
    where every rank has all of it.
    """
    match = _MATRIX.search(name)
    if match is None:
        return None
    matrix, adapter, kind = match.groups()
    if matrix in BY_OUTPUTS:
        return None if adapter == "lora_A" else 0
    if matrix in BY_INPUTS:
        return None if adapter == "lora_B" or kind == "bias" else 1
    return None
