"""The base of everything a recipe can say."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest

ShardingStage = Literal["none", "zero1", "zero2", "zero3"]  # what ranks divide: docs/distributed.md


class Settings(BaseModel):
    """Frozen settings of one component; unknown keys are errors.

    Stateless parts (algorithms, verifiers) *are* their settings. Stateful parts (engines, learners,
    stores) are built from theirs. Recipes are validated in strict mode: no string becomes a number.
    Infinity and NaN are refused: JSON, which runs keep their recipe in, has neither.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    def __init__(self, **values: Any) -> None:
        """Settings made in Python. Raises UsageError with a line for every problem."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            lines = (self._line(dict(problem)) for problem in error.errors(include_url=False))
            raise UsageError("\n".join(lines)) from error

    # Tables of a recipe do not pass here: pydantic asks this of an __init__ of its own alone.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    @classmethod
    def _line(cls, problem: Mapping[str, Any]) -> str:
        """One problem of values given in Python, as the project's messages say it."""
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            close = nearest(key, cls.model_fields)
            hint = f"did you mean {close!r}?" if close else f"known: {', '.join(cls.model_fields)}"
            return f"{cls.__name__}: unknown key {key!r}: {hint}"
        message = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "missing":
            return f"{cls.__name__}: {key} is missing"
        if problem["type"] == "value_error":
            return f"{cls.__name__}: {key}: {message}" if key else f"{cls.__name__}: {message}"
        return f"{cls.__name__}: {key} = {problem['input']!r}: {message[:1].lower()}{message[1:]}"


def problem_of_table(
    problem: Mapping[str, Any], name: str, known_keys: Sequence[str]
) -> tuple[tuple[str | int, ...], str]:
    """One problem of pydantic as a SettingsError has it. name: of what the table is for, as the
    message shows it; known_keys: all that the table may have.
    """
    place = tuple(problem["loc"])
    text = str(problem["msg"]).removeprefix("Value error, ")
    if not place:  # of several settings together
        return place, f"{name}: {text}"
    if problem["type"] == "missing":
        return place, f"{name} needs it, and it is missing"
    if problem["type"] != "extra_forbidden":
        return place, f"{problem['input']!r} does not fit {name}: {text[:1].lower()}{text[1:]}"
    close = nearest(str(place[-1]), known_keys)
    hint = f"did you mean {close!r}?" if close else f"known: {', '.join(known_keys)}"
    return place, f"{name} has no such setting; {hint}"
