"""Roles as the loop calls them: in this process, or on a group of ranks behind a cluster."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from postgrad.core.process import Handle
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.learner.learner import UpdateResult
from postgrad.learner.update import Update

Read = Callable[[str], Mapping[str, Tensor]]  # file stem ("policy.weights") -> its tensors


class LogprobRole(Protocol):
    """A role that computes the logprobs of tokens."""

    @property
    def temperature(self) -> float:
        """The sampling temperature, at which its logprobs are taken."""
        ...

    def logprobs(self, sequences: Sequences, temperature: float | None = None) -> Handle[Ragged]:
        """The logprob of every loss token, float32; zeros elsewhere. temperature: another than the
        sampling temperature.
        """
        ...


class StoredTeacherRole(Protocol):
    """A teacher whose distributions are stored."""

    def top_logprobs(self, sequences: Sequences, top_k: int, temperature: float) -> Handle[Ragged]:
        """Of every loss token the teacher's most likely ones: [N, 2 top_k + 1], see
        models.distilled_head.top_logprobs; zeros elsewhere.
        """
        ...


class ScalarRole(Protocol):
    """A role with a scalar head."""

    def scores(self, sequences: Sequences) -> Handle[Ragged]:
        """The score at every loss token, float32; zeros elsewhere."""
        ...


class SavedRole(Protocol):
    """A role whose weights a checkpoint holds."""

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """All state that a checkpoint has to hold, by file stem: "policy.weights"."""
        ...

    def state_bytes(self) -> int:
        """Bytes of `tensors` after the first update, when the optimizer has all its state."""
        ...

    def load(self, read: Read) -> None:
        """Takes over the state of a checkpoint."""
        ...


class TrainedRole(SavedRole, Protocol):
    """A role with an optimizer."""

    @property
    def name(self) -> str:
        """The first part of its metrics' and files' names: "policy", "critic"."""
        ...

    @property
    def updates(self) -> int:
        """Number of optimizer steps so far."""
        ...

    def update(self, update: Update, algorithm: Any) -> Handle[UpdateResult]:
        """Takes one optimizer step on the samples of `update`, with the loss of `algorithm`."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The trained weights, float32, by hub name, or by PEFT's name where it is an adapter."""
        ...

    def hub_weights(self) -> Iterable[tuple[str, Tensor]]:
        """All weights of the model by hub name, an adapter merged into them."""
        ...

    def adapter_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights of its adapter, which it has, float32, by PEFT's names."""
        ...


class PolicyRole(LogprobRole, TrainedRole, Protocol):
    """A policy that learns."""

    def entropies(self, sequences: Sequences) -> Handle[Ragged]:
        """The entropy of the distribution at every loss token, nats, float32; zeros elsewhere."""
        ...

    def experts(self, sequences: Sequences) -> Handle[Ragged]:
        """int16 [N, layers, k]: the experts that the routers choose now, for every token."""
        ...

    @property
    def has_dropout(self) -> bool:
        """True where updates use dropout: their logprobs differ from those of `logprobs`."""
        ...

    def start(self) -> LogprobRole:
        """The model as it was before any update. Without an adapter only valid until the first."""
        ...


class ScoringRole(ScalarRole, TrainedRole, Protocol):
    """A critic or reward model that learns."""


class MovingReferenceRole(LogprobRole, SavedRole, Protocol):
    """A reference that follows a policy."""

    def after_step(self, step: int, policy: PolicyRole) -> None:
        """Follows the policy; to be called after step number `step` has changed its weights."""
        ...
