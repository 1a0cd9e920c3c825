"""A folder as README and the pages take it for granted: recipes, and a run that has ended."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.jobs import MODEL
from helpers.pages import ROOT
from postgrad.cli.main import main

RECIPE = (
    """
job = "rl"
run_dir = "{run_dir}"
steps = 4
"""
    + MODEL
    + """[model.lora]
rank = 2
[data]
path = "reasoning-gym:spell_backward"
size = 24
max_len = 128
task = {{ min_word_len = 3, max_word_len = 4 }}
[eval]
seed = 1
size = 4
every = 2
max_new_tokens = 4
[[rewards]]
type = "regex"
pattern = "[a-m]"
[scoring]
workers = 1
[algorithm]
type = "grpo"
[batch]
rollout_batch_size = 2
n_samples_per_prompt = 2
[rollout]
max_new_tokens = 4
[learner]
threads = 1
[checkpoint]
save_steps = 1
save_hf = true
best_metric = "eval/reward"
"""
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a person has who did all that the pages tell: made once, with one small run."""
    workspace = tmp_path_factory.mktemp("docs")
    (workspace / "recipes").symlink_to(ROOT / "recipes")
    for name in ("RECIPE.toml", "recipe.toml"):
        (workspace / name).write_text(RECIPE.format(run_dir=workspace / "RUN_DIR"), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("XDG_CONFIG_HOME", str(workspace / "config"))
        patch.setenv("POSTGRAD_CALIBRATION", str(workspace / "calibration.toml"))
        assert main(["train", "RECIPE.toml", "--quiet"]) == 0
        yield workspace


@pytest.fixture
def with_runs(folder: Path) -> Iterator[Path]:
    """The folder, anew for a command: what it writes is gone after it."""
    before = set(folder.iterdir())
    yield folder
    for path in set(folder.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
