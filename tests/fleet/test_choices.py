"""What a recipe leaves open is measured once; a recipe or a record says it without measuring."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from helpers.image_models import IMAGE_MODELS
from helpers.runs import lines
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.fleet import choices
from postgrad.fleet.choices import (
    _shape,  # pyright: ignore[reportPrivateUsage]
    choose,
    runs_compiled,
)
from postgrad.models.settings import LoraSettings, ModelSettings
from postgrad.observe.console import Console
from postgrad.parallel import device
from postgrad.training.start import train

AUTO = {"compile": "auto"}
WIDE = {"init": {"hidden_size": 512, "intermediate_size": 1024}}


def never(*_: Any) -> Any:
    raise AssertionError("it was measured")


@pytest.fixture
def fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A processor on which bfloat16 pays; the sizes that it was asked about."""
    asked: list[tuple[int, int]] = []

    def pays(hidden: int, intermediate: int, _multiply: object) -> bool:
        asked.append((hidden, intermediate))
        return True

    monkeypatch.setattr(device, "bfloat16_pays", pays)
    return asked


def test_the_policys_own_layer_is_measured(
    make_recipe: MakeRecipe, fast_bfloat16: list[tuple[int, int]], tmp_path: Path
) -> None:
    chosen = choose(make_recipe("rl", model=WIDE), {})
    assert (chosen.dtype, chosen.rollout_dtype) == ("bfloat16", "bfloat16")
    config = {"model_type": "qwen3", "hidden_size": 8, "intermediate_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    choose(make_recipe("rl", model={"path": str(tmp_path)}), {})
    choose(make_recipe("rl", model={"path": "nobody/a-hub-model"}), {})
    assert fast_bfloat16 == [(512, 1024), (8, 9), (device.WIDEST, device.WIDEST)]


def test_a_recipe_fixes_every_choice(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "bfloat16_pays", never)
    monkeypatch.setattr(device, "useful_threads", never)
    recipe = make_recipe("rl", model={**WIDE, "dtype": "float32"}, rollout={"dtype": "bfloat16"})
    chosen = choose(recipe, {"dtype": "bfloat16", "threads": 7})
    assert (chosen.dtype, chosen.rollout_dtype, chosen.threads) == ("float32", "bfloat16", 1)


def test_what_was_recorded_is_never_measured_again(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "bfloat16_pays", never)
    monkeypatch.setattr(device, "useful_threads", never)
    recorded = {"dtype": "bfloat16", "rollout_dtype": "float32", "threads": 3, "device": "cpu"}
    chosen = choose(make_recipe("rl", learner={"threads": None}), recorded)
    assert {**chosen.to_json(), **recorded} == chosen.to_json()


def test_the_library_of_each_product_is_measured_once_and_recorded(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def faster(rows: int, columns: int) -> str:
        asked.append((rows, columns))
        return "mkl" if rows == 1024 else "onednn"

    monkeypatch.setattr(choices, "faster_library", faster)
    monkeypatch.setattr(choices, "has_fast_products", lambda: True)
    recipe = make_recipe("rl", model={**WIDE, "dtype": "float32"})
    chosen = choose(recipe, {})
    shape = _shape(recipe)
    assert shape is not None
    assert asked == shape.matrices
    assert chosen.products["1024x512"] == "mkl"
    assert chosen.products["512x1024"] == "onednn"
    monkeypatch.setattr(choices, "faster_library", never)
    assert choose(recipe, chosen.to_json()).products == chosen.products
    old = {name: value for name, value in chosen.to_json().items() if name != "products"}
    assert choose(recipe, old).products == {}  # begun before this was measured
    assert choose(recipe, {}, measure=False).products == {}
    narrow = make_recipe("rl", model={**WIDE, "dtype": "bfloat16"})
    assert choose(narrow, {}).products == {}


def test_what_keeps_no_record_does_not_measure(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "bfloat16_pays", never)
    monkeypatch.setattr(device, "useful_threads", never)
    recipe = make_recipe("rl", model=WIDE, learner={"threads": None})
    assert choose(recipe, {}, measure=False).dtype == "float32"


def test_threads_that_are_left_open_are_measured(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "useful_threads", lambda most: 1)  # pyright: ignore[reportUnknownLambdaType]
    assert choose(make_recipe("rl", learner={"threads": None}), {}).threads == 1


def test_a_resumed_run_goes_on_as_it_was_chosen(
    make_recipe: MakeRecipe,
    fast_bfloat16: list[tuple[int, int]],
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(make_recipe("sft", steps=1), console)
    monkeypatch.setattr(device, "bfloat16_pays", never)
    longer = make_recipe("sft", steps=2)
    train(longer, console)
    events = lines(Path(longer.run_dir) / "events.jsonl")
    dtypes = [event["dtype"] for event in events if event["event"] in ("started", "resumed")]
    assert dtypes == ["bfloat16", "bfloat16"]


def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device, "choose", lambda *_: device.Placement("cuda", threads=1, deterministic=True)
    )


def test_layers_are_compiled_on_cuda_with_flex_attention(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not choose(make_recipe("rl", model=AUTO), {}, measure=False).compiled
    as_on_cuda(monkeypatch)
    assert not choose(make_recipe("rl"), {}).compiled
    assert choose(make_recipe("rl", model=AUTO), {}).compiled
    assert not choose(make_recipe("rl", model={**AUTO, "attention": "sdpa"}), {}).compiled
    assert choose(make_recipe("rl", model={"attention": "sdpa", "compile": True}), {}).compiled


def test_a_run_goes_on_with_the_layers_that_it_began_with(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_cuda(monkeypatch)
    recipe = make_recipe("rl", model=AUTO)
    before = choose(recipe, {}).to_json()
    assert choose(recipe, before).compiled
    assert not choose(recipe, {**before, "compiled": False}).compiled
    del before["compiled"]  # a run of an earlier version
    assert not choose(recipe, before).compiled


def test_compiled_layers_are_refused_on_a_cpu(make_recipe: MakeRecipe) -> None:
    with pytest.raises(UsageError, match=r"model\.compile = true: on a CPU"):
        choose(make_recipe("rl", model={"compile": True}), {}, measure=False)


def test_only_tested_types_in_whole_weights_are_compiled_unasked(make_recipe: MakeRecipe) -> None:
    choices = replace(choose(make_recipe("rl"), {}, measure=False), compiled=True)
    tested, other = (AutoConfig.for_model(kind) for kind in ("gemma3_text", "olmo2"))
    assert runs_compiled(choices, ModelSettings(compile="auto"), tested)
    assert not runs_compiled(choices, ModelSettings(compile="auto"), other)
    assert runs_compiled(choices, ModelSettings(compile=True), other)
    assert not runs_compiled(choices, ModelSettings(compile=False), tested)
    quantized = ModelSettings(compile="auto", quantize="4bit", lora=LoraSettings())
    assert not runs_compiled(choices, quantized, tested)


@pytest.mark.parametrize("kind", IMAGE_MODELS)
def test_models_that_read_images_are_compiled_unasked_without_experts_and_states(
    kind: str, make_recipe: MakeRecipe
) -> None:
    choices = replace(choose(make_recipe("rl"), {}, measure=False), compiled=True)
    dense = kind not in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    config = IMAGE_MODELS[kind].config()
    assert runs_compiled(choices, ModelSettings(compile="auto"), config) == dense
    assert runs_compiled(choices, ModelSettings(compile=True), config)
