"""Which job the time of a worker is held against, whenever its pool comes to look."""

import selectors
import time
from types import SimpleNamespace

from postgrad.rewards import pool
from postgrad.rewards.process import WorkerProcess


def test_the_time_before_a_job_began_is_not_held_against_it(score, monkeypatch):
    """Half a second, the most that counts, passes before each look that sees an answer."""
    clock = SimpleNamespace(now=0.0)

    class Late(selectors.DefaultSelector):
        def select(self, timeout=None):
            events = super().select(timeout)
            clock.now += 0.5 if events else 0.0
            return events

    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(pool.selectors, "DefaultSelector", Late)
    group = score("count", "sleep a little", "count", wall_seconds=0.3)
    assert group.failures == ()
    assert group.total.tolist() == [1.0, 0.75, 2.0]  # one process scored all three


def test_cpu_time_of_the_next_job_is_not_held_against_one_that_has_answered(score, monkeypatch):
    """As on a machine where the pool has to wait between reading answers and looking."""
    look, looks = WorkerProcess.cpu_of_running, []

    def late(worker):
        looks.append(worker)
        until = time.monotonic() + 3.0
        while len(looks) == 1 and look(worker) < 0.5 and time.monotonic() < until:
            time.sleep(0.01)
        return look(worker)

    monkeypatch.setattr(WorkerProcess, "cpu_of_running", late)
    group = score("burn", "burn", "burn", cpu_seconds=0.45)
    assert group.failures == ()
    assert group.total.tolist() == [0.5, 0.5, 0.5]
