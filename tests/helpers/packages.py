"""Packages that some tests need. They are looked for without being imported: an import takes up to
two seconds of every process that collects tests, and few of these run them.
"""

from importlib.util import find_spec

import pytest


def needs(*packages: str, reason: str | None = None) -> pytest.MarkDecorator:
    """A mark: skipped where one of the packages is not installed. Import them inside tests."""
    absent = [package for package in packages if find_spec(package) is None]
    why = reason or f"not installed: {', '.join(absent)}"
    return pytest.mark.skipif(bool(absent), reason=why)


TRL = needs("trl", reason="TRL is a peer: pip install --group peers")
