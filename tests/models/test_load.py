"""Loading: every supported type runs packed as transformers runs it; what cannot is refused."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from helpers.model_types import make_model
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import lay_out
from postgrad.models.attention import hidden_states
from postgrad.models.head import target_logprobs
from postgrad.models.load import load_model
from postgrad.models.save import save_model
from postgrad.models.score import load_score_model
from postgrad.models.settings import ModelType
from postgrad.models.tokenizer import load_tokenizer
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
        ({"model_type": "rwkv"}, "rwkv"),
        ({"model_type": "xlstm"}, "carry a state"),
        ({"model_type": "t5"}, "it has an encoder"),
        ({"model_type": "recurrent_gemma"}, "recurrent_gemma"),
        ({"model_type": "gemma3"}, "reads images too"),
        ({"model_type": "gemma4"}, "reads more than text"),
        ({"model_type": "no_such_type"}, "no model at"),
        ({"model_type": "llama", "num_attention_heads": "four"}, "num_attention_heads"),
        ({}, "names no model_type"),
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


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        (
            "mpt",
            {"d_model": 32, "n_heads": 4, "n_layers": 1},
            "not go through transformers. attention interface",
        ),
        ("hy_v4", {"num_experts": 2}, "takes more than queries, keys and values"),
    ],
)
def test_a_model_whose_attention_ours_cannot_stand_for_is_refused_by_name(
    kind: str,
    more: dict[str, Any],
    reason: str,
    fresh: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Whose config does not tell: its code does."""
    model = shutil.copytree(fresh("llama"), tmp_path / "model")
    vocabulary = len(load_tokenizer(str(model)))
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2, "vocab_size": vocabulary}
    config = AutoConfig.for_model(kind, **{**SMALL, **ids, **more})
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    with pytest.raises(UsageError, match=reason) as refused:
        load_model(str(model), dtype=torch.float32)
    assert f"is a {kind} model" in str(refused.value)
    assert "docs/models.md lists the types that run" in str(refused.value)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda weights: weights.pop(NORM), rf"1 weight missing \({NORM}\)"),
        (
            lambda weights: weights.update({NORM: torch.ones(16)}),
            rf"1 weight of another shape \({NORM}\)",
        ),
    ],
    ids=["missing", "of another shape"],
)
def test_weights_are_never_drawn_at_random_instead_of_read(
    change: Callable[[dict[str, torch.Tensor]], object],
    reason: str,
    fresh: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """transformers only warns of weights that it made up."""
    model = shutil.copytree(fresh("llama"), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=reason):
        load_model(str(model), dtype=torch.float32)


def test_weights_that_are_cut_short_are_named(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    model = shutil.copytree(fresh("qwen3"), tmp_path / "model")
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"cannot be loaded: .*not fully covered"):
        load_model(str(model), dtype=torch.float32)


@pytest.mark.parametrize("named", ["model", ""])
def test_a_run_that_was_meant_to_have_written_its_model_is_told_how(
    named: str, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="writes its model") as refused:
        load_model(str(tmp_path / named), dtype=torch.float32)
    assert f"{tmp_path} is a run: " in str(refused.value)
    with pytest.raises(UsageError, match=r"no tokenizer at .* is a run: "):
        load_tokenizer(str(tmp_path / named))


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


def test_dropout_is_off_whatever_the_config_says(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    model = shutil.copytree(fresh("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}), "utf-8")
    loaded = load_model(str(model), dtype=torch.float32)
    assert loaded.config.attention_dropout == 0.0
    dropouts = [getattr(module, "attention_dropout", 0.0) for module in loaded.lm.modules()]
    assert set(dropouts) == {0.0}


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


@pytest.mark.parametrize("load", [load_model, load_score_model])
def test_weights_that_are_loaded_together_are_one_piece_of_memory(
    load: Any, fresh: Callable[[str], Path]
) -> None:
    apart, together = (
        dict(load(str(fresh("qwen3")), dtype=torch.float32, together=flag).lm.named_parameters())
        for flag in (False, True)
    )
    assert len({p.untyped_storage().data_ptr() for p in together.values()}) == 1
    assert all(torch.equal(p, apart[name]) for name, p in together.items())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="it reads what Linux has mapped")
def test_a_mixture_leaves_its_file_once_its_experts_are_put_together(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    """In the file each expert has weights of its own, so that nothing of it is used as it lies."""
    tokenizer = fresh("qwen2")
    size = len(load_tokenizer(str(tokenizer)))
    folder = make_model("qwen3_moe", tokenizer, size, tmp_path / "mixture")
    loaded = load_model(str(folder), dtype=torch.float32)
    assert str(folder / "model.safetensors") not in Path("/proc/self/maps").read_text("utf-8")
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(plain.named_parameters())
    for name, weight in loaded.lm.named_parameters():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EACCES, "Permission denied; give this user the right to read it"),
        (errno.EIO, "Input/output error; check the disk"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_that_cannot_be_read_is_not_called_damaged(
    name: str,
    number: int,
    why: str,
    fresh: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shutil.copytree(fresh("qwen3"), tmp_path / "model")
    opened = Path.open

    def refusing(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == model / name:  # root may read every file, so chmod would not do
            raise OSError(number, os.strerror(number), str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(UsageError, match=rf"{name} cannot be read: {why}"):
        load_model(str(model), dtype=torch.float32)


def test_a_model_is_read_and_written_without_bars_and_the_programs_own_stay(
    fresh: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    was_enabled = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        model = load_model(str(fresh("qwen3")), dtype=torch.float32)
        save_model(model.lm, load_tokenizer(str(fresh("qwen3"))), tmp_path / "saved")
        stderr = capfd.readouterr().err
        assert "Loading weights" not in stderr
        assert "Writing model shards" not in stderr
        assert logging.is_progress_bar_enabled()
    finally:
        if not was_enabled:
            logging.disable_progress_bar()
