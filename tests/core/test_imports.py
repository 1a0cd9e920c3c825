"""Heavy imports run without the collector, once in a process."""

import gc
import subprocess
import sys

from postgrad.core.process import heavy_imports


def test_the_collector_rests_during_imports_and_leaves_them_alone_afterwards() -> None:
    program = """
import gc
from postgrad.core.process import heavy_imports
with heavy_imports():
    assert not gc.isenabled()
    import decimal
assert gc.isenabled()
print(gc.get_freeze_count() > 1000)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"


def test_the_collector_works_again_after_an_import_that_failed() -> None:
    program = """
import gc
from postgrad.core.process import heavy_imports
frozen = gc.get_freeze_count()  # of Python's own objects: some from 3.12 on
try:
    with heavy_imports():
        __import__("no_such_library_" + "off" * (not gc.isenabled()))
except ImportError as error:
    print(error.name, gc.isenabled(), gc.get_freeze_count() - frozen)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["no_such_library_off", "True", "0"]


def test_where_torch_is_there_already_nothing_is_kept_alive() -> None:
    assert "torch" in sys.modules or __import__("torch")
    frozen = gc.get_freeze_count()
    with heavy_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
