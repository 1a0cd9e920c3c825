"""Adapters whose ranks, alphas and places differ from layer to layer, and PEFT's files of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.adapters import moved
from postgrad.core.errors import UsageError
from postgrad.models.adapter_files import write_adapter
from postgrad.models.adapters import add_adapter
from postgrad.models.linear import fuse_norms, speed_up
from postgrad.models.load import load_model
from postgrad.models.settings import LoraSettings
from postgrad.models.shapes import shape_of
from postgrad.plan.adapters import require_targets

IDS = torch.tensor([[5, 17, 40, 8, 66, 23, 9, 31]])


def read(path: Path) -> Any:
    """A model with transformers' own attention."""
    lm: Any = load_model(str(path), dtype=torch.float32).lm
    lm.set_attn_implementation("eager")
    return lm


# The longest name that fits a layer holds; PEFT would take the first.
BY_LAYER = LoraSettings(
    rank=4, alpha=8, rslora=True, rank_pattern={"down_proj": 2, "layers.1.mlp.down_proj": 6},
    alpha_pattern={"q_proj": 3}, exclude_modules=("up_proj", "layers.0.self_attn.k_proj"),
)  # fmt: skip


@pytest.mark.parametrize("layers", [(), (1,)])
@torch.no_grad()
def test_plain_peft_reads_ranks_alphas_and_places_of_single_layers(
    layers: tuple[int, ...], fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    base, to = fresh("qwen3"), tmp_path / "adapter"
    settings = BY_LAYER.model_copy(update={"layers_to_transform": layers})
    adapter = moved(add_adapter(read(base), settings, seed=0))
    ranks = {
        name.split(".layers.")[1].removesuffix(".lora_A.weight"): len(p)
        for name, p in adapter.parameters().items()
        if "lora_A" in name
    }
    assert ranks["1.mlp.down_proj"] == 6
    assert "1.mlp.up_proj" not in ranks
    assert ranks.get("0.mlp.down_proj") == (None if layers else 2)
    assert len(ranks) == (6 if layers else 11)
    write_adapter(adapter.parameters(), settings, str(base), to)
    plain: Any = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    speed_up(plain, torch.device("cpu"))  # our products and norms: only adapters add otherwise
    fuse_norms(plain, torch.device("cpu"))
    ours: Any = adapter.lm(IDS).logits
    theirs = peft.PeftModel.from_pretrained(plain, str(to)).eval()
    torch.testing.assert_close(theirs(IDS).logits, ours)
    torch.testing.assert_close(read(to)(IDS).logits, ours, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_patterns_that_peft_wrote_are_read_as_peft_reads_them(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    lm: Any = AutoModelForCausalLM.from_pretrained(fresh("qwen3"), dtype=torch.float32)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "up_proj"], init_lora_weights=False,
        rank_pattern={"layers.1.self_attn.q_proj": 2, "q_proj": 6},
        alpha_pattern={"mlp.up_proj": 9}, layers_to_transform=[0, 1],
        exclude_modules=["layers.0.mlp.up_proj"], task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(0)
    written: Any = peft.get_peft_model(lm, config).eval()
    written.save_pretrained(tmp_path / "peft")
    torch.testing.assert_close(
        read(tmp_path / "peft")(IDS).logits, written(IDS).logits, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank_pattern": {"up": 3}}, "rank_pattern: 'up' ends the name of no layer that has an"),
        (
            {"alpha_pattern": {"v_proj": 3}, "targets": ("q_proj",)},
            "alpha_pattern: 'v_proj' ends the name of no layer that has an adapter",
        ),
        ({"exclude_modules": ("up",)}, "exclude_modules: 'up' ends the name of no layer that this"),
        ({"layers_to_transform": (0, 2)}, "there is no layer 2: this decoder has 0 to 1"),
        (
            {"exclude_modules": ("q_proj",), "targets": ("q_proj",)},
            "exclude_modules and layers_to_transform leave no layer",
        ),
    ],
)
def test_ranks_and_places_of_layers_that_are_not_there_are_refused_by_plan_and_run(
    values: dict[str, Any], message: str, fresh: Callable[[str], Path]
) -> None:
    lm, settings = read(fresh("qwen3")), LoraSettings(**values)
    with pytest.raises(UsageError, match=message):
        add_adapter(lm, settings, seed=0)
    with pytest.raises(UsageError, match=message):
        require_targets(shape_of(lm.config.to_dict()), settings)
