"""What a run has on a cluster and asks of it: a connection, places, rollout workers."""

import os
from dataclasses import replace

from postgrad.cluster import connection
from postgrad.cluster.connection import VISIBLE, Reservation
from postgrad.cluster.placing import RoleRequest, role_request
from postgrad.cluster.settings import POLICY, ClusterSettings
from postgrad.core.errors import RunError, UsageError
from postgrad.fleet.choices import Choices
from postgrad.fleet.members import ROLLOUT
from postgrad.fleet.shared import SharedEngine
from postgrad.observe.sinks import Logs
from postgrad.parallel import device as devices
from postgrad.recipe.recipe import Recipe


class ClusterSession:
    """What a run has on a cluster and keeps where its ranks are restarted: the connection, the
    places of all processes, and the rollout workers.
    """

    def __init__(self) -> None:
        self.reservation: Reservation | None = None
        self._connected = False
        self._engine: tuple[SharedEngine, Choices] | None = None  # with the choices of its sizes
        self._waits = False  # the engine, since a restart

    def connect(self, settings: ClusterSettings) -> None:
        """Connects to the cluster, unless this process is in one already."""
        self._connected |= connection.start(settings)  # who calls us may be in one of their own

    def reserve(self, recipe: Recipe, device: str, logs: Logs) -> Reservation:
        """The places of a recipe's processes: those of before, whose rollout workers wait from now
        on, unless a machine was lost. Then everything is placed anew.

        Raises UsageError where the placement is impossible, RunError where it is not free in time,
        or where it was possible before.
        """
        settings, before = recipe.cluster, self.reservation
        self.connect(settings)
        if before is not None and before.stands():
            self._waits = self._engine is not None and self._engine[0].pause(logs)
            if not self._waits:
                self._end_engine()
            return before
        self._release()
        # others may be on their way; a machine that was lost may come back
        patient = before is not None or settings.address is not None
        wants = wants_of(recipe, device)
        try:
            self.reservation = Reservation(wants, settings.start_seconds, patient=patient)
        except UsageError as error:
            if before is not None:  # it did run
                raise RunError(str(error)) from error
            raise
        return self.reservation

    def keep(self, engine: SharedEngine, choices: Choices) -> None:
        """Keeps the run's engine until the session ends, or a restart finds it of no more use."""
        self._engine = engine, choices

    def engine(self, choices: Choices) -> tuple[SharedEngine, Choices] | None:
        """The engine that waits since a restart, and the choices with its sizes; None where there
        is none, or one with other sizes.
        """
        if self._engine is None or not self._waits:
            return None
        self._waits = False
        engine, before = self._engine
        if choices.sizes not in (None, before.sizes):
            self._end_engine()
            return None
        choices = replace(choices, slots=before.slots, cache_tokens=before.cache_tokens)
        return engine, choices

    def close(self) -> None:
        """Ends the rollout workers, gives the places back and disconnects."""
        self._release()
        if self._connected:
            self._connected = False
            connection.stop()

    def _end_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine[0].close()

    def _release(self) -> None:
        self._end_engine()
        if self.reservation is not None:
            self.reservation.close()
            self.reservation = None


def device_of(recipe: Recipe, session: ClusterSession) -> str:
    """What the models work on, "cuda" or "cpu". Without an address they are on this machine; else
    the cluster is asked, since its first machine, where the loop runs, may lack GPUs.
    """
    here, settings = devices.choose(None, False).device, recipe.cluster
    if settings.address is None or here == "cuda" or os.environ.get(VISIBLE) == "":
        return here
    if settings.policy.gpus is not None:
        return "cuda" if settings.policy.gpus else "cpu"
    session.connect(settings)
    return "cuda" if any(node.gpus for node in connection.nodes_alive()) else "cpu"


def wants_of(recipe: Recipe, device: str) -> list[RoleRequest]:
    """What the recipe's processes ask of a cluster. device: "cpu" or "cuda". Raises UsageError for
    a placement that does not suit it.
    """
    settings, ranks, rollout = recipe.cluster, recipe.learner.ranks, recipe.rollout_settings
    gpus = rollout.vllm.devices if rollout is not None and rollout.type == "vllm" else 1
    shares = device == "cuda" and settings.policy.colocate is not None
    together, key = gpus if shares else 1, f"learner.ranks = {ranks}"
    wants = [role_request(POLICY, key, ranks, settings.policy, device, together=together)]
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
        first, inside = settings.first_engines(ranks), settings.policy.colocate and POLICY
        key = f"cluster.rollout.{'workers' if first == count else 'least'} = {first}"
        place = settings.rollout or settings.policy
        later = count - first
        wants.append(role_request(ROLLOUT, key, count, place, device, inside, gpus, later))
    return wants
