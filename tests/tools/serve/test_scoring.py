"""Scores of a packed batch are those of plain transformers, one sequence at a time."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from postgrad.core.errors import RunError, UsageError
from postgrad.models.fresh import make_fresh
from postgrad.models.save import directory_hash
from postgrad.models.settings import ModelInit, TokenizerInit
from postgrad.tools.serve.batcher import load_reward_model


def sequences_of(lengths, vocabulary, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, vocabulary, n).astype(np.int32) for n in lengths]


def test_scores_are_those_of_plain_transformers(reward_dir):
    model = load_reward_model(reward_dir, "float32", batch_tokens=64)
    plain = AutoModelForSequenceClassification.from_pretrained(reward_dir, dtype=torch.float32)
    plain.eval()
    sequences = sequences_of([5, 1, 33, 64, 2, 17, 64, 9], len(model.tokenizer))
    sequences[0][-1] = model.tokenizer.eos_token_id  # a conversation that ended
    with torch.no_grad():
        wanted = [
            float(plain(torch.tensor(token_ids, dtype=torch.int64)[None]).logits[0, 0])
            for token_ids in sequences
        ]
    scores = model.score(sequences)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-6)
    assert np.std(wanted) > 0.01
    assert (model.mean, model.std, model.max_tokens) == (0.5, 2.0, 64)
    assert model.hash == directory_hash(reward_dir)


def test_scores_do_not_depend_on_what_shares_the_batch(reward_dir):
    model = load_reward_model(reward_dir, "float32", batch_tokens=64)
    opening = sequences_of([20], len(model.tokenizer))[0]
    ends = sequences_of([3, 7, 1, 30], len(model.tokenizer), seed=1)
    sequences = [opening, *[np.concatenate([opening, end]) for end in ends], *ends]
    alone = [model.score([token_ids])[0] for token_ids in sequences]
    np.testing.assert_allclose(model.score(sequences), alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.score(sequences[::-1])[::-1], alone, rtol=1e-5, atol=1e-6)


def test_what_is_no_reward_model_is_refused(reward_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(reward_dir, copy)
    config = json.loads((copy / "config.json").read_text())
    config["id2label"], config["label2id"] = {0: "a", 1: "b"}, {"a": 0, "b": 1}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="2 labels"):
        load_reward_model(copy, "float32", 64)
    base = tmp_path / "base"
    init = ModelInit(
        hidden_size=16, num_hidden_layers=1, tokenizer=TokenizerInit(kind="characters")
    )
    make_fresh(init, [], 0, base)
    with pytest.raises(UsageError, match="it is no reward model"):
        load_reward_model(base, "float32", 64)
    with pytest.raises(UsageError, match="there is no such directory"):
        load_reward_model(tmp_path / "none", "float32", 64)


def test_weights_that_give_no_number_are_told_at_the_start(reward_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(reward_dir, copy)
    weights = load_file(copy / "model.safetensors")
    weights["score.weight"][0, 3] = float("nan")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match="gives nan for one token"):
        load_reward_model(copy, "float32", 64)
