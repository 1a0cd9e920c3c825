"""Importing heavy libraries without the collector walking through them again and again."""

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Generator[None]:
    """Around the first import of torch and transformers: some 2 500 modules, nothing of which is
    ever garbage. The cyclic collector rests meanwhile and leaves them alone from then on, which
    takes a fifth off the imports and makes every later collection short.

    Does nothing where torch is there already: what is alive by then may well become garbage.
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
