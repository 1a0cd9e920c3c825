"""Damaged and lying models: one message that names them, whatever command loads them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.hostile_models import CORE, WEIGHTS, Change, edit, mutations, write
from postgrad.cli.main import main
from postgrad.core.errors import PostgradError, UsageError
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model

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
    change, said = CORE[name]
    folder = changed(fresh("qwen3"), change, tmp_path / "model")
    with pytest.raises(UsageError) as refused:
        load_model(str(folder), dtype=torch.float32)
    message = str(refused.value)
    assert said in message
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
    told = capsys.readouterr()
    both = told.out + told.err
    assert code in (1, 2)
    assert "Traceback" not in both
    assert "please report it" not in both
    assert str(hostile) in both.replace("\n", "")
    if command != "dry-run":
        assert [line[:10] for line in told.err.splitlines() if line][-1:] == ["postgrad: "]


@pytest.mark.slow
def test_a_changed_model_loads_or_is_refused_with_one_message(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    refused: list[tuple[str, Path, str]] = []
    for number, (name, change) in enumerate(mutations(fresh("qwen3"), 20, MUTATIONS)):
        folder = changed(fresh("qwen3"), change, tmp_path / str(number))
        load = load_score_model if number % 5 == 4 else load_model
        try:
            load(str(folder), dtype=torch.float32)
        except PostgradError as error:
            refused.append((name, folder, str(error)))
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        shutil.rmtree(folder)
    assert len(refused) > MUTATIONS // 3
    wrong = [one for one in refused if str(one[1]) not in one[2] or len(one[2]) > 900]
    assert wrong == []
    assert (fresh("qwen3") / WEIGHTS).is_file()
