"""The machine of the fault tests, once for all of them."""

import shutil
import sys
from collections.abc import Iterator

import pytest

from helpers.faults import Machine


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("faults are injected by a preloaded C library: Linux and a C compiler")
    started = Machine(tmp_path_factory.mktemp("machine"))
    yield started
    started.close()
