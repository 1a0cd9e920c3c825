"""Random recipes: what a recipe may say together is planned, trained, killed, resumed and exported.

    PYTHONPATH=tests:. python benchmarks/random_recipes.py --count 200 --seed 0

Each recipe has a random job, algorithm and tiny model, a few rows, and up to 24 keys of all
sections; a key that makes no valid recipe is left out again. Then:

- the recipe loads again, from TOML and from JSON, to an equal one;
- a plan ends well, or refuses what the run refuses too;
- the run ends well or with one error of ours, and without a RuntimeWarning;
- it makes as many rows, steps, updates and samples as the plan counted, and trains and stores as
  many weights;
- a run that is killed in its second step ends with the bits and logs of one that was not;
- the exported model has finite logits in plain transformers, and the report is written.

Whatever fails is printed as TOML with its seed, which alone decides a recipe: --count 1 --seed N
repeats it. About 3 seconds of CPU time each, in one process. At the end stands what the plans said
of tokens and memory over what the runs had: these are estimates, and fail nothing, unless a plan
foresees less than half of the tokens of episodes. --ranks 2 draws recipes for so many processes,
which Ray starts.
"""

import argparse
import contextlib
import json
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.drawn_recipes import Table, draw, folders_of
from benchmarks.planned_counts import Ratios, counts, rows_of_runs, too_few_tokens
from helpers.runs import Killed, assert_same_run, kill_after, tensors
from postgrad.core.errors import PostgradError
from postgrad.observe.console import Console
from postgrad.plan.planner import plan
from postgrad.recipe.load import as_toml, load_recipe, parse_recipe, recipe_from_json
from postgrad.recipe.recipe import Recipe
from postgrad.tools.export import export
from postgrad.tools.pages import report
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train
from postgrad.training.supervised import SupervisedJob


class Failed(Exception):
    """A recipe did what no recipe may do; the message says what."""


def attempt(action: str, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """(what the call returns, None), or (None, the message of an error of ours). Raises Failed for
    any other error, and for a RuntimeWarning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return call(), None
        except PostgradError as error:
            return None, f"{type(error).__name__}: {error}"
        except Killed:
            raise
        except Exception as error:
            raise Failed(f"{action}: {type(error).__name__}: {error}") from error


def check(raw: Table, folder: Path, ratios: Ratios | None = None) -> str | None:
    """Tries all that the module's docstring lists, in `folder`. Returns what the run was refused
    with, or None. Raises Failed. ratios: gets what the plan said over what the run had.
    """
    console = Console("quiet")
    recipe = parse_recipe({**raw, "run_dir": str(folder / "whole")})
    path = folder / "recipe.toml"
    path.write_text(as_toml(recipe.dump()), "utf-8")
    again = recipe_from_json(json.loads(json.dumps(recipe.dump())))
    if not again == load_recipe(path) == recipe:
        raise Failed("the recipe loads again to another one")
    planned, unplanned = attempt("plan", lambda: plan(path, [], console))
    rows: list[int] = []
    with rows_of_runs(rows):
        summary, refused = attempt("train", lambda: train(recipe, console))
    if refused is not None:
        return refused
    if unplanned is not None:
        raise Failed(f"a plan refuses what trains: {unplanned}")
    for name, (expected, actual) in counts(planned, recipe, summary, rows[-1]).items():
        if expected != actual:
            raise Failed(f"{name}: the plan counted {expected}, the run {actual}")
    if (wrong := too_few_tokens(planned, recipe)) is not None:
        raise Failed(wrong)
    if ratios is not None:
        ratios.add(planned, recipe)
    if (steps := summary["steps"]) > 1:
        _resumed(raw, recipe, steps, folder, console)
    _shown(recipe, steps, folder, console)
    return None


def _resumed(raw: Table, uninterrupted: Recipe, steps: int, folder: Path, console: Console) -> None:
    killed = parse_recipe({**raw, "run_dir": str(folder / "killed")})
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, RLJob if raw["job"] == "rl" else SupervisedJob, 1)
        with contextlib.suppress(Killed):
            attempt("train to be killed", lambda: train(killed, console))
    _, refused = attempt("resume", lambda: resume(Path(killed.run_dir), [], [], console))
    if refused is not None:
        raise Failed(f"the run ends, and resumed it is refused: {refused}")
    try:
        assert_same_run(uninterrupted, killed, steps)
    except AssertionError as error:
        raise Failed(f"a resumed run is another one: {error}") from error


def _shown(recipe: Recipe, steps: int, folder: Path, console: Console) -> None:
    """Exports the run's model and reports on it."""
    run = Path(recipe.run_dir)
    for action, call in {
        "report": lambda: report([run], folder / "page.html", console),
        "export": lambda: export(run, "latest", folder / "hf"),
    }.items():
        _, refused = attempt(action, call)
        if refused is not None:
            raise Failed(f"{action}: {refused}")
    weights = [w for w in tensors(recipe.run_dir, steps).values() if w.is_floating_point()]
    if recipe.job == "reward" or not all(w.isfinite().all() for w in weights):
        return
    lm = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    if not lm(torch.tensor([[5, 6, 7, 8]])).logits.isfinite().all():
        raise Failed("the exported model has logits that are not finite")


def main() -> None:
    """Draws, checks, and prints what failed and how many were refused."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first recipe")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counted: Counter[str] = Counter()
    ratios = Ratios()
    for seed, world, runs in folders_of(range(args.seed, args.seed + args.count)):
        raw = draw(seed, world, str(runs / "whole"), args.ranks)
        try:
            refused = check(raw, runs, ratios)
        except Failed as failure:
            counted["failed"] += 1
            print(f"# seed {seed}: {failure}\n{as_toml(raw)}", flush=True)
        else:
            counted["ended well" if refused is None else "refused"] += 1
    print("planned over measured", " least median most runs", *ratios.rows(), sep="\n")
    print(dict(counted))
    raise SystemExit(counted["failed"] > 0)


if __name__ == "__main__":
    main()
