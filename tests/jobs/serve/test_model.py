"""Scores of a padded batch are those of plain transformers, one sequence at a time."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from postgrad.core.errors import UsageError
from postgrad.jobs.serve.model import _padded, load_reward_model
from postgrad.models.hashes import directory_hash


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
            float(plain(torch.tensor(one, dtype=torch.int64)[None]).logits[0, 0])
            for one in sequences
        ]
    found = model.score(sequences)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert np.std(wanted) > 0.01
    assert (model.mean, model.std, model.max_tokens) == (0.5, 2.0, 64)
    assert model.hash == directory_hash(reward_dir)


def test_a_padded_batch_never_exceeds_its_tokens():
    rng = np.random.default_rng(1)
    for _ in range(200):
        sequences = [np.zeros(n, np.int32) for n in rng.integers(1, 40, rng.integers(1, 30))]
        cuts = _padded(sequences, 64)
        assert sorted(place for cut in cuts for place in cut) == list(range(len(sequences)))
        for cut in cuts:
            assert len(cut) * max(len(sequences[place]) for place in cut) <= 64


def test_what_is_no_reward_model_is_refused(reward_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(reward_dir, copy)
    config = json.loads((copy / "config.json").read_text())
    config["id2label"], config["label2id"] = {0: "a", 1: "b"}, {"a": 0, "b": 1}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="no reward model"):
        load_reward_model(copy, "float32", 64)
    with pytest.raises(UsageError, match="there is no such directory"):
        load_reward_model(tmp_path / "none", "float32", 64)
