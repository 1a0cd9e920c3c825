"""Images in packed sequences: logprobs and gradients are those of transformers' own forward, one
sequence at a time, and an image that samples share is encoded once.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from helpers.adapters import moved
from helpers.image_directories import write_model
from helpers.image_models import (
    END,
    IMAGE_MODELS,
    KINDS,
    PLACEHOLDER,
    START,
    Scene,
    but_for_a_few,
    fresh,
)
from postgrad.core.errors import RunError, UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Sequences
from postgrad.layout.layout import lay_out
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.models.adapters import add_adapter
from postgrad.models.four_bits import FourBitLinear
from postgrad.models.images import ImageTower, Pixels, image_part
from postgrad.models.load import load_model
from postgrad.models.routers import Routers, balance_of
from postgrad.models.settings import LoraSettings, ModelSettings

CPU = torch.device("cpu")


def own_logprobs(lm: Any, scene: Scene, row: int) -> torch.Tensor:
    """transformers' logprobs of a sequence's loss tokens, computed alone."""
    ids = torch.from_numpy(scene.sequences.tokens.row(row).astype(np.int64))[None]
    named = scene.arguments(ids, scene.sequences.images_of(row))
    lm.model.rope_deltas = None
    logits = lm(input_ids=ids, use_cache=False, **named).logits[0]
    chosen = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return chosen[torch.from_numpy(scene.sequences.loss_mask.row(row)[1:])]


def learner(kind: str, scene: Scene) -> Backbone:
    lm = fresh(kind)
    backbone = Backbone(lm, CPU, MicroBatch())
    backbone.tower = ImageTower(lm, scene.pixels.__getitem__)
    return backbone


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logprobs_and_gradients_are_those_of_each_sequence_alone(kind: str) -> None:
    scene = Scene(kind)
    backbone, their_model = learner(kind, scene), fresh(kind, "eager")
    rows = np.arange(len(scene.sequences))
    layout = lay_out(scene.sequences, rows)
    assert [len(image.rows) for image in layout.images] == [
        len(image.at) for row in (0, 2) for image in scene.sequences.images_of(row)
    ]  # those that two samples share stand there once
    ours, _ = backbone.logprobs(layout, 1.0)
    theirs = torch.cat([own_logprobs(their_model, scene, row) for row in rows])
    order = np.argsort(layout.column)
    torch.testing.assert_close(ours[order], theirs, rtol=1e-5, atol=2e-5)
    weights = torch.linspace(-1.0, 1.0, len(theirs))
    (ours[order] * weights).sum().backward()
    (theirs * weights).sum().backward()
    expected = {name: p.grad for name, p in their_model.named_parameters()}
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, parameter in backbone.lm.named_parameters():
        grad = expected[name]
        assert (parameter.grad is None) == (grad is None), name
        if parameter.grad is None or grad is None:
            continue
        # without rotation the softmax takes it out, and its gradient is rounding
        if name.startswith("model.vision_") and name.endswith("k_proj.bias"):
            assert float(max(parameter.grad.abs().max(), grad.abs().max())) < 1e-4 * largest, name
            continue
        error = (parameter.grad - grad).abs().max() / (grad.abs().max() + 1e-6 * largest)
        assert float(error) < 2e-4, name
    tower = [n for n, g in expected.items() if "vis" in n and g is not None and g.abs().max() > 0]
    assert len(tower) > 10  # the images do matter


def as_scenes_write(config: Any) -> None:
    """Placeholders of a Scene, and weights that tell tokens and pictures apart."""
    config.image_token_id = PLACEHOLDER
    for name, token in {"vision_start": START, "boi": START, "vision_end": END, "eoi": END}.items():
        if hasattr(config, f"{name}_token_id"):
            setattr(config, f"{name}_token_id", token)
    config.get_text_config().initializer_range = config.vision_config.initializer_range = 0.2


@pytest.mark.parametrize("kind", but_for_a_few(k for k in IMAGE_MODELS if not k.endswith("_moe")))
def test_in_four_bits_they_are_those_of_a_plain_model_with_the_expanded_weights(
    kind: str, tmp_path: Path
) -> None:
    """The decoder's matrices are packed, and nothing else. Of an adapter's B the gradient is that
    of the merged matrix times A.
    """
    path, scene = write_model(kind, tmp_path / "model", as_scenes_write), Scene(kind)
    lm = load_model(path, dtype=torch.float32, quantize="4bit", images=True).lm
    plain: Any = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    stored = dict(plain.named_parameters())
    matrices = {f"{n}.weight" for n, m in lm.named_modules() if isinstance(m, FourBitLinear)}
    assert not any(image_part(f".{name}") for name in matrices)
    settings = LoraSettings(rank=4, alpha=8)
    adapter = moved(add_adapter(lm, settings, seed=0))
    weights = dict(adapter.hub_weights())
    assert weights.keys() == stored.keys()
    for name in weights.keys() - matrices:
        assert torch.equal(weights[name], stored[name]), name
    plain.load_state_dict(weights, strict=False)
    backbone = Backbone(lm, CPU, MicroBatch())
    backbone.tower = ImageTower(lm, scene.pixels.__getitem__)
    layout = lay_out(scene.sequences, np.arange(4), min_shared=backbone.min_shared)
    ours, _ = backbone.logprobs(layout, 1.0)
    theirs = torch.cat([own_logprobs(plain.eval(), scene, row) for row in range(4)])
    order, rounding = np.argsort(layout.column), IMAGE_MODELS[kind].rounding
    torch.testing.assert_close(ours[order], theirs, rtol=1e-5, atol=10 * rounding)
    slope = torch.linspace(-1.0, 1.0, len(theirs))
    (ours[order] * slope).sum().backward()
    (theirs * slope).sum().backward()
    ours_by_name = adapter.parameters()
    for name in matrices:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (ours_by_name[f"{layer}.lora_{part}.weight"] for part in "AB")
        want = settings.alpha / settings.rank * plain.get_parameter(name).grad @ a.T
        assert b.grad is not None
        assert (b.grad - want).norm() <= 1e-3 * want.norm() + 1e-6, name


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_the_cut_into_micro_batches_does_not_matter(kind: str) -> None:
    scene = Scene(kind)
    backbone = learner(kind, scene)
    read = lambda layout: backbone.logprobs(layout, 1.0)[0]  # noqa: E731
    together = backbone.column(scene.sequences, read).values
    backbone.micro = MicroBatch(max_sequences=1)
    np.testing.assert_allclose(
        backbone.column(scene.sequences, read).values, together, rtol=1e-5, atol=2e-5
    )


def test_tokens_of_an_image_see_those_behind_them_in_packed_sequences() -> None:
    """Gemma 3's spans matter: as text before text, the same tokens have other logprobs."""
    scene = Scene("gemma3")
    backbone = learner("gemma3", scene)

    def read() -> Any:
        column = backbone.column(scene.sequences, lambda part: backbone.logprobs(part, 1.0)[0])
        return column.values

    mutual = read()
    images = [scene.sequences.images_of(row) for row in range(4)]
    assert all(image.mutual for shown in images for image in shown)
    scene.sequences = Sequences(
        scene.sequences.tokens, scene.sequences.loss_mask, scene.sequences.group,
        images=tuple(tuple(replace(i, mutual=False) for i in shown) for shown in images),
    )  # fmt: skip
    apart = np.abs(read() - mutual)
    assert apart.max() > 1e-3
    without = scene.sequences.tokens.offsets[3]  # the last one has no image
    np.testing.assert_array_equal(apart[without:], 0.0)


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_routers_give_for_images_and_text_what_those_of_transformers_give(kind: str) -> None:
    scene = Scene(kind)
    backbone, their_model = learner(kind, scene), fresh(kind, "eager")
    routers = Routers(backbone.lm)
    assert routers.layers == 3
    for row in range(len(scene.sequences)):
        ids = torch.from_numpy(scene.sequences.tokens.row(row).astype(np.int64))[None]
        named = scene.arguments(ids, scene.sequences.images_of(row))
        their_model.model.rope_deltas = None
        theirs = their_model(input_ids=ids, use_cache=False, output_router_logits=True, **named)
        with routers.recording() as recorded:
            backbone.logprobs(lay_out(scene.sequences, np.array([row])), 1.0)
        for ours, logits in zip(recorded, theirs.router_logits, strict=True):
            torch.testing.assert_close(ours.logits, logits, rtol=1e-4, atol=1e-4)
            assert ours.chosen.shape == (ids.shape[1], 2)
    config = their_model.config
    coefficient = config.text_config.router_aux_loss_coef
    assert balance_of(config, ModelSettings()) == coefficient == 0.001
    assert balance_of(config, ModelSettings(router_aux_loss_coef=0.5)) == 0.5
    assert balance_of(config, ModelSettings(freeze=("router",))) == 0.0


def test_a_dense_model_that_reads_images_has_no_balance_loss() -> None:
    config = IMAGE_MODELS["qwen3_5"].config()
    assert balance_of(config, ModelSettings()) == 0.0
    with pytest.raises(UsageError, match="transformers has no balance loss for a qwen3_5 model"):
        balance_of(config, ModelSettings(router_aux_loss_coef=0.5))


def test_rows_of_text_alone_have_plain_positions_behind_states() -> None:
    """Qwen3.5 on rows without images: logprobs are those of transformers' forward of its text."""
    scene = Scene("qwen3_5")
    backbone, their_model = learner("qwen3_5", scene), fresh("qwen3_5", "eager")
    generator = np.random.default_rng(1)
    prompt = generator.integers(3, 80, 40)
    rows = [np.concatenate([prompt, generator.integers(3, 80, n)]) for n in (5, 9)]
    scene.sequences = Sequences(
        Ragged.of(rows, np.int32),
        Ragged.of([np.arange(len(row)) >= 40 for row in rows], np.bool_),
        np.zeros(2, np.int64),
    )
    layout = lay_out(scene.sequences, np.arange(2), min_shared=backbone.min_shared)
    assert layout.n_tokens == 40 + 5 + 9  # they share the prompt
    assert layout.rotary_positions.ndim == 1
    ours, _ = backbone.logprobs(layout, 1.0)
    theirs = torch.cat([own_logprobs(their_model, scene, row) for row in range(2)])
    torch.testing.assert_close(ours[np.argsort(layout.column)], theirs, rtol=1e-5, atol=2e-4)


def test_an_image_is_encoded_once_for_its_samples() -> None:
    scene = Scene("qwen2_5_vl")
    backbone = learner("qwen2_5_vl", scene)
    asked: list[str] = []

    def pixels(digest: str) -> Pixels:
        asked.append(digest)
        return scene.pixels[digest]

    backbone.tower = ImageTower(backbone.lm, pixels)
    backbone.logprobs(lay_out(scene.sequences, np.arange(4)), 1.0)
    assert sorted(asked) == sorted(scene.pixels)


@pytest.mark.parametrize("kind", KINDS)
def test_images_go_through_the_tower_in_few_calls_and_give_what_each_gives_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(kind)
    backbone = learner(kind, scene)
    assert backbone.tower is not None
    layout, inner = lay_out(scene.sequences, np.arange(4)), cast(Any, backbone.lm.model)
    encode, calls = inner.get_image_features, list[int]()

    def counted(**pixels: Any) -> Any:
        calls.append(len(pixels["pixel_values"]))
        return encode(**pixels)

    monkeypatch.setattr(inner, "get_image_features", counted)
    each = [array.size for pixels in scene.pixels.values() for array in pixels.values()]
    pictures = [backbone.tower.pictures(layout, at_once=n) for n in (0, sum(each) - 1, sum(each))]
    alone, _, together = pictures
    lengths = [len(pixels["pixel_values"]) for pixels in scene.pixels.values()]
    shapes = {tuple(a.shape[1:] for a in pixels.values()) for pixels in scene.pixels.values()}
    expected = [sum(lengths)] if len(shapes) == 1 else lengths
    assert calls == lengths * 2 + expected
    assert alone is not None
    assert together is not None
    torch.testing.assert_close(together.features, alone.features, rtol=1e-5, atol=1e-5)
    for joint, other in zip(together.deeper, alone.deeper, strict=True):
        torch.testing.assert_close(joint, other, rtol=1e-5, atol=1e-5)


def test_samples_with_other_images_do_not_share_their_prompt() -> None:
    scene = Scene("qwen2_5_vl")
    backbone = learner("qwen2_5_vl", scene)
    first, second = scene.sequences.images_of(0), scene.sequences.images_of(1)
    digest = hashlib.sha256(b"another").hexdigest()
    scene.pixels[digest] = {
        name: array + 1 if name == "pixel_values" else array
        for name, array in scene.pixels[first[0].digest].items()
    }
    other = PlacedImage(digest, second[0].at, second[0].grid)
    mixed = Sequences(
        scene.sequences.tokens, scene.sequences.loss_mask, scene.sequences.group,
        images=(first, (other, second[1]), *scene.sequences.images[2:]),
    )  # fmt: skip
    layout = lay_out(mixed, np.arange(2))
    assert len({image.digest for image in layout.images}) == 3
    ours, _ = backbone.logprobs(layout, 1.0)
    their_model = fresh("qwen2_5_vl", "eager")
    scene.sequences = mixed
    theirs = torch.cat([own_logprobs(their_model, scene, row) for row in range(2)])
    torch.testing.assert_close(ours[np.argsort(layout.column)], theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("border", [5, 12, 27])
def test_a_rank_encodes_the_images_of_its_own_rows_and_has_their_features_alone(
    border: int,
) -> None:
    """Of two ranks. The first image has rows 4 to 9: it is encoded by both, by the first, or, with
    the second image, by the first alone.
    """
    scene = Scene("qwen3_vl")
    layout = lay_out(scene.sequences, np.arange(1))
    first, second = (image.digest for image in layout.images)
    asked: list[str] = []

    def pixels(digest: str) -> Pixels:
        asked.append(digest)
        return scene.pixels[digest]

    tower = ImageTower(fresh("qwen3_vl"), pixels)
    states, encoded = tower.pictures(layout), []
    assert states is not None
    runs, parts = (range(border), range(border, layout.n_tokens)), []
    for run in runs:
        asked.clear()
        parts.append(tower.pictures(layout, run=run))
        encoded.append(list(asked))
    assert encoded == {
        5: [[first], [first, second]], 12: [[first], [second]], 27: [[first, second], []],
    }[border]  # fmt: skip
    here = [(run, part) for run, part in zip(runs, parts, strict=True) if part is not None]
    assert torch.equal(torch.cat([part.rows + run.start for run, part in here]), states.rows)
    for number, features in enumerate((states.features, *states.deeper)):
        joined = torch.cat([(part.features, *part.deeper)[number] for _, part in here])
        torch.testing.assert_close(joined, features, rtol=1e-5, atol=1e-6)


def test_an_image_of_another_size_or_without_a_tower_is_an_error() -> None:
    scene = Scene("qwen2_5_vl")
    backbone = learner("qwen2_5_vl", scene)
    layout = lay_out(scene.sequences, np.arange(4))
    wide, tall = scene.pixels
    scene.pixels[wide], scene.pixels[tall] = scene.pixels[tall], scene.pixels[wide]
    with pytest.raises(RunError, match="its image processor is of another model"):
        backbone.logprobs(layout, 1.0)
    backbone.tower = None
    with pytest.raises(RunError, match="a sequence has an image, which this model does not read"):
        backbone.logprobs(layout, 1.0)
