"""Which process goes to which machine, on clusters of every shape."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.cluster.placing import Node, RoleRequest, assign
from postgrad.core.errors import UsageError

TWO = [Node("10.0.0.1", 4, 16), Node("10.0.0.2", 4, 16)]


def ranks(count: int, **more: int) -> RoleRequest:
    return RoleRequest("policy", f"learner.ranks = {count}", count, **more)  # pyright: ignore[reportArgumentType]


def fits(request: RoleRequest, machines: list[Node]) -> bool:
    """By trying every way to spread its processes."""
    rooms = [range(request.processes + 1)] * len(machines)
    even = [request.processes // max(1, request.machines)] * request.machines
    return any(
        sum(counts) == request.processes
        and all(
            count * request.gpus <= machine.gpus and count * request.cpus <= machine.cpus
            for count, machine in zip(counts, machines, strict=True)
        )
        and (not request.machines or sorted(filter(None, counts)) == even)
        for counts in product(*rooms)
    )  # fmt: skip


MACHINES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=3).map(
    lambda sizes: [Node(f"10.0.0.{n}", *size) for n, size in enumerate(sizes)]
)


@given(
    MACHINES,
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 3),
    st.randoms(),
)
def test_what_fits_is_placed_within_what_there_is_and_nothing_else_is(
    machines: list[Node], count: int, gpus: int, cpus: int, spread: int, shuffled: object
) -> None:
    each = count * max(1, spread)  # as recipes are held to
    role = ranks(each if each <= 6 else count, gpus=gpus, cpus=cpus, machines=spread)
    if spread and role.processes % spread:
        return
    if not fits(role, machines):
        with pytest.raises(UsageError, match="the Ray cluster has not"):
            assign([role], machines)
        return
    placement = assign([role], machines)["policy"]
    again = list(machines)
    shuffled.shuffle(again)  # type: ignore[attr-defined]
    assert assign([role], again)["policy"] == placement
    assert len(placement) == role.processes
    for machine in machines:
        here = placement.count(machine.address)
        assert here * gpus <= machine.gpus
        assert here * cpus <= machine.cpus
    if spread:
        assert {placement.count(address) for address in placement} == {role.processes // spread}
        assert len(set(placement)) == spread
    assert placement == sorted(
        placement, key=placement.index
    )  # those of one machine are neighbours


def test_processes_stay_on_one_machine_where_one_has_room() -> None:
    assert assign([ranks(4, gpus=1)], TWO) == {"policy": ["10.0.0.1"] * 4}
    assert assign([ranks(6, gpus=1)], TWO) == {"policy": ["10.0.0.1"] * 4 + ["10.0.0.2"] * 2}
    spread = ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2
    assert assign([ranks(4, gpus=1, machines=2)], TWO) == {"policy": spread}


def test_a_role_of_its_own_gets_what_another_left() -> None:
    engines = RoleRequest("rollout", "cluster.rollout.workers = 4", 4, gpus=1)
    placement = assign([ranks(4, gpus=1, machines=2), engines], TWO)
    both = placement["policy"] + placement["rollout"]
    assert {address: both.count(address) for address in both} == {"10.0.0.1": 4, "10.0.0.2": 4}
    with pytest.raises(UsageError, match=r"^cluster\.rollout\.workers = 4 needs as many GPUs"):
        assign([ranks(5, gpus=1), engines], TWO)


def test_roles_that_share_devices_are_side_by_side() -> None:
    engines = RoleRequest("rollout", "cluster.rollout.workers = 2", 2, gpus=1, inside="policy")
    placement = assign([ranks(8, gpus=1), engines], TWO)
    assert placement["rollout"] == placement["policy"][:2]


def test_ranks_whose_devices_one_engine_has_are_on_one_machine() -> None:
    odd = [Node("10.0.0.1", 3, 16), Node("10.0.0.2", 7, 16)]
    both = RoleRequest("rollout", "cluster.rollout.workers = 4", 4, gpus=2, inside="policy")
    placement = assign([ranks(8, gpus=1, together=2), both], odd)
    assert placement["policy"] == ["10.0.0.2"] * 6 + ["10.0.0.1"] * 2
    assert placement["rollout"] == ["10.0.0.2"] * 3 + ["10.0.0.1"]
    assert assign([ranks(10, gpus=1)], odd)["policy"].count("10.0.0.1") == 3
    with pytest.raises(UsageError, match=r"each 2 of them on one machine, and .*room for 2; .*6"):
        assign([ranks(10, gpus=1, together=2)], odd)


def test_the_error_says_what_each_machine_has() -> None:
    with pytest.raises(UsageError) as error:
        assign([ranks(8, gpus=1, cpus=8)], TWO)
    assert str(error.value) == (
        "learner.ranks = 8 needs as many GPUs and 8 cores for each of 8 processes, and the Ray "
        "cluster has not: 10.0.0.1 has 4 GPUs and 16 cores, room for 2; 10.0.0.2 has 4 GPUs and "
        "16 cores, room for 2; lower it, or join a larger cluster (cluster.address)"
    )


def test_processes_that_may_come_later_need_no_room_at_the_start() -> None:
    engines = RoleRequest("rollout", "cluster.rollout.least = 2", 8, gpus=1, later=6)
    assert assign([ranks(6, gpus=1), engines], TWO)["rollout"] == ["10.0.0.2"] * 2
    with pytest.raises(UsageError, match=r"^cluster\.rollout\.least = 2 needs as many GPUs"):
        assign([ranks(7, gpus=1), engines], TWO)
