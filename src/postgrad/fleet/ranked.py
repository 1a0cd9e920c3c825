"""The models of a run on ranks of a cluster: what the loop calls here, every rank does there."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from postgrad.cluster import connection
from postgrad.cluster.connection import Reservation
from postgrad.cluster.placing import RoleRequest, role_request
from postgrad.cluster.settings import POLICY, ClusterSettings, SidePlacement
from postgrad.cluster.workers import RankGroup
from postgrad.core.errors import RunError, UsageError
from postgrad.fleet.choices import Choices
from postgrad.fleet.engines import build_engine, require_trainable
from postgrad.fleet.fleet import Site
from postgrad.fleet.members import ROLLOUT, EngineSite
from postgrad.fleet.remote import RankCalls, RankedRole
from postgrad.fleet.shared import SharedEngine
from postgrad.models.settings import LoraSettings
from postgrad.observe.console import Console
from postgrad.observe.sinks import Logs
from postgrad.parallel import device as devices
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.engine import Engine

RANK = "postgrad.fleet.worker:RankWorker"
VISIBLE = "CUDA_VISIBLE_DEVICES"  # empty: the user wants a run on CPUs


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
        homes: Mapping[str, RankCalls] | None = None,
    ) -> None:
        """group: the policy's ranks. reservation: the places that the cluster keeps. folder: the
        run's, for engines' logs. homes: the ranks of other roles that have some of their own.
        """
        self._site = site
        self._group = group
        self._groups: dict[str, RankCalls] = {POLICY: group, **(homes or {})}
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
        groups = _started(recipe, choices, reservation, stack)
        for role, group in groups.items():
            logs.event("placed", group.description(), role=role, places=group.places)
        console.note(f"{ranks} ranks, {recipe.learner.sharding} sharding, behind Ray")
        for role, count in recipe.cluster.homes.items():
            console.note(f"{count} ranks of {role} beside them")
        return cls(site, groups.pop(POLICY), reservation, console, logs, folder, groups)

    def policy(self, path: str, temperature: float = 1.0) -> RankedRole:
        lora = self._site.recipe.model.lora
        self._policy = self._load("policy", path, temperature, temperature=temperature, lora=lora)
        return self._policy

    def critic(self, path: str) -> RankedRole:
        return self._load("critic", path, table="critic")

    def reference(self, path: str) -> RankedRole:
        temperature = self._site.recipe.logprob_temperature
        return self._load("reference", path, table="reference", temperature=temperature)

    def moving_reference(self, path: str) -> RankedRole:
        temperature = self._site.recipe.logprob_temperature
        return self._load("moving_reference", path, role="reference", temperature=temperature)

    def reward_model(self, path: str) -> RankedRole:
        return self._load("reward_model", path)

    def frozen_reward_model(self, path: str) -> RankedRole:
        return self._load("frozen_reward_model", path, table="reward_model")

    def frozen_policy(self, path: str) -> RankedRole:
        return self._load("frozen_policy", path, table="reference")

    def release(self, role: str) -> None:
        table = "reward_model" if role == "frozen_reward_model" else "reference"
        self._home(table).call("release", role).result()

    def rest(self) -> None:
        for handle in [group.call("rest") for group in self._groups.values()]:
            handle.result()

    def engine(self, path: str, stack: ExitStack, *, sequences: int, max_len: int) -> Engine:
        """Fleet.engine: in the workers that the recipe places, else in this process, with a copy of
        the weights.
        """
        recipe, settings = self._site.recipe, self._site.recipe.rollout_settings
        assert settings is not None  # of every job that samples
        if count := recipe.cluster.engines(recipe.learner.ranks):
            answers = recipe.answers_per_prompt  # a prompt is dealt with all of its answers
            share = -(-sequences // answers // count) * answers
            return self._shared_engine(count, path, stack, share, max_len)
        require_trainable(settings)
        engine, self._site.choices = build_engine(
            settings, path, self._site.choices, stack,
            sequences=sequences, max_len=max_len, logs=self._folder, lora=recipe.model.lora,
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
        settings = recipe.rollout_settings
        assert settings is not None
        exact, most = settings.type == "local", recipe.cluster.max_restarts
        on_card = settings.transport == "ipc" and settings.sends_adapter  # which goes by the host
        transport = "auto" if on_card else settings.transport
        engine = SharedEngine(engines, members, dtype, exact=exact, most=most, transport=transport)
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
        table: str = POLICY,
        temperature: float = 1.0,
        lora: LoraSettings | None = None,
    ) -> RankedRole:
        """Calls a method of every rank's fleet. role: its name there, where it is another. table:
        of [cluster], which says whose ranks they are.
        """
        group = self._home(table)
        frozen = group.call("load_role", method, self._site.geometry, arguments).result()
        choices = self._site.choices
        self._site.choices = replace(choices, frozen={**choices.frozen, **frozen})
        return RankedRole(group, role or method, temperature, lora=lora)

    def _home(self, table: str) -> RankCalls:
        return self._groups[self._site.recipe.cluster.home(table)]


def _started(
    recipe: Recipe, choices: Choices, reservation: Reservation, stack: ExitStack
) -> dict[str, RankGroup]:
    """The ranks of the policy, and of every other role that has some, by role. All start at once;
    they end with `stack`.
    """
    settings = recipe.cluster
    homes = {POLICY: recipe.learner.ranks, **settings.homes}

    def start(role: str) -> RankGroup:
        there = recipe if role == POLICY else recipe_on(recipe, homes[role])
        arguments, device = (there.dump(), choices), choices.device
        group = RankGroup(RANK, arguments, homes[role], device, settings, reservation, role)
        stack.callback(group.close)
        return group

    with ThreadPoolExecutor(len(homes)) as starter:
        return dict(zip(homes, starter.map(start, homes), strict=True))


def recipe_on(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe as the ranks of another role than the policy read it: so many ranks, which share
    neither matrices nor sequences.
    """
    changes: dict[str, Any] = {"ranks": ranks}
    changes |= {"tensor_parallel": 1, "context_parallel": 1, "shard_groups": 1}
    if ranks == 1:
        changes |= {"sharding": "none", "offload": False}
    tables = recipe.cluster.side_roles
    kept = {
        role: SidePlacement(
            ranks=table.processes or None, colocate=table.colocate, offload=table.offload
        )
        for role, table in tables.items()
    }
    updated: dict[str, Any] = {
        "learner": recipe.learner.model_copy(update=changes),
        "cluster": ClusterSettings(type="ray").model_copy(update=kept),
    }
    if isinstance(recipe, RLRecipe):
        learner = recipe.critic.learner.model_copy(update=changes)
        updated["critic"] = recipe.critic.model_copy(update={"learner": learner})
    return recipe.model_copy(update=updated)


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
    for role, processes in settings.homes.items():
        key = f"cluster.{role}.ranks = {processes}"
        wants.append(role_request(role, key, processes, settings.side_roles[role], device))
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
