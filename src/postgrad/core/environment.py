"""What child processes that run code of others inherit of this process's environment: no keys."""

import os
from collections.abc import Iterable

# To find programs, modules and shared libraries, and to write text as this process does.
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
