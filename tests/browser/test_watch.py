"""The page of a run that is under way, in a real browser."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.made_run import add_step, made_run
from postgrad.observe.sinks import Logs
from postgrad.tools.pages import Feed, WatchServer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run", steps=2)


@contextmanager
def served(*runs: Path) -> Iterator[str]:
    """The address of the runs' page."""
    server = WatchServer(Feed(*runs), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.address
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    with served(run) as address:
        yield address


def test_new_lines_appear_by_themselves(
    opened: Callable[..., Any], run: Path, address: str
) -> None:
    page = opened(address)
    page.wait_for_selector(".live:has-text('live, step 2')")
    page.wait_for_selector(".status:has-text('16 samples')")
    page.get_by_label("Search").fill("of step")
    logs = Logs(run)
    add_step(logs, 3, 2)
    logs.event("sentinel", "entropy fell", sentinel="entropy", action="warn")
    logs.close()
    page.wait_for_selector(".live:has-text('live, step 3')")
    page.wait_for_selector(".status:has-text('24 samples')")
    assert page.get_by_label("Search").input_value() == "of step"
    assert "entropy fell" in page.locator("#events").inner_text()
    page.locator(".list .row").last.click()
    page.wait_for_selector(".tokens .t")


def test_a_run_that_writes_nothing_is_not_called_live(
    opened: Callable[..., Any], run: Path, address: str
) -> None:
    page = opened(address)
    page.wait_for_selector(".live:has-text('live, step 2')")
    long_ago = time.time() - 200
    for path in [run / "recipe.json", *run.glob("*.jsonl")]:
        os.utime(path, (long_ago, long_ago))
    page.wait_for_selector(".live:has-text('step 2, nothing written for 3 min')")
    assert "live" not in page.locator(".live").inner_text()
    (run / "summary.json").write_text('{"steps": 2}')
    page.wait_for_selector(".live:has-text('finished, step 2')")
    assert "finished, 2 of" in page.locator("#overview").inner_text()


def test_the_steps_of_all_runs_are_told(opened: Callable[..., Any], tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"run{steps}", steps=steps) for steps in (1, 3)]
    with served(*runs) as address:
        page = opened(address)
        page.wait_for_selector(".live:has-text('live, steps 1, 3')")
        (runs[0] / "summary.json").write_text('{"steps": 1}')
        page.wait_for_selector("#overview:has-text('finished, 1 of')")
        assert page.locator(".live").inner_text() == "live, steps 1, 3"


def test_a_run_that_begins_anew_is_shown_anew(
    opened: Callable[..., Any], run: Path, address: str
) -> None:
    page = opened(address, expected="status of 503")  # while there is no run
    page.wait_for_selector(".live:has-text('live, step 2')")
    shutil.rmtree(run)
    page.wait_for_selector("body:has-text('not a run directory')")
    made_run(run, steps=1, text=lambda *_: "another run")
    page.wait_for_selector(".live:has-text('live, step 1')")
    page.wait_for_selector(".status:has-text('8 samples')")
    assert "another run" in page.locator(".list .row").first.inner_text()


def test_a_page_that_is_loaded_while_there_is_no_run_shows_the_next_one(
    opened: Callable[..., Any], run: Path, address: str
) -> None:
    page = opened(address, expected="status of 503")
    shutil.rmtree(run)
    page.reload()
    page.wait_for_selector("body:has-text('not a run directory')")
    made_run(run, steps=1)
    page.wait_for_selector(".live:has-text('live, step 1')")
