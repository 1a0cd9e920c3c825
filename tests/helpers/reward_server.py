"""The real server of rewards in a thread, over a model that does what its tokens say."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.chat import chat_tokenizer
from postgrad.tools.pages import own_hosts
from postgrad.tools.serve.app import Pages
from postgrad.tools.serve.batcher import ScoringModel
from postgrad.tools.serve.metrics import Metrics
from postgrad.tools.serve.server import Server, listen
from postgrad.tools.serve.wire import ServerLimits

TOKENIZER = chat_tokenizer()
POISON = 95  # a sequence that begins with this token makes the model raise
NAN = 94  # and with this one gives no number


def score_of(ids: Sequence[int]) -> float:
    """What the model below says: the sum of the ids, each times its place from 1."""
    return float(sum(place * token for place, token in enumerate(ids, 1)))


@dataclass
class FakeModel:
    """A reward model without weights. gate: what each call waits for; batches: what it got."""

    tokenizer: Any = TOKENIZER
    hash: str = "model-1"
    mean: float | None = 10.0
    std: float | None = 4.0
    max_tokens: int | None = None
    separator: str | None = None
    images: Any = None
    seconds: float = 0.0
    gate: threading.Event | None = None
    entered: threading.Event = field(default_factory=threading.Event)
    batches: list[list[list[int]]] = field(default_factory=list)

    def score(self, sequences: Sequence[NDArray[np.int32]], images: Any) -> NDArray[np.float64]:
        self.batches.append([token_ids.tolist() for token_ids in sequences])
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(100)
        time.sleep(self.seconds)
        if any(token_ids[0] == POISON for token_ids in sequences):
            raise RuntimeError("secret text of a request")
        values = [
            np.nan if token_ids[0] == NAN else score_of(token_ids.tolist())
            for token_ids in sequences
        ]
        return np.array(values, np.float64)


@dataclass
class Running:
    """A server at `port`, its model and how to stop it."""

    port: int
    server: Server
    thread: threading.Thread
    metrics: Metrics

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str = "/score", body: Any = None, *, method: str = "", **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, JSON or text, headers) of one request. body: bytes as they are, else JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json"} | headers
        connection.request(method or ("GET" if data is None else "POST"), path, data, all_headers)
        with connection.getresponse() as reply:
            text = reply.read().decode()
            reply_headers = {name.lower(): value for name, value in reply.getheaders()}
        connection.close()
        as_json = reply_headers.get("content-type") == "application/json"
        return reply.status, json.loads(text) if as_json and text else text, reply_headers

    def scores(self, *inputs: Any, **headers: str) -> tuple[int, Any]:
        """(status, JSON) of a request for scores; an input that is a list is token ids."""
        named = [
            {"token_ids": prompt_input} if isinstance(prompt_input, list) else prompt_input
            for prompt_input in inputs
        ]
        return self.ask("/score", {"inputs": named}, **headers)[:2]

    def raw(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """What comes back on a socket that sends `parts` with pauses, until it is closed. A Host
        OWN is this server's.
        """
        host_header = f"Host: 127.0.0.1:{self.port}\r\n".encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            for part in parts:
                try:
                    connection.sendall(part.replace(b"Host: OWN\r\n", host_header))
                except (BrokenPipeError, ConnectionResetError):
                    break
                time.sleep(pause)
            received = b""
            try:
                while chunk := connection.recv(65536):
                    received += chunk
            except ConnectionResetError:
                pass
        return received

    def metric(self, name: str, labels: str = "") -> float:
        """A line of the metrics page; 0 where it is not there."""
        text = self.ask("/metrics")[1]
        start = f"postgrad_reward_{name}{labels} "
        samples = [line for line in text.splitlines() if line.startswith(start)]
        return float(samples[0].removeprefix(start)) if samples else 0.0


@contextmanager
def reward_server(
    model: ScoringModel | None = None,
    *,
    token: str | None = None,
    limits: ServerLimits | None = None,
    port: int = 0,
) -> Iterator[Running]:
    """A server on a free port until the block ends."""
    metrics, started = Metrics(), threading.Event()
    limits = limits or ServerLimits()
    with listen("127.0.0.1", port) as listening:
        port = listening.getsockname()[1]
        hosts = own_hosts("127.0.0.1", port) if token is None else None
        app = Pages(model or FakeModel(), "fake", limits, metrics).app(token, hosts)
        server = Server(app, limits, metrics, started.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            assert started.wait(20)
            yield Running(port, server, thread, metrics)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
