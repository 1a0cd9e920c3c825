"""RL on rows with images, sampled by real vLLM: it sees what the learner sees, before and after
every publish.
"""

import os
import subprocess
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest

from helpers.image_directories import write_model
from helpers.runs import lines
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.rollout.vllm.process import VARIABLE
from postgrad.training.start import train
from rollout.vllm.test_images import recipe

pytestmark = pytest.mark.vllm
SECTIONS = {"qwen2_5_vl": [4, 6, 6], "qwen3_vl": [6, 5, 5]}  # of rotary positions


@pytest.fixture(autouse=True)
def torchvision() -> None:
    """Skips where vLLM's environment has none that can be imported."""
    python = os.environ.get(VARIABLE, "")
    ended = subprocess.run(
        [python, "-I", "-c", "import torchvision"], capture_output=True, check=False
    )
    if ended.returncode:
        pytest.skip(f"{python} imports no torchvision: {ended.stderr.decode()[-200:]}")


def widened(config: Any) -> None:
    """One head of 32, as wide as vLLM's attention on CPUs wants it; weights that tell tokens
    apart.
    """
    text = config.get_text_config()
    text.num_attention_heads = text.num_key_value_heads = 1
    text.head_dim = 32
    text.rope_parameters["mrope_section"] = SECTIONS[config.model_type]
    text.initializer_range = config.vision_config.initializer_range = 0.2


@pytest.mark.parametrize("kind", SECTIONS)
def test_vllm_samples_behind_images_with_the_learners_logprobs(kind: str, tmp_path: Path) -> None:
    model = write_model(kind, tmp_path / "model", widened)
    train(recipe(tmp_path, model), Console())
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 3
    for line in metrics:
        assert line["policy/grad_norm"] > 0
        assert line["sentinel/publish_difference"] < 1e-4
        assert line["sentinel/prob_difference"] < 1e-4
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert {len(sample["images"]) for sample in samples} == {1, 2}


@pytest.mark.parametrize("kind", SECTIONS)
def test_vllm_plays_episodes_with_images_in_prompts_and_replies(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    model = write_model(kind, tmp_path / "model", widened)
    plain = recipe(tmp_path, model, max_new_tokens=30, stop=[*ascii_letters]).dump()
    shows = {"type": "showing:Showing", "max_turns": 3}
    changed = {"environment": shows, "rewards": [], "steps": 2}
    changed["data"] = {"path": plain["data"]["path"], "messages": "messages", "max_len": 500}
    train(parse_recipe(plain | changed), Console())
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["environment/turns"] > 2
        assert line["sentinel/publish_difference"] < 1e-4
        assert line["sentinel/prob_difference"] < 1e-4
    samples = lines(tmp_path / "run" / "samples.jsonl")
    shown = {sum(len(turn.get("images", ())) for turn in sample["turns"]) for sample in samples}
    assert 2 in shown
