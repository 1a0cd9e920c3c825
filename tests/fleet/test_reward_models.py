"""A reward model and the critic that starts from it: when they are the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.fake_ranks import FakeContext
from helpers.model_types import make_model
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.fleet.loading import frozen_reward_model
from postgrad.fleet.local import LocalFleet
from postgrad.models.known_shapes import shape_of_model
from postgrad.models.save import save_model
from postgrad.models.score import load_score_model
from postgrad.models.tokenizer import load_tokenizer
from postgrad.plan.roles import planned_roles
from postgrad.recipe.recipe import RLRecipe


def last_tokens() -> Sequences:
    """Two sequences whose last tokens are scored."""
    rows = [np.array([1, 2, 3, 4]), np.array([5, 6])]
    masks = [np.array([False, False, False, True]), np.array([False, True])]
    return Sequences(Ragged.of(rows, np.int32), Ragged.of(masks, np.bool_), np.arange(2))


def headed(base: str, to: Path) -> str:
    """A directory of a model's body with a head of scores."""
    model = load_score_model(base, dtype=torch.float32)
    save_model(model.lm, model.tokenizer, to)
    return str(to)


def judged(make_recipe: MakeRecipe, path: str, **model: Any) -> FakeContext:
    """A PPO run whose critic starts from the reward model at `path`."""
    settings = {"path": path, "init": None, "dtype": "float32", **model}
    rewards = [{"type": "reward_model"}]
    table = {"model": {"path": path}}
    algorithm = {"type": "ppo"}
    return FakeContext.of(
        make_recipe("rl", model=settings, algorithm=algorithm, rewards=rewards, reward_model=table)
    )


@pytest.mark.parametrize(
    ("kind", "model", "shared"),
    [
        ("qwen3", {"lora": {"rank": 2}}, True),
        ("qwen3", {"lora": {"rank": 2}, "quantize": "4bit"}, False),
        ("qwen3_moe", {"lora": {"rank": 2}, "router_dtype": "float32"}, False),
        ("qwen3_moe", {"freeze": ["router"]}, False),
    ],
)
def test_a_reward_model_is_the_critics_base_only_where_its_own_table_loads_the_same_weights(
    kind: str,
    model: dict[str, Any],
    shared: bool,
    make_recipe: MakeRecipe,
    models: Callable[[int], str],
    tmp_path: Path,
) -> None:
    """A base in four bits is another model, and without an adapter the critic's weights move."""
    base = models(0)
    if kind != "qwen3":
        base = str(make_model(kind, Path(base), len(load_tokenizer(base)), tmp_path / kind))
    path = headed(base, tmp_path / "judge")
    context = judged(make_recipe, path, **model)
    recipe, choices = context.recipe, context.choices
    assert isinstance(recipe, RLRecipe)
    fleet = LocalFleet(context)
    critic, role = fleet.critic(path), fleet.frozen_reward_model(path)
    assert (role.backbone is critic.backbone) == shared
    with torch.no_grad():
        for weight in critic.backbone.lm.parameters():
            if weight.requires_grad:
                weight.add_(0.1)  # as after updates
    alone = frozen_reward_model(recipe, recipe.reward_model.model, path, choices)
    expected = alone.scores(last_tokens()).result().values
    assert role.scores(last_tokens()).result().values.tobytes() == expected.tobytes()
    planned = planned_roles(recipe, shape_of_model)[-1]
    assert (planned.name, planned.on) == ("reward_model", "critic" if shared else None)


def test_a_model_without_a_head_is_no_reward_model_under_an_adapter_of_the_critic_either(
    make_recipe: MakeRecipe, models: Callable[[int], str]
) -> None:
    """The critic's head is drawn then: as a reward it would be noise."""
    fleet = LocalFleet(judged(make_recipe, models(0), lora={"rank": 2}))
    fleet.critic(models(0))
    with pytest.raises(UsageError, match=r"has no score.weight: it is no reward model"):
        fleet.frozen_reward_model(models(0))
