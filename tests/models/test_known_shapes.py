"""Where shapes are read: directories, the table of common models, the hub."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.core.errors import UsageError
from postgrad.models import known_shapes
from postgrad.models.known_shapes import find_shape, shape_of_model
from postgrad.models.settings import ModelInit, ModelSettings
from postgrad.models.shapes import shape_of

# What the hub shows for the base model's safetensors files.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.2": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b": 999_885_952,
}


def test_every_row_gives_the_number_of_weights_that_the_hub_shows() -> None:
    names = {row["id"] for row in known_shapes._rows().values()}  # pyright: ignore[reportPrivateUsage]
    assert {name: find_shape(name).parameters() for name in names} == PUBLISHED


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "google/gemma-3-1b"]
)
def test_a_row_makes_the_model_that_transformers_makes_of_it(name: str) -> None:
    row: dict[str, Any] = dict(known_shapes._rows()[known_shapes._plain(name)])  # pyright: ignore[reportPrivateUsage]
    config = AutoConfig.for_model(**{k: v for k, v in row.items() if k not in ("also", "id")})
    with torch.device("meta"):
        lm: Any = AutoModelForCausalLM.from_config(config)
    assert find_shape(name).parameters() == lm.num_parameters()


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("qwen/qwen2.5-7b-INSTRUCT", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen2.5-Math-7B", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-70B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("google/gemma-3-1b-it", "google/gemma-3-1b"),
    ],
)
def test_variants_of_a_model_fall_to_its_row(name: str, row: str) -> None:
    assert find_shape(name) == find_shape(row)


def test_a_directory_is_read_by_its_config(fresh: Callable[[str], Path]) -> None:
    config = json.loads((fresh("gemma2") / "config.json").read_text("utf-8"))
    assert find_shape(str(fresh("gemma2"))) == shape_of(config)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("other.json", "{}", "has no config.json"),
        ("adapter_config.json", "{}", "names no base model"),
        ("config.json", "{", "cannot be read"),
        ("config.json", "[]", "holds a list"),
    ],
)
def test_a_directory_without_a_config_is_refused(
    name: str, text: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(UsageError, match=reason):
        find_shape(str(tmp_path))


def test_a_directory_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(UsageError, match=r"no model at models/here: the directory is not there"):
        find_shape("./models/here")


class Hub:
    """In place of the hub: what it answers, after how long."""

    def __init__(self, config: Path | None, seconds: float = 0.0) -> None:
        self.config, self.seconds = config, seconds
        self.asked: tuple[str, str | None] | None = None

    def get_hf_file_metadata(self, url: str, timeout: float) -> None:
        time.sleep(self.seconds)
        if self.config is None:
            raise RuntimeError("404 Client Error.\nRepository not found")  # each client has its own

    def hf_hub_download(
        self, name: str, file: str, revision: str | None, local_files_only: bool = False
    ) -> str:
        self.asked = (name, revision)
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        return str(self.config)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hub], None]:
    def put(answers: Hub) -> None:
        for name in ("get_hf_file_metadata", "hf_hub_download"):
            monkeypatch.setattr(huggingface_hub, name, getattr(answers, name))

    return put


def test_an_id_that_the_table_lacks_is_read_from_the_hub(
    hub: Callable[[Hub], None], fresh: Callable[[str], Path]
) -> None:
    answers = Hub(fresh("llama") / "config.json")
    hub(answers)
    assert find_shape("someone/something") == find_shape(str(fresh("llama")))
    assert answers.asked == ("someone/something", None)
    assert find_shape("someone/something@v2") == find_shape(str(fresh("llama")))
    assert answers.asked == ("someone/something", "v2")


def test_what_the_hub_does_not_know_is_refused_with_the_nearest_known_id(
    hub: Callable[[Hub], None],
) -> None:
    hub(Hub(None))
    with pytest.raises(UsageError, match="404 Client Error") as refused:
        find_shape("Qwen/Qwen3-9B")
    assert "did you mean Qwen/Qwen3-8B?" in str(refused.value)


def test_a_plan_does_not_wait_for_a_slow_network(
    hub: Callable[[Hub], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_shapes, "HUB_SECONDS", 0.1)
    hub(Hub(None, seconds=1.0))
    with pytest.raises(UsageError, match=r"no answer in 0\.1 seconds"):
        find_shape("someone/something")


def test_a_model_table_is_read_by_its_path_before_its_init() -> None:
    init = ModelInit()
    named = ModelSettings(path="Qwen/Qwen3-0.6B", init=init)
    assert shape_of_model(named) == find_shape("Qwen/Qwen3-0.6B")
    assert shape_of_model(ModelSettings(init=init)).layers == init.num_hidden_layers
    with pytest.raises(UsageError, match=r"set model\.path"):
        shape_of_model(ModelSettings())
