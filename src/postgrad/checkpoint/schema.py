"""Schemas of a checkpoint's manifest and state, checked before anything in them is used.

A run directory may come from anywhere. Here is every key of docs/checkpoint-format.md with its type
and range. A file that passes needs no further check. The check changes nothing: the state is kept
as it was read, to the bit.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic import Strict as StrictMode

from postgrad.core.untrusted import shown

MOST = 2**53  # of a count: what every reader of JSON keeps exactly
PLAIN_NAME = r"^[^/\\\x00]{1,255}$"


def _plain(name: str) -> str:
    if name in (".", ".."):
        raise ValueError("it leads out of its folder")
    return name


Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[float, StrictMode(), AllowInfNan(False), Field(gt=0.0)]
Size = Annotated[int, Field(ge=1, le=MOST)]
Name = Annotated[str, Field(pattern=PLAIN_NAME), AfterValidator(_plain)]
Dtype = Literal["float32", "bfloat16", "float16"]
Three = Annotated[list[float], Field(min_length=3, max_length=3)]
Two = Annotated[list[float], Field(min_length=2, max_length=2)]


class Strict(BaseModel):
    """No text becomes a number, no key is passed over, no number is infinite."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Open(Strict):
    """Keys of the schema have their types; further keys may hold any JSON value."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


class EntrySchema(Open):
    """A file of a manifest."""

    size: Count
    sha256: str


class ManifestSchema(Open):
    """manifest.json, but for the names of its files, which are checked one by one."""

    step: Count
    files: dict[str, EntrySchema]
    versions: dict[str, str]


def _inside(name: str) -> str:
    if not all(re.fullmatch(PLAIN_NAME, part) and _plain(part) for part in name.split("/")):
        raise ValueError(f"{shown(name)} leads out of the run's directory")
    return name


PieceName = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class MirrorSchema(Open):
    """mirror.json of a mirror."""

    written_by: Literal["postgrad"]
    format: Literal[1]
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    recipe: dict[str, Any]


class MirroredFileSchema(Open):
    """A file in pieces, all but the last of the table's `piece_bytes`."""

    size: Count
    pieces: list[PieceName]


class TableSchema(Open):
    """A table of a mirror: the files beside a checkpoint, by their paths in the run directory."""

    written_by: Literal["postgrad"]
    format: Literal[1]
    step: Count
    piece_bytes: Size
    files: dict[Annotated[str, AfterValidator(_inside)], MirroredFileSchema]


class RecordSchema(Open):
    """mirror.json of a run directory."""

    url: str
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    writer: str
    steps: list[Count]


class CursorSchema(Strict):
    """The settled tickets: all below `frontier`, and those of `beyond`, which are all above it."""

    frontier: Count
    beyond: list[Count]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        ordered = all(a < b for a, b in zip(self.beyond, self.beyond[1:], strict=False))
        if not ordered or (self.beyond and self.beyond[0] <= self.frontier):
            raise ValueError("`beyond` are rising numbers, all above `frontier`")
        return self


class BestSchema(Strict):
    """The best evaluation so far."""

    metric: str
    value: float
    step: Count
    waited: Count = 0
    mode: Literal["", "max", "min"] = ""


class ChoicesSchema(Open):
    """What the run chose at its start, as far as it has: the fields of Choices."""

    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = Field(default=1, ge=1, le=2**16)
    deterministic: bool = True
    dtype: Dtype = "float32"
    rollout_dtype: Dtype | None = None
    micro_train_tokens: Size | None = None
    slots: Size | None = None
    cache_tokens: Size | None = None
    products: dict[str, str] = {}
    compiled: bool = False
    frozen: dict[str, str] = {}
    sources: dict[str, str] = {}


class AlgorithmSchema(Open):
    """What algorithms of this package keep from step to step: coefficients of KL and entropy,
    moments of rewards, the scale of a reward model's scores.
    """

    kl_coef: float = Field(default=0.0, ge=0.0)
    entropy_coef: float = Field(default=0.0, ge=0.0)
    rewards: Three = [0.0, 0.0, 0.0]
    weight: float = Field(default=1.0, gt=0.0)
    sum: float = 0.0
    squares: float = Field(default=0.0, ge=0.0)

    @model_validator(mode="after")
    def _whole_scale(self) -> Self:
        scale = {"weight", "sum", "squares"}
        if 0 < len(scale & self.model_fields_set) < len(scale):
            raise ValueError("a scale has `weight`, `sum` and `squares`, all three")
        return self


class SourceSchema(Open):
    """What a curriculum remembers: by row, its last mean reward and the epoch of that visit."""

    rows: dict[str, Two] = {}


class SentinelSchema(Strict):
    """since: the step from which on a sentinel reports. Its memory is checked by the sentinel."""

    since: Count | None
    memory: dict[str, Any]


class LoggersSchema(Open):
    """The id under which the run's loggers go on with its curves."""

    id: Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]


class StateSchema(Strict):
    """Every key of state.json."""

    format: int
    step: Count
    update: Count
    episodes: Count
    cursor: CursorSchema
    algorithm: AlgorithmSchema
    evaluations: dict[str, float | None]
    best: BestSchema | None
    choices: ChoicesSchema
    log_offsets: dict[Name, Count]
    source: SourceSchema
    sentinels: dict[str, SentinelSchema]
    loggers: Annotated[dict[str, Any], AfterValidator(lambda loggers: _checked_loggers(loggers))]

    @model_validator(mode="after")
    def _one_story(self) -> Self:
        if self.best is not None and self.best.step > self.step:
            raise ValueError(f"the best step is {self.best.step}, after this one ({self.step})")
        settled = self.cursor.frontier + len(self.cursor.beyond)
        # only a curriculum passes tickets over
        if not self.source.rows and settled > self.episodes:
            raise ValueError(
                f"cursor: {settled} tickets are settled, of which {self.episodes} samples came; "
                "each gives at least one"
            )
        return self


def require(schema: Any, data: Mapping[str, Any]) -> Any:
    """`data` as `schema` validates it: a model of this file or any other type. Raises ValueError
    for the first key that is wrong, with its value and what it should be.
    """
    try:
        return TypeAdapter[Any](schema).validate_python(data)
    except ValidationError as error:
        raise ValueError(problem_of(error)) from error


def problem_of(error: ValidationError) -> str:
    """The first problem as a message: 'step is -1: input should be ...'."""
    problem = error.errors(include_url=False, include_context=False)[0]
    key = ".".join(shown(part).strip("'") for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    wanted = f"{message[:1].lower()}{message[1:]}"
    if problem["type"] == "value_error" and not key:
        return wanted
    key = key or "it"
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "value_error":
        return f"{key}: {wanted}"
    return f"{key} is {shown(problem['input'])}: {wanted}"


def _checked_loggers(loggers: dict[str, Any]) -> dict[str, Any]:
    if loggers:
        require(LoggersSchema, loggers)
    return loggers
