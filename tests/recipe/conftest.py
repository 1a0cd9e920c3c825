"""A small valid recipe as a file."""

from collections.abc import Callable
from pathlib import Path

import pytest

RL = """job = "rl"
run_dir = "runs/a"
steps = 10

[model]
path = "some/model"

[data]
path = "rows.jsonl"

[eval]
split = "test"
every = 5

[[rewards]]
type = "gsm8k"

[algorithm]
type = "grpo"
clip_high = 0.28

[batch]
rollout_batch_size = 16
n_samples_per_prompt = 8
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(text=RL, (old, new), ...): the file of a recipe, changed."""

    def make(*changes: tuple[str, str], text: str = RL, name: str = "recipe.toml") -> Path:
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return path

    return make
