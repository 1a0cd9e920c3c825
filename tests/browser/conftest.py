"""A real Chromium, the machine's own; a page that complains fails its test."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here need the browser, and a second each."""
    for item in items:
        if "browser" in item.path.parts:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser. A machine without one fails: nothing would have been tested."""
    from playwright.sync_api import sync_playwright

    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert executable, f"none of {', '.join(NAMES)} is installed: apt-get install chromium"
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not work as root in a container
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        browser = playwright.chromium.launch(executable_path=executable, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[..., Any]]:
    """opened(address, width=1280, dark=False, expected=None) gives a page. Errors of any kind fail
    the test, but for console messages that contain `expected`.
    """
    errors: list[str] = []
    contexts: list[Any] = []

    def open_page(
        address: str, width: int = 1280, dark: bool = False, expected: str | None = None
    ) -> Any:
        def note(message: Any) -> None:
            if expected is None or expected not in message.text:
                errors.append(f"{message.type}: {message.text}")

        context = chromium.new_context(
            viewport={"width": width, "height": 844}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)  # a busy machine fails none
        page.on("console", note)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(f"a dialog: {dialog.message}"))
        page.goto(address)
        page.wait_for_selector("h1")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
