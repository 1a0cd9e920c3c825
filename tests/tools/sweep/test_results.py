"""Which run of a sweep is best, and whether anybody knows."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from postgrad.recipe.sweep import Sweep, parse_swept, sweep_of
from postgrad.tools.sweep.page import PAGE, write_page
from postgrad.tools.sweep.results import Standing, standing
from postgrad.tools.sweep.seeds import limits_of, settings_of

RECIPE = Path(__file__).parents[3] / "recipes" / "7b" / "grpo.toml"  # it names no best_metric
Run = dict[str, Any]


def evaluation(step: int, metric: str, value: float, half: float | None, **more: Any) -> Run:
    line = {"step": step, "set": None, metric: value, **more}
    if half is not None:
        line |= {f"{metric}_low": value - half, f"{metric}_high": value + half}
    return line


def write_run(path: Path, evaluations: list[Run], lines: list[Run], **summary: Any) -> None:
    path.mkdir(parents=True)
    for name, of_file in (("eval.jsonl", evaluations), ("metrics.jsonl", lines)):
        text = "".join(json.dumps(line) + "\n" for line in of_file)
        (path / name).write_text(text, "utf-8")
    if summary:
        (path / "summary.json").write_text(json.dumps(summary), "utf-8")


def sweep_in(folder: Path, *lrs: str, flags: tuple[str, ...] = ()) -> Sweep:
    words = parse_swept([f"learner.lr={','.join(lrs)}"])
    return sweep_of(RECIPE, ["--run_dir", str(folder), *flags], words)


def of_accuracies(folder: Path, *runs: tuple[float, float | None]) -> Standing:
    sweep = sweep_in(folder, *(f"{n}e-5" for n in range(1, len(runs) + 1)))
    for trial, (value, half) in zip(sweep.trials, runs, strict=True):
        lines = [evaluation(0, "accuracy", 0.1, 0.05), evaluation(8, "accuracy", value, half)]
        steps = [{"step": step, "reward": 0.5} for step in range(1, 9)]
        write_run(trial.path, lines, steps, steps=8, seconds=3.0)
    return standing(sweep, {})


def test_the_best_is_named_with_its_interval(tmp_path: Path) -> None:
    result = of_accuracies(tmp_path / "s", (0.4, 0.05), (0.6, 0.05), (0.3, 0.05))
    assert [run.trial.name for run in result.results] == ["lr=2e-5", "lr=1e-5", "lr=3e-5"]
    assert result.tied == []
    assert result.verdict() == (
        "lr=2e-5 has the highest eval/accuracy: 0.6 (95% interval 0.55 to 0.65). It is the best: "
        "no other interval overlaps with its own."
    )
    result_json = result.to_json()
    assert (result_json["best"], result_json["tied"]) == ("lr=2e-5", [])
    assert result_json["runs"][0]["low"] == pytest.approx(0.55)


def test_runs_whose_intervals_overlap_are_named_too(tmp_path: Path) -> None:
    result = of_accuracies(tmp_path / "s", (0.55, 0.06), (0.6, 0.05), (0.3, 0.05))
    assert result.to_json()["tied"] == ["lr=1e-5"]
    assert result.verdict().endswith(
        "Its interval overlaps with that of lr=1e-5, so it is not known which of them is the best. "
        "More rows in [eval] make the intervals narrower."
    )
    assert [result.remark(run) for run in result.results] == [
        "highest value", "overlaps with the best", "",
    ]  # fmt: skip


def test_runs_with_the_same_highest_value_are_all_named(tmp_path: Path) -> None:
    result = of_accuracies(tmp_path / "s", (0.6, 0.05), (0.6, 0.05), (0.3, 0.05))
    start = "lr=1e-5 and lr=2e-5 have the highest eval/accuracy: 0.6 (95% interval 0.55 to 0.65)."
    more = (
        "It is not known which of them is the best. "
        "More rows in [eval] make the intervals narrower."
    )
    assert result.verdict() == f"{start} {more}"
    assert [result.remark(run) for run in result.results] == ["highest value", "highest value", ""]


def test_runs_below_several_highest_ones_are_named_apart(tmp_path: Path) -> None:
    result = of_accuracies(tmp_path / "s", (0.6, 0.05), (0.6, 0.05), (0.58, 0.05), (0.57, 0.05))
    assert (
        "Their intervals overlap with those of lr=3e-5 and lr=4e-5, so it is not known which of "
        "them is the best."
    ) in result.verdict()
    remarks = ["highest value"] * 2 + ["overlaps with the best"] * 2
    assert [result.remark(run) for run in result.results] == remarks


def test_without_an_interval_nobody_knows(tmp_path: Path) -> None:
    result = of_accuracies(tmp_path / "s", (0.4, None), (0.6, 0.05))
    assert result.to_json()["tied"] == ["lr=1e-5"]


def test_a_loss_is_better_lower(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path / "s", "1e-5", "2e-5")
    for trial, loss in zip(sweep.trials, (2.0, 1.0), strict=True):
        lines = [evaluation(4, "loss", loss, 0.1)]
        write_run(trial.path, lines, [{"step": 4, "loss": 9.0}], steps=4, seconds=1.0)
    result = standing(sweep, {})
    assert result.best is not None
    assert result.best.trial.name == "lr=2e-5"
    assert "the lowest eval/loss: 1 (95% interval 0.9 to 1.1)" in result.verdict()


def test_without_evaluations_the_end_of_training_is_compared_and_proves_nothing(
    tmp_path: Path,
) -> None:
    sweep = sweep_in(tmp_path / "s", "1e-5", "2e-5")
    for trial, reward in zip(sweep.trials, (0.5, 0.75), strict=True):
        steps = [{"step": n, "reward": reward if n > 5 else 100.0} for n in range(1, 16)]
        write_run(trial.path, [], steps, steps=15, seconds=1.0)
    result = standing(sweep, {})
    assert [run.value for run in result.results] == [0.75, 0.5]
    assert "lr=2e-5 has the highest reward: 0.75, the mean over its last 10 steps" in (
        result.verdict()
    )
    assert "it is not known whether this run is the best: give the recipe an [eval]" in (
        result.verdict()
    )


def test_the_metric_is_that_of_the_recipe_and_its_set(tmp_path: Path) -> None:
    flags = ("--checkpoint.best_metric", "eval/hard/pass@2", "--checkpoint.best_mode", "max")
    flags += ("--eval.name", "hard", "--eval.n_samples", "2", "--eval.pass_at", "[1, 2]")
    sweep = sweep_in(tmp_path / "s", "1e-5", "2e-5", flags=flags)
    for trial, value in zip(sweep.trials, (0.2, 0.3), strict=True):
        hard = evaluation(4, "pass@2", value, 0.01, accuracy=1 - value) | {"set": "hard"}
        easy = evaluation(4, "pass@2", 1 - value, 0.01) | {"set": "easy"}
        write_run(trial.path, [easy, hard], [{"step": 4}], steps=4, seconds=1.0)
    result = standing(sweep, {})
    assert result.metric is not None
    assert result.metric.name == "eval/hard/pass@2"
    assert [run.value for run in result.results] == [0.3, 0.2]
    assert result.tied == []


def over_seeds(folder: Path, words: list[str], *accuracies: float) -> Standing:
    sweep = sweep_of(RECIPE, ["--run_dir", str(folder)], parse_swept(words))
    for trial, accuracy in zip(sweep.trials, accuracies, strict=False):
        lines = [evaluation(4, "accuracy", accuracy, 0.05)]
        write_run(trial.path, lines, [{"step": 4}], steps=4, seconds=1.0)
    return standing(sweep, {})


def test_a_setting_is_compared_by_its_mean_over_the_seeds(tmp_path: Path) -> None:
    """The best run, 0.75, is one of the worse setting. By hand: its rival's mean is 0.6, its
    deviation 0.1, and 0.1 / sqrt(3) * t(2) = 0.2484 to either side.
    """
    words = ["learner.lr=1e-5,2e-5,3e-5", "seed=0,1,2"]
    result = over_seeds(tmp_path / "s", words, 0.5, 0.6, 0.7, 0.1, 0.35, 0.75, 0.01, 0.02, 0.03)
    assert result.best is not None
    assert result.best.trial.name == "lr=2e-5,seed=2"
    first, second, last = result.to_json()["settings"]
    assert (first["name"], first["values"], first["seeds"]) == (
        "lr=1e-5", {"learner.lr": "1e-5"}, 3,
    )  # fmt: skip
    assert first["mean"] == pytest.approx(0.6)
    assert first["deviation"] == pytest.approx(0.1)
    assert (first["low"], first["high"]) == pytest.approx((0.6 - 0.24841, 0.6 + 0.24841), abs=1e-5)
    assert (second["least"], second["most"]) == (0.1, 0.75)
    assert (second["name"], last["name"]) == ("lr=2e-5", "lr=3e-5")
    assert result.verdict() == (
        "lr=1e-5 has the highest mean eval/accuracy: 0.6 over 3 seeds (95% interval 0.3516 to "
        "0.8484). It is not known whether it is better than lr=2e-5: the intervals overlap, or one "
        "is missing. More seeds make them narrower."
    )
    page = write_page(result).read_text("utf-8")
    assert "<td>lr=1e-5</td><td>0.6</td><td>0.3516 to 0.8484</td><td>0.1</td>" in page


def test_a_setting_whose_interval_is_apart_is_the_best(tmp_path: Path) -> None:
    words = ["learner.lr=1e-5,2e-5", "seed=0,1"]
    result = over_seeds(tmp_path / "s", words, 0.2, 0.21, 0.8, 0.81)
    assert "It is the best: no other setting's interval overlaps" in result.verdict()


def test_one_seed_or_equal_numbers_prove_nothing(tmp_path: Path) -> None:
    words = ["learner.lr=1e-5,2e-5", "seed=0,1"]
    result = over_seeds(tmp_path / "s", words, 0.2, 0.2, 0.8)
    first, second = result.to_json()["settings"]
    assert (first["seeds"], first["deviation"], first["low"]) == (1, None, None)
    assert (second["deviation"], second["low"]) == (0.0, None)
    assert "It is not known whether it is better than lr=1e-5" in result.verdict()


def test_settings_with_the_same_mean_are_all_named(tmp_path: Path) -> None:
    words = ["learner.lr=1e-5,2e-5,3e-5", "seed=0,1"]
    result = over_seeds(tmp_path / "s", words, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25)
    assert result.verdict() == (
        "lr=1e-5 and lr=2e-5 have the highest mean eval/accuracy: 0.5 over 2 seeds. It is not "
        "known which setting is the best: the intervals overlap, or one is missing. More seeds "
        "make them narrower."
    )


def test_a_sweep_over_seeds_alone_has_one_mean(tmp_path: Path) -> None:
    result = over_seeds(tmp_path / "s", ["seed=0,1"], 0.4, 0.5)
    assert result.verdict() == (
        "The mean eval/accuracy is 0.45 over 2 seeds (95% interval 0 to 1)."
    )


def test_the_interval_over_seeds_ends_where_the_metric_does(tmp_path: Path) -> None:
    result = over_seeds(tmp_path / "s", ["seed=0,1"], 0.9, 1.0)
    (setting,) = result.to_json()["settings"]
    assert (setting["low"], setting["high"]) == (pytest.approx(0.95 - 12.7062 * 0.05), 1.0)


@pytest.mark.parametrize(
    ("metric", "limits"),
    [
        ("accuracy", (0.0, 1.0)),
        ("accuracy/algebra", (0.0, 1.0)),
        ("greedy_accuracy", (0.0, 1.0)),
        ("step_accuracy", (0.0, 1.0)),
        ("pass@4", (0.0, 1.0)),
        ("maj@16/algebra", (0.0, 1.0)),
        ("truncated_fraction", (0.0, 1.0)),
        ("loss", (0.0, math.inf)),
        ("reward", (-math.inf, math.inf)),
        ("reward/accuracy", (-math.inf, math.inf)),
        ("margin", (-math.inf, math.inf)),
    ],
)
def test_rates_and_held_out_losses_have_limits(metric: str, limits: tuple[float, float]) -> None:
    assert limits_of(metric) == limits


def test_the_reward_of_a_set_that_is_called_accuracy_has_none(tmp_path: Path) -> None:
    sweep = sweep_of(RECIPE, ["--run_dir", str(tmp_path), "--checkpoint.best_metric",
                              "eval/accuracy/reward"], parse_swept(["seed=0,1"]))  # fmt: skip
    for trial, reward in zip(sweep.trials, (0.0, 1.0), strict=True):
        line = {"step": 8, "set": "accuracy", "reward": reward}
        write_run(trial.path, [line], [{"step": 8}], steps=8)
    (setting,) = standing(sweep, {}).settings
    assert setting.interval == pytest.approx((0.5 - 12.7062 / 2, 0.5 + 12.7062 / 2))


def test_settings_of_keys_that_end_alike_have_their_whole_keys_in_their_names() -> None:
    keys = ["sft.learner.lr", "rl.learner.lr", "rl.seed"]
    values = dict(zip(keys, ("1e-3", "1e-4", "0"), strict=True))
    (setting,) = settings_of(keys, [(values, 0.5)], highest=True)
    assert setting.name == "sft.learner.lr=1e-3,rl.learner.lr=1e-4"


def test_without_swept_seeds_there_are_no_settings(tmp_path: Path) -> None:
    result = of_accuracies(tmp_path / "s", (0.4, 0.05), (0.6, 0.05))
    assert "settings" not in result.to_json()


def test_runs_that_have_not_finished_cannot_be_best(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path / "s", "1e-5", "2e-5", "3e-5", "4e-5")
    first, second, third, _ = sweep.trials
    good = [evaluation(4, "accuracy", 0.9, 0.01)]
    write_run(first.path, [evaluation(4, "accuracy", 0.2, 0.01)], [{"step": 4}], steps=4, seconds=1)
    write_run(second.path, good, [{"step": 4}])
    write_run(third.path, good, [{"step": 4}])
    result = standing(sweep, {third.name: "the disk is full"}, under_way=[second.name])
    assert [(run.trial.name, run.state) for run in result.results] == [
        ("lr=1e-5", "finished"), ("lr=2e-5", "running"), ("lr=3e-5", "failed"),
        ("lr=4e-5", "waiting"),
    ]  # fmt: skip
    assert result.best is not None
    assert result.best.trial is first
    assert "No other run has finished" in result.verdict()


def test_runs_of_different_lengths_are_told(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path / "s", "1e-5", "2e-5")
    for trial, steps in zip(sweep.trials, (4, 8), strict=True):
        lines = [evaluation(steps, "accuracy", steps / 10, 0.01)]
        write_run(trial.path, lines, [{"step": steps}], steps=steps, seconds=1.0)
    assert "trained for different numbers of steps: 4, 8." in standing(sweep, {}).verdict()


def test_a_summary_of_before_the_run_went_on_does_not_count(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path / "s", "1e-5")
    lines = [evaluation(4, "accuracy", 0.2, 0.01)]
    write_run(sweep.trials[0].path, lines, [{"step": 4}, {"step": 5}], steps=4, seconds=1.0)
    assert standing(sweep, {}).results[0].state == "stopped"


def test_the_page_shows_all_of_it_and_lets_nothing_in(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path / "<script>s", "1e-5", "2e-5", "3e-5")
    first, second, third = sweep.trials
    for trial, value in ((first, 0.4), (second, 0.5)):
        lines = [evaluation(0, "accuracy", 0.1, 0.05), evaluation(4, "accuracy", value, 0.2)]
        write_run(trial.path, lines, [{"step": 4}], steps=4, seconds=1.0)
    result = standing(sweep, {third.name: "<img src=x>"})
    page = write_page(result).read_text("utf-8")
    assert (sweep.path / PAGE).is_file()
    for text in (
        "lr=2e-5 has the highest eval/accuracy", "overlaps with the best", "0.3 to 0.7",
        "2 finished, 1 failed", "eval/accuracy over the steps", "&lt;img src=x&gt;",
    ):  # fmt: skip
        assert text in page
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("<path") == 2
    assert page.count('class="dot"') == 2
