"""The report in a real browser: what a person sees, types and presses."""

import hashlib
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from helpers.made_run import GROUP, made_run
from postgrad.observe.console import Console
from postgrad.observe.sinks import Logs
from postgrad.tools.pages import report

Open = Callable[..., Any]
LONG = "<script>document.title='run'</script><img src=x onerror=alert(1)>" + "x" * 100_000
ROW = ".list .row"


DRAWING = b"<svg xmlns='http://www.w3.org/2000/svg' onload='document.title=1'></svg>"


def file_of_picture(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


def written(step: int, ticket: int, number: int) -> str:
    if (ticket, number) == (15, 3):
        return LONG
    return f"Twice {ticket % 10}, says sample {number} of step {step}."


@pytest.fixture(scope="module")
def run_report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of 30 steps with 15 groups; a sample of step 2 is long and hostile."""
    run = made_run(tmp_path_factory.mktemp("one") / "run-a", steps=30, groups=15, text=written)
    report([run], None, Console("quiet"))
    return (run / "report.html").as_uri()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two runs whose recipes differ in the learning rate."""
    folder = tmp_path_factory.mktemp("two")
    runs = [made_run(folder / "a"), made_run(folder / "b", overrides=("--learner.lr", "3e-5"))]
    report(runs, folder / "page.html", Console("quiet"))
    return (folder / "page.html").as_uri()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    """10 000 samples."""
    run = made_run(tmp_path_factory.mktemp("many") / "run", steps=50, groups=50)
    assert report([run], None, Console("quiet"))["samples"] == 10_000
    return (run / "report.html").as_uri()


def status(page: Any, text: str) -> None:
    page.wait_for_function(
        "text => document.querySelector('.status').textContent === text", arg=text
    )


def choose(page: Any, label: str, value: str) -> None:
    page.get_by_label(label, exact=True).select_option(value)


def totals(page: Any) -> list[float]:
    return [float(text) for text in page.locator(f"{ROW} .score").all_inner_texts()]


def test_every_part_of_a_run_is_shown(opened: Open, run_report: str) -> None:
    page = opened(run_report)
    status(page, "1,800 samples")
    assert page.locator("h1").inner_text() == "run-a"
    headings = page.locator("h2").all_inner_texts()
    assert headings[1:] == [
        "Curves", "Distributions", "Time and memory", "Evaluations", "Samples", "Events", "Batch",
        "Recipe",
    ]  # fmt: skip
    overview = page.locator("#overview").inner_text()
    assert "30 of 100 steps" in overview
    assert "sentinel grad_norm since step 30: the gradient norm jumped" in overview
    names = page.locator("#curves .chart .name").all_inner_texts()
    assert {"reward", "loss", "eval/accuracy", "policy/kl", "response_length"} <= set(names)
    assert "policy/lr" in page.locator(".constants").first.inner_text() + "".join(
        page.locator(".constants").all_inner_texts()
    )
    phases = page.get_by_role("table", name="Phases of run-a").locator("tbody tr")
    texts = [text.strip().split("\t") for text in phases.all_inner_texts()]
    assert texts == [
        ["sample", "1 min 0 s", "67%", "2 s", "1.8 s"],
        ["train", "30 s", "33%", "1 s", "–"],
        ["sample/decode", "45 s", "50%", "1.5 s", "–"],
    ]
    memory = page.locator("#phases .chart .name").all_inner_texts()
    assert memory == ["peak_memory_bytes", "train_memory_bytes"]
    assert "the gradient norm jumped" in page.locator("#events").inner_text()
    assert "8,192" in page.locator("#batch").inner_text()
    assert page.locator("#evaluations tbody tr").count() == 2


def test_samples_are_filtered_and_sorted(opened: Open, run_report: str) -> None:
    page = opened(run_report)
    status(page, "1,800 samples")
    choose(page, "State", "truncated")
    status(page, "450 of 1,800 samples")
    choose(page, "State", "")
    page.get_by_label("first step").fill("3")
    page.get_by_label("last step").fill("4")
    status(page, "120 of 1,800 samples")
    choose(page, "Score", "exact")
    page.get_by_label("least score").fill("0.9")
    status(page, "30 of 1,800 samples")
    page.get_by_label("least score").fill("")
    page.get_by_label("Search").fill("sample 2 of step 4")
    status(page, "15 of 1,800 samples")
    page.get_by_label("Search").fill("")
    status(page, "120 of 1,800 samples")
    for sort, reverse in (("-total", True), ("total", False)):
        choose(page, "Sort", sort)
        page.wait_for_function(
            f"(first) => document.querySelector('{ROW} .score').textContent === first",
            arg="1.00" if reverse else "0.00",
        )
        assert totals(page) == sorted(totals(page), reverse=reverse)


def test_a_hostile_sample_of_100_000_characters_is_text(opened: Open, run_report: str) -> None:
    page = opened(run_report)
    status(page, "1,800 samples")
    page.get_by_label("Search").fill("<script>")
    status(page, "1 of 1,800 samples")
    page.locator(ROW).first.click()
    page.wait_for_selector(".detail h3:has-text('Step 2, ticket 15, sample 3')")
    assert page.locator(".tokens").inner_text().startswith("<script>document.title='run'</script>")
    assert page.locator(".tokens .t").count() == 4000
    page.get_by_role("button", name="Show 4000 of").click()
    assert page.locator(".tokens .t").count() == 8000
    assert page.title() == "run-a · postgrad"
    assert page.locator(".detail img, .detail script, .list script").count() == 0


def test_images_of_a_prompt_are_shown_as_data(opened: Open, tmp_path: Path) -> None:
    picture = file_of_picture(24, 16)
    digest, drawing = (hashlib.sha256(c).hexdigest() for c in (picture, DRAWING))
    run = made_run(tmp_path / "run", steps=1, groups=1)
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    (run / "images").mkdir()
    (run / "images" / digest).write_bytes(picture)
    (run / "images" / drawing).write_bytes(DRAWING)
    placed = [{"sha256": name, "runs": [[0, 1]]} for name in (digest, drawing)]
    (run / "samples.jsonl").write_text(
        "".join(f"{json.dumps(line | {'images': placed})}\n" for line in lines)
    )
    report([run], None, Console("quiet"))
    page = opened((run / "report.html").as_uri())
    status(page, "4 samples")
    page.locator(ROW).first.click()
    page.wait_for_selector(".detail h3:has-text('Step 1')")
    shown = page.locator(".detail img")
    assert shown.count() == 1
    assert shown.get_attribute("src").startswith("data:image/png;base64,")
    assert shown.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [24, 16]
    assert (
        f"Image {drawing[:12]}: its file is no image."
        in page.locator("article.detail").inner_text()
    )
    assert page.locator(".detail svg").count() == 0
    assert page.title() == "run · postgrad"


def test_what_an_environment_began_with_stands_in_place_of_the_prompt(
    opened: Open, tmp_path: Path
) -> None:
    run = made_run(tmp_path / "run", steps=1, groups=1)
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        opening_turn = {"author": "environment", "text": "Go.", "opens": True}
        reply = opening_turn | {"token_ids": [38, 78, 13], "logprobs": [0.0] * 3}
        turn = line["turns"][0]
        line["turns"] = [reply, turn, reply, turn] if number == 0 else [turn, reply, turn]
        for key in ("advantages", "mask", "policy_version"):
            del line[key]
    (run / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report([run], None, Console("quiet"))
    page = opened((run / "report.html").as_uri())
    status(page, "4 samples")
    for row, prompt, first in (
        (0, "The row's prompt, which the environment replaced", "in place of the prompt"),
        (1, "The prompt as the model read it", "policy"),
    ):
        page.locator(ROW).nth(row).click()
        page.wait_for_selector(f'.detail summary:has-text("{prompt}")')
        authors = page.locator(".tokens .author").all_inner_texts()
        assert first in authors[0]
        assert "environment, another conversation" in authors[1:]


def test_tokens_are_coloured_and_read_out(opened: Open, run_report: str) -> None:
    page = opened(run_report)
    page.locator(ROW).first.click()
    tokens = page.locator(".tokens")
    assert tokens.inner_text() == "Twice 0, says sample 0 of step 1."
    assert tokens.locator(".t").first.get_attribute("class") == "t n8"  # advantage -0.5
    tokens.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    readout = page.locator(".token-readout").inner_text()
    assert readout.startswith('token 2 · "w"')
    for part in ("logprob −0.250 (p 0.779)", "ratio 1.00100", "advantage −0.500", "in the loss"):
        assert part in readout
    for colour, expected in (("difference", "t q8"), ("mask", "t q5"), ("none", "t ")):
        choose(page, "Colour by", colour)
        assert page.locator(".tokens .t").first.get_attribute("class") == expected


def test_ten_thousand_samples_scroll(opened: Open, many: str) -> None:
    page = opened(many)
    status(page, "10,000 samples")
    rows = page.locator(ROW)
    for part in (0.25, 0.5, 1.0):
        page.eval_on_selector(
            ".list", "(list, part) => list.scrollTop = part * list.scrollHeight", part
        )
        place = int(part * 10_000) - (1 if part == 1 else 0)
        page.wait_for_selector(f"{ROW}[data-place='{place}']")
        assert rows.count() < 60  # only what can be seen is there
    last = page.locator(f"{ROW}[data-place='9999']")
    assert last.get_attribute("aria-posinset") == last.get_attribute("aria-setsize") == "10000"
    last.click()
    page.wait_for_selector(".detail h3:has-text('Step 50, ticket 2,499, sample 3')")


def test_everything_works_by_keyboard(opened: Open, run_report: str) -> None:
    page = opened(run_report)
    status(page, "1,800 samples")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the run"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("step 5.")
    status(page, "60 of 1,800 samples")
    page.locator(".list").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector(f"{ROW}[data-place='58'][aria-selected='true']")
    active = page.locator(".list").get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("data-place") == "58"
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => document.activeElement.textContent.startsWith('Step 5, ticket 74')"
    )
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "listbox"


def test_a_curve_reads_its_values_by_keyboard_and_pointer(opened: Open, run_report: str) -> None:
    page = opened(run_report)
    plot = page.get_by_role("slider", name="reward", exact=True)
    plot.focus()
    page.keyboard.press("Home")
    assert plot.get_attribute("aria-valuetext") == "step 1  1.01"
    page.keyboard.press("ArrowRight")
    assert plot.get_attribute("aria-valuetext") == "step 2  1.02"
    others = page.get_by_role("slider", name="loss", exact=True)
    assert others.get_attribute("aria-valuetext").startswith("step 2")  # one cursor for all
    plot.hover(position={"x": 200, "y": 50})
    assert plot.get_attribute("aria-valuetext").startswith("step 1")


def test_the_same_prompt_is_found_at_other_steps(opened: Open, run_report: str) -> None:
    page = opened(run_report)
    page.locator(ROW).first.click()
    table = page.get_by_role("table", name="The same prompt over steps and runs")
    rows = table.locator("tbody tr")
    assert rows.count() == 45  # 450 tickets over ten rows
    rows.nth(1).get_by_role("button").click()
    page.wait_for_selector(".detail h3:has-text('ticket 10, sample 3')")


@pytest.mark.parametrize("width", [390, 820])
def test_a_phone_needs_no_sideways_scroll(
    opened: Open, run_report: str, two: str, width: int
) -> None:
    for address in (run_report, two):
        page = opened(address, width=width)
        page.wait_for_selector(f"{ROW}")
        for element in page.locator("details > summary").all():
            element.evaluate("one => one.parentElement.open = true")
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        tiles = "[...document.querySelectorAll('.figures dd')]"
        assert page.evaluate(f"{tiles}.filter((one) => one.scrollWidth > one.clientWidth)") == []
    page.locator(ROW).first.click()
    page.wait_for_function(
        "() => document.querySelector('.detail').getBoundingClientRect().top < 200"
    )


def test_the_peak_is_beside_the_estimate_of_the_whole_process(
    opened: Open, run_report: str
) -> None:
    tile = opened(run_report).locator(".figures > div:has(dt:text-is('peak memory'))")
    assert tile.locator("dd").all_text_contents() == ["1 GiB", "estimated 1.5 GiB"]


def test_a_resume_is_marked_in_every_curve(opened: Open, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    logs = Logs(run)
    logs.event("resumed", "step 3", step=3)
    logs.close()
    report([run], None, Console("quiet"))
    page = opened((run / "report.html").as_uri())
    reward = page.locator(".chart:has(.name:text-is('reward'))")
    reward.locator(".line").first.wait_for(state="attached")
    assert reward.locator(".resume").count() == 1


def test_curves_that_were_never_in_view_are_printed_too(opened: Open, run_report: str) -> None:
    page = opened(run_report)
    status(page, "1,800 samples")
    empty = "[...document.querySelectorAll('.plot')].filter((one) => !one.firstChild).length"
    assert page.evaluate(empty) > 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(empty) == 0


def test_sentinels_that_never_spoke_are_said_to_be_silent(opened: Open, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    events = run / "events.jsonl"
    lines = events.read_text("utf-8").splitlines(keepends=True)
    events.write_text("".join(line for line in lines if '"sentinel"' not in line), "utf-8")
    report([run], None, Console("quiet"))
    page = opened((run / "report.html").as_uri())
    page.wait_for_selector(".health:has-text('sentinels silent: nothing looked wrong')")


def test_dark_mode_follows_the_system_and_the_switch(opened: Open, run_report: str) -> None:
    def brightness(page: Any) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(","))

    light, dark = opened(run_report), opened(run_report, dark=True)
    assert brightness(light) > 700
    assert brightness(dark) < 120
    for page, theme, bright in ((light, "dark", False), (dark, "light", True)):
        page.get_by_label("Colours of the page").select_option(theme)
        assert (brightness(page) > 700) == bright


def test_screen_readers_are_told_what_everything_is(opened: Open, run_report: str) -> None:
    page = opened(run_report)
    status(page, "1,800 samples")
    page.wait_for_selector(".tokens .t")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, select, button, [role=slider], [role=listbox], [role=group], nav, article")]
            .filter((one) => !(one.labels?.length || one.ariaLabel || one.textContent.trim()))
            .map((one) => one.outerHTML)"""  # noqa: E501
    )
    assert unnamed == []
    assert page.locator("table:not(:has(caption))").count() == 0
    assert page.locator("th:not([scope])").count() == 0
    assert page.locator("h1").count() == page.locator("main").count() == 1
    levels = page.evaluate(
        "() => [...document.querySelectorAll('h1,h2,h3,h4')].map((one) => Number(one.tagName[1]))"
    )
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), levels
    drawn = page.locator(".chart svg:not([aria-hidden])").count()
    assert drawn == 0  # their values are the slider's, and a table's


def test_two_runs_stand_side_by_side(opened: Open, two: str) -> None:
    page = opened(two)
    assert page.locator("h1").inner_text() == "a against b"
    status(page, "96 samples")
    row = page.get_by_role("table", name="Differences of the recipes").locator(
        "tr:has-text('learner.lr')"
    )
    assert [text.strip() for text in row.first.inner_text().split("\t")][1:] == [
        "0.00001",
        "0.00003",
    ]
    choose(page, "Run", "1")
    status(page, "48 of 96 samples")
    reward = page.get_by_role("slider", name="reward", exact=True)
    reward.scroll_into_view_if_needed()
    reward.locator("path.line").nth(1).wait_for(state="attached")
    assert reward.locator("path.line").count() == 2
    page.locator(ROW).first.click()
    table = page.get_by_role("table", name="The same prompt over steps and runs")
    runs = [text.split("\t")[1] for text in table.locator("tbody tr").all_inner_texts()]
    assert set(runs) == {"a", "b"}
    assert len(runs) % GROUP == 0


def test_a_run_without_samples_says_so(opened: Open, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=3)
    (run / "samples.jsonl").unlink()
    report([run], None, Console("quiet"))
    page = opened((run / "report.html").as_uri())
    page.wait_for_selector("#samples >> text=There are no samples")
    assert not page.locator(".browser").is_visible()
    assert not page.get_by_label("Search").is_visible()


def test_a_fork_says_of_which_run_and_step_it_is(opened: Open, tmp_path: Path) -> None:
    run, fork = made_run(tmp_path / "run", steps=4), made_run(tmp_path / "fork", steps=4)
    logs = Logs(fork)
    for source, step in (("/elsewhere/older", 1), (str(run), 2)):  # a fork of a fork
        logs.event("forked", "", source=source, step=step, manifest_sha256="0" * 64)
    logs.close()
    report([run, fork], tmp_path / "page.html", Console("quiet"))
    page = opened((tmp_path / "page.html").as_uri())
    page.wait_for_selector("p.lead")
    leads = [lead.inner_text() for lead in page.query_selector_all("#overview p.lead")]
    assert [lead.endswith("forked from run at step 2") for lead in leads] == [False, True]
