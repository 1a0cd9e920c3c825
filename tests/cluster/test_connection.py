"""Addresses at which no Ray cluster is: told within seconds, in one message."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from postgrad.cluster import connection
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
