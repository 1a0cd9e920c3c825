"""What a person chooses to see in a report: zoom, filters, runs, distributions, times, versions."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from helpers.made_run import evaluation, made_run, sample
from postgrad.observe.console import Console
from postgrad.observe.sinks import Logs
from postgrad.plan.scale_picture import write_picture
from postgrad.tools.pages import report

Open = Callable[..., Any]
STEPS = 20
HOSTILE = "</script><img src=x onerror=alert(1)>"
ROW = ".list .row"


def overlapped(step: int) -> dict[str, float]:
    """Metrics of a run that samples ahead, with two engines: engine 1 is busy half as long."""
    return {
        "staleness/age_0": 0.75,
        "staleness/age_1": 0.25,
        "publish_seconds": 0.5,
        "idle/learner_time_fraction": 0.5 - 0.01 * step,
        "publish/sent_bytes": 3.0 * 2**20,
        "engine/0/busy_seconds": 2.0,
        "engine/1/busy_seconds": 1.0,
    }


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run with samples ahead, evaluated samples, and a sample that two versions wrote."""
    run = made_run(tmp_path_factory.mktemp("ahead") / "run", steps=STEPS, more=overlapped)
    logs = Logs(run)
    logs.samples([sample(STEPS, 40, 0, "abcdef", policy_version=[[18, 2], [19, 4]])])
    for step in (0, STEPS):
        logs.evaluation_samples(
            sample(step, 0, n, HOSTILE, set=None, correct=n == 1, greedy=n == 0) for n in range(2)
        )
        line = evaluation(step) | {"set": "pairs"}
        histogram = {"edges": [-1.0, 0.0, 1.0, 2.0], "counts": [1, 1 + step, 2]}
        logs.evaluation(line | {"margin_histogram": histogram})
    logs.close()
    write_picture(run / "scale.svg", "a recipe", {0: {8: 2.0, 64: 1.0}, 1: {8: 1.5, 64: 0.5}})
    report([run], None, Console("quiet"))
    return (run / "report.html").as_uri()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Runs with learning rates of their own; run c was evaluated as far better than the others."""
    folder = tmp_path_factory.mktemp("three")
    rates = {"a": "1e-5", "b": "3e-5", "c": "1e-4"}
    runs = [made_run(folder / name, overrides=("--learner.lr", lr)) for name, lr in rates.items()]
    logs = Logs(runs[2])
    better = {"accuracy": 0.9, "accuracy_low": 0.85, "accuracy_high": 0.95}
    logs.evaluation(evaluation(6) | better)
    logs.close()
    report(runs, folder / "page.html", Console("quiet"))
    return (folder / "page.html").as_uri()


def plot(page: Any, name: str) -> Any:
    slider = page.get_by_role("slider", name=name, exact=True)
    slider.scroll_into_view_if_needed()
    slider.locator("svg").first.wait_for(state="attached")
    return slider


def status(page: Any, text: str) -> None:
    page.wait_for_function(
        "text => document.querySelector('.status').textContent === text", arg=text
    )


def drag(page: Any, slider: Any, start: float, end: float) -> None:
    """Drags over a plot between two parts of its width."""
    box = slider.bounding_box()
    inner = box["width"] - 62
    for move, part in ((page.mouse.move, start), (page.mouse.move, end)):
        move(box["x"] + 52 + inner * part, box["y"] + 60, steps=4)
        if part == start:
            page.mouse.down()
    page.mouse.up()


def ends(slider: Any) -> list[float]:
    return [float(slider.get_attribute(f"aria-value{end}")) for end in ("min", "max")]


def test_idle_shares_and_bytes_that_were_sent_are_among_the_curves(
    opened: Open, ahead: str
) -> None:
    part = opened(ahead).locator("section[aria-label='Samples ahead']")
    shown = part.inner_text()
    assert "idle/learner_time_fraction" in shown
    assert "share of the step in which the learner does not learn" in shown
    assert "publish/sent_bytes 3 MiB" in " ".join(shown.split())


def test_the_picture_of_more_devices_is_drawn(opened: Open, ahead: str) -> None:
    page = opened(ahead)
    page.wait_for_function("document.querySelector('.scale-picture img')?.naturalWidth > 0")
    assert "On more devices" in page.locator(".scale-picture").inner_text()


def test_a_drag_zooms_every_curve_and_the_address_keeps_it(opened: Open, ahead: str) -> None:
    page = opened(ahead)
    reward, loss = plot(page, "reward"), plot(page, "loss")
    assert ends(reward) == [1, STEPS]
    drag(page, reward, 0.25, 0.75)
    page.wait_for_selector(".zoomed:visible")
    assert ends(reward) == ends(loss) == [6, 15]
    assert page.locator(".zoomed").inner_text() == "steps 6 to 15 ✕ reset zoom"
    assert page.url.endswith("zoom=6..15")
    again = opened(page.url)
    assert ends(plot(again, "loss")) == [6, 15]
    again.locator(".zoomed").click()
    assert ends(plot(again, "loss")) == [1, STEPS]
    assert "zoom" not in again.url


def test_keys_zoom_and_lead_to_the_samples_of_a_step(opened: Open, ahead: str) -> None:
    page = opened(ahead)
    status(page, "165 samples")
    loss = plot(page, "loss")
    loss.focus()
    page.keyboard.press("Home")
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("+")
    assert ends(loss) == [5, 15]
    page.keyboard.press("End")
    assert loss.get_attribute("aria-valuetext").startswith("step 15")
    page.keyboard.press("-")
    assert ends(loss) == [1, STEPS]
    page.keyboard.press("Enter")
    status(page, "8 of 165 samples")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "listbox"
    page.wait_for_selector(".detail h3:has-text('Step 15, ticket 28, sample 0')")


def test_a_click_on_a_point_shows_its_samples_and_the_way_back(opened: Open, ahead: str) -> None:
    page = opened(f"{ahead}#?state=truncated")
    status(page, "43 of 165 samples")
    reward = plot(page, "reward")
    box = reward.bounding_box()
    page.mouse.click(box["x"] + 53, box["y"] + 60)
    status(page, "8 of 165 samples")
    assert page.get_by_label("first step").input_value() == "1"
    assert page.get_by_label("State", exact=True).input_value() == ""
    assert page.locator(ROW).first.bounding_box()["y"] < 844
    page.go_back()
    status(page, "43 of 165 samples")
    assert page.get_by_label("State", exact=True).input_value() == "truncated"


def test_a_curve_is_enlarged_in_a_dialog(opened: Open, ahead: str) -> None:
    page = opened(ahead)
    plot(page, "reward")
    page.get_by_role("button", name="Enlarge reward", exact=True).click()
    large = page.get_by_role("slider", name="reward, enlarged")
    large.locator("path.line").wait_for()
    assert large.bounding_box()["height"] > 400
    page.get_by_role("button", name="Zoom in").click()
    assert ends(large) == [5, 16]
    again = opened(page.url)
    again.get_by_role("slider", name="reward, enlarged").locator("path.line").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    assert "big" not in page.url
    assert ends(plot(page, "reward")) == [5, 16]


def test_distributions_are_strips_over_the_steps(opened: Open, ahead: str) -> None:
    page = opened(f"{ahead}#distributions")
    reward = plot(page, "reward of each sample")
    reward.focus()
    page.keyboard.press("Home")
    assert reward.get_attribute("aria-valuetext") == "step 1  1.333 (1 to 2), 8 samples"
    cells = reward.locator(".cell")
    assert cells.count() == 4 * STEPS  # rewards 1, 4/3, 5/3 and 2 at each step
    assert {cell.get_attribute("fill-opacity") for cell in cells.all()[:4]} == {
        "0.877"
    }  # step 20: 3 of 9
    age = plot(page, "age of the tokens, in steps")
    assert age.get_attribute("aria-valuetext") == "step 1  75% of age 0, 25% of age 1"
    assert age.locator(".cell").count() == 2 * STEPS
    margin = plot(page, "margin of each held-out pair, pairs")
    margin.focus()
    page.keyboard.press("End")
    assert margin.get_attribute("aria-valuetext") == "step 20  0.5238 (0.06667 to 0.981), 24 pairs"
    page.keyboard.press("Home")
    assert margin.get_attribute("aria-valuetext") == "step 0  1 (−0.6 to 1.8), 4 pairs"


def test_engines_and_learner_are_drawn_to_time(opened: Open, ahead: str) -> None:
    page = opened(ahead)
    table = page.get_by_role("table", name="Shares of the time of engines and learner of run")
    rows = [text.split("\t") for text in table.locator("tr").all_inner_texts()]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["whole run", "sampling", "publishing", "learning", "other", "waiting"],
        ["engine 0", "57%", "14%", "–", "–", "29%"],  # a step: 2 + 1 + 0.5 seconds
        ["engine 1", "29%", "14%", "–", "–", "57%"],
        ["learner", "–", "14%", "29%", "–", "57%"],
    ]
    about = page.locator(".gantt .scale")
    assert about.inner_text() == "Steps 13 to 20, 28 s"
    page.get_by_label("Other steps").fill("2")
    assert about.inner_text() == "Steps 3 to 10, 28 s"
    spans = page.locator(".lanes svg").first.locator(".doing.sampling")
    assert spans.count() == 8
    width = float(spans.first.get_attribute("width"))
    assert width == pytest.approx(1000 * 2 / 28)


def test_tokens_are_coloured_by_the_version_that_wrote_them(opened: Open, ahead: str) -> None:
    page = opened(f"{ahead}#samples?open=0-{STEPS}-40-0")
    page.wait_for_selector(f".detail h3:has-text('Step {STEPS}, ticket 40, sample 0')")
    page.get_by_label("Colour by").select_option("version")
    classes = [token.get_attribute("class") for token in page.locator(".tokens .t").all()]
    assert classes == ["t v0"] * 2 + ["t v1"] * 4
    assert page.locator(".legend .v0").inner_text() == "version 18, 1 step old: 2 tokens"
    assert page.locator(".legend .v1").inner_text() == "version 19, this step's own: 4 tokens"
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".token-readout").inner_text().endswith("policy version 18, 1 step old")
    shades = page.evaluate(
        "['.v0', '.v1'].map((one) => getComputedStyle(document.querySelector(`.tokens ${one}`)).backgroundColor)"  # noqa: E501
    )
    assert len(set(shades)) == 2
    assert "rgba(0, 0, 0, 0)" not in shades


def test_filters_are_in_the_address_and_can_be_cleared(opened: Open, ahead: str) -> None:
    page = opened(ahead)
    status(page, "165 samples")
    page.get_by_label("first step").fill("3")
    page.get_by_label("Score", exact=True).select_option("exact")
    page.get_by_label("least score").fill("0.9")
    page.get_by_label("Sort", exact=True).select_option("-step")
    page.get_by_label("Search").fill("Of step 1")
    status(page, "20 of 165 samples")
    again = opened(page.url)
    status(again, "20 of 165 samples")
    assert again.locator(f"{ROW} mark").first.inner_text() == "of step 1"
    assert again.get_by_label("Search").input_value() == "Of step 1"
    assert again.locator(ROW).first.inner_text().count("step 19")
    again.get_by_role("button", name="Clear filters").click()
    status(again, "165 samples")
    assert again.get_by_label("Search").input_value() == ""
    assert not again.get_by_role("button", name="Clear filters").is_visible()


def test_an_address_from_others_is_text_and_never_breaks_the_page(
    opened: Open, ahead: str, three: str
) -> None:
    odd = (
        "#constructor?state=constructor&sort=__proto__&zoom=9..1&big=nothing&smooth=7&over=x&low=a"
    )
    status(opened(ahead + odd), "165 samples")
    page = opened(f"{three}#?hide=0,1,2,9&name0={'%3Cimg src=x onerror=alert(1)%3E' * 9}&by=x")
    status(page, "144 samples")  # not all runs can be hidden
    name = page.locator(".chip label").first.inner_text()
    assert name.startswith("<img src=x")
    assert len(name) == 60
    assert page.locator("img").count() == 0


def test_the_search_box_stands_above_its_hits(opened: Open, ahead: str) -> None:
    for width in (1280, 390):
        page = opened(ahead, width=width)
        page.wait_for_selector(ROW)
        box = page.get_by_label("Search").bounding_box()
        hits = page.locator(".list").bounding_box()
        assert hits["x"] == box["x"]
        assert 0 < hits["y"] - box["y"] - box["height"] < 60


def test_runs_are_hidden_and_renamed_in_the_address(opened: Open, three: str) -> None:
    page = opened(three)
    status(page, "144 samples")
    page.get_by_label("Show b").uncheck()
    status(page, "96 samples")
    page.get_by_role("button", name="Rename a").click()
    page.keyboard.type("small rate")
    page.keyboard.press("Enter")
    assert page.locator("h1").inner_text() == "small rate against b against c"
    again = opened(page.url)
    status(again, "96 samples")
    reward = plot(again, "reward")
    assert reward.locator("path.line").count() == 2
    for part in ("#evaluations", "#events", "#recipe", "#overview"):
        text = again.locator(part).text_content()
        assert "small rate" in text, part
        assert "30.00003" not in text, part
    again.get_by_label("Show c").uncheck()
    assert again.get_by_label("Show small rate").is_disabled()
    again.get_by_label("Show b").check()
    status(again, "96 samples")
    again.get_by_role("button", name="Rename small rate").click()
    again.keyboard.press("Delete")
    again.keyboard.press("Enter")
    assert again.get_by_label("Show a", exact=True).is_checked()


def test_who_leads_and_what_differs_stands_at_the_top(opened: Open, three: str) -> None:
    page = opened(three)
    status(page, "144 samples")
    verdict = page.locator(".verdict")
    assert verdict.inner_text() == (
        "c leads in eval/accuracy: 0.9. No other interval overlaps with its own."
    )
    assert verdict.bounding_box()["y"] < 300
    table = page.get_by_role("table", name=re.compile("The runs, the best first"))
    rows = [text.split("\t") for text in table.locator("tr").all_inner_texts()]
    assert [row[0].strip() for row in rows] == ["run", "c", "a", "b"]
    assert rows[0][4].strip() == "learner.lr"
    assert [row[4].strip() for row in rows[1:]] == ["0.0001", "0.00001", "0.00003"]
    paths = [whisker.get_attribute("d") for whisker in table.locator(".whisker").all()]
    assert paths[1] == paths[2] != paths[0]  # equal intervals lie at equal places
    low, high = (float(x) for x in re.findall(r"[\d.]+", paths[0].replace("7H", " ")))
    assert low == pytest.approx(6 + 208 * (0.85 - 0.51) / (0.95 - 0.51))
    assert high == pytest.approx(214)
    page.get_by_label("Compare by").select_option("reward")
    assert "leads in reward" in verdict.inner_text()
    assert "may be chance" in verdict.inner_text()
    assert page.url.endswith("by=reward")


def test_samples_of_evaluations_are_shown_with_score_and_cause(opened: Open, ahead: str) -> None:
    page = opened(f"{ahead}#samples?state=evaluated")
    status(page, "4 of 165 samples")
    marks = [row.locator(".mark").all_inner_texts() for row in page.locator(ROW).all()]
    assert marks[0] == ["evaluation, greedy", "wrong", "truncated"]
    assert marks[1] == ["evaluation"]
    page.locator(ROW).nth(3).click()
    page.wait_for_selector(f".detail h3:has-text('Step {STEPS}, ticket 0, sample 1')")
    facts = page.locator(".detail .lead span").all_inner_texts()
    assert {"evaluation", "right"} <= set(facts)
    assert page.locator(".tokens").inner_text() == HOSTILE
    assert page.get_by_label("Colour by").input_value() == "logprob"  # it has no advantages
    assert '"exact"' in page.locator(".notes").inner_text()
    steps = page.get_by_role("table", name="The same prompt over steps and runs")
    assert steps.locator("tbody tr").count() == 7  # two evaluations, five steps of training
    page.get_by_label("State", exact=True).select_option("wrong")
    status(page, "2 of 165 samples")
    assert page.url.endswith(f"open=0-{STEPS}-0-1-evaluation-&state=wrong")
    again = opened(page.url)
    again.wait_for_selector(f".detail h3:has-text('Step {STEPS}, ticket 0, sample 1')")


@pytest.mark.parametrize("dark", [False, True])
def test_all_of_it_fits_a_phone(opened: Open, ahead: str, three: str, dark: bool) -> None:
    for address in (f"{ahead}#?zoom=3..9", three):
        page = opened(address, width=390, dark=dark)
        page.wait_for_selector(ROW)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        button = page.get_by_role("button", name="Enlarge reward", exact=True)
        assert button.bounding_box()["width"] >= 30
        button.click()
        page.wait_for_selector("dialog[open] path.line")
        box = page.locator("dialog").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
