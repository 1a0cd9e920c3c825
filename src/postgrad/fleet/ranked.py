"""The models of a run on ranks of a cluster: what the loop calls here, every rank does there."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from postgrad.cluster.connection import Reservation
from postgrad.cluster.settings import POLICY, ClusterSettings, SidePlacement
from postgrad.cluster.workers import RankGroup, Workers
from postgrad.core.text import how_many
from postgrad.fleet.choices import Choices
from postgrad.fleet.engines import build_engine, image_folders, require_trainable
from postgrad.fleet.fleet import RunContext, teacher_name
from postgrad.fleet.members import ROLLOUT, EngineLauncher
from postgrad.fleet.remote import RankCalls, RankedRole
from postgrad.fleet.session import ClusterSession
from postgrad.fleet.shared import SharedEngine
from postgrad.learner.offload import KeptOnDevice
from postgrad.models.settings import LoraSettings
from postgrad.observe.console import Console
from postgrad.observe.sinks import Logs
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.engine import Engine

RANK = "postgrad.fleet.worker:RankWorker"


class RankedFleet:
    """Roles on a group of ranks behind Ray, and rollout workers where the recipe places some.

    See `postgrad.fleet.fleet.Fleet`. Every rank has a `LocalFleet` of its own, which loads its part
    of each role.
    """

    def __init__(
        self,
        context: RunContext,
        group: RankCalls,
        session: ClusterSession,
        console: Console,
        logs: Logs,
        folder: Path,
        homes: Mapping[str, RankCalls] | None = None,
    ) -> None:
        """group: the policy's ranks. folder: the run's, for engines' logs. homes: the ranks of
        other roles that have some of their own.
        """
        self._context = context
        self._group = group
        self._groups: dict[str, RankCalls] = {POLICY: group, **(homes or {})}
        self._session = session
        self._console = console
        self._logs = logs
        self._folder = folder
        self._policy: RankedRole | None = None  # once it is loaded

    @classmethod
    def start(
        cls,
        context: RunContext,
        stack: ExitStack,
        console: Console,
        logs: Logs,
        folder: Path,
        *,
        session: ClusterSession,
    ) -> "RankedFleet":
        """Starts the ranks, which end with `stack`; engines and places end with `session`.

        Raises UsageError where the placement is impossible, RunError where they do not come up.
        """
        recipe, choices = context.recipe, context.choices
        reservation = session.reserve(recipe, choices.device, logs)
        groups = _started(recipe, choices, reservation, stack)
        for role, group in groups.items():
            logs.event("placed", group.description(), role=role, places=group.places)
        folders = image_folders(recipe, folder)
        for answer in [g.call("keep_images", folders) for g in groups.values()]:
            answer.result()
        learner = recipe.learner
        console.note(f"{how_many(learner.ranks, 'rank')}, {learner.sharding} sharding, behind Ray")
        for role, count in recipe.cluster.homes.items():
            console.note(f"{how_many(count, 'rank')} of {role} beside them")
        return cls(context, groups.pop(POLICY), session, console, logs, folder, groups)

    def policy(self, path: str, temperature: float = 1.0) -> RankedRole:
        lora = self._context.recipe.model.lora
        self._policy = self._load("policy", path, temperature, temperature=temperature, lora=lora)
        return self._policy

    def critic(self, path: str) -> RankedRole:
        return self._load("critic", path, table="critic")

    def reference(self, path: str) -> RankedRole:
        temperature = self._context.recipe.logprob_temperature
        return self._load("reference", path, table="reference", temperature=temperature)

    def moving_reference(self, path: str) -> RankedRole:
        temperature = self._context.recipe.logprob_temperature
        return self._load("moving_reference", path, role="reference", temperature=temperature)

    def reward_model(self, path: str) -> RankedRole:
        return self._load("reward_model", path)

    def frozen_reward_model(self, path: str) -> RankedRole:
        return self._load("frozen_reward_model", path, table="reward_model")

    def frozen_policy(self, path: str) -> RankedRole:
        return self._load("frozen_policy", path, table="reference")

    def teacher(self, path: str, number: int | None = None) -> RankedRole:
        temperature, name = self._context.recipe.logprob_temperature, teacher_name(number)
        return self._load(
            "teacher", path, number, role=name, table="teacher", temperature=temperature
        )

    def reading_teacher(self, path: str, vocabulary: int) -> RankedRole:
        return self._load("reading_teacher", path, vocabulary, table="teacher")

    def release(self, role: str) -> None:
        tables = {"frozen_reward_model": "reward_model", "reading_teacher": "teacher"}
        self._home(tables.get(role, "reference")).call("release", role).result()

    def free_memory(self, keep: KeptOnDevice = "all") -> None:
        for handle in [group.call("free_memory", keep) for group in self._groups.values()]:
            handle.result()

    def engine(self, path: str, stack: ExitStack, *, sequences: int, max_len: int) -> Engine:
        """Fleet.engine: in the workers that the recipe places, which end with the session; else in
        this process, with a copy of the weights.
        """
        recipe, settings = self._context.recipe, self._context.recipe.rollout_settings
        assert settings is not None  # of every job that samples
        if count := recipe.cluster.engines(recipe.learner.ranks):
            answers = recipe.answers_per_prompt  # a prompt is dealt with all of its answers
            first = recipe.cluster.first_engines(recipe.learner.ranks)
            share = -(-sequences // answers // first) * answers  # until others join
            engine = self._engine_again() or self._shared_engine(first, count, path, share, max_len)
            stack.callback(engine.interrupt)
            return engine
        require_trainable(settings)
        engine, self._context.choices = build_engine(
            settings, path, self._context.choices, stack,
            sequences=sequences, max_len=max_len, logs=self._folder,
            lora=recipe.model.lora, eos_token=recipe.model.eos_token,
            router_dtype=recipe.model.router_dtype,
        )  # fmt: skip
        return engine

    def _engine_again(self) -> SharedEngine | None:
        """The engine that outlived a restart of the ranks; None where there is none."""
        if (again := self._session.engine(self._context.choices)) is None:
            return None
        engine, self._context.choices = again
        stayed = engine.resume(self._policy)
        for number, workers in stayed.items():
            self._log_placed(number, workers)
        self._console.note(f"{len(stayed)} rollout workers waited for the ranks")
        return engine

    def _shared_engine(
        self, first: int, count: int, path: str, sequences: int, max_len: int
    ) -> SharedEngine:
        """An engine of `first` workers and up to `count`, each for so many sequences."""
        context, recipe, session = self._context, self._context.recipe, self._session
        assert session.reservation is not None  # since the start
        launcher = EngineLauncher(
            recipe, context.choices, session.reservation, self._policy, self._logs, self._folder,
            path, sequences, max_len,
        )  # fmt: skip
        with ExitStack() as stack, ThreadPoolExecutor(first) as starter:
            members = list(starter.map(launcher.spawn, range(first)))
            for workers in members:
                stack.callback(workers.close)
            launcher.build(members[0], 0)  # the others take its sizes
            list(starter.map(launcher.build, members[1:], range(1, first)))
            stack.pop_all()  # the engine closes them
        context.choices = launcher.choices
        dtype = context.choices.rollout_dtype
        assert dtype is not None  # of every job that answers
        settings = recipe.rollout_settings
        assert settings is not None
        exact, most = settings.type == "local", recipe.cluster.max_restarts
        on_card = settings.transport == "ipc" and settings.sends_adapter  # which goes by the host
        transport = "auto" if on_card else settings.transport
        later = count - first
        engine = SharedEngine(
            launcher, members, dtype, exact=exact, most=most, later=later, transport=transport
        )
        session.keep(engine, context.choices)
        for number, workers in enumerate(members):
            self._log_placed(number, workers)
        others = f", {later} more join when the cluster has room for them" * (later > 0)
        self._console.note(f"{first} rollout workers behind Ray{others}")
        return engine

    def _log_placed(self, number: int, workers: Workers) -> None:
        """Logs where a rollout worker is."""
        text, places = workers.description(), workers.places
        self._logs.event("placed", text, role=ROLLOUT, number=number, places=places)

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
        frozen = group.call("load_role", method, self._context.geometry, arguments).result()
        choices = self._context.choices
        self._context.choices = replace(choices, frozen={**choices.frozen, **frozen})
        return RankedRole(group, role or method, temperature, lora=lora)

    def _home(self, table: str) -> RankCalls:
        return self._groups[self._context.recipe.cluster.home(table)]


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
    tables = recipe.cluster.side_roles
    kept = {
        role: SidePlacement(
            ranks=table.processes or None, colocate=table.colocate, offload=table.offload
        )
        for role, table in tables.items()
    }
    updated: dict[str, Any] = {
        "learner": recipe.learner.on_ranks(ranks),
        "cluster": ClusterSettings(type="ray").model_copy(update=kept),
    }
    if isinstance(recipe, RLRecipe):
        learner = recipe.critic.learner.on_ranks(ranks)
        updated["critic"] = recipe.critic.model_copy(update={"learner": learner})
    return recipe.model_copy(update=updated)
