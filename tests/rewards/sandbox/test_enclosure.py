"""Each layer shuts verifiers in; a machine without one says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards.sandbox import box, enclosure, kernel

TESTS = Path(__file__).parents[1]  # where the module `misbehaving` is
RUN = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
from postgrad.rewards.sandbox import enclosure, kernel
if sys.argv[1] == "namespaces":
    kernel.landlock_version = lambda: 0  # an old kernel
walls = enclosure.Enclosure()
import misbehaving
def ending(name):
    try:
        return misbehaving.DEEDS[name]()
    except Exception as error:
        return type(error).__name__
walls.isolate([misbehaving.__file__])
ends = {name: walls.run_in_child(lambda: ending(name), 2.0) for name in sys.argv[3:]}
print(json.dumps([walls.layer, ends]))
"""
DEEDS = (
    "read the environment of the run",
    "list the root",
    "write a file",
    "open a socket",
    "fork",
    "signal the run",
    "own the signals of the run",
    "execute",
)


@pytest.mark.slow
@pytest.mark.skipif(not kernel.landlock_version(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("layer", ["landlock", "namespaces"])
def test_nothing_leads_out_of_either_layer(layer):
    ends = ("take much memory", "spin", "crash")
    command = [sys.executable, "-c", RUN, layer, str(TESTS), *DEEDS, *ends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    used, ends = json.loads(done.stdout)
    assert used == layer
    listed = ends.pop("list the root")[0]
    assert listed == "PermissionError" if layer == "landlock" else isinstance(listed, float)
    assert ends.pop("take much memory")[0] == "MemoryError"
    assert ends.pop("spin")[1] == "cpu_time"
    assert ends.pop("crash")[1] == "crash"
    errors = {"PermissionError", "FileNotFoundError", "OSError"}
    assert {name: end[0] for name, end in ends.items() if end[0] not in errors} == {}


def test_a_machine_without_walls_says_why(monkeypatch):
    def refuse():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    monkeypatch.setattr(box, "enter_namespaces", refuse)
    walls = enclosure.Enclosure()
    walls.isolate([])
    assert walls.layer == "none"
    with pytest.raises(UsageError, match=r"no Landlock, and allows no namespaces .*not permitted"):
        walls.run_in_child(lambda: 1.0, 1.0)


def test_doctor_names_the_layer():
    assert enclosure.describe() in ("landlock", "namespaces")
