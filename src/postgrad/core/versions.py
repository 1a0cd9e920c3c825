"""Versions of installed libraries, for records of what made a result."""

import importlib.metadata
import platform
from collections.abc import Iterable
from functools import cache

from postgrad import __version__

version = cache(importlib.metadata.version)  # a file is read for each; none changes under a process


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of postgrad, Python and the packages, by name. Raises PackageNotFoundError for one that is
    not installed.
    """
    own = {"postgrad": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in packages}
