"""Routers in float32 in a run in bfloat16: in the learner, in what it is compared with, and in the
engine.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.models import router_dtype
from postgrad.observe.console import Console
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

MakeMixture = Callable[..., Path]
LORA = {"rank": 2, "alpha": 4, "targets": ["q_proj", "experts", "router"]}
PPO = {
    "algorithm": {"type": "ppo", "kl_coef": 0.05},
    "rollout": {"max_new_tokens": 6, "dtype": "bfloat16"},
    "eval": {"every": 0},
    "checkpoint": {"save_steps": 1},
}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> set[tuple[bool, bool]]:
    """Of the wide products of routers: whether an engine computed them, and whether they train."""
    seen: set[tuple[bool, bool]] = set()
    plain = router_dtype._wide_product

    def noted(*args: Any, **named: Any) -> torch.Tensor:
        product = plain(*args, **named)
        assert product.dtype == torch.float32
        seen.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return product

    monkeypatch.setattr(router_dtype, "_wide_product", noted)
    return seen


def table(path: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(path), "init": None, "dtype": "bfloat16", "router_dtype": "float32", **more}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"lora": LORA}], ids=["whole", "lora"])
def test_learner_and_engine_route_in_float32_and_a_killed_run_ends_the_same(
    more: dict[str, Any], make_recipe: MakeRecipe, console: Console, make_mixture: MakeMixture,
    products: set[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = table(make_mixture(), **more)
    uninterrupted, killed = (
        make_recipe("rl", name, model=model, **PPO) for name in ("whole", "killed")
    )
    train(uninterrupted, console)
    assert products == {(True, False), (False, False), (False, True)}
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)
    narrow = make_recipe("rl", "narrow", model={**model, "router_dtype": "auto"}, **PPO)
    products.clear()
    train(narrow, console)
    assert products == set()
    first = [lines(Path(run.run_dir) / "samples.jsonl")[0] for run in (uninterrupted, narrow)]
    assert first[0] != first[1]


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_dtype_alone(
    make_recipe: MakeRecipe, console: Console, make_mixture: MakeMixture
) -> None:
    recipe = make_recipe("sft", model=table(make_mixture()), steps=1, eval={"every": 0})
    train(recipe, console)
    with pytest.raises(UsageError, match="router_dtype"):
        resume(Path(recipe.run_dir), ["--model.router_dtype", "auto"], [], console)
