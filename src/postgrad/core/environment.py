"""The environment of child processes that run foreign code: no API keys, no secrets."""

import os
from collections.abc import Iterable

# Variables by which programs, modules and shared libraries are found, and text is encoded.
_LIBRARIES = """
    PATH HOME USER LANG LANGUAGE TZ TMPDIR TEMP TMP SYSTEMROOT VIRTUAL_ENV CONDA_PREFIX PYTHONPATH
    PYTHONHOME PYTHONUTF8 PYTHONDONTWRITEBYTECODE LD_LIBRARY_PATH DYLD_LIBRARY_PATH
"""
LIBRARIES = frozenset(_LIBRARIES.split())


def inherited(more: Iterable[str] = ()) -> dict[str, str]:
    """LIBRARIES, the locale, and the variables that `more` names, where they are set."""
    names = {*LIBRARIES, *more}
    return {
        name: value for name, value in os.environ.items() if name in names or name.startswith("LC_")
    }
