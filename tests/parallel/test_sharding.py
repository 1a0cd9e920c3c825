"""How a model is divided when it is loaded: nobody holds all of it, and no bit changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from helpers.chat import chat_tokenizer
from helpers.ranks import run_ranks
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.role import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.models.load import load_model
from postgrad.parallel import sharding
from postgrad.parallel.ranks import Ranks
from postgrad.parallel.sharding import whole_tensor

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc"),
]


def own_bytes() -> int:
    """Memory that this process shares with no other: not the file, which is mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def divide(ranks: Ranks, folder: Path, dtype: str) -> None:
    before, most = own_bytes(), 0
    shard: Any = sharding.fully_shard

    def measured(*args: Any, **how: Any) -> Any:
        nonlocal most
        most = max(most, own_bytes() - before)
        found = shard(*args, **how)
        most = max(most, own_bytes() - before)
        return found

    sharding.fully_shard = measured
    model = load_model(str(folder / dtype), dtype=getattr(torch, dtype))
    backbone = Backbone(model.lm, torch.device("cpu"), MicroBatch(max_tokens=64))
    backbone.divide(ranks, "zero3")
    most = max(most, own_bytes() - before)
    part = 4 * sum(p.numel() for p in model.lm.parameters()) // ranks.size
    assert part < most < 1.5 * part, f"{most / part:.2f} of its part in float32"
    one = PolicyLearner(backbone, LearnerSettings(), 1)
    read = load_file(folder / dtype / "model.safetensors")
    for name, mine in one.weights().items():
        assert torch.equal(whole_tensor(mine, one.pieces[name], ranks), read[name].float()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_that_loads_a_model_holds_its_part_alone(dtype: str, tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    lm.save_pretrained(tmp_path / dtype)
    chat_tokenizer().save_pretrained(tmp_path / dtype)
    run_ranks(2, divide, tmp_path, dtype)
