"""Damaged and lying models: one message that names them, whatever command loads them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.hostile_models import CORE, WEIGHTS, Change, edit, indexed, mutations, write
from postgrad.cli.main import main
from postgrad.core.errors import PostgradError, UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.models import load
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model
from postgrad.rollout.engine import Request
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

MUTATIONS = 480

ROWS = '{"question": "1 + 1?", "answer": "#### 2"}\n' * 4
HELD_OUT = '{"question": "2 + 3?", "answer": "#### 5"}\n'
RECIPE = """
job = "rl"
run_dir = "RUN"
steps = 1
model.path = "MODEL"
learner.threads = 1
rollout.max_new_tokens = 4
batch.rollout_batch_size = 2
algorithm.type = "grpo"
data = {path = "DATA", max_len = 64}
eval = {path = "HELD", max_new_tokens = 4}

[[rewards]]
type = "gsm8k"
"""


def changed(model: Path, change: Change, to: Path) -> Path:
    folder = shutil.copytree(model, to)
    change(folder)
    return folder


@pytest.mark.parametrize("name", CORE)
def test_a_hostile_model_is_refused_by_name_with_what_is_wrong(
    name: str, fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    change, message_part = CORE[name]
    folder = changed(fresh("qwen3"), change, tmp_path / "model")
    with pytest.raises(UsageError) as refused:
        load_model(str(folder), dtype=torch.float32)
    message = str(refused.value)
    assert message_part in message
    assert str(folder) in message
    assert len(message) < 900
    assert "\n" not in message
    assert not (folder / "unpickled").exists()


def test_code_that_a_known_type_brings_is_not_run(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    """Many models of the hub still bring it, of types that transformers has had for years."""
    folder = changed(
        fresh("qwen3"), edit("config.json", auto_map={"AutoConfig": "mine.C"}), tmp_path / "model"
    )
    edit("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "mine.T"]})(folder)
    ran = tmp_path / "ran"
    write("mine.py", f"import os\nos.mkdir({str(ran)!r})\nclass C: ...\nclass T: ...\n")(folder)
    assert load_model(str(folder), dtype=torch.float32).config.model_type == "qwen3"
    assert not ran.exists()


def test_an_index_of_a_hub_id_is_looked_at_before_its_files_are_fetched(
    fresh: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(fresh("qwen3"), indexed("model-1.bin"), tmp_path / "snapshot")

    def cached(_: str, name: str, **__: object) -> str | None:
        return str(folder / name) if (folder / name).is_file() else None

    def fetched(_: str, names: list[str]) -> list[str]:
        raise AssertionError(names)

    monkeypatch.setattr(load, "cached_file", cached)
    monkeypatch.setattr(load, "cached_files", fetched)
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(UsageError, match=r"model-1\.bin, which is a pickle and is not read"):
        load.require_readable("someone/something", config, AutoModelForCausalLM)


def test_a_token_without_an_embedding_is_named_before_anything_is_computed(
    fresh: Callable[[str], Path],
) -> None:
    """Where a tokenizer is of another model."""
    loaded = load_model(str(fresh("qwen3")), dtype=torch.float32)
    size = loaded.config.vocab_size
    engine = LocalEngine(loaded.lm, loaded.tokenizer, slots=1, cache_tokens=64)
    message = f"token id {size} has no embedding: the model has {size}"
    request = Request(0, (0,), np.array([1, size], np.int32), SamplingSettings(max_new_tokens=1))
    with pytest.raises(UsageError, match=message):
        engine.submit(request)
    tokens = Ragged.of([[1, size]], np.int32)
    sequences = Sequences(tokens, tokens.like(np.array([False, True])), np.zeros(1, int))
    backbone = Backbone(loaded.lm, torch.device("cpu"), MicroBatch())
    (layout,) = backbone.micro_batches(sequences, np.arange(1))
    with pytest.raises(UsageError, match=message):
        backbone.logprobs(layout, 1.0)


def _commands(folder: Path, model: Path) -> dict[str, list[str]]:
    recipe, data = folder / "recipe.toml", folder / "rows.jsonl"
    data.write_text(ROWS, "utf-8")
    (folder / "held.jsonl").write_text(HELD_OUT, "utf-8")
    text = RECIPE.replace("RUN", str(folder / "run")).replace("MODEL", str(model))
    text = text.replace("DATA", str(data)).replace("HELD", str(folder / "held.jsonl"))
    recipe.write_text(text, "utf-8")
    return {
        "chat": ["chat", str(model), "--json"],
        "eval": ["eval", str(recipe), "--model", str(model)],
        "train": ["train", str(recipe), "--quiet"],
        "dry-run": ["train", str(recipe), "--dry-run", "--quiet"],
        "plan": ["plan", str(recipe)],
        "serve-reward": ["serve-reward", str(model), "--port", "0"],
    }


SAMPLED = (
    "a width below 1", "a width of 10^9", "a list for a config", "a config nested deep",
    "a rotation that is none", "a tokenizer nested deep", "an index that names a pickle",
    "a header of 2^62 bytes",
)  # fmt: skip
# What a plan does not read: it counts weights, and has none.
UNPLANNED = SAMPLED[4:5] + SAMPLED[6:]


@pytest.mark.parametrize("command", ["chat", "eval", "train", "plan", "serve-reward"])
@pytest.mark.parametrize("name", SAMPLED[:2])
def test_every_command_refuses_a_hostile_model_with_one_message(
    name: str,
    command: str,
    fresh: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _refused(name, command, fresh("qwen3"), tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["chat", "eval", "train", "dry-run", "plan", "serve-reward"])
@pytest.mark.parametrize("name", SAMPLED[2:])
def test_every_command_refuses_every_kind_of_hostile_model(
    name: str,
    command: str,
    fresh: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command == "plan" and name in UNPLANNED:
        pytest.skip("a plan reads neither weights nor code")
    _refused(name, command, fresh("qwen3"), tmp_path, capsys)


def _refused(
    name: str, command: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = changed(model, CORE[name][0], folder / "model")
    code = main(_commands(folder, hostile)[command])
    captured = capsys.readouterr()
    both = captured.out + captured.err
    assert code in (1, 2)
    assert "Traceback" not in both
    assert "please report it" not in both
    assert str(hostile) in both.replace("\n", "")
    if command != "dry-run":
        assert [line[:10] for line in captured.err.splitlines() if line][-1:] == ["postgrad: "]


@pytest.mark.slow
def test_a_changed_model_loads_or_is_refused_with_one_message(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    refused: list[tuple[str, Path, str]] = []
    for number, (name, change) in enumerate(mutations(fresh("qwen3"), 20, MUTATIONS)):
        folder = changed(fresh("qwen3"), change, tmp_path / str(number))
        loads = load_score_model if number % 5 == 4 else load_model
        try:
            loads(str(folder), dtype=torch.float32)
        except PostgradError as error:
            refused.append((name, folder, str(error)))
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        shutil.rmtree(folder)
    assert len(refused) > MUTATIONS // 3
    wrong = [
        number for number in refused if str(number[1]) not in number[2] or len(number[2]) > 900
    ]
    assert wrong == []
    assert (fresh("qwen3") / WEIGHTS).is_file()
