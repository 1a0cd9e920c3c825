"""Loading: every supported type runs packed as transformers runs it; what cannot is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import lay_out
from postgrad.models.head import target_logprobs
from postgrad.models.load import load_model, load_tokenizer
from postgrad.models.packed import hidden_states
from postgrad.models.settings import ModelType
from postgrad.models.tree import TreeAttention

TYPES = ModelType.__args__
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_a_loaded_model_gives_the_logprobs_of_plain_transformers(
    kind: str, fresh: Callable[[str], Path]
) -> None:
    loaded = load_model(str(fresh(kind)), dtype=torch.float32)
    ids = loaded.tokenizer("Two plus two is four.", add_special_tokens=False)["input_ids"]
    mask = np.arange(len(ids)) > 0
    sequences = Sequences(Ragged.of([ids], np.int32), Ragged.of([mask], bool), np.zeros(1, int))
    layout = lay_out(sequences, np.arange(1))
    hidden = hidden_states(
        loaded.lm,
        torch.from_numpy(layout.token_ids),
        torch.from_numpy(layout.positions),
        TreeAttention(plan_blocks(layout), CPU),
    )
    rows, target = torch.from_numpy(layout.hidden_row), torch.from_numpy(layout.target)
    packed, _ = target_logprobs(loaded.lm, hidden.index_select(0, rows), target)
    plain: Any = AutoModelForCausalLM.from_pretrained(fresh(kind), dtype=torch.float32)
    logits = plain(torch.tensor([ids])).logits[0].float()
    wanted = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(packed, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "qwen3_next"}, "linear_attention layers"),
        ({"model_type": "t5"}, "an encoder with a decoder"),
        ({"model_type": "recurrent_gemma"}, "recurrent_gemma"),
        ({"model_type": "no_such_type"}, "no model at"),
    ],
)
def test_a_model_that_would_mix_up_packed_samples_is_refused_by_name(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Before a weight is read: there are none."""
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UsageError, match=reason) as refused:
        load_model(str(tmp_path), dtype=torch.float32)
    assert str(tmp_path) in str(refused.value)


def test_a_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"no model at ./nowhere: there is no such directory"):
        load_model("./nowhere", dtype=torch.float32)
    with pytest.raises(UsageError, match=r"no tokenizer at ./nowhere"):
        load_tokenizer("./nowhere")


def test_weights_that_would_have_to_be_unpickled_are_not_read(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    model = shutil.copytree(fresh("qwen3"), tmp_path / "model")
    (model / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, model / "pytorch_model.bin")
    with pytest.raises(UsageError, match="safetensors"):
        load_model(str(model), dtype=torch.float32)


def test_a_tokenizer_without_a_template_or_an_end_is_refused(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    model = shutil.copytree(fresh("qwen3"), tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="has no chat template"):
        load_tokenizer(str(model))
    other = shutil.copytree(fresh("qwen3"), tmp_path / "other")
    path = other / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    del config["eos_token"]
    path.write_text(json.dumps(config), "utf-8")
    with pytest.raises(UsageError, match="no end-of-sequence token"):
        load_tokenizer(str(other))


def test_dropout_is_off_whatever_the_config_says(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    model = shutil.copytree(fresh("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}), "utf-8")
    loaded = load_model(str(model), dtype=torch.float32)
    assert loaded.config.attention_dropout == 0.0
    found = [getattr(module, "attention_dropout", 0.0) for module in loaded.lm.modules()]
    assert set(found) == {0.0}


def test_gradient_checkpointing_leaves_the_model_in_train_mode(
    fresh: Callable[[str], Path],
) -> None:
    plain = load_model(str(fresh("qwen2")), dtype=torch.float32)
    saving = load_model(str(fresh("qwen2")), dtype=torch.float32, gradient_checkpointing=True)
    assert not plain.lm.training
    assert saving.lm.training
    assert any(getattr(m, "gradient_checkpointing", False) for m in saving.lm.modules())


def test_a_model_computes_in_the_dtype_that_is_asked_for(fresh: Callable[[str], Path]) -> None:
    loaded = load_model(str(fresh("mistral")), dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.lm.parameters()} == {torch.bfloat16}
