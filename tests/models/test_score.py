"""Score models: a head on a causal model's body, read and written as plain transformers does."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.score import ScoreRole
from postgrad.models.config import load_config
from postgrad.models.export import export_hf
from postgrad.models.load import load_model
from postgrad.models.score import (
    HEAD,
    RewardScale,
    load_score_model,
    require_padding,
    scale_of,
)
from postgrad.models.tokenizer import load_tokenizer

Fresh = Callable[[str], Path]
CPU = torch.device("cpu")
KINDS = ["qwen3", "qwen2", "llama", "mistral", "gemma", "gemma2", "gemma3"]


def read(path: Path, **more: Any) -> Any:
    return load_score_model(str(path), dtype=torch.float32, **more).lm


def rewrite(path: Path, name: str, **changes: Any) -> None:
    values = json.loads((path / name).read_text("utf-8"))
    (path / name).write_text(json.dumps(values | changes), "utf-8")


@pytest.fixture
def copied(fresh: Fresh, tmp_path: Path) -> Path:
    """A model whose files a test may change."""
    return shutil.copytree(fresh("qwen3"), tmp_path / "copied")


def conversations(tokenizer: Any) -> list[list[int]]:
    """Token ids that end with EOS, of several lengths."""
    texts = ["one", "two and three", "a longer text than the others", "?"]
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]


def last_scores(lm: Any, rows: list[list[int]]) -> np.ndarray:
    """What our packed forward says at the last tokens."""
    tokens = Ragged.of(rows, np.int32)
    last = Ragged.of([[False] * (len(row) - 1) + [True] for row in rows], np.bool_)
    sequences = Sequences(tokens, last, np.arange(len(rows)))
    role = ScoreRole(Backbone(lm, CPU, MicroBatch(max_tokens=512)), "at")
    return role.scores(sequences).result().values[last.values]


def test_a_fresh_head_has_the_papers_deviation_and_no_bias(fresh: Fresh) -> None:
    """1 / sqrt(hidden + 1); over many seeds, since one head has few numbers."""
    heads = torch.cat([read(fresh("qwen3"), seed=seed).score.weight for seed in range(12)])
    assert heads.shape == (12, 32)
    assert heads.std().item() == pytest.approx(1 / math.sqrt(33), rel=0.12)
    assert abs(heads.mean().item()) < 4 / math.sqrt(33 * heads.numel())
    assert read(fresh("qwen3")).score.bias is None


def test_a_head_is_drawn_from_the_seed_alone(fresh: Fresh) -> None:
    torch.manual_seed(1)
    head_weight = read(fresh("qwen3"), seed=5).score.weight
    torch.manual_seed(2)
    assert torch.equal(read(fresh("qwen3"), seed=5).score.weight, head_weight)
    assert not torch.equal(read(fresh("qwen3"), seed=6).score.weight, head_weight)


def test_the_head_is_float32_over_a_bfloat16_body(fresh: Fresh) -> None:
    lm = load_score_model(str(fresh("qwen3")), dtype=torch.bfloat16).lm
    assert lm.score.weight.dtype == torch.float32
    assert next(iter(lm.get_decoder().parameters())).dtype == torch.bfloat16
    assert last_scores(lm, [[5, 6, 7]]).dtype == np.float32


@pytest.mark.parametrize("kind", KINDS)
def test_plain_transformers_gives_the_same_scores_alone_and_padded(
    kind: str, fresh: Fresh, tmp_path: Path
) -> None:
    """Written, then read by AutoModelForSequenceClassification: with EOS, with padding behind it,
    and in a batch of several lengths.
    """
    lm, base = read(fresh(kind), seed=3), str(fresh(kind))
    weights = {name: parameter.detach() for name, parameter in lm.named_parameters()}
    to = tmp_path / "reward"
    export_hf(weights, base, to, dtype=torch.float32, scale=RewardScale(0.25, 2.0))
    tokenizer: Any = AutoTokenizer.from_pretrained(to)
    rows = conversations(tokenizer)
    ours = last_scores(lm, rows)
    assert np.ptp(ours) > 0.01
    plain: Any = AutoModelForSequenceClassification.from_pretrained(to, dtype=torch.float32)
    plain.eval()
    longest = max(map(len, rows))
    padded = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
    seen = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        alone = [plain(torch.tensor([row])).logits.item() for row in rows]
        batch = plain(torch.tensor(padded), attention_mask=seen).logits[:, 0].numpy()
    np.testing.assert_allclose(alone, ours, atol=2e-5)
    np.testing.assert_allclose(batch, ours, atol=2e-5)
    np.testing.assert_allclose(last_scores(read(to, fresh_head=False), rows), ours, atol=1e-6)
    config = json.loads((to / "config.json").read_text("utf-8"))
    assert (config["reward_mean"], config["reward_std"]) == (0.25, 2.0)
    assert scale_of(load_config(str(to))) == RewardScale(0.25, 2.0)


def test_a_reward_model_made_by_plain_transformers_is_read(fresh: Fresh, tmp_path: Path) -> None:
    config = load_config(str(fresh("llama")))
    config.num_labels = 1
    config.pad_token_id = load_tokenizer(str(fresh("llama"))).pad_token_id
    torch.manual_seed(0)
    plain: Any = AutoModelForSequenceClassification.from_config(config)
    plain.eval()
    to = shutil.copytree(fresh("llama"), tmp_path / "plain")
    plain.save_pretrained(to)
    rows = conversations(load_tokenizer(str(to)))
    with torch.no_grad():
        wanted = [plain(torch.tensor([row])).logits.item() for row in rows]
    np.testing.assert_allclose(last_scores(read(to, fresh_head=False), rows), wanted, atol=2e-5)
    assert scale_of(load_config(str(to))) is None


def test_a_model_that_was_never_trained_to_score_is_no_reward_model(fresh: Fresh) -> None:
    with pytest.raises(UsageError, match=rf'has no {HEAD}.*job = "reward"'):
        read(fresh("qwen3"), fresh_head=False)


def test_a_reward_model_is_no_policy_though_its_embeddings_are_tied(
    fresh: Fresh, tmp_path: Path
) -> None:
    lm, base = read(fresh("qwen3")), str(fresh("qwen3"))
    assert lm.config.tie_word_embeddings
    weights = {name: parameter.detach() for name, parameter in lm.named_parameters()}
    export_hf(weights, base, tmp_path / "reward", dtype=torch.float32, scale=RewardScale())
    with pytest.raises(UsageError, match="is a reward model or a critic"):
        load_model(str(tmp_path / "reward"), dtype=torch.float32)


def test_several_labels_are_no_reward(copied: Path) -> None:
    labels = {"0": "bad", "1": "good"}
    rewrite(
        copied,
        "config.json",
        architectures=["Qwen3ForSequenceClassification"],
        id2label=labels,
        label2id={name: int(number) for number, name in labels.items()},
    )
    with pytest.raises(UsageError, match="gives 2 labels: a reward model has one"):
        read(copied)


@pytest.mark.parametrize("pad", ["eos", None])
def test_padding_that_cannot_be_told_from_the_end_is_refused(pad: str | None, copied: Path) -> None:
    tokenizer = load_tokenizer(str(copied))
    require_padding(tokenizer, str(copied))  # as it is made here it can be told
    tokenizer.pad_token = tokenizer.eos_token if pad else None
    with pytest.raises(UsageError, match="no padding token of its own") as refused:
        require_padding(tokenizer, str(copied))
    assert "tokenizer_config.json" in str(refused.value)


def test_padding_equal_to_the_end_would_score_another_token(fresh: Fresh, tmp_path: Path) -> None:
    """Why it is refused: transformers then reads the token before the end, in silence."""
    config = load_config(str(fresh("qwen3")))
    tokenizer = load_tokenizer(str(fresh("qwen3")))
    config.num_labels, config.pad_token_id = 1, tokenizer.eos_token_id
    torch.manual_seed(0)
    plain: Any = AutoModelForSequenceClassification.from_config(config)
    row = conversations(tokenizer)[1]
    with torch.no_grad():
        wrong = plain(torch.tensor([row])).logits.item()
        before = plain(torch.tensor([row[:-1]])).logits.item()
    assert wrong == pytest.approx(before, abs=1e-5)


def test_a_damaged_body_is_not_filled_up(copied: Path) -> None:
    """Only the head may be missing."""
    file = copied / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UsageError, match="up_proj"):
        read(copied)
