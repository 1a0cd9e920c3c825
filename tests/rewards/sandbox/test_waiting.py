"""Which descriptors can be read, and for how long they are waited for."""

import os
import socket
import subprocess
import sys

import pytest

from postgrad.rewards.sandbox.waiting import readable


def test_what_has_bytes_or_has_lost_its_other_end_can_be_read():
    pairs = [socket.socketpair() for _ in range(3)]
    descriptors = [ours.fileno() for ours, _ in pairs]
    assert readable(descriptors, 0.0) == []
    pairs[1][1].send(b"x")
    assert readable(descriptors, 60.0) == descriptors[1:2]
    pairs[2][1].close()
    assert readable(descriptors, 60.0) == descriptors[1:]
    for pair in pairs:
        for end in pair:
            end.close()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there are no pidfds")
def test_a_process_that_has_ended_can_be_read():
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        descriptor = os.pidfd_open(child.pid)
        try:
            assert readable([descriptor], 0.0) == []
            child.kill()
            assert readable([descriptor], 60.0) == [descriptor]
        finally:
            os.close(descriptor)
