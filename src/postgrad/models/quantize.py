"""A frozen base in four bits under an adapter: QLoRA (Dettmers et al. 2023, arXiv:2305.14314)."""

import importlib.util
from typing import Any, Literal

import torch

from postgrad.core.errors import UsageError

Quantize = Literal["none", "4bit"]


def loading_arguments(quantize: Quantize, device: torch.device) -> dict[str, Any]:
    """More arguments of from_pretrained; {} for "none".

    "4bit": NF4 with doubly quantised scales, products in bfloat16, by bitsandbytes; output and
    score heads stay unquantised. Raises UsageError without CUDA or bitsandbytes.
    """
    if quantize == "none":
        return {}
    missing = [
        requirement
        for requirement, there in {
            "a CUDA device": device.type == "cuda" and torch.cuda.is_available(),
            "the package bitsandbytes": importlib.util.find_spec("bitsandbytes") is not None,
        }.items()
        if not there
    ]
    if missing:
        raise UsageError(
            f'model.quantize = "4bit" needs {" and ".join(missing)}: not here; take "none", which '
            "trains the same adapter on a base in model.dtype"
        )
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "score"],  # acts for four bits too, despite its name
    )
    return {"quantization_config": config, "device_map": {"": device}}
