"""RL on rows with images: whole runs of tiny models of every family, from rows to the export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.image_directories import models, row
from helpers.image_models import RUNS
from helpers.runs import tensors
from postgrad.core.errors import RunError, UsageError
from postgrad.core.media import images_kept_in
from postgrad.models.images import image_part
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.local.engine import LocalEngine
from postgrad.tools.dry_run.dry_run import dry_run
from postgrad.tools.evaluate import evaluate
from postgrad.tools.generate import Extent, generate
from postgrad.tools.selection import RowSelection, select
from postgrad.training.rows import image_reader, prompts
from postgrad.training.start import resume, train

__all__ = ["models"]

ROWS = [
    {**row(n, "yes", ((40, 16), (16, 24)) if n % 3 == 0 else ((16, 16),)), "answer": "yes"}
    for n in range(5)
]
TEXT = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    "answer": "ho",
}
Make = Callable[..., Recipe]


@pytest.fixture
def make(tmp_path: Path, models: Callable[[str], str]) -> Make:
    """A recipe of two steps with a reference and two updates a step."""
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    rows.write_text("".join(f"{json.dumps(each)}\n" for each in [*ROWS, TEXT]))
    held_out.write_text(f"{json.dumps({**row(50, 'no'), 'answer': 'no'})}\n")

    def recipe(kind: str, name: str = "run", **changes: Any) -> Recipe:
        model = {"path": models(kind), "dtype": "float32", **changes.pop("model", {})}
        return parse_recipe(
            {
                "job": "rl",
                "run_dir": str(tmp_path / name),
                "steps": 2,
                "model": model,
                "data": {"path": str(rows), "messages": "messages", "max_len": 200},
                "eval": {"path": str(held_out), "at_start": True},
                "rewards": [{"type": "tiny_rewards:looks"}],
                "algorithm": {"type": "grpo", "kl_coef": 0.1, "correction": "tis"},
                "batch": {
                    "rollout_batch_size": 3,
                    "n_samples_per_prompt": 2,
                    "train_batch_size": 3,
                },
                "rollout": {"max_new_tokens": 4},
                "scoring": {"workers": 1},
                "learner": {"lr": 1e-2, "threads": 1},
                "checkpoint": {"save_steps": 1},
                **changes,
            }
        )

    return recipe


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_samples_learns_and_exports(
    kind: str, make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    train(make(kind, checkpoint={"save_hf": True}), Console())
    run = tmp_path / "run"
    before = load_file(Path(models(kind)) / "model.safetensors")
    after = load_file(run / "model" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(image_part(f".{name}") == "vision" for name in moved)  # the tower learns too
    metrics = lines(run / "metrics.jsonl")
    for line in metrics:  # engine and learner see the same
        assert line["sentinel/publish_difference"] < 1e-5
        assert line["sentinel/prob_difference"] < 1e-5
    samples = lines(run / "samples.jsonl")
    kept = {file.name for file in (run / "images").iterdir()}
    shown = [image for sample in samples for image in sample.get("images", ())]
    assert {image["sha256"] for image in shown} <= kept
    for sample in samples:
        ids = np.array(sample["prompt_token_ids"])
        at = [
            start + offset
            for image in sample.get("images", ())
            for start, length in image["runs"]
            for offset in range(length)
        ]
        if at:
            assert len(set(ids[at])) == 1  # placeholders, all of them
            assert (ids == ids[at[0]]).sum() == len(at)
        assert "PNG" not in json.dumps(sample)


@pytest.mark.slow
def test_the_engine_has_a_frozen_tower_too(make: Make, tmp_path: Path) -> None:
    train(make("qwen2_5_vl", model={"freeze": ["vision", "projector"]}), Console())
    run = tmp_path / "run"
    for line in lines(run / "metrics.jsonl"):
        assert line["sentinel/publish_difference"] < 1e-5
    assert not any(image_part(name) for name in tensors(str(run), 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("qwen2_5_vl", marks=pytest.mark.long), "qwen3_5"])
def test_a_run_that_resumes_has_the_same_bits(kind: str, make: Make, tmp_path: Path) -> None:
    train(make(kind, "whole"), Console())
    train(make(kind, "parted", steps=1), Console())
    resume(tmp_path / "parted", ["--steps", "2"], (), Console())
    uninterrupted, parted = (tensors(str(tmp_path / name), 2) for name in ("whole", "parted"))
    assert uninterrupted.keys() == parted.keys()
    assert all(torch.equal(uninterrupted[name], parted[name]) for name in uninterrupted)


@pytest.mark.slow
def test_samples_under_way_go_on_behind_their_images_after_a_resume(
    make: Make, tmp_path: Path
) -> None:
    ahead = {"max_new_tokens": 4, "max_staleness": 1, "slots": 2}
    train(make("qwen3_vl", "whole", rollout=ahead), Console())
    train(make("qwen3_vl", "parted", rollout=ahead, steps=1), Console())
    resume(tmp_path / "parted", ["--steps", "2"], (), Console())
    uninterrupted, parted = (tensors(str(tmp_path / name), 2) for name in ("whole", "parted"))
    assert all(torch.equal(uninterrupted[name], parted[name]) for name in uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_that_the_engine_chose_behind_an_image_are_used_again(
    kind: str, make: Make, tmp_path: Path
) -> None:
    train(make(kind, rollout={"max_new_tokens": 4, "router_replay": "sampled"}), Console())
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert samples
    assert all(sample["prompt_experts"] for sample in samples)
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["sentinel/prob_difference"] < 1e-5


@pytest.mark.slow
def test_rl_on_text_alone_samples_and_learns_as_on_images(make: Make, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(TEXT)}\n" for _ in range(4)))
    train(make("qwen3_5", eval={}), Console())
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["sentinel/publish_difference"] < 1e-5
        assert line["sentinel/prob_difference"] < 1e-5


@pytest.mark.slow
def test_a_dry_run_scores_answers_to_prompts_with_images_and_samples_some(make: Make) -> None:
    report = dry_run(make("qwen3_5", rewards=[{"type": "exact_match"}]), Console())
    assert report.problems == []
    details = {check.name: check.detail for check in report.checks}
    assert details["reference answers"] == "7 rows can be read"
    assert details["verifiers"] == "exact_match 7 of 7"
    assert {"sample", "train"} <= details.keys()


@pytest.mark.slow
def test_a_replay_reads_the_images_of_the_run_by_their_hashes(make: Make, tmp_path: Path) -> None:
    train(make("qwen2_5_vl"), Console())
    other = tmp_path / "other.jsonl"
    other.write_text(f"{json.dumps(TEXT)}\n" * 3)  # rows without any image
    again = make(
        "qwen2_5_vl",
        "again",
        data={"path": str(other), "messages": "messages", "max_len": 200},
        rollout={"max_new_tokens": 4, "source": "replay", "replay_path": str(tmp_path / "run")},
        eval={},
    )
    train(again, Console())
    first, second = (tensors(str(tmp_path / name), 2) for name in ("run", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (tmp_path / "again" / "images").exists()  # nothing is copied
    for image in (tmp_path / "run" / "images").iterdir():
        image.unlink()
    with pytest.raises(RunError, match="cannot be read"):
        train(again.model_copy(update={"run_dir": str(tmp_path / "third")}), Console())


@pytest.mark.slow
def test_a_tower_that_the_engine_does_not_get_is_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_load = LocalEngine.load_weights

    def partly(self: Any, weights: Any, version: int) -> Any:
        kept = dict(self._lm.named_parameters())
        return original_load(
            self,
            [(n, kept[n].clone() if image_part(n) == "vision" else w) for n, w in weights],
            version,
        )

    monkeypatch.setattr(LocalEngine, "load_weights", partly)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        train(make("qwen2_5_vl", learner={"lr": 0.1, "threads": 1}), Console())


@pytest.mark.slow
def test_an_adapter_learns_with_its_base_as_the_reference(make: Make, tmp_path: Path) -> None:
    train(make("gemma3", model={"lora": {"rank": 2, "alpha": 2}}), Console())
    assert any("lora_" in name for name in tensors(str(tmp_path / "run"), 2))


@pytest.mark.slow
def test_sft_is_evaluated_by_sampled_answers(make: Make, tmp_path: Path) -> None:
    recipe = make("smolvlm").dump()
    changed = {
        "job": "sft",
        "batch": {"train_batch_size": 2},
        "algorithm": {"type": "sft"},
        "eval": {"path": str(tmp_path / "held_out.jsonl"), "max_new_tokens": 3},
        "rewards": [{"type": "exact_match"}],
        "steps": 1,
    }
    kept = ("run_dir", "model", "data", "rollout", "learner")
    train(parse_recipe({key: recipe[key] for key in kept} | changed), Console())
    assert "accuracy" in lines(tmp_path / "run" / "eval.jsonl")[-1]


@pytest.mark.slow
def test_eval_and_generate_answer_behind_images(
    make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    recipe = make("qwen2_5_vl", rewards=[{"type": "exact_match"}])
    report = evaluate(recipe, models("qwen2_5_vl"), Console())
    assert (report["rows"], report["failed"]) == (1, 0)
    generated = generate(recipe, tmp_path / "to", Console(), Extent(samples=2))
    rows = tmp_path / "elsewhere" / "all.jsonl"
    rows.parent.mkdir()
    select(generated.groups(rows), RowSelection(), rows, generated.name)
    assert len({file.name for file in (tmp_path / "to" / "images").iterdir()}) == 8  # held out too
    sft = {"path": str(rows), "messages": "messages", "max_len": 220}
    written = parse_recipe(
        {
            "job": "sft", "run_dir": str(tmp_path / "sft"), "steps": 1, "data": sft,
            "model": {"path": models("qwen2_5_vl"), "dtype": "float32"},
            "batch": {"train_batch_size": 4}, "learner": {"threads": 1},
        }
    )  # fmt: skip
    train(written, Console())
    answered = {file.name for file in (tmp_path / "sft" / "images").iterdir()}
    assert len(answered) == 7
    assert answered < {file.name for file in (tmp_path / "to" / "images").iterdir()}


@pytest.mark.slow
def test_prompts_of_a_difficulty_are_read_again_with_their_images(
    make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    path = models("qwen2_5_vl")
    recipe = make("qwen2_5_vl", rewards=[{"type": "exact_match"}])
    assert isinstance(recipe, RLRecipe)
    generated = generate(recipe, tmp_path / "to", Console(), Extent(samples=1))
    rows = tmp_path / "elsewhere" / "difficulty.jsonl"
    rows.parent.mkdir()
    select(generated.groups(rows), RowSelection(kind="difficulty"), rows, generated.name)
    written = lines(rows)
    assert [type(each["question"]) for each in written] == [list] * 5 + [str]
    again = make("qwen2_5_vl", data={"path": str(rows), "max_len": 200})
    assert isinstance(again, RLRecipe)
    tokenizer = load_tokenizer(path)
    reader = image_reader(path, tokenizer)
    with images_kept_in(tmp_path / "read"):
        first, second = (prompts(each, tokenizer, reader).all() for each in (recipe, again))
    assert len(first) == 6
    for before, after in zip(first, second, strict=True):
        np.testing.assert_array_equal(after.token_ids, before.token_ids)
        assert [i.digest for i in after.images] == [i.digest for i in before.images]
        assert (after.answer, after.question) == (before.answer, before.question)


def test_a_prompt_that_a_cut_would_leave_half_an_image_is_dropped(
    make: Make, tmp_path: Path
) -> None:
    data = {
        "path": str(tmp_path / "rows.jsonl"), "messages": "messages", "max_len": 40,
        "on_too_long": "truncate",
    }  # fmt: skip
    with pytest.raises(UsageError, match="dropped: over the limit"):
        train(make("smolvlm", data=data), Console())
