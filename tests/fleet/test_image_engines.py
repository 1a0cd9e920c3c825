"""Rollout workers without Ray that sample from images, which requests name by their hash."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from helpers.image_directories import models, picture
from helpers.shared_engines import Shared, bits, dies_in, tokens
from postgrad.core.errors import RunError
from postgrad.core.media import image_store, images_kept_in
from postgrad.fleet.engines import image_folders
from postgrad.models import image_reader
from postgrad.models.config import load_config
from postgrad.models.image_reader import ImageReader
from postgrad.models.images import ImageTower, Pixels
from postgrad.models.tokenizer import load_tokenizer
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.settings import SamplingSettings

__all__ = ["models"]
KIND = "qwen2_5_vl"


@pytest.fixture
def requests(tmp_path: Path, models: Callable[[str], str]) -> Iterator[list[Request]]:
    """Two samples of each of four prompts: three with an image of their own, one with none."""
    path = models(KIND)
    tokenizer: Any = load_tokenizer(path)
    reader = ImageReader(path, load_config(path), tokenizer)
    settings = SamplingSettings(max_new_tokens=5)
    with images_kept_in(tmp_path / "images"):
        digests = [image_store().add(picture(number, 16, 16)) for number in range(3)]
        texts = [f"a<|vision_start|>{reader.text(each).text}<|vision_end|>" for each in digests]
        image_requests: list[Request] = []
        for ticket, text in enumerate([*texts, "abc"]):
            ids = np.array(tokenizer(text)["input_ids"], np.int32)
            images = reader.placed(ids, digests[ticket : ticket + 1])
            assert images is not None
            image_requests.append(Request(ticket, (0, 1), ids, settings, images=images))
        yield image_requests


@pytest.fixture
def shared(make_recipe: Any, models: Callable[[str], str], tmp_path: Path) -> Iterator[Any]:
    """shared(size, {number: dies})"""
    started: list[Shared] = []

    def start(size: int, dies: Any = None) -> Shared:
        recipe = make_recipe("rl", model={"dtype": "float32"})
        started.append(Shared(recipe, models(KIND), tmp_path, size, dies or {}))
        return started[-1]

    yield start
    for each in started:
        each.engine.close()


def test_processes_sample_what_one_samples_and_encode_an_image_once(
    shared: Any, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = list[str](), ImageTower.encoded

    def noted(self: ImageTower, images: Mapping[str, Pixels]) -> Any:
        encoded.extend(images)
        return encode(self, images)

    monkeypatch.setattr(ImageTower, "encoded", noted)
    alone = generate(shared(1).engine, requests)
    shown = sorted(image.digest for request in requests for image in request.images)
    assert sorted(encoded) == shown
    encoded.clear()
    engine = shared(2).engine
    assert tokens(generate(engine, requests)) == tokens(alone)
    assert sorted(encoded) == shown


def test_a_process_that_dies_is_replaced_and_proved_with_the_same_bits(
    shared: Any, requests: list[Request]
) -> None:
    asked = ([request.token_ids for request in requests], 1.0, [r.images for r in requests])
    intact, lossy = shared(2), shared(2, {1: dies_in("turn", 0)})
    scores = [each.engine.logprobs(*asked) for each in (intact, lossy)]
    assert bits(generate(lossy.engine, requests)) == bits(generate(intact.engine, requests))
    (joined,) = lossy.logs.of("engine_joined")
    assert joined["engine"] == 1
    assert all(np.array_equal(a, b) for a, b in zip(*scores, strict=True))
    blind = intact.engine.logprobs([requests[3].token_ids], 1.0)
    assert np.array_equal(blind[0], scores[0][3])


def test_an_image_that_is_not_in_the_runs_folder_is_named(
    shared: Any, requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_reader, "KEPT", WeakKeyDictionary())  # as a worker begins
    digest = requests[0].images[0].digest
    (tmp_path / "images" / digest).unlink()
    with pytest.raises(RunError, match=f"image {digest} cannot be read"):
        generate(shared(2).engine, requests)


def test_processes_read_the_images_of_the_run_and_of_the_one_that_it_replays(
    make_recipe: Any, tmp_path: Path
) -> None:
    recipe = make_recipe("rl")
    assert image_folders(recipe, tmp_path) == [str(tmp_path / "images")]
    other = tmp_path / "other"
    other.mkdir()
    replay = {"source": "replay", "replay_path": str(other)}
    folders = image_folders(make_recipe("rl", rollout=replay), tmp_path)
    assert folders == [str(tmp_path / "images"), str(other / "images")]
