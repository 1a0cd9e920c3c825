"""The base of everything a recipe can say."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

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
