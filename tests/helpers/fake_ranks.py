"""A group of ranks without Ray: one `RankWorker` in this process answers its calls.

Arguments and answers are pickled on their way, as Ray would, so that nothing is shared by accident.
"""

import json
import os
import pickle
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from postgrad.core.batch import BatchGeometry
from postgrad.core.process import Handle
from postgrad.fleet.choices import Choices, choose
from postgrad.fleet.local import LocalFleet
from postgrad.fleet.ranked import RankedFleet
from postgrad.fleet.sending import RankSender
from postgrad.fleet.worker import RankWorker
from postgrad.recipe.recipe import Recipe


@dataclass
class FakeContext:
    """What a fleet reads of a run."""

    recipe: Recipe
    geometry: BatchGeometry
    choices: Choices

    @classmethod
    def of(cls, recipe: Recipe, rows: int = 40) -> "FakeContext":
        """Of a recipe whose training data has so many rows."""
        return cls(recipe, recipe.geometry(rows), choose(recipe, {}, measure=False))


class FakeLogs:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, message: str, **more: Any) -> None:
        self.events.append({"event": kind, "message": message, **more})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


class SendingRanks:
    """RankCalls of one rank that only sends weights. What goes through the first process is JSON,
    or else an error.
    """

    places = (("127.0.0.1", os.getpid()),)

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._sender = RankSender()
        self._weights = weights

    def call(self, method: str, *arguments: Any) -> Handle[Any]:
        assert method == "publish"
        action, *more = json.loads(json.dumps(arguments))
        if action == "open":
            more = [self._weights, *more[2:]]
        handle: Handle[Any] = Handle()
        try:
            handle.set_result(json.loads(json.dumps(getattr(self._sender, action)(*more))))
        except Exception as error:  # noqa: BLE001  the handle raises it
            handle.set_exception(error)
        return handle

    aside = call


class FakeGroup:
    """RankCalls, each answered before it returns."""

    places = (("127.0.0.1", os.getpid()),)

    def __init__(self, recipe: Recipe, choices: Choices) -> None:
        self.worker = RankWorker(recipe.dump(), choices)
        self.calls: list[tuple[Any, ...]] = []  # (method, *arguments) in their order
        self.working = False  # True while the worker answers

    @property
    def local(self) -> LocalFleet:
        """The fleet of the only rank."""
        return self.worker._fleet

    def call(self, method: str, *arguments: Any) -> Handle[Any]:
        handle: Handle[Any] = Handle()
        self.calls.append((method, *arguments))
        sent = pickle.loads(pickle.dumps(arguments))  # noqa: S301
        self.working = True
        try:
            answer = getattr(self.worker, method)(*sent)
            handle.set_result(pickle.loads(pickle.dumps(answer)))  # noqa: S301
        except Exception as error:  # noqa: BLE001  the handle raises it
            handle.set_exception(error)
        finally:
            self.working = False
        return handle

    aside = call


class NoPlaces:
    """A `Reservation` of nothing."""

    def close(self) -> None: ...


def fleet_on(context: Any, *more: Any) -> tuple[RankedFleet, FakeGroup]:
    """A RankedFleet on such a group. more: console, logs and folder, for engines."""
    group = FakeGroup(context.recipe, context.choices)
    console, logs, folder = more or (None, None, Path())
    return RankedFleet(context, group, None, console, logs, folder), group  # type: ignore[arg-type]


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> list[FakeGroup]:
    """Runs whose recipe has a cluster are on fake ranks. The groups of those that started."""
    groups: list[FakeGroup] = []

    def start(
        context: Any,
        stack: ExitStack,
        console: Any,
        logs: Any,
        folder: Path,
        *,
        session: Any = None,
    ) -> RankedFleet:
        fleet, group = fleet_on(context, console, logs, folder)
        groups.append(group)
        return fleet

    monkeypatch.setattr(RankedFleet, "start", start)
    return groups
