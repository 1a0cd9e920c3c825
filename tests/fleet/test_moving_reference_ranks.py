"""A reference that follows a narrow policy of which some weights stay float32, on several ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_ranks import FakeContext
from helpers.model_types import make_model
from helpers.ranks import run_ranks
from helpers.tiny_runs import MODEL, MakeRecipe
from learner.test_router_dtype_ranks import rows
from postgrad.algorithms.sft import SFT
from postgrad.fleet.local import LocalFleet
from postgrad.learner.update import Update
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.parallel.ranks import Ranks
from postgrad.recipe.load import recipe_from_json

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def follow(ranks: Ranks, folder: Path, recipe: dict[str, Any], model: str) -> None:
    """One update; then the reference takes the weights. Writes how far its logprobs are from the
    policy's before and after, and how many parts of its weights lie elsewhere than the policy's.
    """
    fleet = LocalFleet(FakeContext.of(recipe_from_json(recipe)), ranks)
    policy = fleet.policy(model)
    reference = fleet.moving_reference(model)
    sequences = rows()
    update = Update(SFT().experience(sequences), np.arange(len(sequences.tokens)))
    policy.update(update, SFT()).result()

    def distance() -> float:
        pairs = (role.logprobs(sequences).result().values for role in (policy, reference))
        return float(np.abs(np.subtract(*pairs)).max())

    before = distance()
    reference.after_step(1, policy)
    pieces = reference.pieces.items()
    elsewhere = sum(piece.sizes != policy.pieces[name].sizes for name, piece in pieces)
    answer = {"before": before, "after": distance(), "elsewhere": elsewhere}
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(answer))


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@pytest.mark.parametrize("kind", ["flint", "kimi_linear"])
def test_it_follows_weights_that_stay_float32_in_a_narrow_policy(
    kind: str, stage: str, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    make_fresh(ModelInit.model_validate(MODEL["init"]), [], 0, tmp_path / "tokenizer")
    size = len(load_tokenizer(str(tmp_path / "tokenizer")))
    model = str(make_model(kind, tmp_path / "tokenizer", size, tmp_path / kind))
    recipe = make_recipe(
        "rl",
        model={"path": model, "init": None, "dtype": "bfloat16"},
        algorithm={"kl_coef": 0.05},
        reference={"refresh_steps": 1},
        learner={"sharding": stage, "ranks": 2, "lr": 0.1},
        cluster={"type": "ray"},
    )
    run_ranks(2, follow, tmp_path, recipe.dump(), model)
    for rank in range(2):
        answer = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert answer["elsewhere"] == 0
        assert answer["after"] == 0.0 < answer["before"]
