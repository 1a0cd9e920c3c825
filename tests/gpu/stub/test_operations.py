"""The list of refused operations is that of the builds of torch that users have."""

from pathlib import Path

import pytest

from helpers.alerts import alerts
from helpers.gpu_stub import Stub, torch_of
from helpers.refused import REFUSED, covers
from helpers.stub_results import Results

pytestmark = pytest.mark.gpu_stub
HERE = Path(__file__).parent


def test_every_refusal_in_torchs_binaries_is_in_the_list(stub: Stub, results: Results) -> None:
    libraries = torch_of(stub.python) / "lib"
    names = alerts(libraries / "libtorch_cuda.so") | alerts(libraries / "libtorch_cpu.so")
    results.keep("refusals in the binaries", sorted(names))
    assert len(names) > 30
    assert [name for name in sorted(names) if not covers(name)] == []


def test_each_operation_in_the_list_is_answered_as_it_says(stub: Stub, results: Results) -> None:
    answers = stub.ask(str(HERE / "operations.py"))
    results.keep("answers", answers)
    assert answers == {name: rule.caller for rule in REFUSED for name in rule.samples}
