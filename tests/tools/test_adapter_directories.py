"""An adapter that a run has written: talked to, evaluated, merged, gone on from, served."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.runs import assert_same_run, lines, train_until_killed
from postgrad.cli.main import main
from postgrad.core.errors import RunError, UsageError
from postgrad.models.load import load_model
from postgrad.observe.console import Console
from postgrad.tools.chat.loaded import load
from postgrad.tools.evaluate import evaluate
from postgrad.tools.export import export
from postgrad.tools.serve.batcher import load_reward_model
from postgrad.training.pairs import PreferenceJob
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

LORA = {"rank": 2, "alpha": 4}
SAVING = {"save_steps": 1, "max_ckpt_num": 5}


@pytest.fixture
def adapter(make_recipe: Any, console: Console, tmp_path: Path, models: Any) -> Path:
    """Of an SFT run of two steps, on a base of the test's own."""
    base = shutil.copytree(models(0), tmp_path / "base")
    model = {"path": str(base), "init": None, "lora": LORA}
    recipe = make_recipe("sft", "first", model=model, steps=2)
    train(recipe, console)
    export(Path(recipe.run_dir), "latest", tmp_path / "merged")
    return export(Path(recipe.run_dir), "latest", tmp_path / "adapter", adapter=True)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(str(path), dtype=torch.float32).lm.named_parameters())


@pytest.mark.slow
@pytest.mark.long
def test_chat_eval_and_export_take_it_as_they_take_the_merged_model(
    adapter: Path, make_recipe: Any, console: Console, tmp_path: Path, models: Callable[[int], str]
) -> None:
    merged = tmp_path / "merged"
    ours, theirs = weights(adapter), weights(merged)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-6)
    base = weights(Path(models(0)))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (ours[name] - base[name]).abs().max() > 1e-3
    ids = [load(str(merged), None, "float32", 64).tokenizer("abc")["input_ids"]]
    logprobs_of_both = [
        load(str(path), None, "float32", 64).engine.logprobs(ids, 1.0)[0]
        for path in (adapter, merged)
    ]
    np.testing.assert_allclose(*logprobs_of_both, atol=1e-5)
    recipe = make_recipe("sft")
    results = [evaluate(recipe, str(path), console) for path in (adapter, merged)]
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert main(["export", str(adapter), "--to", str(tmp_path / "again")]) == 0
    again = weights(tmp_path / "again")
    assert all(torch.equal(again[name], weight) for name, weight in ours.items())
    assert not (tmp_path / "again" / "adapter_config.json").exists()
    for more in (["--role", "policy"], ["--checkpoint", "3"], ["--adapter"]):
        assert main(["export", str(adapter), "--to", str(tmp_path / "no"), *more]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA])
def test_training_goes_on_from_the_merged_weights(
    lora: Any, adapter: Path, make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    """Whole or under a fresh adapter, to what a run from the merged model comes to."""
    exported: list[dict[str, torch.Tensor]] = []
    for path in (adapter, tmp_path / "merged"):
        model = {"path": str(path), "init": None, "lora": lora}
        recipe = make_recipe("sft", f"from-{path.name}", model=model, steps=2)
        train(recipe, console)
        exported.append(
            weights(export(Path(recipe.run_dir), "latest", tmp_path / f"to-{path.name}"))
        )
    for name, weight in exported[0].items():
        torch.testing.assert_close(weight, exported[1][name], atol=2e-3, rtol=1e-3)
    if lora is not None:
        with pytest.raises(UsageError, match="an adapter alone would need a base that no file has"):
            export(tmp_path / "from-adapter", "latest", tmp_path / "no", adapter=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "kind", "lora"), [("sft", SFTJob, None), ("preference", PreferenceJob, LORA)]
)
def test_a_killed_run_ends_with_the_same_bits(
    job: str,
    kind: type,
    lora: Any,
    adapter: Path,
    make_recipe: Any,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = {"path": str(adapter), "init": None, "lora": lora}
    recipes = [make_recipe(job, run, model=model, checkpoint=SAVING) for run in ("whole", "killed")]
    train(recipes[0], console)
    train_until_killed(monkeypatch, kind, 2, recipes[1], console)
    resume(Path(recipes[1].run_dir), [], [], console)
    assert_same_run(*recipes, 3)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.long
def test_the_reference_is_the_merged_start(
    lora: Any, adapter: Path, make_recipe: Any, console: Console
) -> None:
    """At the first step of DPO nothing has moved away from it; in RL the engine samples from it."""
    model = {"path": str(adapter), "init": None, "lora": lora}
    recipe = make_recipe("preference", "dpo", model=model, steps=1)
    train(recipe, console)
    (line,) = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert line["policy/loss"] == pytest.approx(np.log(2), rel=1e-6)
    algorithm = {"type": "grpo", "kl_coef": 0.05}
    recipe = make_recipe("rl", "grpo", model=model, algorithm=algorithm, steps=1)
    train(recipe, console)
    (line,) = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert line["sentinel/publish_difference"] < 1e-4


def add_one(file: Path) -> None:
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["adapter/adapter_model.safetensors", "base/model.safetensors"])
@pytest.mark.long
def test_a_resume_is_refused_where_adapter_or_base_changed_under_a_new_adapter(
    changed: str, adapter: Path, make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    model = {"path": str(adapter), "init": None, "lora": LORA}
    recipe = make_recipe("sft", model=model, steps=1)
    train(recipe, console)
    add_one(tmp_path / changed)
    with pytest.raises(RunError, match=r"\(policy\) is not the one"):
        resume(Path(recipe.run_dir), ["--steps", "2"], [], console)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["adapter/adapter_config.json", "base/config.json"])
@pytest.mark.long
def test_a_resume_of_a_whole_model_is_refused_where_a_config_changed(
    changed: str, adapter: Path, make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    model = {"path": str(adapter), "init": None, "lora": None}
    recipe = make_recipe("sft", model=model, steps=1)
    train(recipe, console)
    text = (tmp_path / changed).read_text("utf-8")
    (tmp_path / changed).write_text(json.dumps(json.loads(text), indent=7), "utf-8")
    with pytest.raises(UsageError, match=r"adapter \(an adapter on .*\) has changed since the run"):
        resume(Path(recipe.run_dir), ["--steps", "2"], [], console)


@pytest.mark.slow
@pytest.mark.long
def test_a_plan_and_a_dry_run_look_at_adapter_and_base(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'job = "sft"\nsteps = 1\nrun_dir = "{tmp_path}/planned"\n[model]\npath = "{adapter}"\n'
        '[data]\npath = "reasoning-gym:spell_backward"\nsize = 20\nmax_len = 48\n'
        "task = {min_word_len = 3, max_word_len = 4}\n"
        "[batch]\ntrain_batch_size = 4\n[learner]\nthreads = 1\n",
        "utf-8",
    )
    assert main(["plan", str(recipe)]) == 0
    assert main(["train", str(recipe), "--dry-run"]) == 0
    assert "an adapter merged into" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "base").rename(tmp_path / "moved")
    for command in (["plan"], ["train"]):
        assert main([*command, str(recipe)]) == 2
        stderr = " ".join(capsys.readouterr().err.split())
        assert f"base_model_name_or_path is {tmp_path}/base, and no model is there" in stderr


@pytest.mark.slow
def test_vllm_is_not_given_an_adapter(adapter: Path, make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("rl", model={"path": str(adapter), "init": None})
    rollout = recipe.rollout.model_copy(update={"type": "vllm"})
    recipe = recipe.model_copy(update={"rollout": rollout})
    with pytest.raises(UsageError, match='vllm" reads whole models'):
        train(recipe, console)
    with pytest.raises(UsageError, match='vllm" reads whole models'):
        evaluate(recipe, str(adapter), console)


@pytest.mark.slow
def test_a_reward_model_s_adapter_is_served(
    make_recipe: Any, console: Console, tmp_path: Path, models: Any
) -> None:
    model = {"path": models(0), "init": None, "lora": LORA}
    recipe = make_recipe("reward", model=model, steps=2)
    train(recipe, console)
    merged = export(Path(recipe.run_dir), "latest", tmp_path / "merged")
    adapter = export(Path(recipe.run_dir), "latest", tmp_path / "adapter", adapter=True)
    sequences = [np.array(ids, np.int32) for ids in ([5, 6, 7], [9, 8])]
    alone, merged_model = (load_reward_model(path, "float32", 64) for path in (adapter, merged))
    np.testing.assert_allclose(alone.score(sequences), merged_model.score(sequences), atol=1e-5)
    assert alone.hash != merged_model.hash
    assert merged_model.mean is not None
    assert alone.mean is None  # the scale is not in an adapter's files
