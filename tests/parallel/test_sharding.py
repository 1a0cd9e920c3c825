"""How a model is divided when it is loaded: nobody ever holds all of it."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.chat import chat_tokenizer
from helpers.part_cases import Watched
from helpers.ranks import run_ranks
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.models.adapters import add_adapter
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model
from postgrad.models.settings import LoraSettings
from postgrad.parallel import sharding
from postgrad.parallel.ranks import Ranks
from postgrad.parallel.sharding import local

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc"),
]
THRESHOLD = -3, 65536  # M_MMAP_THRESHOLD: larger tensors go back to the system when they are freed


def own_bytes() -> int:
    """Memory that this process shares with no other: not the file, which is mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def divide(ranks: Ranks, folder: Path, kind: str, dtype: torch.dtype) -> None:
    ctypes.CDLL(None).mallopt(*THRESHOLD)
    before, most = own_bytes(), 0
    shard: Any = sharding.fully_shard

    def look() -> None:
        nonlocal most
        most = max(most, own_bytes() - before)

    def measured(*args: Any, **how: Any) -> Any:
        module = shard(*args, **how)
        look()
        return module

    sharding.fully_shard = measured
    with Watched(look):
        source = load_score_model if kind == "score" else load_model
        lm: Any = source(str(folder / "model"), dtype=dtype, ranks=ranks).lm
        largest = dtype.itemsize * max(parameter.numel() for parameter in lm.parameters())
        backbone = Backbone(lm, torch.device("cpu"), MicroBatch(max_tokens=64))
        if kind == "adapter":
            backbone.adapter = add_adapter(lm, LoraSettings(rank=64, alpha=8), seed=1)
        look()
        held = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        assert max((one.numel() for one in held if one.device.type == "cpu"), default=0) < 2**14
        before = (
            own_bytes()
        )  # kernels that torch made for the probe of a mixture are not its weights
        backbone.divide(ranks, "zero3")
    look()
    part = sum(local(parameter).nbytes for parameter in lm.parameters())
    whole = dtype.itemsize * sum(parameter.numel() for parameter in lm.parameters())
    assert part < most < part + 2 * largest, f"{most:,} bytes: {part:,} of its part, {largest:,}"
    assert part + 2 * largest < 0.6 * whole or dtype == torch.bfloat16  # or it would prove nothing


@pytest.mark.parametrize(
    ("kind", "kept", "dtype"),
    [
        ("plain", torch.float32, torch.float32),
        ("plain", torch.bfloat16, torch.float32),
        ("plain", torch.float32, torch.bfloat16),
        ("plain", torch.bfloat16, torch.bfloat16),
        ("adapter", torch.bfloat16, torch.float32),
        ("score", torch.bfloat16, torch.float32),
        ("mixture", torch.bfloat16, torch.float32),
    ],
)
def test_a_rank_that_loads_a_model_holds_its_part_and_two_tensors(
    kind: str, kept: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    config = AutoConfig.for_model(
        "qwen3_moe" if kind == "mixture" else "qwen3",
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=10,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
        pad_token_id=0, **(more if kind == "mixture" else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(kept).save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    run_ranks(4, divide, tmp_path, kind, dtype)
