"""Builds the stub for each environment, and keeps what was measured."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from helpers.gpu_stub import PYTHONS, Stub, build, versions
from helpers.stub_results import Results, source_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = "POSTGRAD_STUB_PYTHONS names no Python: see `make test-gpu-stub`"
    for item in items:
        if item.get_closest_marker("gpu_stub") and not PYTHONS:
            item.add_marker(pytest.mark.skip(missing))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stub]:
    """Builds the stub for a Python, once."""
    return cache(lambda python: build(python, tmp_path_factory.mktemp("stub")))


@pytest.fixture(scope="session", params=PYTHONS or [None], ids=lambda path: path or "none")
def stub(request: pytest.FixtureRequest, built: Callable[[str], Stub]) -> Stub:
    return built(request.param)


@pytest.fixture(scope="session")
def results_of(request: pytest.FixtureRequest) -> Callable[[Stub], Results]:
    """What is kept of a stub's environment, in the file that POSTGRAD_STUB_RESULTS names."""
    file = os.environ.get("POSTGRAD_STUB_RESULTS")
    source = source_of(request.config.invocation_params.args) if file else {}
    return lambda stub: Results(Path(file) if file else None, versions(stub.python), source)


@pytest.fixture
def results(stub: Stub, results_of: Callable[[Stub], Results]) -> Results:
    """What is kept of the environment of `stub`."""
    return results_of(stub)
