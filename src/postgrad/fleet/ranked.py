"""The models of a run on ranks of a cluster: what the loop calls here, every rank does there."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from postgrad.checkpoint.parts import Divided
from postgrad.cluster import connection
from postgrad.cluster.connection import Reservation
from postgrad.cluster.placing import RoleRequest, role_request
from postgrad.cluster.settings import ClusterSettings
from postgrad.cluster.workers import POLICY, RankGroup
from postgrad.core.errors import RunError, UsageError
from postgrad.core.process import Handle
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.fleet.engines import build_engine, require_trainable
from postgrad.fleet.fleet import Site
from postgrad.fleet.members import ROLLOUT, EngineSite
from postgrad.fleet.shared import SharedEngine
from postgrad.learner.protocols import PolicyRole, Read
from postgrad.learner.role import UpdateResult
from postgrad.learner.update import Update
from postgrad.models.settings import LoraSettings
from postgrad.observe.console import Console
from postgrad.observe.sinks import Logs
from postgrad.parallel import device as devices
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.engine import Engine

RANK = "postgrad.fleet.worker:RankWorker"
VISIBLE = "CUDA_VISIBLE_DEVICES"  # empty: the user wants a run on CPUs


class RankCalls(Protocol):
    """Calls that go to every rank of a group, in one order; rank 0 answers."""

    def call(self, method: str, *arguments: Any) -> Handle[Any]: ...

    def aside(self, method: str, *arguments: Any) -> Handle[Any]: ...


class RankedFleet:
    """Roles on a group of ranks behind Ray, and rollout workers where the recipe places some.

    See `postgrad.fleet.fleet.Fleet`. Every rank has a `LocalFleet` of its own, which loads its part
    of each role.
    """

    def __init__(
        self,
        site: Site,
        group: RankCalls,
        reservation: Reservation,
        console: Console,
        logs: Logs,
        folder: Path,
    ) -> None:
        """reservation: the places that the cluster keeps. folder: the run's, for engines' logs."""
        self._site = site
        self._group = group
        self._reservation = reservation
        self._console = console
        self._logs = logs
        self._folder = folder
        self._policy: RankedRole | None = None  # once it is loaded

    @classmethod
    def start(
        cls,
        site: Site,
        stack: ExitStack,
        console: Console,
        logs: Logs,
        folder: Path,
        *,
        again: bool = False,
    ) -> "RankedFleet":
        """Starts the ranks, which end with `stack`. again: after a process was lost, so that a
        machine is waited for that may come back.

        Raises UsageError where the placement is impossible, RunError where they do not come up.
        """
        recipe, choices = site.recipe, site.choices
        settings, ranks = recipe.cluster, recipe.learner.ranks
        _connect(settings, stack)
        wants = wants_of(recipe, choices.device)
        patient = again or settings.address is not None  # others may still be on their way
        try:
            reservation = Reservation(wants, settings.start_seconds, patient=patient)
        except UsageError as error:
            if again:  # it did run
                raise RunError(str(error)) from error
            raise
        stack.callback(reservation.close)
        arguments = (recipe.dump(), choices)
        group = RankGroup(RANK, arguments, ranks, choices.device, settings, reservation)
        stack.callback(group.close)
        logs.event("placed", group.description(), role=POLICY, places=group.places)
        console.note(f"{ranks} ranks, {recipe.learner.sharding} sharding, behind Ray")
        return cls(site, group, reservation, console, logs, folder)

    def policy(self, path: str, temperature: float = 1.0) -> "RankedRole":
        lora = self._site.recipe.model.lora
        self._policy = self._load("policy", path, temperature, temperature=temperature, lora=lora)
        return self._policy

    def critic(self, path: str) -> "RankedRole":
        return self._load("critic", path)

    def reference(self, path: str) -> "RankedRole":
        return self._load("reference", path, temperature=self._site.recipe.logprob_temperature)

    def moving_reference(self, path: str) -> "RankedRole":
        temperature = self._site.recipe.logprob_temperature
        return self._load("moving_reference", path, role="reference", temperature=temperature)

    def reward_model(self, path: str) -> "RankedRole":
        return self._load("reward_model", path)

    def frozen_reward_model(self, path: str) -> "RankedRole":
        return self._load("frozen_reward_model", path)

    def frozen_policy(self, path: str) -> "RankedRole":
        return self._load("frozen_policy", path)

    def release(self, role: str) -> None:
        self._group.call("release", role).result()

    def rest(self) -> None:
        self._group.call("rest").result()

    def engine(self, path: str, stack: ExitStack, *, sequences: int, max_len: int) -> Engine:
        """Fleet.engine: in the workers that the recipe places, else in this process, with a copy of
        the weights.
        """
        recipe, settings = self._site.recipe, self._site.recipe.rollout_settings
        assert settings is not None  # of every job that samples
        if count := recipe.cluster.engines(recipe.learner.ranks):
            return self._shared_engine(count, path, stack, -(-sequences // count), max_len)
        require_trainable(settings)
        engine, self._site.choices = build_engine(
            settings, path, self._site.choices, stack,
            sequences=sequences, max_len=max_len, logs=self._folder,
        )  # fmt: skip
        return engine

    def _shared_engine(
        self, count: int, path: str, stack: ExitStack, sequences: int, max_len: int
    ) -> SharedEngine:
        """An engine of `count` workers, each for so many sequences."""
        site, recipe = self._site, self._site.recipe
        engines = EngineSite(
            recipe, site.choices, self._reservation, self._policy, self._logs, self._folder,
            path, sequences, max_len,
        )  # fmt: skip
        with ThreadPoolExecutor(count) as starter:
            members = list(starter.map(engines.spawn, range(count)))
            for workers in members:
                stack.callback(workers.close)
            engines.build(members[0], 0)  # the others take its sizes
            list(starter.map(engines.build, members[1:], range(1, count)))
        site.choices = engines.choices
        dtype = site.choices.rollout_dtype
        assert dtype is not None  # of every job that answers
        assert recipe.rollout_settings is not None
        exact, most = recipe.rollout_settings.type == "local", recipe.cluster.max_restarts
        engine = SharedEngine(engines, members, dtype, exact=exact, most=most)
        stack.callback(engine.close)
        for number, workers in enumerate(members):
            self._logs.event(
                "placed",
                workers.description(),
                role=ROLLOUT,
                number=number,
                places=workers.places,
            )
        self._console.note(f"{count} rollout workers behind Ray")
        return engine

    def _load(
        self,
        method: str,
        *arguments: Any,
        role: str | None = None,
        temperature: float = 1.0,
        lora: LoraSettings | None = None,
    ) -> "RankedRole":
        """Calls a method of every rank's fleet. role: its name there, where it is another."""
        frozen = self._group.call("load_role", method, self._site.geometry, arguments).result()
        choices = self._site.choices
        self._site.choices = replace(choices, frozen={**choices.frozen, **frozen})
        return RankedRole(self._group, role or method, temperature, lora=lora)


def device_of(recipe: Recipe, stack: ExitStack) -> str:
    """What the models work on, "cuda" or "cpu". Without an address they are on this machine; else
    the cluster is asked, since its first machine, where the loop runs, may lack GPUs. A connection
    that this makes ends with `stack`.
    """
    here, settings = devices.choose(None, False).device, recipe.cluster
    if settings.address is None or here == "cuda" or os.environ.get(VISIBLE) == "":
        return here
    if settings.policy.gpus is not None:
        return "cuda" if settings.policy.gpus else "cpu"
    _connect(settings, stack)
    return "cuda" if any(node.gpus for node in connection.nodes_alive()) else "cpu"


def _connect(settings: ClusterSettings, stack: ExitStack) -> None:
    """Connects to the cluster, until `stack` closes, unless this process is in one already."""
    if connection.start(settings):  # who calls us may be in a cluster of their own
        stack.callback(connection.stop)


def wants_of(recipe: Recipe, device: str) -> list[RoleRequest]:
    """What the recipe's processes ask of a cluster. device: "cpu" or "cuda". Raises UsageError for
    a placement that does not suit it.
    """
    settings, ranks, rollout = recipe.cluster, recipe.learner.ranks, recipe.rollout_settings
    wants = [role_request(POLICY, f"learner.ranks = {ranks}", ranks, settings.policy, device)]
    count = settings.engines(ranks)
    if rollout is None or not recipe.samples_answers:
        return wants
    if device == "cuda" and not count:
        raise UsageError(
            "cluster: the rollout engine has no place. In the first process it would work on a GPU "
            "that Ray gives to a rank: let engines share the ranks' GPUs "
            "(--cluster.policy.colocate rollout), or give them GPUs of their own "
            "(--cluster.rollout.workers 1)"
        )
    if count:
        key, inside = f"cluster.rollout.workers = {count}", settings.policy.colocate and POLICY
        place = settings.rollout or settings.policy
        engine = rollout.vllm
        gpus = engine.tensor_parallel * engine.engines if rollout.type == "vllm" else 1
        wants.append(role_request(ROLLOUT, key, count, place, device, inside, gpus))
    return wants


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
    def drops(self) -> bool:
        return self._lora is not None and self._lora.dropout > 0.0

    @property
    def updates(self) -> int:
        return self._group.call("updates", self._role).result()

    def logprobs(self, sequences: Sequences) -> Handle[Ragged]:
        return self._group.call("do", self._role, "logprobs", sequences)

    def scores(self, sequences: Sequences) -> Handle[Ragged]:
        return self._group.call("do", self._role, "scores", sequences)

    def update(self, update: Update, algorithm: Any) -> Handle[UpdateResult]:
        return self._group.call("do", self._role, "update", update, algorithm)

    def start(self) -> "RankedRole":
        name = f"{self._role} at its start"
        self._group.call("start", self._role, name).result()
        return RankedRole(self._group, name, self.temperature)

    def after_step(self, step: int, policy: PolicyRole) -> None:
        """Follows.after_step: the policy is on the same ranks."""
        self._group.call("follow", step).result()

    def weights(self) -> Mapping[str, Tensor]:
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
        return self._size

    def copied(self) -> Divided:
        """Divided.copied: a copy on each rank, in place of an older one."""
        self._group.call("keep", self._role, self._stem).result()
        names, size = self._names, self._size
        return _OnRanks(self._group, self._role, self._stem, names, size, kept=True)

    def write(self, folder: Path, stem: str) -> None:
        assert stem == self._stem
        to = str(folder.absolute())
        self._group.aside("write", self._role, to, stem, self._kept).result()
