"""Ids of the hub with a revision, and the commits that they mean."""

import json
import socket
import string
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import HfApi
from hypothesis import given
from hypothesis import strategies as st

from helpers.hub import A, B, OfflineHub
from postgrad.core import hub as module
from postgrad.core.errors import UsageError
from postgrad.core.hub import at_revision, cached_commits, commit_of, pretrained, split_revision

WORDS = st.text(string.ascii_letters + string.digits + "_.-", min_size=1, max_size=8)


@given(st.lists(WORDS, min_size=1, max_size=2), st.none() | st.lists(WORDS, min_size=1, max_size=3))
def test_a_revision_comes_back_from_its_source(parts: list[str], more: list[str] | None) -> None:
    name, revision = "/".join(parts), more and "/".join(more)
    assert split_revision(at_revision(name, revision)) == (name, revision)


def test_paths_with_an_at_sign_are_left_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model@2").mkdir()
    for path in ("model@2", "@sft", "./runs/a@b", "/a/b/c@d"):
        assert split_revision(path) == (path, None)
    assert pretrained("org/name@v1") == ("org/name", {"revision": "v1"})
    assert pretrained("org/name") == ("org/name", {})


def test_the_cache_says_what_a_branch_means_where_the_hub_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = OfflineHub(tmp_path, monkeypatch)
    (tmp_path / "files").mkdir()
    hub.model("org/name", A, tmp_path / "files")
    hub.model("org/name", B, tmp_path / "files", branch="refs/pr/1")
    assert commit_of("model", "org/name") == A
    assert commit_of("model", "org/name", "refs/pr/1") == B
    assert commit_of("model", "org/name", B) == B
    assert cached_commits("model", "org/name") == [A, B]
    assert cached_commits("dataset", "org/name") == []
    with pytest.raises(UsageError, match=r"no model org/name@v9: .*no commit of it"):
        commit_of("model", "org/name", "v9")
    with pytest.raises(UsageError, match=r"no dataset org/name: .*file or folder"):
        commit_of("dataset", "org/name")


class _Answers(BaseHTTPRequestHandler):
    """The hub's answer about one model: main is B, and there is no other revision."""

    def do_GET(self) -> None:
        is_known = self.path.partition("?")[0] in (
            "/api/models/org/name",
            "/api/models/org/name/revision/main",
        )
        body = json.dumps({"id": "org/name", "sha": B, "siblings": []} if is_known else {}).encode()
        self.send_response(200 if is_known else 404)
        if not is_known:
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    yield address
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_is_asked_before_the_cache(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub = OfflineHub(tmp_path, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "files").mkdir()
    hub.model("org/name", A, tmp_path / "files")
    hub.point("models", "org/name", "gone", A)
    assert commit_of("model", "org/name") == B
    assert commit_of("model", "org/name", "main") == B
    with pytest.raises(UsageError, match="no model org/name@gone: 404"):
        commit_of("model", "org/name", "gone")  # the hub says no: the cache is not believed


def test_a_hub_that_never_answers_is_asked_once_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket takes connections and says nothing, as behind a firewall."""
    remembered = OfflineHub(tmp_path, monkeypatch)
    (tmp_path / "files").mkdir()
    remembered.model("org/name", A, tmp_path / "files")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "SECONDS", 0.2)
    monkeypatch.setattr(module, "_silent_at", None)
    asked: list[str] = []
    ask = module._ask

    def counted(kind: Any, path: str, revision: str | None) -> str:
        asked.append(path)
        return ask(kind, path, revision)

    monkeypatch.setattr(module, "_ask", counted)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        monkeypatch.setattr(HfApi, "__init__", _at(f"http://{host}:{port}"))
        assert commit_of("model", "org/name") == A  # the cache knows it
        with pytest.raises(UsageError, match=r"no model org/other: the hub did not answer"):
            commit_of("model", "org/other")
    assert asked == ["org/name"]


def test_a_hub_that_cannot_be_reached_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OfflineHub(tmp_path, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "_silent_at", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host, port = taken.getsockname()
    monkeypatch.setattr(HfApi, "__init__", _at(f"http://{host}:{port}"))
    refused = r"no dataset org/other: the hub did not answer \(\[Errno \d+\] Connection refused\); "
    with pytest.raises(UsageError, match=refused):
        commit_of("dataset", "org/other")


def _at(endpoint: str) -> Any:
    original_init = HfApi.__init__

    def init(self: HfApi) -> None:
        original_init(self, endpoint=endpoint)

    return init
