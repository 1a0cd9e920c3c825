"""Roles of a run as its loop calls them: in this process, or on ranks, by proxy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from postgrad.checkpoint.parts import Divided
from postgrad.core.handles import Handle
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.fleet import local as roles
from postgrad.learner.protocols import (
    Follows,
    Learns,
    LogprobRole,
    PolicyRole,
    Read,
    Scores,
    ScoringRole,
)
from postgrad.learner.role import Learner, Policy, PolicyLearner, UpdateResult
from postgrad.learner.score import ScoreLearner, ScoreRole
from postgrad.learner.update import Update
from postgrad.models.settings import LoraSettings
from postgrad.recipe.recipe import RLRecipe
from postgrad.train import memory as auto_sizes
from postgrad.train.run import RankCalls, Run


def policy(run: Run, path: str, temperature: float = 1.0) -> PolicyRole:
    """See fleet.local.policy."""
    run.clock.peaks.set_baseline()  # data are read, and no weight is
    if run.group is None:
        return roles.policy(run, path, temperature)
    more = {"temperature": temperature}
    _make(run, run.group, "policy", path, more)
    return RankedRole(run.group, "policy", temperature, lora=run.recipe.model.lora)


def reward_model(run: Run, path: str) -> ScoringRole:
    """See fleet.local.reward_model."""
    run.clock.peaks.set_baseline()
    if run.group is None:
        return roles.reward_model(run, path)
    _make(run, run.group, "reward_model", path)
    return RankedRole(run.group, "reward_model")


def critic(run: Run, recipe: RLRecipe, path: str) -> ScoringRole:
    """See fleet.local.critic."""
    if run.group is None:
        return roles.critic(run, recipe, path)
    _make(run, run.group, "critic", path)
    return RankedRole(run.group, "critic")


def reference(run: Run, recipe: RLRecipe, path: str, policy: PolicyRole) -> LogprobRole:
    """See fleet.local.reference."""
    if run.group is None:
        assert isinstance(policy, PolicyLearner)
        return roles.reference(run, recipe, path, policy)
    _make(run, run.group, "reference", path)
    return RankedRole(run.group, "reference", policy.temperature)


def moving_reference(run: Run, recipe: RLRecipe, path: str, policy: PolicyRole) -> Follows:
    """See fleet.local.moving_reference."""
    if run.group is None:
        assert isinstance(policy, PolicyLearner)
        return roles.moving_reference(run, recipe, path, policy)
    _make(run, run.group, "moving_reference", path)
    return RankedRole(run.group, "reference", policy.temperature)


def scorer(run: Run, recipe: RLRecipe, path: str, critic: ScoringRole | None) -> Scores:
    """See fleet.local.scorer."""
    if run.group is None:
        assert critic is None or isinstance(critic, ScoreLearner)
        return roles.scorer(run, recipe, path, critic)
    _make(run, run.group, "scorer", path)
    return RankedRole(run.group, "scorer")


def try_tokens(run: Run, learners: Sequence[Learns], readers: Sequence[object] = ()) -> None:
    """See train.memory.try_tokens. On ranks the token budget is the plan's and is not tried."""
    if run.group is None:
        here: list[Learner[Any]] = [one for one in learners if isinstance(one, Learner)]
        reading = [one for one in readers if isinstance(one, Policy | ScoreRole)]
        auto_sizes.try_tokens(run, here, reading)


def _make(
    run: Run, group: RankCalls, kind: str, path: str, more: Mapping[str, Any] | None = None
) -> None:
    frozen = group.call("make", kind, run.geometry, path, dict(more or {})).result()
    run.choices = replace(run.choices, frozen={**run.choices.frozen, **frozen})


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
        """Learns.name."""
        return self._role

    @property
    def drops(self) -> bool:
        """PolicyRole.drops."""
        return self._lora is not None and self._lora.dropout > 0.0

    @property
    def updates(self) -> int:
        """Learns.updates."""
        return self._group.call("updates", self._role).result()

    def logprobs(self, sequences: Sequences) -> Handle[Ragged]:
        """Reads.logprobs."""
        return self._group.call("do", self._role, "logprobs", sequences)

    def scores(self, sequences: Sequences) -> Handle[Ragged]:
        """Scores.scores."""
        return self._group.call("do", self._role, "scores", sequences)

    def update(self, update: Update, algorithm: Any) -> Handle[UpdateResult]:
        """Learns.update."""
        return self._group.call("do", self._role, "update", update, algorithm)

    def start(self) -> "RankedRole":
        """PolicyRole.start."""
        name = f"{self._role} at its start"
        self._group.call("start", self._role, name).result()
        return RankedRole(self._group, name, self.temperature)

    def under_adapter(self) -> Any:
        """PolicyRole.under_adapter."""
        return None if self._lora is None else self.start()

    def after_step(self, step: int, policy: PolicyRole) -> None:
        """Follows.after_step: the policy is on the same ranks."""
        self._group.call("follow", step).result()

    def weights(self) -> Mapping[str, Tensor]:
        """Learns.weights."""
        return self.tensors()[f"{self._role}.weights"]

    def hub_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Learns.hub_weights: some at a time."""
        first = True
        while some := self._group.call("send", self._role, first).result():
            yield from some
            first = False

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Changes.tensors: they stay on the ranks until one is asked for."""
        described = self._group.call("describe", self._role).result()
        return {
            stem: _OnRanks(self._group, self._role, stem, names, size)
            for stem, (names, size) in described.items()
        }

    def state_bytes(self) -> int:
        """Changes.state_bytes."""
        return self._group.call("state_bytes", self._role).result()

    def load(self, read: Read) -> None:
        """Changes.load: every rank reads its parts."""
        self._group.call("load", self._role, read).result()


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
        """Divided.size."""
        return self._size

    def copied(self) -> Divided:
        """Divided.copied: a copy on each rank, in place of an older one."""
        self._group.call("keep", self._role, self._stem).result()
        names, size = self._names, self._size
        return _OnRanks(self._group, self._role, self._stem, names, size, kept=True)

    def write(self, folder: Path, stem: str) -> None:
        """Divided.write."""
        assert stem == self._stem
        to = str(folder.absolute())
        self._group.aside("write", self._role, to, stem, self._kept).result()
