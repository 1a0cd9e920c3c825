"""A publish, step by step: parcels go from a source to a target, then the target commits.

Whoever leads it passes JSON between the two sides; the payloads go their own way. While the target
loads a parcel, the source packs the next.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.core.process import done
from postgrad.rollout.engine import Sent
from postgrad.rollout.transport.parcel import BUCKET, Carrier, Sender
from postgrad.rollout.transport.route import Route

PublishJson = dict[str, Any]


class AwaitedStep(Protocol):
    """A call that is under way."""

    def result(self) -> Any:
        """Waits for the call's value; raises its error."""
        ...


class WeightSource(Protocol):
    """The learner's side of a publish."""

    def next(self) -> AwaitedStep:
        """The next parcel as JSON; None once all were packed."""
        ...

    def pass_on(self) -> AwaitedStep:
        """Hands over the newest parcel's payload, while the target takes it."""
        ...

    def end(self) -> PublishJson:
        """The manifest as JSON; frees the payloads and what gathering took."""
        ...

    def abandon(self) -> None:
        """Frees what this process holds for a publish that broke off."""
        ...


class Target(Protocol):
    """The engine's side of a publish. Between `begin_weights` and the end of `commit_weights` its
    weights are neither the old nor the new ones, and it refuses all work.
    """

    def begin_weights(self) -> None:
        """Makes room; what came of a publish that broke off is forgotten."""
        ...

    def take_weights(self, parcel: Mapping[str, Any]) -> AwaitedStep:
        """Loads a parcel. Parcels may come in any order."""
        ...

    def commit_weights(self, version: int, manifest: Mapping[str, Any]) -> None:
        """Makes what was taken the weights of `version`. Raises RunError where that is not what the
        manifest says.
        """
        ...


class LocalSource:
    """The source of weights in this process."""

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        carrier: Carrier,
        bucket: int = BUCKET,
    ) -> None:
        """The arguments are those of Sender."""
        self._sender = Sender(weights, dtype, carrier, bucket)

    def next(self) -> AwaitedStep:
        parcel = self._sender.next()
        return done(None if parcel is None else parcel.to_json())

    def pass_on(self) -> AwaitedStep:
        return done(self._sender.pass_on())

    def end(self) -> PublishJson:
        self._sender.close()
        return self._sender.manifest().to_json()

    def abandon(self) -> None:
        self._sender.close()


def send(source: WeightSource, target: Target, version: int, route: Route) -> Sent:
    """Sends all weights of `source`.

    An error on the way leaves the target without weights that it would use: whoever catches it has
    to publish once more, or to replace the target.
    """
    started = time.perf_counter()
    target.begin_weights()
    try:
        parcel = source.next().result()
        while parcel is not None:
            taking = target.take_weights(parcel)
            if route.pushes:
                _pass_on(source, taking)
            following = source.next()
            taking.result()
            parcel = following.result()
    except BaseException:
        source.abandon()
        raise
    manifest = source.end()
    target.commit_weights(version, manifest)
    seconds = time.perf_counter() - started
    return Sent(route.way, manifest["size"], seconds, route.fallback)


def _pass_on(source: WeightSource, taking: AwaitedStep) -> None:
    """Raises the target's own error, where it has one: it says more than a broken connection."""
    try:
        source.pass_on().result()
    except RunError:
        taking.result()
        raise
