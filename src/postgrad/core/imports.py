"""Imports heavy libraries while the garbage collector rests."""

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Generator[None]:
    """For the first import of torch and transformers: some 2 500 modules, none of which ever
    becomes garbage. Inside, the cyclic collector is off; afterwards it ignores what was imported.
    Imports take a fifth less time, and all later collections are short.

    Does nothing where torch is imported already: objects of the program may become garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
