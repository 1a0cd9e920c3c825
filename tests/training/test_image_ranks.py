"""Runs on images on two ranks behind Ray: the weights of one process."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.image_directories import models, row, vision_pair
from helpers.rank_cases import distance
from helpers.runs import lines, timeless
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.fleet.shared import SharedEngine
from postgrad.models.images import image_part
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.training.start import resume, train

pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
__all__ = ["models"]

CLUSTER = {"type": "ray", "start_seconds": 600.0}
BATCH = 4
SHARED = {"expert_parallel", "tensor_parallel", "context_parallel"}
DIVIDED: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"sharding": "zero2"},
    "qwen3_5_moe": {"sharding": "zero3", "expert_parallel": 2},
    "qwen3_vl_moe": {"sharding": "zero3", "expert_parallel": 2, "tensor_parallel": 2},
    "gemma3": {"context_parallel": 2},
}
FOUR_BITS = {"quantize": "4bit", "lora": {"rank": 4, "alpha": 8}}  # whole on every rank


@pytest.mark.parametrize(
    ("kind", "divided", "model"),
    [*((kind, divided, {}) for kind, divided in DIVIDED.items()), ("qwen3_5", {}, FOUR_BITS)],
)
def test_two_ranks_have_the_weights_of_one_process(
    kind: str,
    divided: dict[str, Any],
    model: dict[str, Any],
    tmp_path: Path,
    models: Callable[[str], str],
) -> None:
    """Preferences with a reference; of the rows two have no image. After two steps one process goes
    on from what the ranks have saved.
    """
    text = {"prompt": "Ready?", "chosen": "yes", "rejected": "no"}
    rows = [*map(vision_pair, (1, 2)), text, {**text, "prompt": "Once more?"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))

    def exported(name: str, **learner: Any) -> dict[str, Any]:
        raw = {
            "job": "preference",
            "run_dir": str(tmp_path / name),
            "steps": 3,
            "model": {"path": models(kind), "dtype": "float32", **model},
            "data": {"path": str(tmp_path / "rows.jsonl"), "max_len": 200, "cache": False},
            "batch": {"train_batch_size": len(rows)},
            "learner": {"lr": 1e-2, "eps": 1e-6, "threads": 1, **learner},
            "checkpoint": {"save_steps": 2, "save_hf": True},
            "cluster": CLUSTER if learner else {},
        }
        recipe = parse_recipe(raw)
        if not learner:
            train(recipe, Console())
        else:
            train(recipe.model_copy(update={"steps": 2}), Console())
            alone = {"ranks": 1, "sharding": "none"} | dict.fromkeys(SHARED & learner.keys(), 1)
            flags = [f"--learner.{key}={value}" for key, value in alone.items()]
            resume(tmp_path / name, ["--steps=3", "--cluster.type=local", *flags], (), Console())
        return load_file(tmp_path / name / "model" / "model.safetensors")

    alone, ranked = exported("alone"), exported("ranked", ranks=2, **divided)
    assert distance("", ranked, alone) < 1e-4
    start = load_file(Path(models(kind)) / "model.safetensors")
    both = ranked, start
    towers = ({n: t for n, t in model.items() if image_part(f".{n}")} for model in both)
    learned = distance("", *towers)
    assert learned == 0.0 if model else learned > 1e-2


@pytest.fixture
def reinforced(tmp_path: Path, models: Callable[[str], str]) -> Callable[..., Path]:
    """reinforced(name, ranked, steps, ...): runs RL with a critic and a reference; its directory.
    ranked: on two ranks, with two rollout workers. More are sections of the recipe.
    """
    shown = [{**row(n, "yes", ((16, 16), (24, 16))[: 1 + n % 2]), "answer": "yes"} for n in (1, 2)]
    text = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [*shown, {"messages": text, "answer": "ho"}, {**row(3, "no"), "answer": "no"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    held_out = {**row(9, "no"), "answer": "no"}
    (tmp_path / "held_out.jsonl").write_text(f"{json.dumps(held_out)}\n")

    def run(name: str, *, ranked: bool, steps: int = 2, **sections: Any) -> Path:
        table = {"lr": 1e-2, "eps": 1e-6}
        ranks = {"ranks": 2, "sharding": "zero2"} if ranked else {}
        raw = {
            "job": "rl",
            "run_dir": str(tmp_path / name),
            "steps": steps,
            "model": {"path": models("qwen2_5_vl"), "dtype": "float32"},
            "data": {"path": str(tmp_path / "rows.jsonl"), "messages": "messages", "max_len": 200},
            "eval": {"path": str(tmp_path / "held_out.jsonl"), "at_start": True},
            "algorithm": {"type": "ppo", "kl_coef": 0.1},
            "critic": {"learner": table},
            "rewards": [{"type": "tiny_rewards:looks"}],
            "scoring": {"workers": 1},
            "batch": {"rollout_batch_size": BATCH, "n_samples_per_prompt": 2},
            "rollout": {"max_new_tokens": 4},
            "learner": {**table, "threads": 1, **ranks},
            "checkpoint": {"save_steps": 1},
            "cluster": {**CLUSTER, "rollout": {"workers": 2}} if ranked else {},
        }
        train(parse_recipe(raw | sections), Console())
        return tmp_path / name

    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of all roles after the second step, of whatever parts."""
    checkpoint = CheckpointStore(run / "checkpoints", CheckpointSettings()).load(2)
    return {
        f"{stem}/{name}": tensor
        for stem in checkpoint.stems
        if stem.endswith(".weights")
        for name, tensor in checkpoint.tensors(stem).items()
    }


@pytest.mark.long
def test_rollout_workers_sample_from_four_bits_expanded_and_merged(
    reinforced: Callable[..., Path], models: Callable[[str], str]
) -> None:
    """What ranks and workers compute with are the same matrices: samples have the policy's
    logprobs.
    """
    model = {"path": models("qwen2_5_vl"), "dtype": "float32", **FOUR_BITS}
    learner = {"lr": 1e-2, "eps": 1e-6, "threads": 1, "ranks": 2}
    run = reinforced("run", ranked=True, model=model, learner=learner)
    for line in lines(run / "metrics.jsonl"):
        assert line["sentinel/publish_difference"] < 1e-5
        assert line["sentinel/prob_difference"] < 1e-5


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_rollout_workers_sample_from_images_and_one_that_is_killed_changes_no_bit(
    reinforced: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """resumed: the worker is killed after a resume."""
    alone, ranked_run = (reinforced(name, ranked=name == "whole") for name in ("alone", "whole"))
    first, second = map(weights, (alone, ranked_run))
    assert distance("", second, first) < 1e-4
    tokens = [
        [[turn["token_ids"] for turn in line["turns"]] for line in lines(folder / "samples.jsonl")]
        for folder in (alone, ranked_run)
    ]
    assert tokens[0] == tokens[1]

    submit = SharedEngine.submit
    killed: list[int] = []

    def kill_once(self: Any, request: Any) -> None:
        submit(self, request)
        if not killed and request.images and request.ticket >= BATCH:  # in the second step
            workers = self._members[request.ticket % 2].workers
            killed.append(workers.places[0][1])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(SharedEngine, "submit", kill_once)
    lossy = reinforced("lossy", ranked=True, steps=1 if resumed else 2)
    if resumed:
        resume(lossy, ["--steps", "2"], (), Console())
    events = lines(lossy / "events.jsonl")
    assert [event["event"] for event in events].count("engine_lost") == len(killed) == 1
    assert "restarted" not in {event["event"] for event in events}
    again = weights(lossy)
    assert all(torch.equal(second[name], again[name]) for name in second)
    assert timeless(ranked_run / "samples.jsonl") == timeless(lossy / "samples.jsonl")


def test_workers_and_ranks_read_the_images_of_replies(
    reinforced: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    sections: dict[str, Any] = {
        "environment": {"type": "showing:Showing", "max_turns": 3},
        "rollout": {"max_new_tokens": 20, "stop": [*ascii_letters]},
        "data": {"path": str(tmp_path / "rows.jsonl"), "messages": "messages", "max_len": 400},
    }
    alone, ranked_run = (
        reinforced(name, ranked=name == "whole", **sections) for name in ("alone", "whole")
    )
    first, second = map(weights, (alone, ranked_run))
    assert distance("", second, first) < 1e-4
    sampled_tokens = [
        [[turn["token_ids"] for turn in line["turns"]] for line in lines(folder / "samples.jsonl")]
        for folder in (alone, ranked_run)
    ]
    assert sampled_tokens[0] == sampled_tokens[1]
    assert any(
        turn.get("images") for s in lines(ranked_run / "samples.jsonl") for turn in s["turns"]
    )
