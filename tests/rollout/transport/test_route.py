"""The way that weights go, by where learner and engines are."""

import sys

import pytest
import torch

from postgrad.core.errors import RunError
from postgrad.rollout.transport.route import Place, Route, _machine, choose


def place(
    card: str | None = None, machine: str = "here", nccl: str = "2.29.1", shares: bool = True
) -> Place:
    return Place(machine, card, "2.13.0", nccl if card else None, shares)


HOST = place()


@pytest.mark.parametrize(
    ("senders", "receivers", "number", "way", "rank"),
    [
        ([HOST], [HOST, HOST], 0, "memory", 0),
        ([HOST, HOST, HOST], [HOST], 4, "memory", 1),
        ([place(machine="there"), HOST, HOST], [HOST], 0, "memory", 1),
        ([HOST, HOST], [place(machine="there")], 1, "gloo", 1),
        ([place("a")], [HOST], 0, "memory", 0),
        ([place("a")], [place("a")], 0, "ipc", 0),
        ([place("a"), place("b")], [place("b")], 0, "ipc", 1),
        ([place("a"), place("b")], [place("c")], 3, "nccl", 1),
        (
            [place("a"), place("b", "there")],
            [place("c", "there"), place("d", "there")],
            0,
            "nccl",
            1,
        ),
        ([place("a")], [place("c", "there")], 0, "nccl", 0),
    ],
)
def test_the_fastest_way_from_the_nearest_rank_is_chosen(
    senders, receivers, number, way, rank
) -> None:
    route = choose("auto", senders, receivers, number)
    assert (route.way, route.sender, route.fallback) == (way, rank, "")


def test_an_engine_over_the_cards_of_several_ranks_has_the_weights_from_each() -> None:
    ranks = [place("a"), place("b"), place("c"), place("d")]
    route = choose("auto", ranks, [place("d"), place("b")], 1)
    assert (route.way, route.sender, route.beside, route.fallback) == ("ipc", 3, (1,), "")
    assert choose("ipc", ranks, [place("a"), place("a")]) == Route("ipc", 0)
    places = [place("a"), place("b", shares=False)]
    assert "driver cannot share memory" in choose("auto", places, places).fallback
    assert choose("auto", ranks, [place("d"), place("e")]).way == "nccl"  # from a card of others


def test_engines_are_shared_out_over_ranks() -> None:
    ranks = [HOST, HOST, HOST]
    assert [choose("auto", ranks, [HOST], n).sender for n in range(5)] == [0, 1, 2, 0, 1]


def test_ways_that_push_and_ways_on_cards_are_known() -> None:
    ways = [Route(way) for way in ("memory", "ipc", "nccl", "gloo")]
    assert [(route.pushes, route.on_card) for route in ways] == [
        (False, False),
        (False, True),
        (True, True),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("senders", "receivers", "way", "reason"),
    [
        ([place("a")], [place("b", nccl="2.27.5")], "memory", "NCCL is 2.29.1 .* and 2.27.5 where"),
        ([place("a")], [place("b", "there", "2.27.5")], "gloo", "install the torch of one"),
        ([place("a")], [place("a"), place("b")], "memory", "two of its members work on one card"),
        ([place("a", shares=False)], [place("a")], "memory", "driver cannot share memory"),
    ],
)
def test_what_the_cards_could_and_versions_cannot_is_told(senders, receivers, way, reason) -> None:
    route = choose("auto", senders, receivers)
    assert route.way == way
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(route.fallback)


@pytest.mark.parametrize(
    ("stated", "senders", "receivers", "message"),
    [
        ("memory", [HOST], [place(machine="there")], "needs a rank on the machine of each engine"),
        ("ipc", [HOST], [HOST], "needs GPUs"),
        ("ipc", [place("a")], [place("b")], "a card that no rank of the learner has"),
        ("broadcast", [place("a")], [place("a")], "work on one card"),
    ],
)
def test_a_stated_way_that_cannot_be_gone_is_an_error(stated, senders, receivers, message) -> None:
    with pytest.raises(RunError, match=message):
        choose(stated, senders, receivers)


def test_a_stated_way_is_gone() -> None:
    assert choose("memory", [place("a")], [place("a")]).way == "memory"
    assert choose("broadcast", [HOST], [HOST]).way == "gloo"


def test_this_process_is_on_its_machine_without_a_card() -> None:
    here = Place.here(torch.device("cpu"))
    assert here == Place(**here.to_json())
    assert (here.card, here.nccl, here.shares) == (None, None, False)


def test_without_linux_weights_go_by_gloo_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    _machine.cache_clear()
    try:
        here, again = Place.here(torch.device("cpu")), Place.here(torch.device("cpu"))
    finally:
        _machine.cache_clear()
    assert here.machine == again.machine
    assert choose("auto", [here], [again]) == Route("gloo", 0)
    with pytest.raises(RunError, match='transport = "memory" needs Linux: use "auto"'):
        choose("memory", [here], [again])
