"""How often the zygote looks at what its programs have used."""

import socket

import pytest

from postgrad.rewards.sandbox import zygote


class Burning:
    """A program whose threads burn so many seconds in one, on a clock of its own."""

    end, pid, clock = None, 0, 0.0

    def __init__(self, threads):
        self.threads = threads

    def cpu(self):
        return self.clock * self.threads

    def reap(self):
        return self.end is not None

    def kill(self):
        self.end = {"code": -9}


@pytest.mark.skipif(not hasattr(zygote.os, "pidfd_open"), reason="there are no pidfds")
@pytest.mark.parametrize(("threads", "cores"), [(16, 64), (16, 2), (1, 64)])
def test_threads_on_many_cores_do_not_outrun_the_limit(threads, cores, monkeypatch):
    child, looks = Burning(min(threads, cores)), []

    def readable(descriptors, seconds):
        child.clock += seconds
        looks.append(seconds)
        return []

    monkeypatch.setattr(zygote.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(zygote.os, "pidfd_open", lambda pid: socket.socketpair()[0].detach())
    monkeypatch.setattr(zygote, "readable", readable)
    with socket.socket() as control:
        assert zygote._watch(control, [child], 2.0, 16)
    assert 2.0 <= child.cpu() < 2.0 + 2 * 0.001 * 64
    assert len(looks) < 200
