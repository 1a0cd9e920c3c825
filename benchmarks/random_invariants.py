"""Random invariants: random recipes train twice, and the second time compute in another way.

    PYTHONPATH=tests:. python benchmarks/random_invariants.py --count 60 --seed 0

Recipes are those of random_recipes.py, in float32. The second run has other micro-batches, slots,
cache, threads or gradient checkpointing, and with --ranks 2 other ranks or another sharding: up to
four of them, which the seed draws. None may change what is learned (tests/invariants/README.md),
but for the order of sums. So these have to agree:

- the samples, token for token, and the rows that each step trained on;
- every metric of every step, but for times, bytes and what counts computed tokens;
- the weights after the last step: the norm of their difference over that of the way that they went.

Where another order of sums led to another sampled token, runs part: that is counted as "sampled
otherwise", and is rare. Whatever else differs is printed as TOML with its seed, which alone decides
a recipe and its changes.
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from benchmarks.drawn_recipes import Table, draw, folders_of, is_recipe, with_key
from benchmarks.random_recipes import Failed, attempt
from helpers.runs import lines, timeless
from postgrad.core.members import has_lines
from postgrad.learner.learner import Learner
from postgrad.learner.update import Update
from postgrad.observe.console import Console
from postgrad.observe.run_dir import RunDirectory
from postgrad.recipe.load import as_toml, parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.training.saving import store_of
from postgrad.training.start import train

LIMIT = 1e-2  # of a difference of weights over the way that they went, both as norms
METRIC_LIMIT = 1e-3  # of a difference of metrics over 1, or over the larger one
# Sums in another order change a gradient in its last bits. Adam divides by its size, so that bits
# of one that is nearly 0 would become whole steps.
EPS = 1e-4
# Keys that say how a run computed, and those that jump where a margin, or the log w of a token that
# the policy itself drew, is 0 but for last bits.
NOT_COMPARED = (
    *("computed_tokens", "idle/empty_rows_fraction"),
    *("accuracy", "selection/second_moment"),
)
# Values of keys that say how a run computes, not what.
CHANGES: dict[str, tuple[Any, ...]] = {
    "batch.micro_train_batch_size": (1, 2),
    "batch.micro_train_tokens": (130, 300),
    "model.gradient_checkpointing": (True, "offload"),
    "critic.model.gradient_checkpointing": (True,),
    "rollout.slots": (1, 2, 7),
    "rollout.cache_tokens": (300,),
    "learner.threads": (2,),
}
RANKED: tuple[Table, ...] = (
    *({"learner.sharding": stage} for stage in ("none", "zero1", "zero2", "zero3")),
    {"learner.tensor_parallel": 2},
    {"learner.context_parallel": 2},
)
MOST_CHANGES = 4


def exact(raw: Table) -> Table:
    """The recipe in float32, with AdamW's `eps` as EPS, and without clips at a ratio of 1, on
    either side of which last bits may lie. Two ranks can share its heads.
    """
    for role in ("", "reference.", "critic.", "teacher.", "reward_model."):
        if not role or role[:-1] in raw:
            raw = with_key(raw, f"{role}model.dtype", "float32")
    for key in ("learner.eps", *(["critic.learner.eps"] if "critic" in raw else [])):
        raw = with_key(raw, key, EPS)
    if raw["job"] == "rl":
        raw = with_key(raw, "rollout.dtype", "float32")
    if "init" in raw["model"]:
        raw = with_key(raw, "model.init.num_key_value_heads", 2)
    algorithm = raw["algorithm"]
    clips = {key for key, value in algorithm.items() if key.startswith("clip") and value == 0}
    raw = {**raw, "algorithm": {k: v for k, v in algorithm.items() if k not in clips}}
    return with_key(raw, "checkpoint.max_ckpt_num", 9)


def changed(raw: Table, rng: random.Random, ranks: int) -> tuple[Table, list[str]]:
    """A recipe that computes in another way, and what was changed in it."""
    names: list[str] = []
    if ranks > 1:
        way = rng.choice(RANKED)
        tried = with_key(with_key(raw, "learner.ranks", ranks), "cluster.type", "ray")
        for key, value in way.items():
            tried = with_key(tried, key, value)
        if is_recipe(tried):
            raw, names = tried, [f"{ranks} ranks, {way}"]
    keys = set(CHANGES)
    if raw.get("rollout", {}).get("max_staleness"):  # slots decide what is sampled ahead
        keys -= {"rollout.slots", "rollout.cache_tokens"}
    for key in rng.sample(sorted(keys), rng.randint(0 if names else 1, MOST_CHANGES)):
        value = rng.choice(CHANGES[key])
        tried = with_key(raw, key, value)
        if is_recipe(tried):
            raw = tried
            names.append(f"{key} = {value}")
    return raw, names


@contextmanager
def starts_kept(starts: dict[str, dict[str, Tensor]]) -> Iterator[None]:
    """Keeps copies of the weights with which roles of this process begin, by role."""
    original = Learner.update

    def update(self: Learner[Any], update: Update, algorithm: Any) -> Any:
        if self.name not in starts:
            starts[self.name] = {n: t.detach().clone() for n, t in self.weights().items()}
        return original(self, update, algorithm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", update)
        yield


def compare(raw: Table, other: Table, folder: Path) -> str:
    """Trains both; returns "same", "sampled otherwise" or "refused". Raises Failed."""
    console = Console("quiet")
    first = parse_recipe({**raw, "run_dir": str(folder / "first")})
    second = parse_recipe({**other, "run_dir": str(folder / "second")})
    starts: dict[str, dict[str, Tensor]] = {}
    with starts_kept(starts):
        summary, refused = attempt("train", lambda: train(first, console))
    if refused is not None:
        return "refused"
    _, refused = attempt("train in another way", lambda: train(second, console))
    if refused is not None and second.learner.ranks > 1 and refused.startswith("UsageError"):
        return "refused"  # a model that ranks cannot divide in this way
    if refused is not None:
        raise Failed(f"only the changed recipe is refused: {refused}")
    if not _same_samples(first, second):
        return "sampled otherwise"
    _compare_metrics(first, second)
    if starts and summary["steps"]:
        _compare_weights(first, second, summary["steps"], starts)
    return "same"


def _same_samples(first: Recipe, second: Recipe) -> bool:
    """Whether both sampled the same tokens. Raises Failed where these have other advantages."""
    paths = [Path(recipe.run_dir) / "samples.jsonl" for recipe in (first, second)]
    if not all(map(has_lines, paths)):
        return True
    samples = [lines(path) for path in paths]
    if [*map(_tokens, samples[0])] != [*map(_tokens, samples[1])]:
        return False
    for here, there in zip(*samples, strict=True):
        if not _equal(here.get("advantages"), there.get("advantages")):
            raise Failed(f"samples.jsonl, step {here['step']}: other advantages: {here} / {there}")
    return True


def _tokens(line: Mapping[str, Any]) -> list[Any]:
    """Which sample a line is of, and its tokens, where it has any."""
    turns = [turn["token_ids"] for turn in line.get("turns", ())]
    return [line.get("ticket"), line.get("sample"), line.get("prompt_token_ids"), turns]


def _compare_metrics(first: Recipe, second: Recipe) -> None:
    for file in ("metrics.jsonl", "eval.jsonl"):
        paths = [Path(recipe.run_dir) / file for recipe in (first, second)]
        if not all(map(has_lines, paths)):
            continue
        steps = [timeless(path) for path in paths]
        if len(steps[0]) != len(steps[1]):
            raise Failed(f"{file} has {len(steps[0])} lines, and {len(steps[1])}")
        for here, there in zip(*steps, strict=True):
            if wrong := _differences(here, there):
                raise Failed(f"{file}, step {here.get('step')}: {wrong}")


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """What differs between two lines of a file, by key."""
    texts: list[str] = []
    for key in {**here, **there}:
        a, b = here.get(key), there.get(key)
        if key.endswith(NOT_COMPARED) or _equal(a, b):
            continue
        texts.append(f"{key} {a} / {b}")
    return ", ".join(texts)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, int | float) and isinstance(b, int | float):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return abs(a - b) <= METRIC_LIMIT * max(1.0, abs(a), abs(b))
    return a == b


def _compare_weights(
    first: Recipe, second: Recipe, steps: int, starts: Mapping[str, Mapping[str, Tensor]]
) -> None:
    checkpoints = [
        store_of(recipe, RunDirectory(Path(recipe.run_dir))).load(steps)
        for recipe in (first, second)
    ]
    for role, start in starts.items():
        here, there = (checkpoint.tensors(f"{role}.weights") for checkpoint in checkpoints)
        if here.keys() != there.keys():
            raise Failed(f"{role} has other weights: {sorted(here.keys() ^ there.keys())}")
        apart = math.sqrt(sum(float((here[n] - there[n]).double().square().sum()) for n in here))
        way = math.sqrt(sum(float((here[n] - start[n]).double().square().sum()) for n in here))
        if not apart <= LIMIT * way:
            raise Failed(f"weights of {role}: {apart:.3g} apart after a way of {way:.3g}")


def main() -> None:
    """Draws, trains, compares, and prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first recipe")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train the second")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    counted: Counter[str] = Counter()
    for seed, world, runs in folders_of(range(args.seed, args.seed + args.count)):
        raw = exact(draw(seed, world, str(runs / "first")))
        if not is_recipe(raw):
            counted["refused"] += 1
            continue
        other, names = changed(raw, random.Random(seed), args.ranks)
        try:
            counted[compare(raw, other, runs)] += 1
        except Failed as failure:
            counted["different"] += 1
            print(f"# seed {seed}: {'; '.join(names)}: {failure}\n{as_toml(raw)}", flush=True)
    print(dict(counted))
    raise SystemExit(counted["different"] > 0)


if __name__ == "__main__":
    main()
