"""Images on their way to vLLM: arrays in a file beside a message, placed as the prompt has them."""

import json
import pickletools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from helpers.fake_vllm import fake_vllm
from helpers.image_directories import models, picture, row
from postgrad.core.errors import UsageError
from postgrad.core.media import image_store, images_kept_in
from postgrad.core.records import PlacedImage
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.settings import RolloutSettings, SamplingSettings
from postgrad.rollout.vllm import inputs, start
from postgrad.rollout.vllm.inputs import PromptInputs, engine_arguments
from postgrad.rollout.vllm.protocol import Start
from postgrad.training.start import train

__all__ = ["models"]
KEPT = """\
import shutil
for name in [message["pixels"]] if "pixels" in message else []:
    shutil.move(name, os.environ["KEPT"] + "/" + str(len(os.listdir(os.environ["KEPT"]))))
"""


def test_a_message_names_images_and_their_arrays_come_in_a_file(
    tmp_path: Path, models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = models("qwen2_5_vl"), tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setenv("KEPT", str(kept))
    python = Path(fake_vllm(tmp_path))
    looks = "message = json.loads(line)\n"
    indented = "".join(f"    {line}\n" for line in KEPT.splitlines())
    python.write_text(python.read_text().replace(looks, looks + indented))
    rollout = RolloutSettings.model_validate({"type": "vllm", "vllm": {"python": str(python)}})
    model = start.read_model(path, torch.float32, 60)
    assert model.reader is not None
    sizes = start.sizes_of(path, rollout, torch.float32, sequences=4, max_len=60)
    device = torch.device("cpu")
    engine = start.start(path, rollout, model, sizes, device=device, threads=1, logs=tmp_path)
    with images_kept_in(tmp_path / "images"):
        digest = image_store().add(picture(0, 16, 16))
        ids = np.array([5, 6, *[model.reader.token_id] * 4, 7, 8], np.int32)
        images = model.reader.placed(ids, [digest])
        assert images is not None
        request = Request(0, (0, 1), ids, SamplingSettings(max_new_tokens=3), images=images)
        assert len(generate(engine, [request])) == 2
        engine.logprobs([ids, ids[:1], ids], 1.0, [images, (), images])
        engine.close()
        pixels = model.reader.pixels(digest)
    messages = [
        json.loads(line)
        for line in (tmp_path / "vllm-0.log").read_text().splitlines()
        if line.startswith("{")
    ]
    shown = {"digest": digest, "runs": [[2, 4]]}
    assert [message["images"] for message in messages] == [[[shown]], [[shown], [], [shown]]]
    for file in sorted(kept.iterdir()):  # one for each message, with each image once
        arrays = load_file(file)
        assert arrays.keys() == {f"{digest}/{name}" for name in pixels}
        assert all(np.array_equal(arrays[f"{digest}/{name}"], a) for name, a in pixels.items())
        with pytest.raises(ValueError, match=r"."):
            list(pickletools.genops(file.read_bytes()))


class Items(dict[str, Any]):
    """vLLM's arguments of images."""

    @classmethod
    def from_hf_inputs(cls, arrays: Any, fields: Any) -> "Items":
        assert fields == sorted(arrays)
        return cls(image=[dict(arrays)])


class Update:
    """Of a placeholder to as many tokens as the grid has, some of which get an embedding."""

    def __init__(self, modality: str, item: Any, embedded: Any) -> None:
        self.modality, self._item, self._embedded = modality, item, embedded

    def resolve(self, number: int) -> Any:
        assert number == 0
        full = [9] * int(self._item["grid"].prod())
        return SimpleNamespace(content=SimpleNamespace(full=full, is_embed=self._embedded))


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PromptInputs]:
    """prompts(embedded=None): over an engine that processes as vLLM's does."""
    modules = {
        "vllm.multimodal.inputs": SimpleNamespace(
            MultiModalKwargsItems=Items,
            PlaceholderRange=lambda offset, length, is_embed: (offset, length, is_embed),
        ),
        "vllm.multimodal.parse": SimpleNamespace(MultiModalDataItems=dict),
    }
    monkeypatch.setattr(inputs, "import_module", modules.__getitem__)

    def make(embedded: Any = None) -> PromptInputs:
        processor = SimpleNamespace(
            _get_mm_fields_config=lambda arrays, more: sorted(arrays),
            _get_prompt_updates=lambda none, more, items: [
                Update("image", items["image"][0], embedded),
                Update("video", {}, None),
            ],
        )
        return PromptInputs(SimpleNamespace(renderer=SimpleNamespace(mm_processor=processor)))

    return make


@pytest.fixture
def pixels(tmp_path: Path) -> str:
    """A file with the arrays of an image of 2 x 3 tokens, and of one of 4."""
    file = tmp_path / "pixels.safetensors"
    save_file({"aa/grid": np.array([2, 3]), "bb/grid": np.array([2, 2])}, file)
    return str(file)


def test_vllm_gets_our_tokens_with_the_places_of_images(
    prompts: Callable[..., PromptInputs], pixels: str
) -> None:
    first = {"digest": "aa", "runs": [[1, 6]]}
    second = {"digest": "bb", "runs": [[8, 1], [10, 3]]}  # with a token between that is text
    ids = list(range(14))
    both, text = prompts().of([ids, [1, 2]], pixels, [[first, second], []])
    assert text == {"prompt_token_ids": [1, 2]}
    assert both["prompt_token_ids"] == ids
    assert both["mm_hashes"] == {"image": ["aa", "bb"]}
    unparted, parted = both["mm_placeholders"]["image"]
    assert unparted == (1, 6, None)
    assert (parted[0], parted[1], parted[2].tolist()) == (8, 5, [True, False, True, True, True])
    assert [item["grid"].tolist() for item in both["mm_kwargs"]["image"]] == [[2, 3], [2, 2]]
    assert not Path(pixels).exists()
    assert prompts().of([[1], [2]]) == [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}]


def test_an_image_that_vllm_expands_otherwise_is_refused(
    prompts: Callable[..., PromptInputs], pixels: str
) -> None:
    shown = {"digest": "aa", "runs": [[0, 5]]}
    with pytest.raises(RuntimeError, match="aa has 5 tokens in its prompt, and vLLM gives it 6"):
        prompts().of([[1] * 5], pixels, [[shown]])


def test_tokens_without_an_embedding_do_not_count(
    prompts: Callable[..., PromptInputs], pixels: str
) -> None:
    shown = {"digest": "aa", "runs": [[0, 5]]}
    but_one = prompts(lambda full: torch.arange(len(full)) > 0)
    (prompt,) = but_one.of([[1] * 5], pixels, [[shown]])
    assert prompt["mm_hashes"] == {"image": ["aa"]}


def test_torchvision_that_is_broken_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = Start("a model", "float32", 40, 4, 1, 1, 0.5, True, False, True, images=True)

    def broken(name: str) -> None:
        raise RuntimeError(f"operator {name}::nms does not exist")

    monkeypatch.setattr(inputs, "import_module", broken)
    with pytest.raises(
        RuntimeError, match=r"torchvision .* RuntimeError: operator torchvision::nms"
    ):
        engine_arguments(message)
    assert "mm_device_do_normalize" not in engine_arguments(replace(message, images=False))
    monkeypatch.setattr(inputs, "import_module", lambda name: None)
    arguments = engine_arguments(message)
    assert arguments["mm_device_do_normalize"] is False
    assert arguments["skip_mm_profiling"] is True
    assert engine_arguments(replace(message, cache_bytes=None))["skip_mm_profiling"] is False


def test_models_that_vllm_does_not_sample_are_refused_by_name(
    models: Callable[[str], str],
) -> None:
    for kind in ("gemma3", "internvl", "llava"):
        with pytest.raises(UsageError, match=f"of type {kind}, which is not tried with images in"):
            start.read_model(models(kind), torch.float32, 60)


def test_an_image_for_a_model_of_text_is_refused(model_path: str, tmp_path: Path) -> None:
    model = start.read_model(model_path, torch.float32, 40)
    assert model.shown(tmp_path, [(), ()]) == {}
    with pytest.raises(UsageError, match="the model that vLLM samples reads none"):
        model.shown(tmp_path, [(PlacedImage("ab" * 32, np.array([1])),)])


def recipe(tmp_path: Path, model: str, **rollout: Any) -> Any:
    rows = [{**row(n, "yes", ((16, 16), (24, 16))[: 1 + n % 2]), "answer": "yes"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return parse_recipe(
        {
            "job": "rl",
            "run_dir": str(tmp_path / "run"),
            "steps": 3,
            "model": {"path": model, "dtype": "float32"},
            "data": {"path": str(tmp_path / "rows.jsonl"), "messages": "messages", "max_len": 120},
            "rewards": [{"type": "tiny_rewards:looks"}],
            "algorithm": {"type": "grpo"},
            "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
            "rollout": {"type": "vllm", "max_new_tokens": 4, "dtype": "float32", **rollout},
            "scoring": {"workers": 1},
            "learner": {"lr": 3e-2, "threads": 1},
        }
    )


def test_an_environment_without_torchvision_is_refused_before_weights_are_read(
    tmp_path: Path, models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()
    monkeypatch.setattr("postgrad.fleet.loading.load_model", lambda *_, **__: read.append("model"))
    python = Path(fake_vllm(tmp_path))
    python.write_text(python.read_text().replace('behaviour == "without_vllm"', "2"))
    vllm = {"python": str(python)}
    with pytest.raises(UsageError, match="has no package torchvision, without which vLLM cannot"):
        train(recipe(tmp_path, models("qwen2_5_vl"), vllm=vllm), Console())
    assert not read
