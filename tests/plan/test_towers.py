"""What towers of images keep and cost in a plan, against torch and numbers worked out by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from helpers.image_directories import models, row, vision_pair
from helpers.image_models import IMAGE_MODELS, KINDS
from postgrad.core.media import images_kept_in
from postgrad.data.conversations import load_conversations
from postgrad.learner.settings import LearnerSettings
from postgrad.models.config import load_config
from postgrad.models.counted import counted_shape
from postgrad.models.image_reader import ImageReader
from postgrad.models.known_shapes import shape_of_model
from postgrad.models.settings import LoraSettings, ModelSettings
from postgrad.models.tokenizer import load_tokenizer
from postgrad.models.towers import ImageCost
from postgrad.plan import towers
from postgrad.plan.activations import Blocks, kept_by_layer
from postgrad.plan.costs import CostModel
from postgrad.plan.hardware import efficiency_of, parse_hardware
from postgrad.plan.lengths import row_lengths
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import Sharing
from postgrad.recipe.load import parse_recipe

__all__ = ["models"]

Make = Callable[..., Any]


def role(kind: str, config: Any = None, **settings: Any) -> PlannedRole:
    config = config or IMAGE_MODELS[kind].config()
    shape = counted_shape({"model_type": kind, **config.to_dict()}, kind)
    return PlannedRole("policy", shape, ModelSettings(path=kind, **settings), LearnerSettings())


IMAGE = ImageCost(1, 24, 6, 24**2, 16**2 + 8**2)


def test_what_a_tower_keeps_by_hand() -> None:
    """Qwen2.5-VL in float32: 16 wide, 24 in feed-forwards, 2 layers, 96 numbers in a patch."""
    trained = role("qwen2_5_vl")
    assert trained.shape.tower is not None
    layer = 2 * 16 * (4 + 4) + 2 * 16 * 4 + 7 * 16 * 4 + 4 * 24 * 4
    assert towers.kept_by_layer(trained.shape.tower, 4) == layer == 1216
    projector = 24 * 16 * (4 + 4) + 6 * 4 * (64 + 64 + 64)
    kept = {
        "all": 24 * (96 * 4 + 2 * 1216) + projector,
        "checkpointed": 24 * (96 * 4 + 2 * 16 * 4) + projector,
        "projector": projector,
        "frozen": 0,
        "adapter": 0,
    }
    roles = {
        "all": trained,
        "checkpointed": role("qwen2_5_vl", gradient_checkpointing=True),
        "projector": role("qwen2_5_vl", freeze=("vision",)),
        "frozen": role("qwen2_5_vl", freeze=("vision", "projector")),
        "adapter": role("qwen2_5_vl", lora=LoraSettings()),
    }
    tower = trained.shape.tower
    assert {name: towers.kept(tower, IMAGE, 4, r) for name, r in roles.items()} == kept


def wide(kind: str) -> Any:
    """The config with a tower in which layers weigh more than what surrounds them."""
    config = IMAGE_MODELS[kind].config()
    config.vision_config.update({"hidden_size": 128, "intermediate_size": 320})
    config.vision_config.update({"depth" if kind.startswith("qwen") else "num_hidden_layers": 4})
    if kind == "mistral3":
        config.vision_config.head_dim = 64
    if kind == "qwen3_vl":
        config.vision_config.deepstack_visual_indexes = [1, 2]
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_keeps_what_autograd_saves(kind: str) -> None:
    config = wide(kind)
    lm: Any = AutoModelForImageTextToText.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    model = IMAGE_MODELS[kind]
    pixels = model.pixels(np.random.default_rng(0), 3, 4)
    saved: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = lm.model.get_image_features(
            **{name: torch.as_tensor(array) for name, array in pixels.items()}, return_dict=True
        )
    assert out.pooler_output is not None
    planned = role(kind, config)
    tower = planned.shape.tower
    assert tower is not None
    patches = pixels["pixel_values"].size // tower.patch_values
    cost = ImageCost(1, patches, patches // tower.merged**2)
    assert towers.kept(tower, cost, 4, planned) == pytest.approx(sum(saved.values()), rel=0.1)


@pytest.fixture
def make(tmp_path: Path, models: Callable[[str], str]) -> Make:
    def recipe(kind: str, rows: list[Any] | None = None, **changes: Any) -> Any:
        path = tmp_path / "rows.jsonl"
        written = rows or [
            row(seed, "yes", ((16, 16), (40, 16))[: 1 + seed % 2]) for seed in range(4)
        ]
        path.write_text("".join(f"{json.dumps(each)}\n" for each in written))
        return parse_recipe({
            "job": "sft", "run_dir": str(tmp_path / "run"), "steps": 2,
            "model": {"path": models(kind), "dtype": "float32", **changes.pop("model", {})},
            "data": {"path": str(path), "max_len": 200},
            "batch": {"train_batch_size": 4},
            "learner": {"threads": 1}, **changes,
        })  # fmt: skip

    return recipe


def planned(recipe: Any, **facts: Any) -> RunPlan:
    known_facts = {"lengths": row_lengths(recipe), **facts}
    return make_plan(recipe, Facts(shape_of_model, parse_hardware("CPU"), **known_facts))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_as_long_as_training_sees_them(
    make: Make, models: Callable[[str], str], kind: str, tmp_path: Path
) -> None:
    single_images = [row(seed, "yes") for seed in range(4)] if kind == "llava_onevision" else None
    recipe, path = make(kind, single_images), models(kind)
    lengths = row_lengths(recipe)
    assert lengths is not None
    assert lengths.images is not None
    assert lengths.images.images == (1 if single_images else 1.5)
    assert f"{lengths.images.images:g} images in each" in lengths.source
    tokenizer = load_tokenizer(path)
    with images_kept_in(tmp_path / "images"):
        reader = ImageReader(path, load_config(path), tokenizer)
        rows = load_conversations(recipe.data, tokenizer, reader=reader).all()
    seen = [len(row.token_ids) for row in rows]
    # the templates of these models write no new line that ChatML has not
    assert lengths.prompt + lengths.answer == pytest.approx(np.mean(seen), abs=2.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_takes_memory_and_time(make: Make, kind: str) -> None:
    recipe = make(kind)
    with_images, frozen = planned(recipe), planned(make(kind, model={"freeze": ["vision"]}))
    text = replace(with_images.lengths, images=None)
    without = planned(recipe, lengths=text)
    lines = {line.purpose: line.bytes for line in with_images.memory.lines}
    assert lines["activations of the tower"]["update"] > 0
    assert with_images.memory.at("update") > without.memory.at("update")
    seconds = [each.timing.step["update"] for each in (with_images, frozen, without)]
    assert seconds == sorted(seconds, reverse=True)
    tower = with_images.roles[0].shape.tower
    assert tower is not None
    kept_back = with_images.roles[0].trained - frozen.roles[0].trained
    assert kept_back == tower.parameters


@pytest.mark.parametrize("key", ["tensor_parallel", "context_parallel"])
def test_one_of_the_ranks_that_share_rows_may_encode_all_images_of_a_row(
    make: Make, key: str
) -> None:
    """Two rows of an image each in a micro-batch: each of two ranks has those of one, of four too.
    Images take as long on four ranks as on two, since two of the four have none.
    """
    rows = [row(seed, "yes") for seed in range(2)]

    def plan(ranks: int) -> RunPlan:
        learner = {"threads": 1, "ranks": ranks, key: ranks}
        batch = {"train_batch_size": 2}
        table = {"learner": learner, "batch": batch, "cluster": {"type": "ray"}}
        return planned(make("qwen2_5_vl", rows, **(table if ranks > 1 else {"batch": batch})))

    def kept(of: RunPlan) -> int:
        lines = {line.purpose: line.bytes for line in of.memory.lines}
        return lines["activations of the tower"]["update"]

    one_rank, two_ranks, four_ranks = map(plan, (1, 2, 4))
    assert kept(one_rank) == pytest.approx(2 * kept(two_ranks), rel=0.01)
    assert kept(two_ranks) == kept(four_ranks)
    device = one_rank.hardware.device
    changed = {"overhead": 0.0, "between": 1e12}
    products = efficiency_of(device).model_copy(update=changed)  # and nothing else
    images = ImageCost(2, 48, 12, 2 * 24**2, 2 * (16**2 + 8**2))
    seconds = [
        towers.tower_seconds(
            of.roles[0],
            images,
            4,
            CostModel(device, products, Sharing.of(of.recipe.learner)),
            updating=False,
            passes=1,
        )
        for of in (one_rank, two_ranks, four_ranks)
    ]
    assert seconds == pytest.approx([2 * seconds[1], seconds[1], seconds[1]], rel=1e-3)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_a_process_keeps_the_images_of_its_rows_as_the_tower_reads_them(
    make: Make, models: Callable[[str], str], kind: str, tmp_path: Path
) -> None:
    recipe, path = make(kind), models(kind)
    tokenizer = load_tokenizer(path)
    with images_kept_in(tmp_path / "images"):
        reader = ImageReader(path, load_config(path), tokenizer)
        rows = load_conversations(recipe.data, tokenizer, reader=reader).all()
        digests = {image.digest for row in rows for image in row.images}
        kept = sum(reader.pixels(digest)["pixel_values"].nbytes for digest in digests)
    assert len(digests) == 6
    lines = {line.purpose: line.bytes for line in planned(recipe).memory.lines}
    assert lines["processed images"]["update"] == kept
    assert "load" not in lines["processed images"]
    elsewhere = make(kind, data={"path": "someone/pictures", "max_len": 200})
    lines = {line.purpose: line.bytes for line in planned(elsewhere).memory.lines}
    assert lines["processed images"]["update"] == 2**28


def test_a_pair_has_its_image_once(make: Make) -> None:
    rows = [vision_pair(1), vision_pair(3)]
    lengths = row_lengths(make("qwen2_5_vl", rows, job="preference"))
    assert lengths is not None
    assert lengths.images is not None
    assert lengths.images.images == 1
    assert lengths.images.tokens == 6  # 16 x 24 pixels


def test_rows_that_are_elsewhere_have_an_assumed_image(make: Make) -> None:
    recipe = make("qwen2_5_vl", data={"path": "someone/pictures", "max_len": 200})
    assert row_lengths(recipe) is None
    lengths = planned(recipe).lengths
    assert lengths.images is not None
    # the processor makes at most 16 tokens, which are less than the prompt's 100
    assert lengths.images.tokens == 16
    assert "assumed: an image of 1024 x 1024 pixels in each, 16 of its tokens" in lengths.source


def test_rows_that_reasoning_gym_makes_have_no_image(make: Make) -> None:
    data = {"path": "reasoning-gym:spell_backward", "size": 8, "max_len": 200}
    lengths = planned(make("qwen3_5", data=data)).lengths
    assert lengths.images is None
    assert "assumed" not in lengths.source


def test_a_text_model_does_not_count_images(make: Make) -> None:
    recipe = make("qwen2_5_vl", model={"path": None, "init": {"type": "qwen2"}})
    assert row_lengths(recipe) is None


def test_sampling_encodes_each_prompts_images(make: Make) -> None:
    recipe = make(
        "qwen2_5_vl", job="rl", rewards=[{"type": "exact_match"}], algorithm={"type": "grpo"},
        batch={"rollout_batch_size": 2, "n_samples_per_prompt": 4},
        data={"path": str(make("qwen2_5_vl").data.path), "messages": "messages", "max_len": 200},
        rollout={"max_new_tokens": 8},
    )  # fmt: skip
    with_images = planned(recipe)
    without = planned(recipe, lengths=replace(with_images.lengths, images=None))
    assert with_images.timing.step["sample"] > without.timing.step["sample"]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_a_run_compiles_keep_less_beside_the_tower(make: Make, kind: str) -> None:
    """Those of mixtures, and those that carry a state, are compiled only where `true` says so."""

    def kept(compile: Any) -> int:
        recipe = make(kind, model={"dtype": "bfloat16", "compile": compile})
        known_facts = {"lengths": row_lengths(recipe)}
        memory = make_plan(
            recipe, Facts(shape_of_model, parse_hardware("1xH100"), **known_facts)
        ).memory
        return sum(
            line.bytes["update"]
            for line in memory.lines
            if (line.role, line.purpose) == ("policy", "activations")
        )

    eager, chosen, compiled = kept(False), kept("auto"), kept(True)
    assert compiled < eager
    others = kind in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    assert chosen == (eager if others else compiled)


def test_what_a_compiled_layer_of_a_decoder_keeps_by_hand() -> None:
    """In bfloat16, 32 wide, 48 in feed-forwards, 4 heads of queries and 2 of keys with 8 numbers:
    the inputs of two norms and of their products, gate, up and down's input, q, k, v and the
    result, and in float32 two scales and four log sums. Qwen3-VL: q and k before their norms, and
    the scales of 6 heads. Gemma 3: the inputs of four norms, of which one is computed again, and
    four scales.
    """
    plain = 2 * (4 * 32 + 3 * 48 + 2 * 32 + 2 * 16) + 4 * (2 + 4)
    heads = 2 * (32 + 16) + 4 * 6
    by_hand = {
        "qwen2_5_vl": plain,
        "qwen3_vl": plain + heads,
        "gemma3": plain + heads + 2 * 32 + 4 * 2,
    }
    how: Any = {"cpu": False, "compiled": True}
    kept = {kind: kept_by_layer(role(kind).shape, 2, None, Blocks(), **how) for kind in by_hand}
    assert kept == by_hand
