"""Roles as the loop calls them: in this process, or on a group of ranks behind a cluster."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from postgrad.core.handles import Handle
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.learner.role import UpdateResult
from postgrad.learner.update import Update

Read = Callable[[str], Mapping[str, Tensor]]  # the tensors of a checkpoint's file, by its stem


class LogprobRole(Protocol):
    """A role that says how likely tokens are."""

    @property
    def temperature(self) -> float:
        """At which its logprobs are taken."""
        ...

    def logprobs(self, sequences: Sequences) -> Handle[Ragged]:
        """The logprob of every loss token, float32; zeros elsewhere."""
        ...


class Scores(Protocol):
    """A role with a scalar head."""

    def scores(self, sequences: Sequences) -> Handle[Ragged]:
        """The score at every loss token, float32; zeros elsewhere."""
        ...


class Changes(Protocol):
    """A role whose weights a checkpoint holds."""

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """All state that a checkpoint has to hold, by file stem: "policy.weights"."""
        ...

    def state_bytes(self) -> int:
        """What `tensors` will take once there were updates."""
        ...

    def load(self, read: Read) -> None:
        """Goes on from a checkpoint."""
        ...


class Learns(Changes, Protocol):
    """A role with an optimizer."""

    @property
    def name(self) -> str:
        """What its metrics and files begin with."""
        ...

    @property
    def updates(self) -> int:
        """How many it has had."""
        ...

    def update(self, update: Update, algorithm: Any) -> Handle[UpdateResult]:
        """One optimizer step."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """What is trained, float32, by name."""
        ...

    def hub_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights by hub name, an adapter's merged."""
        ...


class PolicyRole(LogprobRole, Learns, Protocol):
    """A policy that learns."""

    @property
    def drops(self) -> bool:
        """True where dropout acts in updates, so that their logprobs are not those of the role."""
        ...

    def under_adapter(self) -> LogprobRole | None:
        """Its own start, as a reference; None where that is gone, without an adapter."""
        ...

    def start(self) -> LogprobRole:
        """What it is before its first update, whether there is an adapter or not."""
        ...


class ScoringRole(Scores, Learns, Protocol):
    """A critic or reward model that learns."""

    def under_adapter(self) -> Scores:
        """The frozen weights under its adapter and their head, as a reward model."""
        ...


class Follows(LogprobRole, Changes, Protocol):
    """A reference that follows a policy."""

    def after_step(self, step: int, policy: PolicyRole) -> None:
        """Once step `step` has moved the policy's weights."""
        ...
