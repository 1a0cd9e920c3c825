"""Adapters on models that read images whose decoder is held in four bits: whole runs of every job,
on rows with images and on text alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.image_directories import models, row, vision_pair
from helpers.image_models import IMAGE_MODELS
from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from postgrad.core.errors import UsageError
from postgrad.models.adapter_files import merged_state
from postgrad.models.four_bits import FourBitLinear
from postgrad.models.images import image_part
from postgrad.models.load import load_model
from postgrad.models.settings import LoraSettings
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.tools.evaluate import evaluate
from postgrad.tools.export import export
from postgrad.training.rl import RLJob
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

__all__ = ["models"]

Make = Callable[..., Recipe]
LORA = {"rank": 4, "alpha": 8}
TEXT = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    "answer": "ho",
}
DENSE = [kind for kind in IMAGE_MODELS if not kind.endswith("_moe")]
FIRST = ("qwen3_5", "gemma3")
KINDS = [
    pytest.param(kind, marks=[pytest.mark.slow, *([] if kind in FIRST else [pytest.mark.long])])
    for kind in DENSE
]


def asked(seed: int, images: int = 1) -> dict[str, Any]:
    sizes = ((40, 16), (16, 24))[:images] if images > 1 else ((16, 16),)
    return {**row(seed, "yes", sizes), "answer": "yes"}


SFT = {"job": "sft", "batch": {"train_batch_size": 4}}
GRPO: dict[str, Any] = {
    "job": "rl",
    "rewards": [{"type": "tiny_rewards:looks"}],
    "algorithm": {"type": "grpo", "kl_coef": 0.1},
    "batch": {"rollout_batch_size": 3, "n_samples_per_prompt": 2, "train_batch_size": 3},
    "rollout": {"max_new_tokens": 4},
    "scoring": {"workers": 1},
}


@pytest.fixture
def make(tmp_path: Path, models: Callable[[str], str]) -> Make:
    """A recipe of three steps on rows with one image, with two, and with none."""

    def recipe(
        kind: str, name: str = "run", rows: Any = None, held_out: Any = None, **changes: Any
    ) -> Recipe:
        several = 1 if kind == "llava_onevision" else 2  # of whose images rows have one
        images = [asked(n, several if n % 3 == 0 else 1) for n in range(5)]
        data, held = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
        data.write_text("".join(f"{json.dumps(each)}\n" for each in rows or [*images, TEXT]))
        held.write_text(f"{json.dumps(held_out or asked(50))}\n")
        of_rl = {"messages": "messages"} if changes.get("job") == "rl" else {}
        model = {"quantize": "4bit", "lora": LORA, **changes.pop("model", {})}
        return parse_recipe(
            {
                "run_dir": str(tmp_path / name),
                "steps": 3,
                "model": {"path": models(kind), "dtype": "float32", **model},
                "data": {"path": str(data), "max_len": 200, **of_rl},
                "eval": {"path": str(held)},
                "learner": {"lr": 3e-2, "threads": 1},
                "checkpoint": {"save_steps": 1, "save_hf": True},
                **changes,
            }
        )

    return recipe


def packed(path: str) -> dict[str, torch.Tensor]:
    """What the matrices in four bits read as, by name."""
    lm = load_model(path, dtype=torch.float32, quantize="4bit", images=True).lm
    return {
        f"{name}.weight": module.expanded(torch.float32)
        for name, module in lm.named_modules()
        if isinstance(module, FourBitLinear)
    }


def loaded(path: Path | str) -> dict[str, torch.Tensor]:
    lm = load_model(str(path), dtype=torch.float32, images=True).lm
    return {name: weight.detach() for name, weight in lm.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_sft_learns_and_exports_the_four_bits_with_its_adapter(
    kind: str, make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    recipe = make(kind, **SFT, steps=4)
    train(recipe, Console())
    run = tmp_path / "run"
    losses = [line["policy/loss"] for line in lines(run / "metrics.jsonl")]
    assert min(losses[1:]) < losses[0]
    learned = {
        name.partition("/")[2]: tensor
        for name, tensor in tensors(str(run), 4).items()
        if name.startswith("policy.weights/")
    }
    assert learned
    assert not any(image_part(name) for name in learned)  # an adapter on the language part
    base, written, matrices = loaded(models(kind)), loaded(run / "model"), packed(models(kind))
    assert base.keys() == written.keys()
    scale = LORA["alpha"] / LORA["rank"]
    for name, tensor in written.items():
        if name not in matrices:  # the tower, the projector, embeddings, norms, the head
            assert torch.equal(tensor, base[name]), name
            continue
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        change = learned[f"{layer}.lora_B.weight"] @ learned[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(tensor, matrices[name] + scale * change, rtol=0, atol=1e-5)
    (report,) = evaluate(recipe, str(run), Console())["sets"]
    assert report["loss"] == pytest.approx(lines(run / "eval.jsonl")[-1]["loss"], rel=1e-5)
    export(run, "latest", tmp_path / "adapter", adapter=True)
    alone = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, learned[name]) for name, tensor in alone.items())
    assert alone.keys() == learned.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "job", "kind"),
    [
        pytest.param(SFT, SFTJob, "qwen3_5", id="sft-qwen3_5"),
        pytest.param(GRPO, RLJob, "gemma3", id="grpo-gemma3"),
        pytest.param(SFT, SFTJob, "gemma3", id="sft-gemma3", marks=pytest.mark.long),
        pytest.param(GRPO, RLJob, "qwen3_5", id="grpo-qwen3_5", marks=pytest.mark.long),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(
    kind: str, recipe: dict[str, Any], job: type, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted, killed = (make(kind, name, **recipe) for name in ("whole", "killed"))
    train(uninterrupted, Console())
    train_until_killed(monkeypatch, job, 2, killed, Console())
    resume(Path(killed.run_dir), [], [], Console())
    assert_same_run(uninterrupted, killed, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_grpo_samples_from_the_same_four_bits(kind: str, make: Make, tmp_path: Path) -> None:
    recipe = make(kind, **GRPO)
    train(recipe, Console())
    run = tmp_path / "run"
    for line in lines(run / "metrics.jsonl"):  # engine and learner see the same
        assert line["sentinel/publish_difference"] < 2e-5
        assert line["sentinel/prob_difference"] < 2e-5
    samples = lines(run / "samples.jsonl")
    assert any(sample.get("images") for sample in samples)
    assert any(not sample.get("images") for sample in samples)
    report = evaluate(recipe, str(run), Console())  # the newest checkpoint
    assert (report["rows"], report["failed"]) == (1, 0)


@pytest.mark.parametrize(
    "recipe", [SFT, pytest.param(GRPO, marks=pytest.mark.slow)], ids=["sft", "grpo"]
)
def test_qwen3_5_learns_from_text_alone(
    recipe: dict[str, Any], make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    rows = [
        {**TEXT, "messages": [{"role": "user", "content": f"hi {n}"}, TEXT["messages"][1]]}
        for n in range(6)
    ]
    train(make("qwen3_5", rows=rows, held_out=TEXT, **recipe), Console())
    run = tmp_path / "run"
    metrics = lines(run / "metrics.jsonl")
    if recipe is SFT:
        assert metrics[-1]["policy/loss"] < metrics[0]["policy/loss"]
    for line in metrics if recipe is GRPO else ():
        assert line["sentinel/publish_difference"] < 2e-5
        assert line["sentinel/prob_difference"] < 2e-5
    base, written = loaded(models("qwen3_5")), loaded(run / "model")
    towers = [name for name in base if image_part(f".{name}")]
    assert len(towers) > 20
    assert all(torch.equal(base[name], written[name]) for name in towers)
    images = run / "images"
    assert not images.exists() or not [*images.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("gemma3", marks=pytest.mark.long)])
def test_dpo_and_reward_models_learn_from_pairs_with_images(
    kind: str, make: Make, tmp_path: Path
) -> None:
    rows = [vision_pair(n) for n in range(4)]
    pairs = {"rows": rows, "held_out": vision_pair(50), "batch": {"train_batch_size": 4}}
    train(make(kind, "dpo", job="preference", **pairs), Console())
    first, *_, last = lines(tmp_path / "dpo" / "metrics.jsonl")
    # policy and reference are the same four bits
    assert first["policy/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert last["policy/loss"] < first["policy/loss"]
    recipe = make(kind, "reward", job="reward", **pairs)
    train(recipe, Console())
    (evaluated,) = lines(tmp_path / "reward" / "eval.jsonl")
    report = evaluate(recipe, str(tmp_path / "reward"), Console())
    assert report["sets"][0]["margin"] == pytest.approx(evaluated["margin"], rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("qwen3_5", marks=pytest.mark.long), "qwen2_5_vl"])
def test_ppo_has_critic_and_reward_model_in_four_bits(
    kind: str, make: Make, tmp_path: Path
) -> None:
    pairs = {"rows": [vision_pair(n) for n in range(4)], "held_out": vision_pair(50)}
    judge = {"job": "reward", "batch": {"train_batch_size": 4}, "steps": 1}
    train(make(kind, "judge", **judge, **pairs), Console())
    ppo = {
        **GRPO,
        "algorithm": {"type": "ppo", "kl_coef": 0.1},
        "rewards": [{"type": "reward_model", "normalise": True}],
        "reward_model": {"model": {"path": str(tmp_path / "judge" / "model"), "quantize": "4bit"}},
        "critic": {"learner": {"lr": 1e-2}},
    }
    train(make(kind, **ppo), Console())
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        assert np.isfinite(line["critic/loss"])
        assert line["sentinel/publish_difference"] < 2e-5
    saved = tensors(str(tmp_path / "run"), 3)
    assert any(name.startswith("critic.weights/") and "lora_" in name for name in saved)
    assert not any(name.startswith("critic.weights/") and image_part(name) for name in saved)
    export(tmp_path / "run", "latest", tmp_path / "critic", "critic")


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_in_one_weight_stay_refused(kind: str, make: Make) -> None:
    with pytest.raises(UsageError, match="keeps several matrices in one weight"):
        train(make(kind, **SFT), Console())


@pytest.mark.slow
def test_a_checkpoint_is_read_back_as_the_run_computed(
    make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    """Adapters of bfloat16 runs are merged into what four bits of bfloat16 weights read as."""
    train(make("smolvlm", model={"dtype": "bfloat16"}, **SFT), Console())
    learned = {
        name.partition("/")[2]: tensor
        for name, tensor in tensors(str(tmp_path / "run"), 3).items()
        if name.startswith("policy.weights/")
    }
    settings = LoraSettings.model_validate(LORA)
    merged = merged_state(
        models("smolvlm"), learned, settings, quantize="4bit", dtype=torch.bfloat16
    )
    written = loaded(tmp_path / "run" / "model")
    assert merged.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, merged[name].bfloat16().float()), name
