"""Models that read images, merged: towers and processors too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

from helpers.adapters import moved
from helpers.image_directories import write_model
from postgrad.models.adapter_files import write_adapter
from postgrad.models.adapters import add_adapter
from postgrad.models.config import load_config
from postgrad.models.export import export_hf
from postgrad.models.images import image_part
from postgrad.models.load import load_model
from postgrad.models.score import RewardScale, load_score_model, scale_of
from postgrad.models.settings import LoraSettings
from postgrad.observe.console import Console
from postgrad.tools.merge import merge
from postgrad.tools.merge_settings import Parameter, requested


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """reading("qwen3_5", seed): a model that reads images, with weights of its own."""
    folder = tmp_path_factory.mktemp("reading")

    def model(kind: str, seed: int) -> Path:
        base, to = folder / kind, folder / f"{kind}-{seed}"
        if not base.exists():
            write_model(kind, base)
        if not to.exists():
            generator = torch.Generator().manual_seed(seed)
            lm = load_model(str(base), dtype=torch.float32, images=True).lm
            weights = {
                name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
                for name, p in lm.named_parameters()
            }
            export_hf(weights, str(base), to, dtype=torch.float32)
        return to

    return model


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_5",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("smolvlm", marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", marks=pytest.mark.slow),
        pytest.param("mistral3", marks=pytest.mark.long),
    ],
)
def test_models_that_read_images_are_merged_with_their_towers(
    kind: str, reading: Any, tmp_path: Path
) -> None:
    paths = [reading(kind, seed) for seed in (0, 1)]
    merge(
        requested("linear", list(map(str, paths)), weights=[1.0, 3.0]),
        tmp_path / "to",
        Console("quiet"),
    )
    a, b, got = (load_file(path / "model.safetensors") for path in (*paths, tmp_path / "to"))
    assert got.keys() == a.keys()
    parts = {image_part(f".{name}") for name in got}
    assert parts == {None, "vision", "projector"}
    for name, tensor in got.items():
        want = (a[name].double() + 3 * b[name].double()) / 4
        torch.testing.assert_close(tensor.double(), want, atol=1e-6, rtol=1e-6)
    processor = "preprocessor_config.json"
    assert (tmp_path / "to" / processor).read_bytes() == (paths[0] / processor).read_bytes()
    lm: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "to")
    assert (
        type(lm).__name__ == json.loads((paths[0] / "config.json").read_text())["architectures"][0]
    )


@pytest.mark.parametrize(
    "method",
    [
        "slerp",
        "dare_ties",
        pytest.param("ties", marks=pytest.mark.slow),
        pytest.param("task_arithmetic", marks=pytest.mark.slow),
    ],
)
def test_all_methods_reach_the_tower(method: str, reading: Any, tmp_path: Path) -> None:
    """All changes of one model give that model, and so does the arc between two equal ones."""
    first, second = reading("gemma3", 0), reading("gemma3", 1)
    more: dict[str, Any] = {"t": 0.5} if method == "slerp" else {"base": str(first)}
    names = [str(second)] * 2 if method == "slerp" else [str(second)]
    merge(requested(method, names, **more), tmp_path / "to", Console("quiet"))
    got, want = (load_file(path / "model.safetensors") for path in (tmp_path / "to", second))
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], atol=1e-6, rtol=1e-6)


def test_an_adapter_on_a_model_that_reads_images_changes_the_decoder_alone(
    reading: Any, tmp_path: Path
) -> None:
    base = reading("gemma3", 0)
    settings = LoraSettings(rank=2, alpha=4)
    lm = load_model(str(base), dtype=torch.float32, images=True).lm
    adapter = moved(add_adapter(lm, settings, seed=0))
    write_adapter(adapter.parameters(), settings, str(base), tmp_path / "adapter")
    asked = requested("adapter", [str(tmp_path / "adapter")], base=str(base))
    merge(asked, tmp_path / "to", Console("quiet"))
    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "to"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 7 * 3  # the matrices of three layers
    assert not any(image_part(f".{name}") for name in changed)


def test_numbers_by_layer_are_those_of_the_decoders_layers() -> None:
    parameter = Parameter((("", (0.0, 1.0)),))
    numbers = {
        "model.language_model.layers.0.mlp.up_proj.weight": 0.0,
        "model.language_model.layers.2.mlp.up_proj.weight": 1.0,
        "model.vision_tower.encoder.layers.26.mlp.fc1.weight": 0.0,
        "model.multi_modal_projector.linear_1.weight": 0.0,
        "model.language_model.norm.weight": 1.0,
    }
    assert {name: parameter.at(name, 3) for name in numbers} == numbers


@pytest.mark.slow
def test_reward_models_that_read_images_are_averaged(reading: Any, tmp_path: Path) -> None:
    paths: list[Path] = []
    for seed in (0, 1):
        base = str(reading("gemma3", seed))
        lm = load_score_model(base, dtype=torch.float32, seed=seed, images=True).lm
        weights = dict(lm.named_parameters())
        paths.append(tmp_path / f"reward-{seed}")
        scale = RewardScale(0.5, 2.0)
        export_hf(weights, base, paths[-1], dtype=torch.float32, scale=scale)
    merge(requested("linear", list(map(str, paths))), tmp_path / "to", Console("quiet"))
    a, b, got = (load_file(path / "model.safetensors") for path in (*paths, tmp_path / "to"))
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, (a[name] + b[name]) / 2, atol=1e-6, rtol=1e-6)
    assert "score.weight" in got
    assert scale_of(load_config(str(tmp_path / "to"))) == RewardScale(0.5, 2.0)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "to")
