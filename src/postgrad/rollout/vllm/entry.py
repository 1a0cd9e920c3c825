"""The entry point of a process with vLLM: `PYTHON .../entry.py`.

PYTHON is of vLLM's environment, which has no postgrad and must see no other package of the
controller's: this file makes postgrad importable from its own path. Processes that vLLM starts in
turn run this file too.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]


def make_importable() -> None:
    """Make `import postgrad` find the package that contains this file."""
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
elif __name__ == "__mp_main__":  # a worker: while it loads, it would not notice its engine's end
    from postgrad.core.process import die_with_parent

    die_with_parent()
