"""Weights from ranks to rollout workers: the bits that arrive, the ways that they go, and who is
lost where some do not.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts.conftest import small_model, small_tokenizer
from helpers import dying_publish
from helpers.dying_publish import digest
from helpers.fake_cuda import FakeCuda
from helpers.fake_ranks import FakeContext, FakeLogs, SendingRanks
from postgrad.core.errors import RunError, WorkerLost
from postgrad.core.process import Handle
from postgrad.fleet import members, ranked, sending
from postgrad.fleet.publishing import RankPublisher, parcel_of
from postgrad.fleet.ranked import RankedFleet
from postgrad.fleet.receiving import WorkerWeights
from postgrad.fleet.remote import RankedWeights
from postgrad.fleet.sending import RankSender
from postgrad.fleet.session import ClusterSession
from postgrad.observe.console import Console
from postgrad.rollout.engine import WeightHandover
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.transport import memory
from postgrad.rollout.transport.ipc import Driver, IpcCarrier, IpcFetcher
from postgrad.rollout.transport.parcel import Parcel, Receiver
from postgrad.rollout.transport.route import Place, choose

CPU = torch.device("cpu")


def weights() -> list[tuple[str, torch.Tensor]]:
    return [(name, w.detach() * 1.2345) for name, w in small_model().named_parameters()]


class Engine:
    """`cluster.workers.Workers` of one process: a built-in engine in a thread."""

    def __init__(self) -> None:
        self.lm = small_model(1).bfloat16()
        self.engine = LocalEngine(self.lm, small_tokenizer(), slots=2, cache_tokens=64)
        self.weights = WorkerWeights(self.engine, CPU)
        self.actions: list[str] = []
        self._thread = ThreadPoolExecutor(1)

    def call(self, method: str, *arguments: Any) -> Handle[Any]:
        assert method == "publish"
        return self._thread.submit(self._do, *arguments)

    def _do(self, action: str, *arguments: Any) -> Any:
        self.actions.append(action)
        return getattr(self.weights, action)(*arguments)

    def bits(self) -> dict[str, str]:
        return {name: digest(weight) for name, weight in self.lm.named_parameters()}


EXPECTED = {name: digest(weight.bfloat16()) for name, weight in weights()}
LOST = list[tuple[int, str]]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "BUCKET", 4096)


def published(engines: dict[int, Engine], stated: Any = "auto", ranks: Any = None) -> Any:
    """(what was sent, who was lost) of a publish, and whoever led it."""
    lost: LOST = []
    publisher = RankPublisher(stated, "bfloat16", lambda n, error: lost.append((n, str(error))))
    source = RankedWeights(ranks or SendingRanks(weights()), "policy")
    return publisher.send(source, engines, 3), lost, publisher  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(("stated", "way"), [("auto", "memory"), ("broadcast", "gloo")])
def test_every_engine_gets_all_bits_rounded_once(stated: str, way: str) -> None:
    engines = {0: Engine(), 3: Engine()}
    sent, lost, publisher = published(engines, stated)
    assert lost == []
    for engine in engines.values():
        assert engine.bits() == EXPECTED
        assert engine.actions.count("take") > 3
    assert {engine: route.way for engine, route in publisher.routes.items()} == {0: way, 3: way}
    exact = sum(2 * weight.numel() for _, weight in weights())
    assert exact <= sent.size <= exact + 64 * len(weights())
    assert sent.metrics[f"publish/by_{way}"] == 1.0


@pytest.mark.usefixtures("small_buckets")
def test_the_groups_of_a_way_serve_all_publishes_of_an_engines_life() -> None:
    engines, other, lost = {0: Engine(), 1: Engine()}, Engine(), []
    ranks = SendingRanks(weights())
    publisher = RankPublisher("broadcast", "bfloat16", lambda n, error: lost.append(n))
    for version, those in ((1, engines), (2, engines), (3, {**engines, 1: other})):
        publisher.send(RankedWeights(ranks, "policy"), those, version)  # type: ignore[arg-type]
    assert lost == []
    assert [engine.actions.count("meet") for engine in (engines[0], engines[1], other)] == [1, 1, 1]
    assert other.bits() == engines[0].bits() == EXPECTED


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
def test_parcels_may_come_in_any_order_and_none_may_be_missing(order: Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "BUCKET", 4096)
        patch.setattr(memory, "KEPT", 99)
        sender, engine = RankSender(), Engine()
        sender.open(weights(), "bfloat16", [(0, {"way": "memory"})])
        parcels = []
        while (parcel := sender.next()[0]) is not None:
            parcels.append(parcel)
        order.shuffle(parcels)
        engine.weights.begin()
        for parcel in parcels[:-1]:
            engine.weights.take(parcel)
        assert sender._sender is not None
        manifest = sender._sender.manifest().to_json()
        with pytest.raises(RunError, match=r"were sent \(missing: \[\d+\]\): these weights"):
            engine.weights.commit(1, manifest)
        with pytest.raises(RunError, match="a publish to the rollout engine broke off"):
            engine.engine.logprobs([np.array([2, 3], np.int32)], 1.0)
        engine.weights.take(parcels[-1])
        engine.weights.commit(1, sender.end()[0])
    assert engine.bits() == EXPECTED


class Damaging(SendingRanks):
    """Changes a bit of the second payload that the first engine reads."""

    taken = 0

    def call(self, method: str, *arguments: Any) -> Handle[Any]:
        handle = super().call(method, *arguments)
        if arguments[0] == "next":
            self.taken += 1
            if self.taken == 2:
                payload = self._sender._sender.payload  # type: ignore[union-attr]
                payload[7] ^= 1
        return handle


@pytest.mark.usefixtures("small_buckets")
def test_a_damaged_parcel_loses_the_engine_and_nothing_else() -> None:
    engines = {0: Engine()}
    _, lost, _ = published(engines, ranks=Damaging(weights()))
    ((engine, cause),) = lost
    assert engine == 0
    assert "parcel 1 of" in cause
    assert "is damaged" in cause
    assert "commit" not in engines[0].actions
    with pytest.raises(RunError, match="a publish to the rollout engine broke off"):
        engines[0].engine.logprobs([np.array([2, 3], np.int32)], 1.0)


class Elsewhere(Engine):
    """An engine on another machine, with the same torch or another."""

    torch_version = torch.__version__

    def _do(self, action: str, *arguments: Any) -> Any:
        answer = super()._do(action, *arguments)
        if action != "places":
            return answer
        there = replace(Place.here(CPU), machine="another")
        return self.torch_version, [there.to_json()]


@pytest.mark.usefixtures("small_buckets")
def test_an_engine_on_another_machine_gets_them_over_gloo_beside_one_that_maps_memory() -> None:
    engines = {0: Engine(), 1: Elsewhere()}
    sent, lost, publisher = published(engines)
    assert lost == []
    assert {n: route.way for n, route in publisher.routes.items()} == {0: "memory", 1: "gloo"}
    assert {n for n in sent.metrics if n.startswith("publish/by_")} == {
        "publish/by_memory",
        "publish/by_gloo",
    }
    assert engines[0].bits() == engines[1].bits() == EXPECTED


class Rank:
    """`Ranks` of which one is here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gathered(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.slow
def test_an_engine_over_two_cards_takes_on_each_the_payload_of_the_rank_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda()
    senders = {card: RankSender(cast(Any, Rank(rank))) for rank, card in enumerate("abc")}
    route = choose("auto", [there(card) for card in "abc"], [there("c"), there("b")])
    assert (route.way, route.sender, route.beside) == ("ipc", 2, (1,))
    parcels: list[Any] = []
    for card, sender in senders.items():
        carrier = IpcCarrier(CPU, card, Driver(cuda))
        monkeypatch.setattr(sending, "carrier_of", lambda *way, carrier=carrier: carrier)
        sender.open(weights(), "bfloat16", [(0, asdict(route))])
        parcels += sender.next()
    assert parcels[0] is None  # on whose card there is no engine
    parcel = Parcel.from_json(parcel_of(parcels, route))
    assert parcel.where["handles"].keys() == {"b", "c"}
    assert len(set(parcel.where["handles"].values())) == 2
    for card in "bc":
        receiver = Receiver({"ipc": IpcFetcher(CPU, card, Driver(cuda))})
        arrived = dict(receiver.take(parcel))
        assert all(torch.equal(arrived[name], w.bfloat16()) for name, w in weights())
    manifests = [manifest for sender in senders.values() for manifest in sender.end()]
    assert manifests[1] == manifests[2]
    assert not cuda.memory


def there(card: str) -> Place:
    return Place("here", card, "2.13.0", "2.29.1", True)


def test_another_torch_on_another_machine_is_an_error_before_anything_is_sent() -> None:
    there = Elsewhere()
    there.torch_version = "2.0.0"
    with pytest.raises(RunError, match=r"rollout worker 1 has torch 2\.0\.0 and rank 0 2\."):
        published({1: there})
    assert there.actions == ["places"]


@pytest.mark.slow
def test_an_engine_that_does_not_come_to_its_group_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MEET_SECONDS", 0.3)

    class Absent(Engine):
        def _do(self, action: str, *arguments: Any) -> Any:
            return threading.Event().wait(1.0) if action == "meet" else super()._do(action)

    engines = {0: Absent()}
    sent, lost, _ = published(engines, "broadcast")
    assert [engine for engine, _ in lost] == [0]
    assert "could not join" in lost[0][1]
    assert (sent.way, sent.size) == ("none", 0)


pytest.importorskip("ray")


@pytest.fixture
def deaths(own_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which deaths are asked for; the Ray that the test starts has its name."""
    monkeypatch.setenv(dying_publish.FOLDER, str(tmp_path))
    return tmp_path


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "stated"),
    [("zero3", "auto"), pytest.param("zero2", "broadcast", marks=pytest.mark.long)],
)
def test_four_ranks_send_to_two_engines_whoever_of_them_dies(
    sharding: str,
    stated: str,
    deaths: Path,
    make_recipe: Any,
    models: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bits as through the first process. A worker that is killed between two parcels is
    replaced alone; a rank that is killed there ends the publish, and nobody has half of it.
    """
    monkeypatch.setattr(ranked, "RANK", dying_publish.RANKS)
    monkeypatch.setattr(members, "WORKER", dying_publish.ENGINES)
    recipe = make_recipe(
        "rl",
        learner={"ranks": 4, "sharding": sharding, "threads": 1},
        rollout={"dtype": "bfloat16", "transport": stated},
        cluster={"type": "ray", "start_seconds": 600.0, "rollout": {"workers": 2}},
    )
    context, logs = FakeContext.of(recipe), FakeLogs()
    with ExitStack() as stack:
        session = stack.enter_context(closing(ClusterSession()))
        fleet = RankedFleet.start(
            context,
            stack,
            Console("quiet"),
            logs,
            tmp_path,
            session=session,  # type: ignore[arg-type]
        )
        policy = fleet.policy(models(0))
        engine: Any = fleet.engine(models(1), stack, sequences=8, max_len=32)
        expected = {n: digest(w.bfloat16()) for n, w in policy.hub_weights()}

        def engines_have() -> list[dict[str, str]]:
            handles = [member.workers.call("bits") for member in engine._members]
            return [handle.result() for handle in handles]

        assert engines_have()[0] != expected
        sent = engine.load_weights(WeightHandover(policy.hub_weights()), 1)
        assert engines_have() == [expected, expected]
        way = "memory" if stated == "auto" else "gloo"
        assert sent.ways == {"0": way, "1": way}
        assert [engine._publisher.routes[number].sender for number in (0, 1)] == [0, 1]

        dying_publish.ask_for_a_death(deaths, "engine")
        engine.load_weights(WeightHandover(policy.hub_weights()), 2)
        (lost,) = logs.of("engine_lost")
        while not all(member.serves for member in engine._members):
            engine._join()
        (joined,) = logs.of("engine_joined")
        assert (joined["engine"], joined["version"], joined["way"]) == (lost["engine"], 2, way)
        assert engines_have() == [expected, expected]

        dying_publish.ask_for_a_death(deaths, "rank")
        with pytest.raises(WorkerLost, match="rank 1 died"):
            engine.load_weights(WeightHandover(policy.hub_weights()), 3)
        with pytest.raises(RunError) as refused:
            engine.logprobs([np.arange(2, 6, dtype=np.int32)], 1.0)
        # An engine that cannot read what the rank had sent is lost as well: only then the one that
        # starts in its place asks the same ranks for weights, and hears of the rank.
        also_lost = len(logs.of("engine_lost")) > 1
        message = str(refused.value)
        assert "a publish to the rollout engine broke off" in message or (
            also_lost and message.startswith("rank 1 died")
        )
