"""Curves of real runs on pages of the documentation: a picture and a table each.

    for seed in 0 1 2; do
      postgrad train recipes/algorithms --seed $seed --run_dir runs/algorithms-$seed \
        --learner.threads 1
    done
    postgrad train recipes/preferences --seed 0 --run_dir runs/preferences-0 --learner.threads 1
    postgrad train recipes/distill --seed 0 --run_dir runs/distill-0 --learner.threads 1
    postgrad train recipes/process_reward --seed 0 --run_dir runs/process_reward-0 \
      --learner.threads 1
    postgrad train recipes/best_of_n --seed 0 --run_dir runs/best_of_n-0 --learner.threads 1
    python -m postgrad.models.vision_tiny runs/vision_tiny/start
    postgrad train recipes/vision_tiny --seed 0 --run_dir runs/vision_tiny-0
    postgrad train recipes/rlhf_tiny --seed 0 --run_dir runs/rlhf_tiny-0 --learner.threads 1 \
      --reward.eval.at_start true --reward.eval.every 50
    python -m benchmarks.learning_curves runs

Each of FIGURES whose runs have all ended is written into its page, under the heading HEADING and in
place of the one before, drawn to docs/images/curves/PAGE.svg, and kept, every point, in
benchmarks/results/curves/PAGE.json.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.curve_svg import Curve, mean, picture

Curves = Mapping[str, Curve]  # by seed

HEADING = "## Learning curves"
DOCS = Path(__file__).parents[1] / "docs"
RESULTS = Path(__file__).parent / "results" / "curves"
MOST_COLUMNS, MOST_POINTS = 8, 70
ONE = ("0",)
SAMPLED = (
    "grpo dr_grpo dapo gspo cispo sapo gmpo vespo gpg opo maxrl pass_at_k rloo reinforce_pp "
    "reinforce_pp_baseline online_dpo gdpo remax"
)
OF_ONE_SEED = [
    "sapo",
    "gmpo",
    "vespo",
    "gpg",
    "opo",
    "maxrl",
    "pass_at_k",
    "online_dpo",
    "gdpo",
    "remax",
]


@dataclass(frozen=True, slots=True)
class Figure:
    """One page's curve: `field` of the log (metrics.jsonl, eval.jsonl) of runs/RUN-SEED/STAGE.

    made_by: the command of seed 0. of: the evaluation set. since: the first step that
    is shown; before it all pairs are ties where scores are against a reference. folder: of the
    page, in docs.
    """

    page: str
    title: str
    caption: str
    made_by: str
    run: str
    field: str
    stage: str = ""
    log: str = "eval.jsonl"
    of: str | None = None
    since: int = 0
    seeds: tuple[str, ...] = ("0", "1", "2")
    folder: str = "algorithms"

    @property
    def picture(self) -> str:
        """The link from the page to its picture."""
        return f"{'../' if self.folder else ''}images/curves/{self.page}.svg"


def _figures() -> list[Figure]:
    of_pipeline = "postgrad train recipes/{0} --seed 0 --run_dir runs/{0}-0"
    one_thread = "--learner.threads 1"
    sampled = [
        Figure(
            page, "held-out accuracy",
            "Held-out accuracy of sampled answers (temperature 1) on the quickstart's task, from "
            "the model that SFT made with the same seed.",
            f"{of_pipeline.format('algorithms')} {one_thread}", "algorithms", "accuracy", page,
            seeds=ONE if page in OF_ONE_SEED else ("0", "1", "2"),
        )
        for page in SAMPLED.split()
    ]  # fmt: skip
    preferred = [
        Figure(
            page, "held-out pairs in people's order",
            "Fraction of 300 held-out pairs whose preferred answer the policy gives the higher "
            "implicit reward, from the model that SFT made with the same seed. Some labels are "
            "wrong: about 0.92 is the maximum.",
            f"{of_pipeline.format('preferences')} {one_thread}", "preferences", "accuracy", page,
            of="people", since=0 if page in ("simpo", "cpo", "orpo") else 1, seeds=ONE,
        )
        for page in ["dpo", "ipo", "simpo", "cpo", "wpo", "aot", "kto", "orpo"]
    ]  # fmt: skip
    starts = {
        "distillation": "a fresh model of 0.2M parameters",
        "on_policy_distillation": "the student of [distillation](distillation.md)",
    }
    taught = [
        Figure(
            page, "held-out accuracy",
            "Held-out accuracy of sampled answers (temperature 1) on the quickstart's task, of "
            f"{start}; the teacher has 0.8M.",
            f"{of_pipeline.format('distill')} {one_thread}", "distill", "accuracy", page, seeds=ONE,
        )
        for page, start in starts.items()
    ]  # fmt: skip
    by_step = [
        Figure(
            "process_reward", "held-out sums with every line right",
            "Held-out sums of which every line is right (temperature 1), of a model of 0.4M "
            "parameters that is trained by RL on the scores of a process reward model alone: the "
            "last stage of `recipes/process_reward`.",
            f"{of_pipeline.format('process_reward')} {one_thread}", "process_reward", "accuracy",
            "rl", seeds=ONE,
        )
    ]  # fmt: skip
    selected = Figure(
        "generate", "held-out accuracy",
        "Held-out accuracy of sampled answers (temperature 1) on the quickstart's task, of SFT on "
        "the best of 8 answers that the model sampled to each of 3 000 problems "
        "(`recipes/best_of_n`).",
        f"{of_pipeline.format('best_of_n')} {one_thread}", "best_of_n", "accuracy", "best_of_n",
        seeds=ONE, folder="",
    )  # fmt: skip
    read = Figure(
        "vision_tiny", "held-out pictures read right",
        "Share of 200 held-out pictures whose bar the model reads right in a sampled answer, of a "
        "fresh Qwen2.5-VL of 0.2M parameters, during RL behind SFT (`recipes/vision_tiny`). Greedy "
        "answers go from 0.985 to 1.000.",
        of_pipeline.format("vision_tiny"), "vision_tiny", "accuracy", "rl", seeds=ONE, folder="",
    )  # fmt: skip
    rlhf = f"{of_pipeline.format('rlhf_tiny')} {one_thread}"
    of_rlhf = _of_rlhf(f"{rlhf} --reward.eval.at_start true --reward.eval.every 50")
    return [*sampled, *preferred, *taught, *by_step, selected, read, *of_rlhf]


def _of_rlhf(made_by: str) -> list[Figure]:
    return [
        Figure(
            "sft", "loss, nats a token",
            "Loss of each update, nats per token, of a fresh model of 0.4M parameters that learns "
            "to write short notes (`recipes/rlhf_tiny/sft.toml`).",
            made_by, "rlhf_tiny", "loss", "sft", "metrics.jsonl", seeds=ONE,
        ),
        Figure(
            "reward-model", "held-out pairs in people's order",
            "Fraction of 300 held-out pairs whose preferred answer the model scores higher. Some "
            "labels are wrong: about 0.92 is the maximum.",
            made_by, "rlhf_tiny", "accuracy", "reward", of="people", seeds=ONE,
        ),
        Figure(
            "ppo", "the hidden preference",
            "Mean of the hidden preference `gold` over the samples of a step, from 0 to 1. "
            "Nothing is trained on it: the reward is the reward model's.",
            made_by, "rlhf_tiny", "reward/gold", "ppo", "metrics.jsonl", seeds=ONE,
        ),
    ]  # fmt: skip


def curve(run: Path, figure: Figure) -> dict[int, float] | None:
    """Step -> value of a run that has ended."""
    if not (run / "summary.json").exists():
        return None
    lines = (run / figure.log).read_text("utf-8").splitlines()
    evaluations: list[dict[str, Any]] = [json.loads(line) for line in lines]
    shown = [line for line in evaluations if line.get("set") == figure.of]
    return {line["step"]: line[figure.field] for line in shown if line["step"] >= figure.since}


def binned(full_curve: Curve, most: int) -> dict[int, float]:
    """At most so many points: means over equal runs of steps, each at its last step."""
    points = sorted(full_curve.items())
    size = -(-len(points) // most)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return {run[-1][0]: statistics.mean(value for _, value in run) for run in runs}


def table(curves: Curves) -> str:
    """Markdown: a row a seed, a column a step, and what was gained."""
    rows = {**curves, "mean": mean(curves)} if len(curves) > 1 else curves
    steps = sorted(mean(curves))
    head, rule = ["seed", *map(str, steps), "change"], ["---:"] * (len(steps) + 2)
    body = [
        [
            name,
            *(f"{curve_of_row[step]:.3f}" for step in steps),
            f"{curve_of_row[steps[-1]] - curve_of_row[steps[0]]:+.3f}",
        ]
        for name, curve_of_row in rows.items()
    ]
    return "\n".join(
        [f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(r)} |" for r in body)]
    )


def day_and_versions(runs: Sequence[Path]) -> str:
    """The day of the first run's first event, and the versions that it wrote down."""
    with (runs[0] / "events.jsonl").open(encoding="utf-8") as events:
        day = str(json.loads(next(events))["time"])[:10]
    versions = json.loads((runs[0] / "recipe.json").read_text("utf-8"))["versions"]
    used = ", ".join(f"{name} {versions[name]}" for name in ("postgrad", "torch", "transformers"))
    return f"on {day} with {used}"


def section(figure: Figure, curves: Curves, origin: str) -> str:
    """The page's section; its picture lies in docs/images/curves. made: see day_and_versions."""
    short = {seed: binned(points, MOST_COLUMNS) for seed, points in curves.items()}
    means = any(len(points) > MOST_COLUMNS for points in curves.values())
    note = " Each column is a mean over the steps up to that one." if means else ""
    drawn = "Thin lines are seeds, the thick one is their mean. " if len(curves) > 1 else ""
    each = ", for each seed" if len(curves) > 1 else ""
    first, last = (f"{value:.3f}" for value in (_end(short, 0), _end(short, -1)))
    return (
        f"{HEADING}\n\n"
        f"![{figure.title} by step: from {first} to {last}]({figure.picture})\n\n"
        f"{figure.caption} {drawn}Made {origin}{each} by\n\n"
        f"```sh\n{figure.made_by}\n```\n\n"
        f"{table(short)}\n{f'{chr(10)}{note.strip()}{chr(10)}' if note else ''}"
    )


def _end(curves: Curves, at: int) -> float:
    mean_curve = mean(curves)
    return mean_curve[sorted(mean_curve)[at]]


def write(page: Path, text: str) -> None:
    """Puts a section at the end of a page, in place of the one before."""
    before = page.read_text("utf-8").partition(f"\n{HEADING}")[0].rstrip()
    page.write_text(f"{before}\n\n{text}", "utf-8")


def main() -> None:
    """Draws and writes every figure that all of its seeds have ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, help="a folder with runs/NAME-SEED")
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    pictures = options.docs / "images" / "curves"
    pictures.mkdir(parents=True, exist_ok=True)
    for figure in _figures():
        paths = {
            seed: options.runs / f"{figure.run}-{seed}" / figure.stage for seed in figure.seeds
        }
        read_curves = {seed: curve(path, figure) for seed, path in paths.items()}
        curves = {seed: points for seed, points in read_curves.items() if points is not None}
        if len(curves) < len(read_curves):
            print(f"{figure.page}: not all seeds have ended")
            continue
        drawn = {seed: binned(points, MOST_POINTS) for seed, points in curves.items()}
        (pictures / f"{figure.page}.svg").write_text(picture(drawn, figure.title), "utf-8")
        origin = day_and_versions([paths[seed] for seed in figure.seeds])
        page = options.docs / figure.folder / f"{figure.page}.md"
        write(page, section(figure, curves, origin))
        kept = {"title": figure.title, "made": origin, "made_by": figure.made_by, "curves": curves}
        results = options.results / f"{figure.page}.json"
        results.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", "utf-8")
        print(f"{figure.page}: written")


if __name__ == "__main__":
    main()
