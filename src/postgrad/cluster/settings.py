"""What a recipe says of where ranks run. Free of ray."""

from typing import Literal

from pydantic import Field

from postgrad.core.settings import Settings


class ClusterSettings(Settings):
    """Where ranks run: in this process ("local"), or behind Ray, on one machine too.

    address: of a Ray cluster that runs already ("auto", HOST:PORT); none: one is made of this
    machine. start_seconds: until every rank has to be there. limit_seconds: how long a rank waits
    for another in one collective, before the run ends with the name of the one that did not come.
    """

    type: Literal["local", "ray"] = "local"
    address: str | None = None
    start_seconds: float = Field(default=120.0, gt=0.0)
    limit_seconds: float = Field(default=600.0, gt=0.0)
