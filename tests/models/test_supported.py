"""What is refused beside whole types (these: tests/contracts/test_model_types.py)."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.hostile_models import edit
from helpers.model_types import config_of, make_model
from postgrad.core.errors import UsageError
from postgrad.models.load import load_model
from postgrad.models.settings import ModelSettings
from postgrad.models.supported import experts_of
from postgrad.models.tokenizer import load_tokenizer

Make = Callable[[str], Path]


@pytest.fixture
def make(fresh: Callable[[str], Path], tmp_path: Path) -> Make:
    """make("phi3"): the directory of a tiny model of that type."""
    size = len(load_tokenizer(str(fresh("llama"))))
    return lambda kind: make_model(kind, fresh("llama"), size, tmp_path / kind)


def test_a_packed_forward_that_differs_is_refused_in_bfloat16_too(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("phi3")
    load_model(str(folder), dtype=torch.bfloat16)

    def scaled(lm: Any, hidden: torch.Tensor) -> torch.Tensor:
        return lm.get_output_embeddings()(hidden).float() * 1.5

    monkeypatch.setattr("postgrad.models.probe.full_logits", scaled)
    with pytest.raises(UsageError, match=r"a phi3 model, .* packed forward differs"):
        load_model(str(folder), dtype=torch.bfloat16)


def test_weights_that_are_no_numbers_are_named(make: Make) -> None:
    from safetensors.torch import load_file, save_file

    folder = make("phi3")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="no finite numbers"):
        load_model(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("key", ["use_bidirectional_attention", "is_causal"])
def test_a_tested_type_that_looks_ahead_is_refused(key: str, make: Make) -> None:
    folder = make("gemma3_text")
    edit("config.json", **{key: key != "is_causal"})(folder)
    with pytest.raises(UsageError, match=f"{key} is .* see those after them"):
        load_model(str(folder), dtype=torch.float32)


def test_a_mixture_of_experts_is_told_of_its_missing_auxiliary_loss(make: Make) -> None:
    from postgrad.training.prepare import warn_of_experts

    events: list[tuple[str, str, dict[str, Any]]] = []
    warnings: list[str] = []
    recipe = SimpleNamespace(model=ModelSettings(router_aux_loss_coef=0.0))
    run: Any = SimpleNamespace(
        recipe=recipe,
        logs=SimpleNamespace(event=lambda kind, text, **more: events.append((kind, text, more))),
        console=SimpleNamespace(warn=warnings.append),
    )
    folder = str(make("mixtral"))
    warn_of_experts(run, folder)
    ((kind, text, more),) = events
    assert (kind, more) == ("no_auxiliary_loss", {"experts": 4})
    assert "a mixtral model with 4 experts a layer: it is trained without a balance" in text
    assert warnings == [text]
    warn_of_experts(run, str(make("phi3")))
    recipe.model = ModelSettings()  # mixtral's config has a coefficient
    warn_of_experts(run, folder)
    recipe.model = ModelSettings(freeze=("router",))
    warn_of_experts(run, folder)
    assert len(events) == 1


def test_experts_are_counted_by_every_name_that_configs_have() -> None:
    kinds = ("mixtral", "qwen3_moe", "deepseek_v3", "ernie4_5_moe", "olmoe")
    assert [experts_of(config_of(kind, 90)) for kind in kinds] == [4] * len(kinds)
    assert experts_of(config_of("llama", 90)) == 0
