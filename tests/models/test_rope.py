"""Rotations that follow the length of a sequence: the original ones, and never another's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.hostile_models import edit
from helpers.model_types import config_of
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import lay_out
from postgrad.models.attention import hidden_states
from postgrad.models.config import load_config
from postgrad.models.load import load_model
from postgrad.models.rope import fixed_length, max_positions, require_length, unseen_length
from postgrad.models.save import save_model
from postgrad.models.tree import TreeAttention
from postgrad.rollout.engine import Request
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

HALF = 4  # frequencies of a head of 8
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * HALF,
    "long_factor": [3.0] * HALF,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
KINDS = {
    "longrope": {"rope_parameters": LONG, "max_position_embeddings": 128},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 32},
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, fresh: Callable[[str], Path], tmp_path: Path) -> Path:
    """Of Llama's type, with an original length of 32."""
    folder = shutil.copytree(fresh("llama"), tmp_path / request.param)
    edit("config.json", **KINDS[request.param])(folder)
    return folder


def packed(lm: Any, sequences: list[np.ndarray[Any, Any]]) -> torch.Tensor:
    tokens = Ragged.of(sequences, np.int32)
    mask = tokens.like(np.ones(len(tokens.values), np.bool_))
    columns = Sequences(tokens, mask, np.arange(len(sequences)))
    layout = lay_out(columns, np.arange(len(sequences)), reads="at")
    return hidden_states(
        lm,
        torch.from_numpy(layout.token_ids),
        torch.from_numpy(layout.positions),
        TreeAttention(plan_blocks(layout), torch.device("cpu")),
    )


@torch.no_grad()
def test_a_sequence_within_the_original_length_is_rotated_as_alone(model: Path) -> None:
    rng = np.random.default_rng(0)
    short, longer = rng.integers(3, 90, 12), rng.integers(3, 90, 32)
    lm: Any = load_model(str(model), dtype=torch.float32).lm
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logprobs = packed(lm, [short, longer])
    for sequence, rows in ((short, logprobs[:12]), (longer, logprobs[12:])):
        wanted = plain.model(torch.from_numpy(sequence)[None]).last_hidden_state[0]
        torch.testing.assert_close(rows, wanted, atol=2e-5, rtol=0)


def test_a_longer_sequence_is_refused_before_it_changes_its_pack(model: Path) -> None:
    lm = load_model(str(model), dtype=torch.float32).lm
    rng = np.random.default_rng(0)
    with pytest.raises(UsageError, match=r"beyond 32 tokens .* 33 tokens here: set data\.max_len"):
        packed(lm, [rng.integers(3, 90, 33), rng.integers(3, 90, 5)])
    assert bool(packed(lm, [rng.integers(3, 90, 32)]).isfinite().all())  # and goes on


def test_samples_are_drawn_from_the_original_rotations_or_refused(model: Path) -> None:
    loaded = load_model(str(model), dtype=torch.float32)
    engine = LocalEngine(loaded.lm, loaded.tokenizer, slots=2, cache_tokens=512)
    prompt = np.random.default_rng(0).integers(3, 90, 20).astype(np.int32)
    engine.submit(Request(0, (0,), prompt, SamplingSettings(max_new_tokens=8)))
    (done,) = engine.completed()
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.from_numpy(np.concatenate([prompt, done.token_ids]).astype(np.int64))
    with torch.no_grad():
        logprobs = plain(ids[None]).logits[0].log_softmax(-1)
    wanted = logprobs[19:-1].gather(1, ids[20:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(done.logprobs), wanted, atol=2e-4, rtol=0)
    engine.submit(Request(1, (0,), np.tile(prompt, 2)[:33], SamplingSettings(max_new_tokens=2)))
    with pytest.raises(UsageError, match="beyond 32 tokens"):
        engine.completed()


def test_a_recipe_that_is_longer_is_refused_before_training(model: Path) -> None:
    config = load_config(str(model))
    assert fixed_length(config) == max_positions(config) == 32
    require_length(config, 32, "m")
    with pytest.raises(UsageError, match=r"rotates by the length .*longrope|dynamic"):
        require_length(config, 33, "m")


def test_other_rotations_have_no_length_of_their_own(fresh: Callable[[str], Path]) -> None:
    config = load_config(str(fresh("llama")))
    assert fixed_length(config) is None
    assert max_positions(config) == 128
    require_length(config, 10**6, "m")


SCALED = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "factor": 4.0},
}


@pytest.fixture(params=SCALED)
def extended(request: pytest.FixtureRequest, fresh: Callable[[str], Path], tmp_path: Path) -> Path:
    """A directory of links to a model of 32 positions, with a config of its own that scales them,
    as users extend a model (docs/how-to/longer-rows.md).
    """
    folder, original = tmp_path / request.param, fresh("llama")
    folder.mkdir()
    for file in original.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((original / "config.json").read_text("utf-8"))
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"rope_theta": theta, "rope_scaling": SCALED[request.param]}
    config["max_position_embeddings"] = 32
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


@torch.no_grad()
def test_scaled_rotations_are_those_of_transformers_behind_the_original_length(
    extended: Path,
) -> None:
    rng = np.random.default_rng(0)
    short, longer = rng.integers(3, 90, 12), rng.integers(3, 90, 100)
    loaded = load_model(str(extended), dtype=torch.float32)
    plain: Any = AutoModelForCausalLM.from_pretrained(extended, dtype=torch.float32)
    rows = packed(loaded.lm, [short, longer])
    for sequence, ours in ((short, rows[:12]), (longer, rows[12:])):
        wanted = plain.model(torch.from_numpy(sequence)[None]).last_hidden_state[0]
        torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=0)
    engine = LocalEngine(loaded.lm, loaded.tokenizer, slots=2, cache_tokens=512)
    prompt = longer[:60].astype(np.int32)
    engine.submit(Request(0, (0,), prompt, SamplingSettings(max_new_tokens=40)))
    (done,) = engine.completed()
    ids = torch.from_numpy(np.concatenate([prompt, done.token_ids]).astype(np.int64))
    logprobs = plain(ids[None]).logits[0].log_softmax(-1)
    wanted = logprobs[59:-1].gather(1, ids[60:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(done.logprobs), wanted, atol=2e-4, rtol=0)


def test_a_scaled_model_reaches_its_factor_times_the_original_length(extended: Path) -> None:
    config = load_config(str(extended))
    assert fixed_length(config) is None
    assert max_positions(config) == 4 * 32
    assert unseen_length(config, 128, "m") is None
    assert "m was never trained on more than 128" in (unseen_length(config, 129, "m") or "")


def test_an_export_of_a_scaled_model_scales_its_positions_too(
    extended: Path, tmp_path: Path
) -> None:
    loaded = load_model(str(extended), dtype=torch.float32)
    save_model(loaded.lm, loaded.tokenizer, tmp_path / "export")
    exported = load_config(str(tmp_path / "export"))
    table = SCALED[extended.name]
    assert {key: exported.rope_parameters[key] for key in table} == table
    assert max_positions(exported) == 4 * 32


def test_a_config_with_both_lengths_reaches_the_longer(fresh: Callable[[str], Path]) -> None:
    config = load_config(str(fresh("llama")))
    table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config.rope_parameters = config.rope_parameters | table
    assert config.max_position_embeddings == max_positions(config) == 128  # as DeepSeek-V3 says it
    config.max_position_embeddings = 160  # as gpt-oss might
    assert max_positions(config) == 160


def test_a_table_of_positions_is_not_read_behind_its_end() -> None:
    config = config_of("gpt2", 90)
    require_length(config, 128, "m")
    with pytest.raises(UsageError, match=r"m has a table of 128 positions .* have 129 tokens here"):
        require_length(config, 129, "m")


def test_positions_that_a_model_was_never_trained_on_are_told(fresh: Callable[[str], Path]) -> None:
    config = load_config(str(fresh("llama")))
    assert unseen_length(config, 128, "m") is None
    assert "m was never trained on more than 128" in (unseen_length(config, 129, "m") or "")
