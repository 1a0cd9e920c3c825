"""A publish that fails in silence stops the run."""

from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import RunError, UsageError
from postgrad.observe.console import Console
from postgrad.rollout.local.engine import LocalEngine
from postgrad.training.start import train


def test_an_engine_that_keeps_its_old_weights_is_found_after_the_first_update(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's reload keeps a tied output head; also at a small learning rate."""
    monkeypatch.setattr(LocalEngine, "load_weights", lambda self, weights, version: None)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        train(make_recipe("rl", learner={"lr": 1e-3}), console)


def test_an_engine_that_loses_one_weight_is_found(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LocalEngine.load_weights

    def partly(self: Any, weights: Any, version: int) -> None:
        kept = dict(self._lm.named_parameters())
        name = "model.embed_tokens.weight"
        whole(self, [(n, kept[n].clone() if n == name else w) for n, w in weights], version)

    monkeypatch.setattr(LocalEngine, "load_weights", partly)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        train(make_recipe("rl"), console)


def test_an_evaluation_during_sft_is_of_the_policys_weights_or_none(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "load_weights", lambda self, weights, version: None)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        train(make_recipe("sft", eval={"every": 1}), console)


def test_vllm_without_its_environment_is_refused_before_anything_is_loaded(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSTGRAD_VLLM_PYTHON", raising=False)
    recipe = make_recipe("rl", rollout={"type": "vllm"})
    with pytest.raises(UsageError, match="POSTGRAD_VLLM_PYTHON"):
        train(recipe, console)
    assert not (Path(recipe.run_dir) / "init").exists()
