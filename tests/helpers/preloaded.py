"""What ranks import, imported once: by the process whose forks they are in tests (helpers.ranks).
Ray's own library is not among it: it reads the environment, where each process has a number and the
cluster's token, as it is imported.
"""

import sys

from postgrad.core.process import heavy_imports

with heavy_imports():  # a fork's collector passes over what was imported, whose pages stay shared
    import peft  # noqa: F401

    import postgrad.fleet.engines
    import postgrad.fleet.worker  # noqa: F401

assert "ray" not in sys.modules
