"""Whole runs on ranks behind Ray: the weights of one process, saves on 4, resumes on 1, 2 and 4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.jobs import write_pairs
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.jobs.export import export
from postgrad.jobs.train import resume, train
from postgrad.jobs.verify import verify
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe

pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 10
CLUSTER = {"type": "ray", "start_seconds": 600.0}
LEARNER = {"eps": 1e-6}  # moments of nothing but rounding do not decide a step
PPO = {
    "algorithm": {"type": "ppo", "kl_coef": 0.05},
    "critic": {"learner": {"lr": 5e-3, "eps": 1e-6}},  # at 2e-2 rounding grows past 1e-4
}


def on_ranks(ranks: int, sharding: str, **learner: Any) -> dict[str, Any]:
    chosen = {"ranks": ranks, "sharding": sharding, **LEARNER, **learner}
    return {"learner": chosen, "cluster": CLUSTER, "steps": STEPS}


def weights(recipe: Recipe, step: int = STEPS) -> dict[str, torch.Tensor]:
    """All float tensors of a checkpoint, of whatever parts."""
    store = CheckpointStore(Path(recipe.run_dir) / "checkpoints", CheckpointSettings())
    found = store.load(step)
    return {
        f"{stem}/{name}": tensor
        for stem in found.stems
        if stem.endswith(".weights")
        for name, tensor in found.tensors(stem).items()
    }


def apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    difference = sum(float((one[n] - two[n]).square().sum()) for n in one)
    return (difference / sum(float(t.square().sum()) for t in one.values())) ** 0.5


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl"))


@pytest.mark.parametrize(("ranks", "sharding"), [(2, "zero3"), (4, "zero1")])
@pytest.mark.parametrize("job", ["sft", "reward"])
def test_a_run_on_ranks_gives_the_weights_of_one_process(
    make_recipe: Any, console: Console, job: str, ranks: int, sharding: str
) -> None:
    alone = make_recipe(job, "alone", steps=STEPS, learner=LEARNER)
    several = make_recipe(job, "several", **on_ranks(ranks, sharding))
    train(alone, console)
    train(several, console)
    assert apart(weights(alone), weights(several)) < 1e-4


@pytest.mark.parametrize(("ranks", "sharding"), [(2, "none"), (4, "zero2")])
@pytest.mark.parametrize("changes", [{"algorithm": {"type": "grpo", "kl_coef": 0.05}}, PPO])
def test_replayed_rollouts_on_ranks_give_the_weights_of_one_process(
    make_recipe: Any, console: Console, changes: dict[str, Any], ranks: int, sharding: str
) -> None:
    train(make_recipe("rl", "live", steps=STEPS, **changes), console)
    replay = {"source": "replay", "replay_path": make_recipe("rl", "live").run_dir}
    changes = {**changes, "rollout": replay}
    alone = make_recipe("rl", "alone", steps=STEPS, learner=LEARNER, **changes)
    several = make_recipe("rl", "several", **on_ranks(ranks, sharding), **changes)
    train(alone, console)
    train(several, console)
    assert apart(weights(alone), weights(several)) < 1e-4


@pytest.mark.parametrize(
    ("ranks", "sharding", "cluster"),
    [(1, "none", "local"), (2, "zero1", "ray"), (4, "zero3", "ray")],
)
def test_what_four_ranks_saved_goes_on_with_another_number(
    make_recipe: Any, console: Console, ranks: int, sharding: str, cluster: str, tmp_path: Path
) -> None:
    checkpoint = {"save_steps": 4, "max_ckpt_num": 9}
    alone = make_recipe("sft", "alone", steps=8, learner=LEARNER, checkpoint=checkpoint)
    saved = make_recipe(
        "sft", "saved", **{**on_ranks(4, "zero3"), "steps": 4}, checkpoint=checkpoint
    )
    train(alone, console)
    train(saved, console)
    assert all(one["good"] for one in verify(Path(saved.run_dir), console))
    flags = [
        "--steps", "8", "--learner.ranks", f"{ranks}", "--learner.sharding", sharding,
        "--cluster.type", cluster,
    ]  # fmt: skip
    resume(Path(saved.run_dir), flags, [], console)
    assert apart(weights(alone, 8), weights(saved, 8)) < 1e-4
    export(Path(saved.run_dir), "4", tmp_path / "exported")
    assert (tmp_path / "exported" / "config.json").exists()


def test_the_same_layout_gives_the_same_bits(make_recipe: Any, console: Console) -> None:
    changes = {**on_ranks(2, "zero3"), "steps": 3}
    one, two = (make_recipe("rl", name, **changes) for name in ("one", "two"))
    train(one, console)
    train(two, console)
    first, second = weights(one, 3), weights(two, 3)
    assert all(torch.equal(first[name], second[name]) for name in first)
    samples = [(Path(one.run_dir) / "samples.jsonl"), (Path(two.run_dir) / "samples.jsonl")]
    told = [[json.loads(line)["turns"] for line in path.open()] for path in samples]
    assert told[0] == told[1]
