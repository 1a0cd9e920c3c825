"""Which way a decoder's matrices are cut for tensor parallelism, by their names.

Megatron's way (arXiv:1909.08053): what makes heads and inner features is cut by outputs, what adds
them up again by inputs, so that between the two no rank needs another. Adapters are cut with their
matrix: B with its outputs, A with its inputs.
"""

import re

BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_INPUTS = ("o_proj", "down_proj")
_MATRIX = re.compile(
    r"(?:^|\.)layers\.\d+\.(?:self_attn|mlp)\.(\w+_proj)\.(?:base_layer\.)?(lora_[AB])?.*(weight|bias)$"
)


def cut_dim(name: str) -> int | None:
    """The dimension in which the parameter of this name (the hub's, PEFT's or a module's) is cut;
    None where every rank has all of it.
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
