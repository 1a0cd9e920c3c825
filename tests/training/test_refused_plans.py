"""A plan refuses what a run refuses once it has loaded the model, in the same words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.model_types import make_model
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.models.known_shapes import find_shape
from postgrad.observe.console import Console
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.lengths import RowLengths
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.recipe.recipe import Recipe
from postgrad.training.start import train

ADAPTER = {"rank": 2, "alpha": 4}
ON_EXPERTS = {**ADAPTER, "targets": ["q_proj", "experts", "router"]}
HERE = parse_hardware("1xH100")
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "z-loss": ("qwen3", {"model": {"router_z_loss_coef": 0.1}}),
    "balance loss": ("qwen3", {"model": {"router_aux_loss_coef": 0.1}}),
    "replay": ("qwen3", {"rollout": {"router_replay": "old"}}),
    "dtype of routers": ("qwen3", {"model": {"router_dtype": "float32"}}),
    "dtype of the reference's routers": (
        "qwen3",
        {"algorithm": {"kl_coef": 0.1}, "reference": {"model": {"router_dtype": "float32"}}},
    ),
    "tied": ("qwen3", {"model": {"lora": {**ADAPTER, "modules_to_save": ["lm_head"]}}}),
    "dora of experts": ("qwen3_moe", {"model": {"lora": {**ON_EXPERTS, "dora": True}}}),
    "dropout of experts": ("qwen3_moe", {"model": {"lora": {**ON_EXPERTS, "dropout": 0.1}}}),
    "dropout": ("qwen3_next", {"model": {"lora": {**ADAPTER, "dropout": 0.1}}}),
}


def planned(recipe: Recipe) -> RunPlan:
    path = recipe.model.path
    assert path is not None
    lengths = RowLengths(20, 40, 1.0, "here")
    return make_plan(recipe, Facts(lambda _: find_shape(path), HERE, lengths))


@pytest.fixture(scope="module")
def tiny(models: Callable[[int], str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """tiny(kind): the directory of a model of a type."""
    folder = tmp_path_factory.mktemp("kinds")

    def model_path(kind: str) -> str:
        if kind == "qwen3":
            return models(0)
        if not (folder / kind).exists():
            make_model(kind, Path(models(0)), 101, folder / kind)
        return str(folder / kind)

    return model_path


@pytest.mark.parametrize("refused_case", REFUSED)
def test_a_plan_refuses_in_the_words_of_the_run(
    refused_case: str, tiny: Any, make_recipe: MakeRecipe, console: Console
) -> None:
    kind, sections = REFUSED[refused_case]
    model = {"init": None, "path": tiny(kind), **sections.get("model", {})}
    recipe = make_recipe("rl", **{**sections, "model": model})
    messages: list[str] = []
    for attempt in (lambda: planned(recipe), lambda: train(recipe, console)):
        with pytest.raises(UsageError) as refused:
            attempt()
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


def test_experts_in_one_weight_are_refused_in_four_bits(
    tiny: Any, make_recipe: MakeRecipe, console: Console
) -> None:
    model = {"init": None, "path": tiny("qwen3_moe"), "lora": ADAPTER}
    recipe = make_recipe("rl", model={**model, "quantize": "4bit"})
    pattern = r'quantize = "4bit": .* of this qwen3_moe model keeps several matrices in one weight'
    for attempt in (lambda: planned(recipe), lambda: train(recipe, console)):
        with pytest.raises(UsageError, match=pattern):
            attempt()


def test_what_a_model_has_is_planned(tiny: Any, make_recipe: MakeRecipe) -> None:
    model = {"init": None, "path": tiny("qwen3_moe"), "router_z_loss_coef": 0.1}
    mixture = {**model, "router_aux_loss_coef": 0.1}
    assert planned(make_recipe("rl", model=mixture, rollout={"router_replay": "old"})).roles
    dense = {"init": None, "path": tiny("qwen3")}
    dropout = {"lora": {**ADAPTER, "dropout": 0.1}, "quantize": "4bit"}
    assert planned(make_recipe("rl", model={**dense, **dropout})).roles
