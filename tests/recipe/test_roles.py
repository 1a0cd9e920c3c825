"""What a recipe says of its roles that could not be done is refused, not left undone."""

from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.load import parse_recipe, require_resolved

RL: dict[str, Any] = {
    "job": "rl",
    "run_dir": "runs/x",
    "steps": 1,
    "model": {"path": "some/model"},
    "data": {"path": "rows.jsonl", "max_len": 1024},
    "rewards": [{"type": "gsm8k"}],
    "algorithm": {"type": "grpo", "kl_coef": 0.1},
}
PREFERENCE: dict[str, Any] = {
    "job": "preference",
    "run_dir": "runs/x",
    "steps": 1,
    "model": {"path": "some/model"},
    "data": {"path": "pairs.jsonl"},
}


@pytest.mark.parametrize("how", [{"refresh_steps": 5}, {"ema_decay": 0.9}])
def test_a_reference_that_would_not_move_is_not_told_to(how: dict[str, Any]) -> None:
    parse_recipe({**RL, "reference": how})
    adapted = {**RL, "model": {"path": "some/model", "lora": {"rank": 8}}}
    parse_recipe(adapted)
    with pytest.raises(UsageError, match="cannot follow a policy with an adapter"):
        parse_recipe({**adapted, "reference": how})
    with pytest.raises(UsageError, match="computes its logprobs once"):
        parse_recipe({**PREFERENCE, "reference": how})


def test_four_bits_without_an_adapter_have_nothing_to_train() -> None:
    model = {"path": "some/model", "quantize": "4bit"}
    with pytest.raises(UsageError, match=r"model\.quantize: weights in four bits are frozen"):
        parse_recipe({**PREFERENCE, "model": model})
    parse_recipe({**PREFERENCE, "model": {**model, "lora": {}}})


@pytest.mark.parametrize("role", ["reference", "critic", "reward_model"])
def test_a_stage_s_model_is_for_pipelines_in_every_role(role: str) -> None:
    recipe = parse_recipe({**RL, role: {"model": {"path": "@reward"}}})
    with pytest.raises(UsageError, match=rf"^{role}\.model\.path = '@reward' is the model of"):
        require_resolved(recipe)
