"""postgrad post-trains language models: SFT, reward models, preferences, PPO, RL from verifiable
rewards.

The public names are those of `postgrad.api`, imported when they are asked for: `import postgrad`
alone costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from postgrad._version import __version__ as __version__

if TYPE_CHECKING:
    from postgrad.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        api = import_module("postgrad.api")
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'postgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *import_module("postgrad.api").__all__])
