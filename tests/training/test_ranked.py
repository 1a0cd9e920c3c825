"""Whole runs on ranks behind Ray: the weights of one process, saves on 4, resumes on 1, 2 and 4."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.jobs import write_pairs, write_recipe
from helpers.pages import commands
from helpers.runs import lines
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.cli.main import main
from postgrad.cluster.workers import RankGroup
from postgrad.core.errors import UsageError
from postgrad.fleet import loading, ranked
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.tools.checkpoints import verify
from postgrad.tools.export import export
from postgrad.training.start import resume, train

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

STEPS = 10
CLUSTER = {"type": "ray", "start_seconds": 600.0}
LEARNER = {"eps": 1e-6}  # moments of nothing but rounding do not decide a step
GRPO = {"algorithm": {"type": "grpo", "kl_coef": 0.05}}
PPO = {
    "algorithm": {"type": "ppo", "kl_coef": 0.05},
    "critic": {"learner": {"lr": 5e-3, "eps": 1e-6}},  # at 2e-2 rounding grows past 1e-4
}


def on_ranks(ranks: int, sharding: str, **learner: Any) -> dict[str, Any]:
    chosen = {"ranks": ranks, "sharding": sharding, **LEARNER, **learner}
    return {"learner": chosen, "cluster": CLUSTER, "steps": STEPS}


def weights(recipe: Recipe, step: int = STEPS) -> dict[str, torch.Tensor]:
    """All float tensors of a checkpoint, of whatever parts."""
    return weights_in(Path(recipe.run_dir), step)


def weights_in(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Of the run in a directory."""
    store = CheckpointStore(run / "checkpoints", CheckpointSettings())
    checkpoint = store.load(step)
    return {
        f"{stem}/{name}": tensor
        for stem in checkpoint.stems
        if stem.endswith(".weights")
        for name, tensor in checkpoint.tensors(stem).items()
    }


def apart(first_tensors: dict[str, torch.Tensor], second_tensors: dict[str, torch.Tensor]) -> float:
    assert first_tensors.keys() == second_tensors.keys()
    difference = sum(
        float((first_tensors[n] - second_tensors[n]).square().sum()) for n in first_tensors
    )
    return (difference / sum(float(t.square().sum()) for t in first_tensors.values())) ** 0.5


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl"))


@pytest.mark.parametrize(
    ("job", "ranks", "sharding"),
    [
        ("reward", 2, "zero3"),
        pytest.param("sft", 4, "zero1", marks=pytest.mark.long),
        pytest.param("sft", 2, "zero3", marks=pytest.mark.long),
        pytest.param("reward", 4, "zero1", marks=pytest.mark.long),
    ],
)
def test_a_run_on_ranks_gives_the_weights_of_one_process(
    make_recipe: Any, console: Console, job: str, ranks: int, sharding: str
) -> None:
    alone = make_recipe(job, "alone", steps=STEPS, learner=LEARNER)
    several = make_recipe(job, "several", **on_ranks(ranks, sharding))
    train(alone, console)
    train(several, console)
    assert apart(weights(alone), weights(several)) < 1e-4


@pytest.mark.long
def test_the_command_that_the_page_shows_for_one_machine_trains_on_four_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = (
        command.words
        for command in commands()
        if command.at.startswith("docs/cluster.md") and "--learner.ranks" in command.words
        if command.words[:3] == ("postgrad", "train", "recipe.toml")
    )
    monkeypatch.chdir(tmp_path)
    write_recipe("sft", tmp_path)
    more = ["--run_dir", "run", "--steps", "2", "--quiet", "--cluster.start_seconds", "600"]
    assert main([*shown[1:], *more]) == 0
    (placed,) = (
        event for event in lines(tmp_path / "run" / "events.jsonl") if event["event"] == "placed"
    )
    assert (placed["role"], len(placed["places"])) == ("policy", 4)
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.parametrize("rows", [9, 1])
def test_a_held_out_loss_on_ranks_is_that_of_one_process(
    make_recipe: Any, console: Console, rows: int
) -> None:
    """Nine conversations on two ranks: shares are unequal, and every token counts once. Of a single
    one, one of the ranks has nothing (verl#7464).
    """
    held = {"size": rows, "n_samples": 1, "pass_at": [1], "greedy": False, "max_new_tokens": None}
    changes = {"rewards": [], "eval": held}
    alone = make_recipe("sft", "alone", steps=STEPS, learner=LEARNER, **changes)
    several = make_recipe("sft", "several", **on_ranks(2, "zero3"), **changes)
    train(alone, console)
    train(several, console)
    lines_alone, lines_on_ranks = (
        [json.loads(line) for line in (Path(each.run_dir) / "eval.jsonl").open()]
        for each in (alone, several)
    )
    assert [line["step"] for line in lines_on_ranks] == [0, STEPS]
    for a, b in zip(lines_alone, lines_on_ranks, strict=True):
        assert (b["loss_tokens"], b["loss_rows"]) == (a["loss_tokens"], rows)
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_a_reference_with_a_model_of_its_own_lies_on_the_ranks_and_leaves_them(
    make_recipe: Any, console: Console, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller loads no model; the reference is gone once its logprobs are there."""
    sections = {
        "model": {"path": models(1), "init": None},
        "reference": {"model": {"path": models(2)}},
        "data": {"max_len": 64, "cache": False},
    }
    alone = make_recipe("preference", "alone", steps=STEPS, learner=LEARNER, **sections)
    train(alone, console)
    several = make_recipe("preference", "several", **on_ranks(2, "zero3"), **sections)
    held: list[Any] = []
    call = RankGroup.call

    def watched(group: RankGroup, method: str, *arguments: Any) -> Any:
        handle = call(group, method, *arguments)
        if method == "release":
            handle.result()
            nothing = ray.put(())  # no arguments
            held.extend(ray.get([actor.call.remote("held", nothing) for actor in group._actors]))
        return handle

    def refuse(path: str, **_: Any) -> Any:
        raise AssertionError(f"the controller loads {path}")

    monkeypatch.setattr(RankGroup, "call", watched)
    monkeypatch.setattr(ranked, "RANK", "telling_rank:Telling")
    monkeypatch.setattr(loading, "load_model", refuse)
    train(several, console)
    assert held == [(["policy"], 1)] * 2
    assert apart(weights(alone), weights(several)) < 1e-4
    lines_alone, lines_on_ranks = (
        [json.loads(line) for line in (Path(each.run_dir) / "metrics.jsonl").open()]
        for each in (alone, several)
    )
    for a, b in zip(lines_alone, lines_on_ranks, strict=True):
        assert b["policy/loss"] == pytest.approx(a["policy/loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "ranks", "sharding"),
    [
        pytest.param(GRPO, 2, "none", id="grpo", marks=pytest.mark.long),
        pytest.param(PPO, 4, "zero2", id="ppo on four", marks=pytest.mark.long),
        pytest.param(GRPO, 4, "zero2", id="grpo on four", marks=pytest.mark.long),
        pytest.param(PPO, 2, "none", id="ppo on two", marks=pytest.mark.long),
    ],
)
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
    "numbers",
    [
        (("1", "none", "local"), ("2", "zero1", "ray")),
        pytest.param((("4", "zero3", "ray"),), marks=pytest.mark.long),
    ],
    ids=["others", "the same"],
)
def test_what_four_ranks_saved_goes_on_with_another_number(
    numbers: Sequence[tuple[str, str, str]], make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    """Two of the four share each matrix; those that go on share none."""
    same = {"checkpoint": {"save_steps": 4, "max_ckpt_num": 9}, "model": TENSOR}
    alone = make_recipe("sft", "alone", steps=8, learner=LEARNER, **same)
    on_four = {**on_ranks(4, "zero3", tensor_parallel=2), "steps": 4}
    saved = make_recipe("sft", "saved", **on_four, **same)
    train(alone, console)
    train(saved, console)
    folder = Path(saved.run_dir)
    assert all(checked["good"] for checked in verify(folder, console))
    export(folder, "4", tmp_path / "exported")
    assert (tmp_path / "exported" / "config.json").exists()
    for ranks, sharding, cluster in numbers:
        copy = shutil.copytree(folder, tmp_path / f"goes on with {ranks}")
        flags = [
            "--steps", "8", "--learner.ranks", ranks, "--learner.sharding", sharding,
            "--learner.tensor_parallel", "1", "--cluster.type", cluster,
        ]  # fmt: skip
        resume(copy, flags, [], console)
        assert apart(weights(alone, 8), weights_in(copy, 8)) < 1e-4


TENSOR = {  # two key heads, so that two ranks can have one each
    "init": {
        "type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tokenizer": {
            "kind": "characters",
            "phrases": ["Spell this word backward (example: sun -> nus): "],
        },
    },
}


@pytest.mark.parametrize(
    ("job", "changes"),
    [
        pytest.param("reward", {}, id="reward", marks=pytest.mark.long),
        pytest.param("rl", PPO, id="ppo"),
        pytest.param("sft", {}, id="sft", marks=pytest.mark.long),
        pytest.param("rl", GRPO, id="grpo", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("ranks", "sharding"), [(4, "zero2"), pytest.param(2, "none", marks=pytest.mark.long)]
)
def test_ranks_that_share_matrices_give_the_weights_of_one_process(
    make_recipe: Any,
    console: Console,
    job: str,
    changes: dict[str, Any],
    ranks: int,
    sharding: str,
) -> None:
    changes = {**changes, "model": TENSOR}
    if job == "rl":
        train(make_recipe("rl", "live", steps=STEPS, **changes), console)
        replay = {"source": "replay", "replay_path": make_recipe("rl", "live").run_dir}
        changes["rollout"] = replay
    alone = make_recipe(job, "alone", steps=STEPS, learner=LEARNER, **changes)
    train(alone, console)
    on = on_ranks(ranks, sharding, tensor_parallel=2)
    several = make_recipe(job, "several", **on, **changes)
    train(several, console)
    assert apart(weights(alone), weights(several)) < 1e-4


@pytest.mark.long
def test_a_run_goes_on_with_other_ranks_sharing_its_matrices(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    """On 4 ranks, two to a matrix; on 2 that share none; on 4 in two groups; in one process."""
    same: dict[str, Any] = {"checkpoint": {"save_steps": 2, "max_ckpt_num": 9}, "model": TENSOR}
    alone = make_recipe("sft", "alone", steps=8, learner=LEARNER, **same)
    train(alone, console)
    first = {**on_ranks(4, "zero3", tensor_parallel=2), "steps": 2}
    saved = make_recipe("sft", "saved", **first, **same)
    train(saved, console)
    folder = Path(saved.run_dir)
    for steps, ranks, sharding, tensor, groups, offload in (
        ("4", "2", "zero1", "1", "1", "true"),
        ("6", "4", "zero2", "2", "2", "false"),
        ("8", "1", "none", "1", "1", "false"),
    ):
        flags = [
            "--steps", steps, "--learner.ranks", ranks, "--learner.sharding", sharding,
            "--learner.tensor_parallel", tensor, "--learner.shard_groups", groups,
            "--learner.offload", offload, "--cluster.type", "local" if ranks == "1" else "ray",
        ]  # fmt: skip
        export(folder, "latest", tmp_path / f"before {steps}")
        resume(folder, flags, [], console)
    assert apart(weights(alone, 8), weights(saved, 8)) < 1e-4
    assert all(checked["good"] for checked in verify(folder, console))
    assert apart(exported(tmp_path / "before 4"), exported(tmp_path / "before 6")) > 0.0


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_model_that_cannot_be_cut_is_refused_before_its_weights_are_read(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("sft", "refused", **on_ranks(2, "none", tensor_parallel=2))
    with pytest.raises(UsageError, match=r"tensor_parallel = 2: 1 key heads .* what works: 1"):
        train(recipe, console)


def test_roles_on_ranks_of_their_own_give_the_weights_of_one_process_and_resume_anywhere(
    make_recipe: Any, console: Console
) -> None:
    """The critic on one rank, the reference on another, the policy on a third; then all on one."""
    changes: dict[str, Any] = {**PPO, "learner": LEARNER, "checkpoint": {"save_steps": 2}}
    train(make_recipe("rl", "live", steps=4, **changes), console)
    replay = {"source": "replay", "replay_path": make_recipe("rl", "live").run_dir}
    alone = make_recipe("rl", "alone", steps=4, rollout=replay, **changes)
    train(alone, console)
    places = {"critic": {"ranks": 1}, "reference": {"ranks": 1}}
    apart_at_first = make_recipe(
        "rl", "apart", steps=2, rollout=replay, **changes, cluster={**CLUSTER, **places}
    )
    train(apart_at_first, console)
    folder = Path(apart_at_first.run_dir)
    events = [json.loads(line) for line in (folder / "events.jsonl").open()]
    placed = {
        placed["role"]: placed["places"][0][1] for placed in events if placed["event"] == "placed"
    }
    assert placed.keys() == {"policy", "critic", "reference"}
    assert len(set(placed.values())) == 3
    assert apart(weights(alone, 2), weights_in(folder, 2)) < 1e-4
    train(make_recipe("rl", "apart", steps=4, rollout=replay, **changes), console)  # goes on
    assert apart(weights(alone, 4), weights_in(folder, 4)) < 1e-4


@pytest.mark.parametrize(
    ("ranks", "sharding", "tensor"),
    [
        pytest.param(2, "zero3", 1, id="zero3", marks=pytest.mark.long),
        pytest.param(4, "zero2", 2, id="tensor", marks=pytest.mark.long),
    ],
)
def test_a_student_beside_its_teacher_on_ranks_has_the_weights_of_one_process(
    make_recipe: Any, console: Console, models: Any, ranks: int, sharding: str, tensor: int
) -> None:
    """The teacher's matrices are cut, or its weights divided, as the student's are."""
    make = models if tensor == 1 else None
    model = {"path": make(1), "init": None} if make else TENSOR
    changes: dict[str, Any] = {
        "model": model,
        "algorithm": {"type": "distillation", "divergence": "jsd", "nll_coef": 0.2},
    }
    if make is None:
        train(make_recipe("sft", "first", steps=1, model=TENSOR), console)
        teacher = str(Path(make_recipe("sft", "first").run_dir) / "init")
        changes["seed"] = 1
    else:
        teacher = make(2)
    changes["teacher"] = {"model": {"path": teacher}}
    alone = make_recipe("sft", "alone", steps=STEPS, learner=LEARNER, **changes)
    several = make_recipe(
        "sft", "several", **on_ranks(ranks, sharding, tensor_parallel=tensor), **changes
    )
    train(alone, console)
    train(several, console)
    assert apart(weights(alone), weights(several)) < 1e-4


def test_a_student_on_ranks_answers_and_learns_as_one_process_does(
    make_recipe: Any, console: Console, models: Any
) -> None:
    changes: dict[str, Any] = {
        "model": {"path": models(1), "init": None},
        "teacher": {"model": {"path": models(2)}},
        "algorithm": {"type": "distillation", "divergence": "jsd", "on_policy": 0.5},
        "rollout": {"max_new_tokens": 6},
        "eval": {"at_start": False, "at_end": False},
    }
    alone = make_recipe("sft", "alone", steps=4, learner=LEARNER, **changes)
    several = make_recipe("sft", "several", **on_ranks(2, "zero3") | {"steps": 4}, **changes)
    train(alone, console)
    train(several, console)
    assert apart(weights(alone, 4), weights(several, 4)) < 1e-4
    lines_alone, lines_on_ranks = (
        lines(Path(each.run_dir) / "metrics.jsonl") for each in (alone, several)
    )
    for name in ("on_policy/samples", "on_policy/mean_tokens", "loss_tokens"):
        assert [step.get(name) for step in lines_on_ranks] == [
            step.get(name) for step in lines_alone
        ]
    assert any("on_policy/samples" in step for step in lines_alone)


def test_the_same_layout_gives_the_same_bits(make_recipe: Any, console: Console) -> None:
    changes = {**on_ranks(2, "zero3"), "steps": 3}
    first_run, second_run = (make_recipe("rl", name, **changes) for name in ("one", "two"))
    train(first_run, console)
    train(second_run, console)
    first, second = weights(first_run, 3), weights(second_run, 3)
    assert all(torch.equal(first[name], second[name]) for name in first)
    samples = [
        (Path(first_run.run_dir) / "samples.jsonl"),
        (Path(second_run.run_dir) / "samples.jsonl"),
    ]
    turns_by_run = [[json.loads(line)["turns"] for line in path.open()] for path in samples]
    assert turns_by_run[0] == turns_by_run[1]
