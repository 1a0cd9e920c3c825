"""Rewards and datasets with any name: the report shows them as they are, and as what they are."""

from collections.abc import Callable
from typing import Any

import pytest

from helpers.made_run import GROUP, evaluation, made_run, metric, sample
from postgrad.observe.console import Console
from postgrad.observe.sinks import Logs
from postgrad.tools.pages import report

Open = Callable[..., Any]
ODD = [
    "__proto__", "constructor", "toString", "<img src=x onerror=document.title=1>", "a/b/c",
    "price_low", "think_seconds", "kept_memory_bytes", "total", "“quoted” & 'so'", "n" * 300,
    "nothing",
]  # fmt: skip


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of two steps whose rewards, and the datasets of its evaluations, have odd names;
    "nothing" was never scored.
    """
    run = made_run(tmp_path_factory.mktemp("odd") / "run", steps=0)
    logs = Logs(run)
    for step in (1, 2):
        scores = {name: n + step / 4 for n, name in enumerate(ODD)} | {"nothing": float("nan")}
        rewards = {f"reward/{name}": score for name, score in scores.items()}
        ends = (("", 0.5), ("_low", 0.4), ("_high", 0.6))
        rates = {f"accuracy{end}/{name}": at + step / 10 for name in ODD for end, at in ends}
        logs.metric(metric(step) | rewards)
        logs.evaluation(evaluation(step) | rewards | rates)
        details = {name: {"answer": name} for name in ODD}
        drawn = scores | {"nothing": None}
        lines = [sample(step, step, n, "x", rewards=drawn, details=details) for n in range(GROUP)]
        logs.samples(lines)
    logs.close()
    report([run], None, Console("quiet"))
    return (run / "report.html").as_uri()


def test_curves_and_evaluations_of_odd_names_are_there(opened: Open, odd: str) -> None:
    page = opened(odd)
    plottable = ODD[:-1]
    names = set(page.locator("#curves .chart .name").all_inner_texts())
    wanted = {f"{start}/{name}" for start in ("reward", "eval/reward") for name in plottable}
    assert wanted | {f"eval/accuracy/{name}" for name in ODD} <= names
    still = page.locator("#curves .constant").all_inner_texts()
    assert "reward/nothing –" in still
    page.locator("#curves summary").click()
    numbers = page.locator("#curves tbody tr").all_inner_texts()
    assert any(row.split("\t")[::2] == ["reward/think_seconds", "6.25", "6.25"] for row in numbers)
    head = page.locator("#evaluations thead th").all_inner_texts()
    assert {f"reward/{name}" for name in plottable} | {f"accuracy/{name}" for name in ODD} <= set(
        head
    )
    row = page.locator("#evaluations tbody tr").nth(-2)  # of step 1
    cells = dict(zip(head, row.locator("th, td").all_inner_texts(), strict=True))
    assert cells["accuracy/price_low"] == "0.600 0.500–0.700"
    assert cells["reward/think_seconds"] == "6.250"


def test_a_reward_is_no_phase_and_no_memory_whatever_its_name(opened: Open, odd: str) -> None:
    page = opened(odd)
    phases = page.get_by_role("table", name="Phases of run").locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[0].strip() for row in phases] == ["sample", "train", "sample/decode"]
    memory = page.locator("#phases .chart .name").all_inner_texts()
    assert memory == ["peak_memory_bytes", "train_memory_bytes"]


def test_scores_of_odd_names_are_listed_and_filtered_by(opened: Open, odd: str) -> None:
    page = opened(odd)
    page.locator(".list .row").first.click()
    rewards = page.get_by_role("table", name="Rewards by component").locator("tbody tr")
    shown = [text.split("\t") for text in rewards.all_inner_texts()]
    expected = [[name, f"{n + 0.25:.4f}"] for n, name in enumerate(ODD[:-1])]
    assert shown[: len(ODD)] == [*expected, ["nothing", "failed"]]
    page.get_by_label("least score").fill("0")
    for n, name in enumerate(ODD):
        page.get_by_label("Score", exact=True).select_option(name)
        page.get_by_label("highest score").fill(str(n + 0.4))  # in step 1, not in step 2
        left = 0 if name == "nothing" else GROUP
        page.wait_for_function(
            "text => document.querySelector('.status').textContent === text",
            arg=f"{left} of {2 * GROUP} samples",
        )
    assert page.title() == "run · postgrad"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
