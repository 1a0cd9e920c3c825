"""Groups of ranks behind Ray: what is answered, in which order, and what bad days look like."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from postgrad.cluster import connection, pulse, workers
from postgrad.cluster.connection import MARK, Reservation
from postgrad.cluster.placing import RoleRequest
from postgrad.cluster.settings import ClusterSettings
from postgrad.cluster.workers import RankGroup, Workers
from postgrad.core.errors import RunError, UsageError, WorkerLost

pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
SETTINGS = ClusterSettings(type="ray", start_seconds=600.0)
STILL = 3.0  # seconds
MISBEHAVING = "helpers.rank_workers:Misbehaving"


def reserve(count: int, gpus: int = 0) -> Reservation:
    return Reservation([RoleRequest("policy", f"learner.ranks = {count}", count, gpus)], 600.0)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    """Where one of them raises an error at once, the other says nothing however long one waits."""
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.2)
    held = reserve(2)
    group = RankGroup(MISBEHAVING, ("hello",), 2, "cpu", SETTINGS, held)
    yield group
    group.close()
    held.close()


def test_a_cluster_that_this_process_is_in_is_taken() -> None:
    assert not connection.start(SETTINGS)


def test_rank_0_answers_and_calls_keep_their_order(two: RankGroup) -> None:
    assert two.call("greet", "Ann").result() == "hello Ann from 0"
    handles = [two.call("remember", number) for number in range(20)]
    assert [len(handle.result()) for handle in handles] == list(range(1, 21))
    assert two.aside("greet", "Bob").result() == "hello Bob from 0"


def test_the_error_of_any_rank_ends_the_group_with_its_message(two: RankGroup) -> None:
    with pytest.raises(RunError, match=r"^the gradient of rank 1 is not finite$"):
        two.call("fail", 1).result()
    with pytest.raises(RunError, match=r"^the gradient of rank 1 is not finite$"):
        two.call("greet", "Ann")


def test_a_rank_that_dies_beside_a_save_is_lost_to_whoever_calls_next(two: RankGroup) -> None:
    """A run restarts after a loss alone. What is written behind the steps may hear of it first."""
    with ThreadPoolExecutor(1) as saver:
        assert isinstance(saver.submit(two.aside("die", 1).exception).result(), WorkerLost)
    with pytest.raises(WorkerLost, match=r"^rank 1 died: "):
        two.call("greet", "Ann")
    two.close()
    with pytest.raises(WorkerLost, match=r"^rank 1 died: "):
        two.call("greet", "Ann")


def test_ranks_that_were_closed_say_so(two: RankGroup) -> None:
    two.close()
    with pytest.raises(RunError, match=r"^the ranks have ended$"):
        two.call("greet", "Ann")


def test_an_error_of_ours_is_told_with_its_rank(two: RankGroup) -> None:
    with pytest.raises(RunError, match=r"rank 0 failed: ZeroDivisionError"):
        two.call("stumble", 0).result()


def test_the_cause_is_told_and_not_who_waited_for_it(two: RankGroup) -> None:
    with pytest.raises(RunError, match=r"^rank 1 has no memory left$"):
        two.call("wait_in_vain", 1).result()


def test_a_rank_that_hangs_is_named_by_its_silence(
    two: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "HUNG_SECONDS", 1.0)
    pattern = (
        r"^rank 1 \(pid \d+ on [\d.]+\) did not come and says nothing, it hangs: rank 0 of 2 wait"
    )
    with pytest.raises(RunError, match=pattern):
        two.call("hang", 1).result()


@pytest.mark.parametrize("notices", [True, False])
def test_a_collective_that_nccl_gave_up_is_a_hang_and_no_loss(
    two: RankGroup, notices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch ends the process that waited, and often the one that was waited for, with SIGABRT. Ray
    knows no more than that they died. A lost process would be restarted.
    """
    monkeypatch.setattr(pulse, "LOOK_SECONDS", 0.2)
    # Where both end, a busy machine may be late with the other one; where one hangs, all is waited.
    monkeypatch.setattr(workers, "ENDED_SECONDS", 60.0 if notices else 5.0)
    place = r"at \S+rank_workers.py:\d+ in is_ended_by_nccl"
    pattern = (
        rf"^rank 1 \(pid \d+ on [\d.]+\) did not come and says nothing, it hangs {place}: "
        rf"rank 0 \(pid \d+ on [\d.]+\) waited in vain {place} for a collective of NCCL, "
        r"_REDUCE_SCATTER_BASE of 544997376 values \(number 7753\), for 600 seconds"
    )
    with pytest.raises(RunError, match=pattern) as raised:
        two.call("is_ended_by_nccl", 1, notices).result()
    assert not isinstance(raised.value, WorkerLost)


@pytest.mark.parametrize(
    "words",
    [
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network "
        "error, NCCL version 2.27.5",
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234",
    ],
)
def test_a_rank_that_lost_its_peer_in_a_collective_is_not_a_hang(
    two: RankGroup, words: str
) -> None:
    with pytest.raises(WorkerLost, match=r"^rank 0 of 2 waited in vain"):
        two.call("lose", 0, words).result()


def test_a_rank_that_aborts_for_another_reason_is_lost(two: RankGroup) -> None:
    with pytest.raises(WorkerLost, match=r"^rank 0 died: "):
        two.call("abort", 0).result()


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    """Two ranks of a group over gloo, watched at short intervals."""
    monkeypatch.setattr(pulse, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(pulse, "STILL_SECONDS", STILL)
    monkeypatch.setattr(pulse, "OUTSIDE_SECONDS", 1.0)
    held = reserve(2)
    group = RankGroup("helpers.rank_workers:Meeting", (), 2, "cpu", SETTINGS, held)
    yield group
    group.close()
    held.close()


def test_a_rank_that_does_nothing_while_another_waits_is_told_with_its_place(
    meeting: RankGroup,
) -> None:
    pattern = (
        r"^rank 1 \(pid \d+ on [\d.]+\) hangs: for \d+ seconds it has computed nothing at "
        r"\S+rank_workers.py:\d+ in sleeps, while rank 0 waited for it at \S+ranks.py:\d+ in sum$"
    )
    with pytest.raises(RunError, match=pattern):
        meeting.call("meet", 1, "sleeps", 3600.0).result()


def test_a_rank_that_is_stopped_is_told_and_ended(meeting: RankGroup) -> None:
    _, pid = meeting.places[1]
    with pytest.raises(RunError, match=rf"^rank 1 \(pid {pid} on .*hangs: .* has not answered"):
        meeting.call("meet", 1, "is_stopped", 0.0).result()
    end = time.monotonic() + 60.0
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)


def test_a_worker_that_is_alone_and_is_stopped_is_ended_and_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So another takes its place, as for one that died. Those of a group of ranks end the run."""
    monkeypatch.setattr(pulse, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(pulse, "STILL_SECONDS", STILL)
    monkeypatch.setattr(pulse, "OUTSIDE_SECONDS", 1.0)
    held = reserve(1)
    name = "helpers.rank_workers:Meeting"
    alone = Workers("rollout worker", name, (), 1, SETTINGS, held, "policy")
    ((_, pid),) = alone.places
    pattern = (
        rf"^rollout worker 0 \(pid {pid} on .*\) hangs: .* it uses no processor; was it stopped\?$"
    )
    try:
        with pytest.raises(WorkerLost, match=pattern):
            alone.call("is_stopped", 0.0).result()
        end = time.monotonic() + 60.0
        while psutil.pid_exists(pid) and time.monotonic() < end:
            time.sleep(0.1)
        assert not psutil.pid_exists(pid)
    finally:
        alone.close()
        held.close()


def test_a_rank_that_is_slow_is_waited_for(meeting: RankGroup) -> None:
    for how in ("computes", "keeps_the_interpreter", "starts_another"):
        assert meeting.call("meet", 1, how, 2.0 * STILL).result() == 2.0


def test_a_rank_that_dies_is_named_though_the_others_wait(two: RankGroup) -> None:
    with pytest.raises(RunError, match="rank 1 died: "):
        two.call("die", 1).result()


def test_a_full_disk_is_an_os_error_and_the_ranks_go_on(two: RankGroup) -> None:
    with pytest.raises(OSError, match="No space left"):
        two.aside("full").result()
    assert two.call("greet", "Ann").result() == "hello Ann from 0"


def test_more_ranks_than_gpus_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UsageError, match=r"learner\.ranks = 4096 needs as many GPUs"):
        reserve(4096, gpus=1)


def test_many_ranks_that_ask_for_nothing_fit_on_one_core() -> None:
    assert 4096 * MARK < 1.0
    reserve(64).close()


def test_a_worker_that_cannot_be_made_says_why() -> None:
    with pytest.raises(UsageError, match="has no 'Absent'"):
        RankGroup("helpers.rank_workers:Absent", (), 1, "cpu", SETTINGS, reserve(1))
