"""Export: proved by reading it with plain transformers, or not there at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from postgrad.core.errors import RunError, UsageError
from postgrad.models import export
from postgrad.models.export import export_hf
from postgrad.models.load import load_model
from postgrad.models.settings import ModelType


def changed(model: Path) -> dict[str, Tensor]:
    """Weights as a learner has them: float32, tied ones once, moved from where they started."""
    lm = load_model(str(model), dtype=torch.float32).lm
    generator = torch.Generator().manual_seed(0)
    return {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in lm.named_parameters()
    }


@pytest.mark.parametrize("kind", ModelType.__args__)
@torch.no_grad()
def test_the_exported_model_has_the_given_weights(
    kind: str, fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = changed(fresh(kind))
    export_hf(weights, str(fresh(kind)), tmp_path / "model", dtype=torch.float32)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    found = dict(read.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(fresh(kind)).chat_template
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    assert generation.eos_token_id == tokenizer.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id


def test_bfloat16_is_rounded_from_the_masters(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    weights = changed(fresh("qwen3"))
    export_hf(weights, str(fresh("qwen3")), tmp_path / "model", dtype=torch.bfloat16)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, weights[name].bfloat16())


def test_a_target_that_is_there_is_left_alone(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    weights, base, to = changed(fresh("qwen3")), str(fresh("qwen3")), tmp_path / "model"
    to.mkdir()
    (to / "mine.txt").write_text("mine", "utf-8")
    with pytest.raises(UsageError, match="is there already"):
        export_hf(weights, base, to, dtype=torch.float32)
    assert (to / "mine.txt").read_text("utf-8") == "mine"
    export_hf(weights, base, to, dtype=torch.float32, overwrite=True)
    assert (to / "model.safetensors").exists()


def test_weights_of_another_model_are_refused(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    weights = changed(fresh("qwen3"))
    name = next(iter(weights))
    weights["model.other"] = weights.pop(name)
    with pytest.raises(RunError, match=rf"unknown \['model.other'\], missing \['{name}'"):
        export_hf(weights, str(fresh("qwen3")), tmp_path / "model", dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_reads_back_differently_leaves_nothing_behind(
    fresh: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a library writes a tied or renamed weight wrongly."""
    plain = AutoModelForCausalLM.from_pretrained

    def wrong(*args: Any, **kwargs: Any) -> Any:
        lm: Any = plain(*args, **kwargs)
        with torch.no_grad():
            lm.get_input_embeddings().weight.mul_(1.01)
        return lm

    monkeypatch.setattr(export.AutoModelForCausalLM, "from_pretrained", wrong)
    weights = changed_plain(fresh("llama"))
    with pytest.raises(RunError, match="gives other logits"):
        export_hf(weights, str(fresh("llama")), tmp_path / "model", dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def changed_plain(model: Path) -> dict[str, Tensor]:
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: p.detach().clone() for name, p in lm.named_parameters()}
