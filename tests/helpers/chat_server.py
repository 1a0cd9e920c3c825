"""A server of chat completions or of scores, that behaves as badly as it is told."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """One reply. text: the assistant's, as a chat completion; else `raw` bytes as they are.

    delay: seconds before it; drip: seconds between its bytes; cut: bytes it ends short of what its
    header promises.
    """

    text: str | None = None
    status: int = 200
    raw: bytes = b""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    delay: float = 0.0
    drip: float = 0.0
    cut: int = 0

    @property
    def body(self) -> bytes:
        """What goes over the wire."""
        if self.text is None:
            return self.raw
        message = {"role": "assistant", "content": self.text}
        return json.dumps({"choices": [{"index": 0, "message": message}]}).encode()


Script = Callable[[str, int], Answer]  # (what is asked, how often it was before) -> Answer


@dataclass
class ChatServer:
    """url: its base. requests: (path, headers, body) of each. held: how many wait for a reply."""

    url: str
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list[Any])
    held: int = 0


def _asked_in(body: dict[str, Any]) -> str:
    """The last message's text, the text that is to be continued, or that is to be scored."""
    if "prompt" in body:  # a text, or token ids
        prompt = body["prompt"]
        return prompt if isinstance(prompt, str) else json.dumps(prompt)
    first_input = body["inputs"][0] if "inputs" in body else body
    content = (
        first_input["text"] if "text" in first_input else first_input["messages"][-1]["content"]
    )
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


@contextmanager
def chat_server(script: Script) -> Iterator[ChatServer]:
    """A server that answers as `script` says, until the block ends."""
    state = ChatServer("")
    lock = threading.Lock()
    asked: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._asked(self.path, {})

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            self._asked(_asked_in(body), body)

        def _asked(self, prompt: str, body: dict[str, Any]) -> None:
            with lock:
                before = asked[prompt]
                asked[prompt] += 1
                state.requests.append((self.path, dict(self.headers), body))
                state.held += 1
            try:
                answer = script(prompt, before)
                time.sleep(answer.delay)
            finally:
                with lock:  # before the reply: who has it may ask again at once
                    state.held -= 1
            with suppress(BrokenPipeError, ConnectionResetError):  # the client had waited enough
                self._answer(answer)

        def _answer(self, answer: Answer) -> None:
            body = answer.body
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for byte in body if answer.drip else b"":
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(answer.drip)
            if not answer.drip:
                self.wfile.write(body[: len(body) - answer.cut])

        def log_message(self, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
