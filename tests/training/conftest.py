"""Whole runs that last a second: see helpers.tiny_runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.model_types import make_model
from helpers.tiny_runs import console, make_recipe, models, reward_on_path, trained
from postgrad.models.tokenizer import load_tokenizer

__all__ = ["console", "make_recipe", "models", "reward_on_path", "trained"]


@pytest.fixture
def make_mixture(models: Any, tmp_path: Path) -> Callable[..., Path]:
    """make_mixture(KIND): the directory of a small mixture of experts."""
    vocabulary = len(load_tokenizer(models(0)))

    def make(kind: str = "qwen3_moe") -> Path:
        to = tmp_path / kind
        return to if to.exists() else make_model(kind, Path(models(0)), vocabulary, to)

    return make
