"""The few answers of a hub that one push needs, on loopback."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "c" * 40


class Pushed:
    """What clients made: repositories with their privacy, and files by name."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.message = ""
        self.refuses = 0  # a status that every request gets


class _Handler(BaseHTTPRequestHandler):
    pushed: Pushed

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.pushed.refuses:
            self._answer({"error": "no"}, self.pushed.refuses)
        elif self.path == "/api/repos/create":
            asked = json.loads(raw)
            name = "/".join(filter(None, [asked.get("organization"), asked["name"]]))
            self.pushed.repositories[name] = asked.get("visibility") == "private" or bool(
                asked.get("private")
            )
            self._answer({"url": f"{constants.ENDPOINT}/{name}", "id": name, "name": name})
        elif self.path == "/api/validate-yaml":
            self._answer({"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(raw)["files"]
            ]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, raw.splitlines()):
                if line["key"] == "header":
                    self.pushed.message = line["value"]["summary"]
                elif line["key"] == "file":
                    value = line["value"]
                    self.pushed.files[value["path"]] = base64.b64decode(value["content"])
            repository = self.path.split("/api/models/")[1].partition("/commit")[0]
            url = f"{constants.ENDPOINT}/{repository}/commit/{COMMIT}"
            self._answer({"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self._answer({"error": self.path}, 404)

    def do_GET(self) -> None:
        description = {"id": "org/name", "sha": "d" * 40, "siblings": []}
        self._answer(description if self.path.startswith("/api/models/") else {"error": self.path})

    def _answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub_server(patch: pytest.MonkeyPatch) -> Iterator[Pushed]:
    """A hub of this process's own, at constants.ENDPOINT."""
    pushed = Pushed()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"pushed": pushed}))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    patch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setenv("HF_TOKEN", "hf_of_a_test")
    try:
        yield pushed
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
