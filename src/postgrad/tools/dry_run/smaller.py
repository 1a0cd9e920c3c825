"""The recipe of a dry run's small run: the same models, rows and roles, less of everything.

It is a recipe like any other, and the same code runs it. It learns nothing worth keeping.
"""

import math
from pathlib import Path
from typing import Any

from postgrad.core.batch import BatchGeometry
from postgrad.core.hub import split_revision
from postgrad.fleet.choices import choose
from postgrad.recipe.eval_checks import same_rows
from postgrad.recipe.lines import KeyPath
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Answering, Recipe, RLRecipe
from postgrad.rewards.mixing import ENVIRONMENT
from postgrad.rewards.registry import for_rollout
from postgrad.tools.dry_run.data import Sets, limit_for

ROWS = 16  # of each training set
EVALUATED = 2  # rows of each evaluation set
SAMPLES = 4  # of a prompt
MOST = 32  # samples of the update, unless one micro-batch is more
NEW_TOKENS = 64
WHOLE_RATE = {
    "warmup_updates": 0,
    "warmup_ratio": 0.0,
    "warmup_start_ratio": None,
    "decay_updates": 0,
    "decay_ratio": 0.0,
}
DENSE = {"type": "postgrad.rewards.call:by_text", "name": "dry run", "weight": 1e-3}


def small_recipe(recipe: Recipe, sets: Sets, run_dir: Path, model: str) -> Recipe:
    """One step with one update of about a micro-batch, a few rows evaluated, one checkpoint.

    sets: all rows that were read; model: the policy's start, where the recipe makes a fresh one
    too. Every verifier scores, and a reward that differs from sample to sample is added, so that
    there is a gradient; gates are open, for the same reason.
    """
    data = recipe.dump()
    data |= {"run_dir": str(run_dir), "steps": 1, "total_episodes": None, "epochs": None}
    data["model"]["path"], data["model"]["revision"] = split_revision(model)
    data["observe"]["loggers"] = []
    for place in recipe.learner_tables:
        _table(data, place).update(WHOLE_RATE)
    data["checkpoint"] |= {
        "ckpt_path": None,
        "mirror": "",
        "save_steps": 0,
        "keep_steps": 0,
        "save_minutes": 0.0,
        "save_epochs": 0,
        "best_metric": None,
        "early_stop": 0,
        "wait_for_room_minutes": 0.0,
        "push_to_hub": "",
        "save_hf": "each" if recipe.checkpoint.save_hf == "each" else False,
    }
    _shorten_data(recipe, data, sets)
    data["batch"] |= _batch(recipe, sets)
    data["eval"] |= {"every": 0, "at_start": False, "at_end": True}
    if isinstance(recipe, Answering):
        _shorten_sampling(recipe, data)
    if recipe.trains_on_rollouts and "critic_warmup_steps" in data["algorithm"]:
        data["algorithm"]["critic_warmup_steps"] = 0
    return recipe_from_json(data)


def _table(data: dict[str, Any], place: KeyPath) -> dict[str, Any]:
    """The table at a place, ("critic", "learner") say."""
    table: Any = data
    for key in place:
        table = table[key]
    return table


def _shorten_data(recipe: Recipe, data: dict[str, Any], sets: Sets) -> None:
    """Sets the limit of each dataset to as many rows as give a few records. That is counted on all
    rows, because the first may all be lost. A dataset and its part for evaluation keep one limit.
    """
    assert sets.training is not None
    tables = data["data"]["sets"] or [data["data"]]
    read = list(zip(tables, recipe.data.sources, sets.training.parts, strict=True))
    limits = [limit_for(source, part, ROWS) for _, source, part in read]
    for place, part in sets.evaluation.items():
        settings = recipe.eval.sets[place].data
        limit = limit_for(settings, part, EVALUATED)
        of = [n for n, (_, source, _) in enumerate(read) if same_rows(source, settings)]
        if settings.eval_fraction and of:
            limits[of[0]] = limit = max(limit, limits[of[0]])
        data["eval"]["sets"][place] |= {"limit": limit, "max_lost_fraction": 1.0}
    for (table, _, _), limit in zip(read, limits, strict=True):
        table |= {"limit": limit, "max_lost_fraction": 1.0}


def _shorten_sampling(recipe: Answering, data: dict[str, Any]) -> None:
    each = [min(SAMPLES, sampling.n_samples) for sampling in recipe.eval.samplings]
    most = max(each, default=1)
    data["eval"] |= {
        "n_samples": min(SAMPLES, recipe.eval.n_samples),
        "pass_at": [k for k in recipe.eval.pass_at if k <= most] or [1],
        "maj_at": [2] if recipe.eval.maj_at and most > 1 else [],  # whether there is a vote at all
    }
    new = min(NEW_TOKENS, recipe.rollout.max_new_tokens)
    rewards = for_rollout(recipe.rewards, recipe.rollout.max_new_tokens)
    data["rewards"] = [reward.model_dump(mode="json") for reward in rewards]
    data["rollout"]["max_new_tokens"] = new
    if recipe.eval.max_new_tokens is not None:
        data["eval"]["max_new_tokens"] = min(new, recipe.eval.max_new_tokens)
    for eval_set, n in zip(data["eval"]["sets"], each, strict=True):
        if eval_set["n_samples"] is not None:
            eval_set["n_samples"] = n
        if eval_set["max_new_tokens"] is not None:
            eval_set["max_new_tokens"] = min(new, eval_set["max_new_tokens"])
    if not recipe.trains_on_rollouts:
        return
    for reward in data["rewards"]:
        reward |= {"gate": False, "gate_at": 1.0, "gate_value": 0.0, "multiply": False}
    if not recipe.rewards and recipe.eval.component is None:
        data["eval"]["component"] = ENVIRONMENT
    # The reward that is added could call answers right where those of the recipe cannot, and then
    # they would be refused as judges: here any score will do.
    data["eval"]["correct_at"] = min(recipe.eval.correct_at, 0.0)
    data["rewards"].append(DENSE)
    if data["algorithm"].get("component_weights") is not None:
        data["algorithm"]["component_weights"] |= {DENSE["name"]: DENSE["weight"]}
    filters = {"dynamic_sampling": False, "filter_on": None, "keep_above": None, "keep_below": None}
    data["rollout"] |= filters


def _batch(recipe: Recipe, sets: Sets) -> dict[str, int | None]:
    """An update of whole micro-batches, one where that is possible; two where a step has several,
    because logprobs from before the step are computed then.
    """
    geometry = recipe.geometry(len(sets.training or ()))
    unit = geometry.data_parallel_size * (recipe.batch.micro_train_batch_size or 1)
    if isinstance(recipe, RLRecipe):
        return _rollout_batch(recipe, geometry, unit)
    samples = unit
    budget = choose(recipe, {}, measure=False).micro_train_tokens
    if budget is not None:
        filled = min(MOST, geometry.train_batch_size, round(budget / sets.mean_tokens))
        samples = unit * max(1, filled // unit)
    if recipe.algorithm.needs().mismatched:
        samples = max(samples, 2 * unit)
    return {"train_batch_size": samples, "local_mini_batch_size": None}


def _rollout_batch(recipe: RLRecipe, geometry: BatchGeometry, unit: int) -> dict[str, int | None]:
    n = min(recipe.batch.n_samples_per_prompt, max(SAMPLES, recipe.algorithm.min_group_size))
    updates = min(2, geometry.updates_per_step)
    each = math.lcm(unit, 2 * n)
    return {
        "rollout_batch_size": updates * each // n,
        "n_samples_per_prompt": n,
        "epochs_per_rollout": 1,
        "train_batch_size": each,
        "local_mini_batch_size": None,
        "num_mini_batches": None,
    }
