"""The page of a run that is under way, in a real browser."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.made_run import add_step, made_run
from postgrad.observe.sinks import Logs
from postgrad.tools.pages import Feed, WatchServer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run", steps=2)


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    server = WatchServer(Feed(run), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.address
    server.shutdown()
    thread.join()
    server.server_close()


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
