"""Builds the stub for each environment, and keeps what was found."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_stub import PYTHONS, Stub, build, versions

Results = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = "POSTGRAD_STUB_PYTHONS names no Python: see `make test-gpu-stub`"
    for item in items:
        if item.get_closest_marker("gpu_stub") and not PYTHONS:
            item.add_marker(pytest.mark.skip(missing))


@pytest.fixture(scope="session", params=PYTHONS or [None], ids=lambda path: path or "none")
def stub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return build(request.param, tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="session")
def all_results() -> Iterator[dict[str, Results]]:
    """By torch's version, by kind: what the file POSTGRAD_STUB_RESULTS has, and at the end gets."""
    to = os.environ.get("POSTGRAD_STUB_RESULTS")
    found: dict[str, Results] = {}
    if to and Path(to).exists():
        found = json.loads(Path(to).read_text("utf-8"))
    yield found
    if to:
        ordered = {version: found[version] for version in sorted(found)}
        Path(to).write_text(_text(ordered, 3) + "\n", "utf-8")


def _text(value: Any, depth: int) -> str:
    """JSON with `depth` levels of objects unfolded, and a line for each of what is below them.
    Counts of 0 are left out.
    """
    if not depth or not isinstance(value, dict):
        return json.dumps(_short(value))
    lines = (f"{json.dumps(name)}: {_text(each, depth - 1)}" for name, each in value.items())
    body = ",\n".join(lines).replace("\n", "\n ")
    return f"{{\n {body}\n}}"


def _short(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: _short(each)
        for name, each in value.items()
        if each not in (0, {}, []) or each is False
    }


@pytest.fixture
def results(stub: Stub, all_results: dict[str, Results]) -> Results:
    """What is kept of the environment of `stub`."""
    known = versions(stub.python)
    return all_results.setdefault(known["torch"], {"versions": known})
