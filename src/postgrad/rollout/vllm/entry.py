"""Where a process with vLLM begins: `PYTHON .../entry.py`.

Its Python has no postgrad, and must get nothing of the controller's environment but this package:
the package is made importable by its place. Processes that vLLM starts in turn run this file too.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]


def make_importable() -> None:
    """`import postgrad` finds the package that this file lies in."""
    if "postgrad" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "postgrad", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["postgrad"] = module
    spec.loader.exec_module(module)


make_importable()

if __name__ == "__main__":
    from postgrad.rollout.vllm.child import main

    main()
elif __name__ == "__mp_main__":  # a worker, which would only miss its engine once it is loaded
    from postgrad.core.pipes import die_with_parent

    die_with_parent()
