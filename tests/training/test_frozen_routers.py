"""Mixtures whose routers are frozen: every job keeps them, and ends the same after a kill."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import RunError, UsageError
from postgrad.observe.console import Console
from postgrad.tools.checkpoints import verify
from postgrad.tools.export import export
from postgrad.training.rl import RLJob
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

GATE = "mlp.gate.weight"
# A reference that follows the policy, an average, and a critic that reads the policy's [model].
PPO = {
    "algorithm": {"type": "ppo", "kl_coef": 0.05},
    "reference": {"ema_decay": 0.5},
    "rollout": {"max_new_tokens": 6, "router_replay": "sampled"},
    "eval": {"every": 0},
    "learner": {"lr": 0.05, "threads": 1, "ema_decay": 0.5},
}
MakeMixture = Callable[..., Path]


def table(path: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(path), "init": None, "freeze": ["router"], **more}


def moved(before: Path, after: Path) -> set[str]:
    """The names of the weights that differ between two models."""
    before_tensors, after_tensors = (
        load_file(folder / "model.safetensors") for folder in (before, after)
    )
    assert before_tensors.keys() - {"lm_head.weight"} == after_tensors.keys() - {
        "lm_head.weight",
        "score.weight",
    }
    return {
        name
        for name in before_tensors
        if name in after_tensors and not torch.equal(before_tensors[name], after_tensors[name])
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "kind", "changes"), [("sft", SFTJob, {}), ("rl", RLJob, PPO)], ids=["sft", "ppo"]
)
def test_a_killed_run_ends_with_the_same_bits_and_the_routers_of_its_start(
    job: str, kind: type, changes: dict[str, Any], make_recipe: MakeRecipe, console: Console,
    make_mixture: MakeMixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    more: dict[str, Any] = {
        "model": table(make_mixture()),
        **changes,
        "checkpoint": {"save_steps": 1},
    }
    uninterrupted, killed = (make_recipe(job, name, **more) for name in ("whole", "killed"))
    train(uninterrupted, console)
    train_until_killed(monkeypatch, kind, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)
    assert not [name for name in tensors(uninterrupted.run_dir, 3) if GATE in name]
    assert all(checked["good"] for checked in verify(Path(uninterrupted.run_dir), console))
    for role in ("policy", "critic", "ema") if job == "rl" else ("policy",):
        export(Path(uninterrupted.run_dir), "latest", tmp_path / role, role)
        different = moved(make_mixture(), tmp_path / role)
        assert not [name for name in different if GATE in name]
        assert [name for name in different if ".experts." in name]
    if job == "rl":
        steps = lines(Path(uninterrupted.run_dir) / "metrics.jsonl")
        assert all(line["sentinel/publish_difference"] < 1e-4 for line in steps)


@pytest.mark.parametrize("kind", [pytest.param("gpt_oss", marks=pytest.mark.slow), "ernie4_5_moe"])
def test_routers_with_biases_are_exported_as_they_were(
    kind: str, make_recipe: MakeRecipe, console: Console, make_mixture: MakeMixture
) -> None:
    recipe = make_recipe(
        "sft",
        model=table(make_mixture(kind)),
        steps=2,
        checkpoint={"save_hf": True},
        eval={"every": 0},
    )
    train(recipe, console)
    different = moved(make_mixture(kind), Path(recipe.run_dir) / "model")
    assert not [n for n in different if ".router." in n or "gate.w" in n or "correction_bias" in n]
    assert [name for name in different if ".experts." in name]
    assert all(checked["good"] for checked in verify(Path(recipe.run_dir), console))


def test_a_run_does_not_go_on_from_other_routers(
    make_recipe: MakeRecipe, console: Console, make_mixture: MakeMixture
) -> None:
    recipe = make_recipe("sft", model=table(make_mixture()), steps=1, eval={"every": 0})
    train(recipe, console)
    file = make_mixture() / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith(GATE))
    save_file({**weights, name: weights[name] + 1}, file, metadata={"format": "pt"})
    with pytest.raises(RunError, match="its files have changed"):
        resume(Path(recipe.run_dir), ["--steps", "2"], [], console)


def test_a_dense_model_is_refused_before_it_is_loaded(
    make_recipe: MakeRecipe, console: Console, models: Any
) -> None:
    recipe = make_recipe("sft", model=table(Path(models(0))))
    with pytest.raises(UsageError, match="this qwen3 model is no mixture of experts") as error:
        train(recipe, console)
    assert str(error.value).startswith('model.freeze: "router"')
