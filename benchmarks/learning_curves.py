"""Held-out accuracy of every algorithm by step, from the run directories of several seeds.

    for seed in 0 1 2; do
      postgrad train recipes/algorithms --seed $seed --run_dir runs/algorithms-$seed \
        --learner.threads 1
    done
    python benchmarks/learning_curves.py runs/algorithms-0 runs/algorithms-1 runs/algorithms-2 \
      --docs docs/algorithms

Prints a table for each algorithm; --docs writes it into the algorithm's page, under the heading
HEADING and in place of the one before. An algorithm that a seed has not ended is left out.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

HEADING = "## Learning curves"
COMMAND = "postgrad train recipes/algorithms --seed SEED --run_dir runs/algorithms-SEED"


def curve(run: Path) -> dict[int, float] | None:
    """Step -> accuracy of a run that has ended."""
    if not (run / "summary.json").exists():
        return None
    lines = (run / "eval.jsonl").read_text("utf-8").splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {line["step"]: line["accuracy"] for line in found}


def section(curves: dict[str, dict[int, float]]) -> str:
    """Markdown: a row a seed, a column a step, and what was gained."""
    steps = sorted(set.intersection(*(set(one) for one in curves.values())))
    head = " | ".join(["seed", *map(str, steps), "gain"])
    rule = "|".join(["---:"] * (len(steps) + 2))
    rows = [
        " | ".join([seed, *(f"{one[s]:.3f}" for s in steps), f"{one[steps[-1]] - one[0]:+.3f}"])
        for seed, one in curves.items()
    ]
    means = [statistics.mean(one[s] for one in curves.values()) for s in steps]
    rows.append(" | ".join(["mean", *(f"{m:.3f}" for m in means), f"{means[-1] - means[0]:+.3f}"]))
    table = "\n".join(f"| {row} |" for row in (head, *rows))
    first, rest = table.split("\n", 1)
    return (
        f"{HEADING}\n\n"
        "Held-out accuracy of sampled answers (temperature 1) on the quickstart's task, by step:\n"
        f"`{COMMAND}`\n"
        "with `--learner.threads 1`, from the model that SFT made with the same seed.\n\n"
        f"{first}\n|{rule}|\n{rest}\n"
    )


def write(page: Path, text: str) -> None:
    """Puts a section at the end of a page, in place of the one before."""
    before = page.read_text("utf-8").partition(f"\n{HEADING}")[0].rstrip()
    page.write_text(f"{before}\n\n{text}", "utf-8")


def main() -> None:
    """Prints a section for each algorithm that all seeds have ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    names = sorted(path.name for path in options.runs[0].iterdir() if path.is_dir())
    for name in (name for name in names if name != "sft"):
        found = {run.name.rpartition("-")[2]: curve(run / name) for run in options.runs}
        curves = {seed: one for seed, one in found.items() if one is not None}
        if len(curves) < len(options.runs):
            print(f"{name}: not all seeds have ended")
            continue
        text = section(curves)
        print(f"# {name}\n\n{text}")
        if options.docs:
            write(options.docs / f"{name}.md", text)


if __name__ == "__main__":
    main()
