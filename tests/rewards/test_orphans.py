"""Nothing of a worker and its sandbox stays in the process table when it is killed."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards import descendants as descendants_module
from postgrad.rewards.descendants import adopting, descendants, end_with_descendants
from postgrad.rewards.settings import RewardSettings


def remaining(pids):
    """Those that are still in the table, zombies of whoever included, after a moment."""
    late = time.monotonic() + 60.0
    while (left := [p for p in pids if Path(f"/proc/{p}").exists()]) and time.monotonic() < late:
        time.sleep(0.01)
    return left


def test_a_child_is_ended_with_those_that_lose_their_parent_by_it(monkeypatch):
    monkeypatch.setattr(descendants_module, "_SECONDS", 60.0)  # a killed process needs a processor
    sleep = "import subprocess, sys, time\n{}\nprint('ready', flush=True)\ntime.sleep(600)"
    inner = sleep.format("")
    outer = sleep.format(
        f"p = subprocess.Popen([sys.executable, '-c', {inner!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", outer], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline() == b"ready\n"
    under = list(descendants(process.pid))
    assert len(under) == 1
    assert end_with_descendants(process, group=True) == -signal.SIGKILL
    assert [pid for pid in under if Path(f"/proc/{pid}").exists()] == []
    process.stdout.close()


def adopts():
    """Whether this process is given the orphans among its descendants."""
    is_set, of_subreapers = ctypes.c_int(), 37
    ctypes.CDLL(None).prctl(of_subreapers, ctypes.byref(is_set), 0, 0, 0)
    return bool(is_set.value)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels let nobody adopt")
def test_a_process_adopts_until_the_last_of_its_threads_has_what_it_waited_for():
    before = adopts()
    first, second = adopting(), adopting()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert adopts()
    second.__exit__(None, None, None)
    assert adopts() == before


def test_a_worker_that_is_killed_over_a_text_leaves_no_process_of_its_sandbox(
    own_workers, make_scorer, make_prompt, make_rollouts
):
    others = set(descendants(os.getpid()))
    scorer = make_scorer(
        RewardSettings(type="code", name="code", whole_text=True),
        RewardSettings(type="regex", pattern="(a+)+b", when={"slow": "yes"}, cpu_seconds=0.2),
    )
    sums = {"answer": json.dumps({"inputs": ["7"], "outputs": ["7"]})}
    try:
        group = scorer.score([(make_prompt(**sums, slow="no"), make_rollouts(["print(input())"]))])
    except UsageError as error:
        pytest.skip(str(error))
    assert group[0].total.tolist() == [1.0]
    before = set(descendants(os.getpid())) - others
    (backtracks,) = scorer.score([(make_prompt(**sums, slow="yes"), make_rollouts(["a" * 40]))])
    assert [failure.cause for failure in backtracks.failures] == ["cpu_time"]
    gone = before - set(descendants(os.getpid()))
    scorer.close()
    assert len(gone) >= 3  # a worker, and its sandbox with it
    assert remaining(before) == []
