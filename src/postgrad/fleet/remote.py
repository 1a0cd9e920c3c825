"""Roles on ranks of a cluster: each call goes to every rank, and rank 0 answers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from postgrad.checkpoint.parts import Divided
from postgrad.core.process import Handle
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.learner.learner import UpdateResult
from postgrad.learner.protocols import PolicyRole, Read
from postgrad.learner.update import Update
from postgrad.models.settings import LoraSettings


class RankCalls(Protocol):
    """Calls that go to every rank of a group, in one order; rank 0 answers."""

    @property
    def places(self) -> Sequence[tuple[str, int]]:
        """Of each rank: its machine's address, its pid."""
        ...

    def call(self, method: str, *arguments: Any) -> Handle[Any]: ...

    def aside(self, method: str, *arguments: Any) -> Handle[Any]: ...


class RankedRole:
    """A role on a group of ranks: every protocol of learner.protocols, each call sent to all."""

    def __init__(
        self,
        group: RankCalls,
        role: str,
        temperature: float = 1.0,
        *,
        lora: LoraSettings | None = None,
    ) -> None:
        """lora: of its adapter, where it has one."""
        self._group = group
        self._role = role
        self._lora = lora
        self.temperature = temperature

    @property
    def name(self) -> str:
        return self._role

    @property
    def has_dropout(self) -> bool:
        return self._lora is not None and self._lora.dropout > 0.0

    @property
    def updates(self) -> int:
        return self._group.call("updates", self._role).result()

    def logprobs(self, sequences: Sequences, temperature: float | None = None) -> Handle[Ragged]:
        return self._group.call("do", self._role, "logprobs", sequences, temperature)

    def top_logprobs(self, sequences: Sequences, top_k: int, temperature: float) -> Handle[Ragged]:
        return self._group.call("do", self._role, "top_logprobs", sequences, top_k, temperature)

    def entropies(self, sequences: Sequences) -> Handle[Ragged]:
        return self._group.call("do", self._role, "entropies", sequences)

    def experts(self, sequences: Sequences) -> Handle[Ragged]:
        return self._group.call("do", self._role, "experts", sequences)

    def scores(self, sequences: Sequences) -> Handle[Ragged]:
        return self._group.call("do", self._role, "scores", sequences)

    def update(self, update: Update, algorithm: Any) -> Handle[UpdateResult]:
        return self._group.call("do", self._role, "update", update, algorithm)

    def start(self) -> "RankedRole":
        name = f"{self._role} at its start"
        self._group.call("start", self._role, name).result()
        return RankedRole(self._group, name, self.temperature)

    def after_step(self, step: int, policy: PolicyRole) -> None:
        """MovingReferenceRole.after_step: the policy is on the same ranks."""
        self._group.call("follow", step).result()

    def weights(self) -> Mapping[str, Tensor]:
        return self.tensors()[f"{self._role}.weights"]

    def hub_weights(self) -> "RankedWeights":
        """TrainedRole.hub_weights: they stay on the ranks until somebody iterates over them."""
        return RankedWeights(self._group, self._role)

    def adapter_weights(self) -> "RankedWeights":
        """TrainedRole.adapter_weights, on the ranks as those of `hub_weights`."""
        return RankedWeights(self._group, self._role, adapter=True)

    def free_memory(self) -> None:
        """Fleet.free_memory of its ranks alone, where nothing stays."""
        self._group.call("free_memory", "nothing").result()

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """SavedRole.tensors: they stay on the ranks until one is asked for."""
        described = self._group.call("describe", self._role).result()
        return {
            stem: _OnRanks(self._group, self._role, stem, names, size)
            for stem, (names, size) in described.items()
        }

    def state_bytes(self) -> int:
        return self._group.call("state_bytes", self._role).result()

    def load(self, read: Read) -> None:
        """SavedRole.load: every rank reads its parts."""
        self._group.call("load", self._role, read).result()


class RankedWeights(Iterable[tuple[str, Tensor]]):
    """The whole weights of a role on ranks, or of its adapter: sent from there to rollout workers
    (publishing.py), or iterated over here, some at a time, for an engine in this process.
    """

    def __init__(self, group: RankCalls, role: str, *, adapter: bool = False) -> None:
        self.group = group
        self.role = role
        self.adapter = adapter

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        first = True
        while some := self.group.call("send", self.role, first, self.adapter).result():
            yield from some
            first = False


class _OnRanks(Divided):
    """The tensors of one file, on their ranks. kept: as they were, not as they are by then."""

    def __init__(
        self,
        group: RankCalls,
        role: str,
        stem: str,
        names: list[str],
        size: int,
        *,
        kept: bool = False,
    ) -> None:
        self._kept = kept
        self._group = group
        self._role = role
        self._stem = stem
        self._names = names
        self._size = size

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._group.call("gather", self._role, self._stem, name).result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def size(self) -> int:
        return self._size

    def copied(self) -> Divided:
        """Divided.copied: a copy on each rank, in place of an older one."""
        self._group.call("keep", self._role, self._stem).result()
        names, size = self._names, self._size
        return _OnRanks(self._group, self._role, self._stem, names, size, kept=True)

    def write(self, folder: Path, stem: str) -> list[str]:
        assert stem == self._stem
        to = str(folder.absolute())
        return self._group.aside("write", self._role, to, stem, self._kept).result()
