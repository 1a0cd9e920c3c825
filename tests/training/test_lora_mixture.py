"""Adapters on experts and routers in runs: engine, replay, balance loss, kills and export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.model_types import make_model
from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import MakeRecipe
from postgrad.models.load import load_model
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.tools.export import export
from postgrad.training.rl import RLJob
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "experts", "router"]}
KL = {"algorithm": {"type": "grpo", "kl_coef": 0.05}}
REPLAY = {"rollout": {"max_new_tokens": 6, "router_replay": "sampled"}, "eval": {"every": 0}}
Start = Callable[..., dict[str, Any]]


@pytest.fixture
def model(models: Any, tmp_path: Path) -> Start:
    """[model] of a small Qwen3-MoE with an adapter on experts and routers."""
    vocabulary = len(load_tokenizer(models(0)))
    mixture = make_model("qwen3_moe", Path(models(0)), vocabulary, tmp_path / "mixture")

    def table(**more: Any) -> dict[str, Any]:
        return {"path": str(mixture), "init": None, "lora": LORA, **more}

    return table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "kind", "changes"),
    [("sft", SFTJob, {}), ("rl", RLJob, {**KL, **REPLAY})],
    ids=["sft", "grpo with a reference and router replay"],
)
def test_a_killed_run_ends_with_the_same_bits(
    job: str, kind: type, changes: dict[str, Any], make_recipe: MakeRecipe, console: Console,
    model: Start, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    table = model(router_aux_loss_coef=0.1, router_z_loss_coef=0.01)
    more: dict[str, Any] = {**changes, "checkpoint": {"save_steps": 1}}
    uninterrupted = make_recipe(job, "whole", model=table, **more)
    killed = make_recipe(job, "killed", model=table, **more)
    train(uninterrupted, console)
    train_until_killed(monkeypatch, kind, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)


@pytest.mark.slow
def test_the_engine_samples_with_merged_experts_and_the_export_gives_their_logits(
    make_recipe: MakeRecipe, console: Console, model: Start, tmp_path: Path
) -> None:
    learner = {"lr": 0.05, "threads": 1}
    recipe = make_recipe("rl", model=model(), steps=2, learner=learner, **KL, **REPLAY)
    train(recipe, console)
    published = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert all(line["sentinel/publish_difference"] < 1e-4 for line in published)
    assert any(line["sentinel/policy_moved"] > 1e-3 for line in published)
    export(Path(recipe.run_dir), "latest", tmp_path / "merged")
    export(Path(recipe.run_dir), "latest", tmp_path / "adapter", adapter=True)
    ids = torch.tensor([[5, 17, 40, 8, 66, 23]])
    logits: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "merged", tmp_path / "adapter", Path(model()["path"])):
        lm: Any = load_model(str(path), dtype=torch.float32).lm
        lm.set_attn_implementation("eager")
        logits[path.name] = lm(ids).logits.detach()
    torch.testing.assert_close(logits["merged"], logits["adapter"], rtol=1e-5, atol=1e-5)
    assert (logits["merged"] - logits["mixture"]).abs().max() > 1e-3
    moved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    names = [name for name, tensor in moved.items() if ".lora_B" in name and tensor.any()]
    changed = {name.split(".mlp.")[1] for name in names if ".mlp." in name}
    assert changed == {
        "experts.base_layer.lora_B.weight", "experts.lora_B.weight", "gate.lora_B.weight",
    }  # fmt: skip
