"""Versions of installed libraries, for records of what made a result."""

import importlib.metadata
import platform
from collections.abc import Iterable
from functools import cache

from postgrad import __version__

version = cache(importlib.metadata.version)  # a file is read for each; none changes under a process


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of postgrad, Python and `packages`: {"postgrad": ..., "python": "3.11.7", ...}.

    Raises PackageNotFoundError for a package that is not installed.
    """
    runtime = {"postgrad": __version__, "python": platform.python_version()}
    return runtime | {name: version(name) for name in packages}
