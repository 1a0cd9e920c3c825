"""How the age of samples changes what is learned, with and without a correction.

    python -m benchmarks.staleness_curves run WORK --to benchmarks/results/staleness_curves.json
    python -m benchmarks.staleness_curves show benchmarks/results/staleness_curves.json \
        --svg docs/images/staleness.svg

The quickstart's SFT once, then its RL part from that model, for every max_staleness, way and seed:
"none" corrects nothing, "tis" truncates importance weights, "sampled" puts the clip around the
sampler. Samples are as old as the bound allows: rollout.in_flight_updates is false, so a sample
is written whole by the weights that began it, which are max_staleness steps old when it is trained
on (only the first max_staleness steps have younger ones; `ages` of the result has what was
measured). Each run is evaluated on held-out rows at its start and end, and in between.

A recipe with max_staleness and neither correction nor clip around the sampler is refused by
postgrad. `--ways none` is this benchmark's own and openly goes round that: the recipe is checked
with a correction, which is then taken out of the checked object. Nothing of the product does so.

Runs that the file of --to has are skipped, so a run of this that was killed goes on. `show` prints
a Markdown table: the mean over seeds with the standard error of that mean, and draws a picture.
"""

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.curve_svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ticks_between
from benchmarks.speed.report import machine
from postgrad.core.files import write_json
from postgrad.observe.console import Console
from postgrad.observe.follow import read_lines
from postgrad.recipe.load import load_recipe
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.training.start import train

RECIPES = Path(__file__).parents[1] / "recipes" / "quickstart"
WAYS = {
    "none": "no correction",
    "tis": 'correction = "tis"',
    "sampled": 'old_logprobs = "sampled"',
}
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #3b4252 }
  .grid { stroke: #d6dae2; stroke-width: 1 }
  .none { stroke: #a02c6d; fill: #a02c6d } .tis { stroke: #2f4fd0; fill: #2f4fd0 }
  .sampled { stroke: #0b7a75; fill: #0b7a75 }
  .line { stroke-width: 2.2; fill: none } .seed { opacity: 0.45; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #cfd6e6 } .grid { stroke: #434b5e }
    .none { stroke: #f08cc0; fill: #f08cc0 } .tis { stroke: #8fa8ff; fill: #8fa8ff }
    .sampled { stroke: #58c9c2; fill: #58c9c2 }
    .line { fill: none } .seed { stroke: none }
  }
"""

Scores = Mapping[str, Mapping[int, Sequence[float]]]  # way -> max_staleness -> one a seed


def recipe_of(options: argparse.Namespace, way: str, staleness: int, seed: int) -> Recipe:
    """The quickstart's RL part, with what is compared. See the module for "none"."""
    flags: dict[str, object] = {
        "run_dir": options.work / f"{way}-{staleness}-{seed}",
        "model.path": options.work / "sft" / "model",
        "seed": seed,
        "steps": options.steps,
        "batch.rollout_batch_size": options.prompts,
        "learner.lr": options.lr,
        "learner.schedule": "constant",  # a run of 60 steps, not the beginning of one of 280
        "learner.threads": 1,
        "rollout.slots": options.slots,
        "rollout.max_staleness": staleness,
        "eval.size": options.rows,
        "eval.greedy": "false",
        "eval.every": options.every,
        "checkpoint.save_steps": 0,
        "checkpoint.save_hf": "false",
    }
    if staleness:
        flags["rollout.in_flight_updates"] = "false"
    if way == "sampled":
        flags["algorithm.old_logprobs"] = "sampled"
    else:
        flags["algorithm.correction"] = "tis"
    recipe = load_recipe(RECIPES / "rl.toml", [f"--{key}={value}" for key, value in flags.items()])
    assert isinstance(recipe, RLRecipe)
    if way == "none":
        uncorrected = recipe.algorithm.model_copy(update={"correction": "off"})
        return recipe.model_copy(update={"algorithm": uncorrected})
    return recipe


def first_model(options: argparse.Namespace) -> None:
    """The quickstart's SFT, unless it is there."""
    flags = [
        f"--run_dir={options.work / 'sft'}",
        "--learner.threads=1",
        "--checkpoint.save_hf=true",
    ]
    train(load_recipe(RECIPES / "sft.toml", flags), Console("quiet"))


def measured(recipe: Recipe) -> dict[str, Any]:
    """Does a run from its start; what its logs say."""
    began = time.perf_counter()
    train(recipe, Console("quiet"), overwrite=True)
    folder = Path(recipe.run_dir)
    steps = list(read_lines(folder / "metrics.jsonl"))
    evaluations = list(read_lines(folder / "eval.jsonl"))
    last = evaluations[-1]
    return {
        "accuracy": last["accuracy"],
        "standard_error": math.sqrt(last["accuracy"] * (1 - last["accuracy"]) / last["rows"]),
        "accuracies": {line["step"]: line["accuracy"] for line in evaluations},
        "rewards": [round(step["reward"], 4) for step in steps],
        "ages": [step.get("staleness/mean", 0.0) for step in steps],
        "oldest": max(step.get("staleness/max", 0.0) for step in steps),
        "seconds": round(time.perf_counter() - began, 1),
    }


def run(options: argparse.Namespace) -> None:
    """Does all runs that --to lacks, and writes it after each."""
    # A seed's runs before the next seed's: the picture is whole after a third of the time.
    planned = [
        {"way": way, "max_staleness": staleness, "seed": seed}
        for seed in range(options.seeds)
        for staleness in options.staleness
        for way in options.ways
    ]
    asked = {name: getattr(options, name) for name in ("steps", "prompts", "lr", "rows", "slots")}
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.staleness_curves", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "settings": asked,
        "runs": [],
    }
    if options.to.exists():
        before = json.loads(options.to.read_text("utf-8"))
        if before["settings"] != asked:
            sys.exit(f"{options.to} has runs of {before['settings']}: name another file with --to")
        result["runs"] = before["runs"]
    have = [{name: done[name] for name in planned[0]} for done in result["runs"]]
    first_model(options)
    for case in planned:
        if case in have:
            continue
        done = measured(recipe_of(options, case["way"], case["max_staleness"], case["seed"]))
        result["runs"].append(case | done)
        write_json(options.to, result)
        print(json.dumps(case | {"accuracy": done["accuracy"], "seconds": done["seconds"]}))
        sys.stdout.flush()


def commit() -> str:
    """Of the working tree that this file is in, "+" after it where files were changed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    name = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    changed = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True)
    return name + ("+" if changed else "")


def scores(result: Mapping[str, Any]) -> Scores:
    """The accuracies at the end of each run."""
    grouped: dict[str, dict[int, list[float]]] = {}
    for done in result["runs"]:
        line = grouped.setdefault(done["way"], {})
        line.setdefault(done["max_staleness"], []).append(done["accuracy"])
    return grouped


def spread(values: Sequence[float]) -> float:
    """The standard error of a mean over seeds; NaN for one."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a row a way, a column a max_staleness, mean ± standard error over seeds."""
    grouped = scores(result)
    columns = sorted({staleness for line in grouped.values() for staleness in line})
    rows = [["", *map(str, columns)], ["---"] * (len(columns) + 1)]
    for way in (way for way in WAYS if way in grouped):
        line = grouped[way]
        name = WAYS[way] if way == "none" else f"`{WAYS[way]}`"
        rows.append([name, *(_cell(line.get(staleness, ())) for staleness in columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = statistics.mean(values)
    return f"{mean:.2f} ± {spread(values):.2f}" if len(values) > 1 else f"{mean:.2f}"


def picture(result: Mapping[str, Any], title: str) -> str:
    """SVG: accuracy over max_staleness. A line a way through the means, a dot a seed, bars of two
    standard errors.
    """
    grouped = {way: dict(sorted(line.items())) for way, line in scores(result).items()}
    columns = sorted({staleness for line in grouped.values() for staleness in line})
    values = [value for line in grouped.values() for each in line.values() for value in each]
    ticks = ticks_between(0.0, max(values))
    right = WIDTH - RIGHT - 180  # names of lines stand beside them
    across = {
        staleness: round(LEFT + 20 + (right - LEFT - 40) * place / max(1, len(columns) - 1), 1)
        for place, staleness in enumerate(columns)
    }

    def up(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / ticks[-1], 1)

    words = "; ".join(
        f"{WAYS[way]}: "
        + ", ".join(f"{statistics.mean(each):.2f} at {age}" for age, each in line.items())
        for way, line in grouped.items()
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(f'{title}. {words}')}</title>",
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="20">{escape(title)}</text>',
    ]
    for tick in ticks:
        y = up(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{right}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for staleness, x in across.items():
        parts.append(f'<text x="{x}" y="{HEIGHT - 22}" text-anchor="middle">{staleness}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">max_staleness</text>')
    below = -math.inf  # names keep a line's height apart
    for way in sorted(grouped, key=lambda way: -statistics.mean(list(grouped[way].values())[-1])):
        line = grouped[way]
        means = {age: statistics.mean(each) for age, each in line.items()}
        points = " ".join(f"{across[age]},{up(mean)}" for age, mean in means.items())
        parts.append(f'<polyline class="line {way}" points="{points}"/>')
        for age, each in line.items():
            parts += [
                f'<circle class="seed {way}" cx="{across[age]}" cy="{up(value)}" r="3"/>'
                for value in each
            ]
            if len(each) > 1:
                low, high = (means[age] + sign * 2 * spread(each) for sign in (-1, 1))
                bar = f"M{across[age]} {up(max(0.0, low))}V{up(min(ticks[-1], high))}"
                parts.append(f'<path class="line {way}" d="{bar}"/>')
        last = list(means.values())[-1]
        below = max(up(last) + 4, below + 16)
        parts.append(f'<text x="{right + 6}" y="{below}">{escape(WAYS[way])}</text>')
    return "\n".join([*parts, "</svg>\n"])


def show(options: argparse.Namespace) -> None:
    """Prints the table, and draws the picture."""
    result = json.loads(options.result.read_text("utf-8"))
    print(table(result))
    if options.svg:
        title = f"held-out accuracy after {result['settings']['steps']} steps"
        options.svg.write_text(picture(result, title), "utf-8")


def main() -> None:
    """`run` measures, `show` tells."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="do the runs that --to lacks")
    runs.add_argument("work", type=Path, help="a folder for run directories")
    runs.add_argument("--to", type=Path, required=True, help="JSON file, written after each run")
    runs.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    runs.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    runs.add_argument("--seeds", type=int, default=3)
    runs.add_argument("--steps", type=int, default=60)
    runs.add_argument("--prompts", type=int, default=32, help="of a step, with 8 samples each")
    runs.add_argument("--lr", type=float, default=4e-4)
    runs.add_argument("--rows", type=int, default=1280, help="held-out ones")
    runs.add_argument("--every", type=int, default=20, help="steps between evaluations")
    runs.add_argument("--slots", type=int, default=256, help="of the engine")
    runs.set_defaults(do=run)
    shows = commands.add_parser("show", help="print the table of a result, and draw it")
    shows.add_argument("result", type=Path)
    shows.add_argument("--svg", type=Path)
    shows.set_defaults(do=show)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
