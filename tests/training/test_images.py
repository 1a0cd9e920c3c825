"""SFT on rows with images: whole runs of tiny models of every family, from rows to the export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.image_directories import models, row, write_model
from helpers.image_models import RUNS
from helpers.runs import tensors
from postgrad.core.errors import UsageError
from postgrad.core.media import images_kept_in
from postgrad.data.conversations import load_conversations
from postgrad.data.settings import DataSettings
from postgrad.models.images import image_part
from postgrad.models.known_shapes import find_shape
from postgrad.models.load import load_model
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.tools.dry_run.dry_run import dry_run
from postgrad.training.rows import image_reader
from postgrad.training.start import resume, train

__all__ = ["models"]

ROWS = [row(n, "yes", ((40, 16), (16, 24)) if n % 3 == 0 else ((16, 16),)) for n in range(7)]
TEXT = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
}
Make = Callable[..., Recipe]


@pytest.fixture
def make(tmp_path: Path, models: Callable[[str], str]) -> Make:
    """A recipe of two steps; model: what its table says beside the path."""
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    rows.write_text("".join(f"{json.dumps(each)}\n" for each in [*ROWS, TEXT]))
    held_out.write_text(f"{json.dumps(row(50, 'no'))}\n")

    def recipe(kind: str, name: str = "run", model: Any = None, **changes: Any) -> Recipe:
        return parse_recipe(
            {
                "job": "sft",
                "run_dir": str(tmp_path / name),
                "steps": 2,
                "model": {"path": models(kind), "dtype": "float32", **(model or {})},
                "data": {"path": str(rows), "max_len": 200},
                "eval": {"path": str(held_out)},
                "batch": {"train_batch_size": 4},
                "learner": {"lr": 1e-2, "threads": 1},
                "checkpoint": {"save_steps": 1, "save_hf": True},
                **changes,
            }
        )

    return recipe


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "smolvlm"])
def test_where_all_of_a_conversation_is_learned_the_tokens_of_images_are_not(
    kind: str, make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    data = {"path": str(tmp_path / "rows.jsonl"), "max_len": 200, "loss_turns": "everything"}
    recipe = make(kind, data=data)
    assert np.isfinite(train(recipe, Console())["loss_after"])
    tokenizer = load_tokenizer(models(kind))
    reader = image_reader(models(kind), tokenizer)
    assert reader is not None
    assert isinstance(recipe.data, DataSettings)
    with images_kept_in(tmp_path / "images"):
        conversations = load_conversations(recipe.data, tokenizer, reader=reader).all()
    assert len(conversations) == 8
    for each in conversations:
        of_images = {int(at) for image in each.images for at in image.at}
        unlearned = set(np.flatnonzero(~each.loss_mask).tolist())
        assert unlearned == {0, *of_images}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_learns_and_exports_what_it_learned(
    kind: str, make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    summary = train(make(kind), Console())
    assert np.isfinite(summary["loss_after"])
    before, after = weights(Path(models(kind))), weights(tmp_path / "run" / "model")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(image_part(f".{name}") == "vision" for name in moved)  # the tower learns
    assert any(image_part(f".{name}") == "projector" for name in moved)
    processor = "preprocessor_config.json"
    copied = (tmp_path / "run" / "model" / processor).read_bytes()
    assert copied == (Path(models(kind)) / processor).read_bytes()
    kept = {file.name for file in (tmp_path / "run" / "images").iterdir()}
    assert len(kept) == 11  # each once
    assert all(len(name) == 64 for name in kept)  # by hash
    train(make(kind, "again", steps=1, model={"path": str(tmp_path / "run" / "model")}), Console())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "qwen2_5_vl",
        "qwen3_5",
        pytest.param("gemma3", marks=pytest.mark.long),
        pytest.param("qwen3_vl_moe", marks=pytest.mark.long),
    ],
)
def test_a_run_that_resumes_has_the_same_bits(kind: str, make: Make, tmp_path: Path) -> None:
    train(make(kind, "whole"), Console())
    train(make(kind, "parted", steps=1), Console())
    resume(tmp_path / "parted", ["--steps", "2"], (), Console())
    uninterrupted, parted = (tensors(str(tmp_path / name), 2) for name in ("whole", "parted"))
    assert uninterrupted.keys() == parted.keys()
    assert all(torch.equal(uninterrupted[name], parted[name]) for name in uninterrupted)


@pytest.mark.parametrize(
    "freeze",
    [
        pytest.param(("vision",), marks=pytest.mark.slow),
        pytest.param(("projector",), marks=pytest.mark.slow),
        ("vision", "projector"),
    ],
)
def test_frozen_parts_stay_as_they_were(
    freeze: tuple[str, ...], make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    train(make("qwen2_5_vl", model={"freeze": freeze}), Console())
    before, after = weights(Path(models("qwen2_5_vl"))), weights(tmp_path / "run" / "model")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if image_part(f".{name}") in freeze}
    assert not any(image_part(name) in freeze for name in tensors(str(tmp_path / "run"), 2))


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({"learner": {"lr": 1e-3, "weight_decay": 0.1}}, True),
        ({"learner": {"lr": 1e-3}}, False),
        (
            {
                "learner": {"lr": 1e-3, "weight_decay": 0.1},
                "model": {"freeze": ["vision", "projector"]},
            },
            False,
        ),
    ],
)
def test_a_run_on_text_alone_warns_that_weight_decay_would_shrink_the_tower(
    changes: dict[str, Any], warns: bool, make: Make, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(TEXT)}\n" for _ in range(5)))
    train(make("qwen2_5_vl", steps=1, eval={}, **changes), Console())
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    idle = [event for event in map(json.loads, events) if event["event"] == "idle_tower"]
    assert len(idle) == warns
    assert all('model.freeze = ["vision", "projector"]' in event["message"] for event in idle)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.long)])
def test_a_run_on_text_alone_keeps_the_tower_and_the_type(
    kind: str, make: Make, tmp_path: Path
) -> None:
    """From a checkpoint as the hub has them: a head that is the embedding matrix, and weights of
    multi-token prediction, which transformers does not read.
    """

    def tie(config: Any) -> None:
        config.tie_word_embeddings = config.text_config.tie_word_embeddings = True

    base = Path(write_model(kind, tmp_path / "tied", tie))
    before = weights(base)
    extra = {"mtp.fc.weight": torch.ones(32, 64), "mtp.norm.weight": torch.ones(32)}
    save_file({**before, **extra}, base / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight" not in before
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(TEXT)}\n" for _ in range(5)))
    recipe = make(kind, model={"path": str(base)}, eval={})
    train(recipe, Console())
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(line)["policy/loss"] for line in metrics)
    assert last < first
    written = tmp_path / "run" / "model"
    after = weights(written)
    assert after.keys() == before.keys()  # what is left out of them: mtp
    towers = {name for name in before if image_part(f".{name}")}
    assert len(towers) > 20
    assert all(torch.equal(before[name], after[name]) for name in towers)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("linear_attn" in name for name in moved)
    config = json.loads((written / "config.json").read_text())
    assert config["model_type"] == kind
    assert config["architectures"][0].endswith("ForConditionalGeneration")
    assert not (tmp_path / "run" / "images").exists() or not [*(tmp_path / "run/images").iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3_vl_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.long)]
)
def test_the_routers_of_a_mixture_are_balanced_or_frozen(
    kind: str, make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    before = load_model(models(kind), dtype=torch.float32, images=True).lm
    routers = {name for name, _ in before.named_parameters() if name.endswith("mlp.gate.weight")}
    for name, freeze in (("run", []), ("frozen", ["router"])):
        train(make(kind, name, model={"freeze": freeze}), Console())
        after = load_model(str(tmp_path / name / "model"), dtype=torch.float32, images=True).lm
        same = {n for n in routers if torch.equal(before.get_parameter(n), after.get_parameter(n))}
        assert same == (routers if freeze else set())
        events = (tmp_path / name / "events.jsonl").read_text()
        assert "no_auxiliary_loss" not in events
        metrics = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert all("policy/router_balance" in json.loads(line) for line in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_vl_moe"])
def test_an_adapter_on_layers_of_every_kind_is_merged_into_an_export(
    kind: str, make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    targets = ["in_proj_qkv", "out_proj", "q_proj"] if kind == "qwen3_5" else ["experts", "q_proj"]
    train(make(kind, model={"lora": {"rank": 2, "alpha": 2, "targets": targets}}), Console())
    before, after = (
        load_model(path, dtype=torch.float32, images=True).lm
        for path in (models(kind), str(tmp_path / "run" / "model"))
    )
    moved = {
        name for name, weight in before.named_parameters()
        if not torch.equal(weight, after.get_parameter(name))
    }  # fmt: skip
    assert moved
    assert {next(t for t in targets if f".{t}." in f".{name}.") for name in moved} == set(targets)
    assert not any(image_part(name) for name in moved)


def test_an_adapter_stands_on_the_language_part(make: Make, tmp_path: Path) -> None:
    train(make("smolvlm", model={"lora": {"rank": 2, "alpha": 2}}), Console())
    adapted = {name for name in tensors(str(tmp_path / "run"), 2) if "lora_" in name}
    assert adapted
    assert not any(image_part(name) for name in adapted)


def test_half_an_image_is_never_shown(make: Make, tmp_path: Path) -> None:
    data = {"path": str(tmp_path / "rows.jsonl"), "max_len": 30, "on_too_long": "truncate"}
    with pytest.raises(UsageError, match="4  dropped: over the limit"):
        train(make("smolvlm", data=data), Console())


@pytest.mark.slow
def test_a_text_model_has_nothing_to_freeze(make: Make) -> None:
    from helpers.tiny_runs import MODEL

    with pytest.raises(UsageError, match="reads text alone, and has no tower"):
        train(make("smolvlm", model={"path": None, "freeze": ["vision"], **MODEL}, **{
            "data": {"path": "reasoning-gym:spell_backward", "size": 8, "max_len": 64},
            "eval": {},
        }), Console())  # fmt: skip


def test_a_plan_counts_the_weights_of_the_tower(make: Make) -> None:
    recipe = make("qwen2_5_vl")
    lm = load_model(str(recipe.model.path), dtype=torch.float32, images=True).lm
    counted = find_shape(str(recipe.model.path)).parameters()
    assert counted == sum(parameter.numel() for parameter in lm.parameters())  # the tower too


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5", "qwen3_vl_moe"])
def test_a_dry_run_reads_rows_with_images_and_tries_them(kind: str, make: Make) -> None:
    recipe = make(kind)
    report = dry_run(recipe, Console())
    assert report.problems == []
    details = {check.name: check.detail for check in report.checks}
    assert details["rows"] == "8 of 8 rows are used"
    assert "plain transformers gives the same logits" in details["export"]
    assert not Path(recipe.run_dir).exists()


@pytest.mark.long
def test_llava_onevision_learns_from_rows_with_one_image(make: Make, tmp_path: Path) -> None:
    recipe = make("llava_onevision")
    with pytest.raises(UsageError, match="it has 2 images, and this type of model makes other"):
        train(recipe, Console())
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(each)}\n" for each in (*ROWS[1:3], *ROWS[4:6], TEXT)))
    assert np.isfinite(train(make("llava_onevision", "again"), Console())["loss_after"])
