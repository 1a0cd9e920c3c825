"""A user's configuration files, which apply to all runs on a machine."""

from collections.abc import Mapping
from pathlib import Path


def user_file(name: str, variable: str, environment: Mapping[str, str]) -> Path | None:
    """The file that the environment variable `variable` names, else postgrad/`name` in
    $XDG_CONFIG_HOME or ~/.config. None where there is no home directory.
    """
    if named := environment.get(variable):
        return Path(named).expanduser()
    if shared := environment.get("XDG_CONFIG_HOME"):
        return Path(shared) / "postgrad" / name
    try:
        return Path.home() / ".config" / "postgrad" / name
    except RuntimeError:
        return None
