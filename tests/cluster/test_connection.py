"""Addresses at which no Ray cluster is: told within seconds, in one message."""

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from postgrad.cluster import connection
from postgrad.cluster.connection import NoPlace, Reservation
from postgrad.cluster.placing import RoleRequest
from postgrad.cluster.settings import ClusterSettings
from postgrad.core.errors import RunError

pytest.importorskip("ray")


@contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """Something that listens, and says `answer` to everybody, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk() -> None:
            with listening.accept()[0] as held:
                held.recv(64)
                if answer is None:
                    held.recv(64)  # until the other one goes
                else:
                    held.sendall(answer)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


def start(address: str) -> None:
    connection.start(ClusterSettings(type="ray", address=address))


def test_an_address_where_nobody_listens_is_told() -> None:
    with socket.socket() as held:  # bound and not listening: nobody else takes the port
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(RunError, match=f"^no Ray cluster at {address}: Connection refused; "):
            start(address)


def test_a_name_that_nobody_knows_is_told() -> None:
    with pytest.raises(RunError, match=r"^no Ray cluster at nobody\.invalid:6379: "):
        start("nobody.invalid:6379")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_something_else_that_answers_is_told(answer: bytes) -> None:
    with server(answer) as address, pytest.raises(RunError, match="something else answers there"):
        start(address)


def test_silence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.1)
    with server(None) as address, pytest.raises(RunError, match="no answer; start one there"):
        start(address)


def test_auto_means_the_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nobody.invalid:6379")
    with pytest.raises(RunError, match=r"^no Ray cluster at nobody\.invalid:6379: "):
        start("auto")


@pytest.mark.ranks
@pytest.mark.slow
def test_of_a_start_that_failed_nothing_runs_on(
    own_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own shutdown ends what a complete start has started."""
    from ray._private.node import Node

    started: list[subprocess.Popen[bytes]] = []

    def fail(node: Node) -> None:
        started.extend(process for _, process in node.live_processes())
        raise TimeoutError("the raylet did not come up")

    monkeypatch.setattr(Node, "start_ray_processes", fail)
    with pytest.raises(RunError, match="the raylet did not come up; is the machine overloaded"):
        connection.start(ClusterSettings(type="ray", start_seconds=1.0))
    assert [process for process in started if "gcs_server" in process.args[0]]
    assert [process.args for process in started if psutil.pid_exists(process.pid)] == []


Bundles = list[dict[str, float]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Bundles]:
    """The bundles of each placement group, on a cluster that has room for anything."""
    import ray

    asked: list[Bundles] = []

    class Group:
        def wait(self, seconds: float) -> bool:
            return True

    def placement_group(bundles: Bundles, strategy: str) -> Group:
        asked.append(bundles)
        return Group()

    placed = {"policy": [None] * 4}
    monkeypatch.setattr(ray.util, "placement_group", placement_group)
    monkeypatch.setattr(connection, "_assigned", lambda *arguments: placed)
    return asked


def test_a_rank_and_the_worker_beside_it_have_half_of_a_device_each(asked: list[Bundles]) -> None:
    ranks = RoleRequest("policy", "learner.ranks = 4", 4, gpus=1, cpus=1)
    engines = RoleRequest("rollout", "policy.colocate", 4, gpus=1, inside="policy")
    reservation = Reservation([ranks, engines], 1.0)
    ((first, second, *_),) = asked
    assert first["GPU"] == second["GPU"] == 1
    for number in (0, 1):
        both = [reservation.options(role, number) for role in ("policy", "rollout")]
        assert [options["num_gpus"] for options in both] == [0.5, 0.5]
        places = {options["scheduling_strategy"].placement_group_bundle_index for options in both}
        assert places == {number}
        assert reservation.devices("rollout", number) is None  # Ray says


def test_an_engine_over_two_devices_works_on_those_of_two_ranks(asked: list[Bundles]) -> None:
    ranks = RoleRequest("policy", "learner.ranks = 4", 4, gpus=1, cpus=3, together=2)
    engines = RoleRequest("rollout", "workers = 2", 2, gpus=2, inside="policy")
    reservation = Reservation([ranks, engines], 1.0)
    assert asked == [[{"GPU": 2.0, "CPU": 6.0}, {"GPU": 2.0, "CPU": 6.0}]]
    place = lambda role, n: (  # noqa: E731
        reservation.options(role, n)["scheduling_strategy"].placement_group_bundle_index,
        reservation.options(role, n)["num_gpus"],
    )
    assert [place("policy", n) for n in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert [place("rollout", n) for n in range(2)] == [(0, 0), (1, 0)]
    reservation.note_devices("policy", ["3", "1", "GPU-a", "0"])
    assert [reservation.devices("rollout", n) for n in range(2)] == ["3,1", "GPU-a,0"]
    assert reservation.devices("policy", 0) is None
    reservation.note_devices("policy", ["3", "1", "", ""])
    with pytest.raises(RunError, match=r"Ray set no CUDA_VISIBLE_DEVICES .* rollout 1 shares"):
        reservation.devices("rollout", 1)


class Cluster:
    """What Ray tells of a placement group of two places, on two machines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ray

        self.state = "CREATED"
        self.used = {0: "first", 1: "second"}
        self.up = {name: socket.create_server(("127.0.0.1", 0)) for name in ("first", "second")}
        ports = {name: listening.getsockname()[1] for name, listening in self.up.items()}
        self.nodes = [
            {"NodeID": name, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
            for name, port in ports.items()
        ]
        table = lambda group: {"state": self.state, "bundles_to_node_id": self.used}  # noqa: E731
        monkeypatch.setattr(ray.util, "placement_group_table", table)
        monkeypatch.setattr(ray, "nodes", lambda: self.nodes)
        self.reservation = object.__new__(Reservation)
        self.reservation._group = self.reservation._further = {}
        self.reservation._bundles = {"rollout": [0, 1]}

    def has(self, number: int) -> bool:
        try:
            self.reservation.wait_for("rollout", number, 0.0, threading.Event())
        except NoPlace:
            return False
        return True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(monkeypatch)
    yield cluster
    for listening in cluster.up.values():
        listening.close()


def test_a_machine_that_does_not_answer_is_lost_before_ray_knows_it(cluster: Cluster) -> None:
    assert cluster.reservation.stands()
    cluster.up["second"].close()
    assert not cluster.reservation.stands()
    assert (cluster.has(0), cluster.has(1)) == (True, False)


def test_a_place_that_ray_looks_for_anew_leaves_the_others_where_they_are(cluster: Cluster) -> None:
    cluster.state, cluster.used = "RESCHEDULING", {0: "first"}
    assert not cluster.reservation.stands()
    assert (cluster.has(0), cluster.has(1)) == (True, False)


def test_a_machine_that_ray_has_forgotten_is_lost(cluster: Cluster) -> None:
    del cluster.nodes[1]
    assert not cluster.reservation.stands()
    assert (cluster.has(0), cluster.has(1)) == (True, False)


@pytest.mark.slow
def test_a_pending_group_has_no_place_and_is_waited_for_until_it_is_given_up(
    cluster: Cluster,
) -> None:
    cluster.state, cluster.used = "PENDING", {}
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(NoPlace, match=r"^no machine of the cluster had room for it within"):
        cluster.reservation.wait_for("rollout", 0, 3600.0, given_up)
    waiting = threading.Thread(
        target=cluster.reservation.wait_for, args=("rollout", 0, 3600.0, threading.Event())
    )
    waiting.start()
    cluster.state, cluster.used = "CREATED", {0: "first"}
    waiting.join(60.0)
    assert not waiting.is_alive()
