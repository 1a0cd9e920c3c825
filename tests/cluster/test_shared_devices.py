"""GPUs that Ray gives to ranks and engines share, on a Ray that only believes to have some."""

import pytest

from postgrad.cluster.connection import Reservation
from postgrad.cluster.placing import RoleRequest
from postgrad.cluster.settings import ClusterSettings
from postgrad.cluster.workers import Workers

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]
SETTINGS = ClusterSettings(type="ray", start_seconds=600.0)
WORKER = "helpers.seen_devices:Devices"


@pytest.fixture(autouse=True)
def _cluster(own_ray: None) -> None:
    # "local": another test may have a cluster of its own at the same time
    ray.init("local", num_gpus=4, include_dashboard=False, log_to_driver=False)


def devices(workers: Workers) -> str:
    return workers.call("devices").result()


def test_an_engine_over_two_gpus_sees_those_of_two_ranks_and_no_other() -> None:
    ranks = RoleRequest("policy", "learner.ranks = 4", 4, gpus=1, together=2)
    engines = RoleRequest("rollout", "workers = 2", 2, gpus=2, inside="policy")
    held = Reservation([ranks, engines], 600.0)
    started: list[Workers] = []

    def start(role: str, size: int, first: int = 0) -> Workers:
        started.append(Workers(role, WORKER, (), size, SETTINGS, held, role, first))
        return started[-1]

    try:
        policy = start("policy", 4)
        by_rank = [held._visible["policy"][number] for number in range(4)]
        assert sorted(by_rank) == ["0", "1", "2", "3"]
        seen = [devices(start("rollout", 1, number)) for number in range(2)]
        assert seen == [",".join(by_rank[:2]), ",".join(by_rank[2:])]
        policy.close()  # ranks that are started anew have the same GPUs
        again = start("policy", 4)
        assert devices(again) in "0123"
        for number, pair in enumerate(seen):
            both = held.devices("rollout", number)
            assert both is not None
            assert set(both.split(",")) == set(pair.split(","))
    finally:
        for workers in started:
            workers.close()
        held.close()
