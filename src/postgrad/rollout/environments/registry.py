"""Environments by their names in recipes; one of yours is "package.module:Class"."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from postgrad.core.errors import UsageError
from postgrad.core.names import nearest, resolve
from postgrad.rollout.environments.base import ChatEnvironment
from postgrad.rollout.environments.settings import EnvironmentSettings

ENVIRONMENTS = {
    "guess_number": "postgrad.rollout.environments.guess_number:GuessNumber",
    "tools": "postgrad.rollout.environments.tools:Tools",
}


def build(settings: EnvironmentSettings) -> ChatEnvironment:
    """The environment that `settings` name. Raises UsageError for an unknown name, key or value."""
    kind = resolve(settings.type, ENVIRONMENTS, "environment")
    if not (isinstance(kind, type) and issubclass(kind, ChatEnvironment)):
        raise UsageError(
            f"environment {settings.type!r} is not a subclass of "
            "postgrad.rollout.environments.base.ChatEnvironment"
        )
    try:
        return kind.model_validate_json(
            json.dumps(settings.extra_settings, default=str), strict=True
        )
    except ValidationError as error:
        accepted = [*kind.model_fields, *EnvironmentSettings.model_fields]
        lines = [_line(settings.type, accepted, problem) for problem in error.errors()]
        raise UsageError("\n".join(lines)) from error


def _line(name: str, accepted: Sequence[str], problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"environment.{key} is missing: {name!r} needs it"
    if problem["type"] != "extra_forbidden":
        text = str(problem["msg"]).removeprefix("Value error, ")
        return f"environment.{key} = {problem['input']!r} of {name!r}: {text}"
    close = nearest(key, accepted)
    hint = f"did you mean {close!r}?" if close else f"known: {', '.join(accepted)}"
    return f"environment.{key}: {name!r} has no such setting; {hint}"
