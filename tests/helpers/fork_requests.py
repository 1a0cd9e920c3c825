"""How a process asks a server for a fork: three standard streams and a JSON value over a socket.
For helpers.ray_forks and helpers.worker_forks.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIZE = 8  # bytes of a number


def require_one_thread() -> None:
    """A fork has one thread, and may wait for the others forever."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads, of which a fork has one"


def send_request(server: socket.socket, request: Any, streams: Sequence[int]) -> None:
    """streams: standard input, output and error of the fork."""
    text = json.dumps(request).encode()
    socket.send_fds(server, [len(text).to_bytes(SIZE, "big")], streams)
    server.sendall(text)


def receive_request(asked: socket.socket) -> tuple[Any, list[int]] | None:
    """(request, streams), or None where whoever asks has ended."""
    size, streams, *_ = socket.recv_fds(asked, SIZE, 3)
    if not size:
        return None
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += asked.recv(1 << 16)
    return json.loads(text), streams


def take_place(streams: Sequence[int], environment: Mapping[str, str], folder: str) -> None:
    """This fork has these streams, variables and folder from now on."""
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
