"""A whole run whose ranks share the experts of a mixture, behind Ray."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.model_types import make_model
from helpers.tiny_runs import MakeRecipe
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.tools.checkpoints import verify
from postgrad.tools.export import export
from postgrad.training.start import resume, train

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

CLUSTER = {"type": "ray", "start_seconds": 600.0}
SAMPLED = {"max_new_tokens": 6, "router_replay": "sampled"}
LEARNER = {"eps": 1e-6}  # moments of nothing but rounding do not decide a step
SHARED = {"ranks": 4, "sharding": "zero3", "expert_parallel": 2, **LEARNER}


def exported(run: str, to: Path, console: Console) -> dict[str, torch.Tensor]:
    """The model that the last checkpoint of a run becomes."""
    export(Path(run), "latest", to)
    return load_file(to / "model.safetensors")


@pytest.mark.parametrize("freeze", [[], pytest.param(["router"], marks=pytest.mark.long)])
def test_ranks_that_share_experts_sample_save_and_go_on_otherwise(
    freeze: list[str],
    make_recipe: MakeRecipe,
    models: Callable[[int], str],
    console: Console,
    tmp_path: Path,
) -> None:
    """Two steps of RL on four ranks, two to the experts, with weights published to the engine; two
    more on two ranks. One process replays the samples, and has the same model.
    """
    vocabulary = len(load_tokenizer(models(0)))
    mixture = make_model("qwen3_moe", Path(models(0)), vocabulary, tmp_path / "mixture")
    table = {"path": str(mixture), "init": None, "freeze": freeze}
    same: dict[str, Any] = {"model": table, "eval": {"every": 0}}
    several = make_recipe(
        "rl", "several", steps=2, learner=SHARED, cluster=CLUSTER, rollout=SAMPLED, **same
    )
    train(several, console)
    flags = ["--steps", "4", "--learner.ranks", "2", "--learner.sharding", "none"]
    resume(Path(several.run_dir), flags, [], console)
    replay = {**SAMPLED, "source": "replay", "replay_path": several.run_dir}
    alone = make_recipe("rl", "alone", steps=4, learner=LEARNER, rollout=replay, **same)
    train(alone, console)
    assert all(checked["good"] for checked in verify(Path(several.run_dir), console))
    single, shared = (
        exported(recipe.run_dir, tmp_path / name, console)
        for name, recipe in (("one", alone), ("many", several))
    )
    before = load_file(mixture / "model.safetensors")
    assert single.keys() == shared.keys() == before.keys()
    assert any(".experts.3." in name for name in shared)  # one by one, as on the hub
    gates = [name for name in before if name.endswith(".gate.weight")]
    for model in (single, shared):
        assert all(torch.equal(model[name], before[name]) for name in gates) == bool(freeze)
    moved = sum(float((single[n] - before[n]).square().sum()) for n in single)
    apart = sum(float((single[n] - shared[n]).square().sum()) for n in single)
    assert moved > 0
    assert (apart / sum(float(t.square().sum()) for t in single.values())) ** 0.5 < 1e-4
