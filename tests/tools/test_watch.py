"""`postgrad watch`: one user's page of a run that is under way."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.made_run import GROUP, add_step, made_run
from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.observe.report.selection import Cap
from postgrad.observe.sinks import Logs
from postgrad.tools.pages import Feed, WatchServer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run", steps=2)


@pytest.fixture
def server(run: Path) -> Iterator[WatchServer]:
    watch_server = WatchServer(Feed(run), 0)
    thread = threading.Thread(target=watch_server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield watch_server
    watch_server.shutdown()
    thread.join()
    watch_server.server_close()


def get(
    server: WatchServer, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.headers)
    finally:
        connection.close()


def bearer(server: WatchServer) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.token}"}


def test_the_address_opens_the_page_and_its_data(server: WatchServer) -> None:
    path = server.address.removeprefix(f"http://127.0.0.1:{server.server_port}")
    status, page, headers = get(server, path)
    assert status == 200
    assert page.startswith("<!doctype html>")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert server.token not in page
    status, text, _ = get(server, "/messages?generation=&next=0", bearer(server))
    feed_page = json.loads(text)
    assert status == 200
    assert [message["kind"] for message in feed_page["messages"]][:2] == ["run", "metrics"]
    status, text, _ = get(server, "/bodies?run=0&id=3", bearer(server))
    assert set(json.loads(text)["bodies"]) == {"3"}


@pytest.mark.parametrize("path", ["/", "/messages", "/bodies?id=0", "/none"])
def test_nothing_is_told_without_the_token(server: WatchServer, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Basic {server.token}"}):
        assert get(server, path, headers)[0] == 403
    near = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
    assert get(server, path, {"Authorization": f"Bearer {near}"})[0] == 403
    assert get(server, f"{path}{'&' if '?' in path else '?'}token={near}")[0] == 403


def test_another_name_for_this_machine_is_refused_even_with_the_token(server: WatchServer) -> None:
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert get(server, "/messages", {**bearer(server), "Host": host})[0] == 403
    good = {**bearer(server), "Host": f"localhost:{port}"}
    assert get(server, "/messages", good)[0] == 200


def test_a_request_names_one_host_and_it_is_this_machine(server: WatchServer) -> None:
    """As raw HTTP: no browser sends two, or none, and a library might mend them."""
    port, page = server.server_port, f"/messages?token={server.token}"

    def status(*lines: str) -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
            return int(connection.recv(4096).split()[1])

    own_host, foreign_host = f"Host: 127.0.0.1:{port}", f"Host: evil.example:{port}"
    assert status(f"GET {page} HTTP/1.1", own_host) == 200
    assert status(f"GET {page} HTTP/1.1", f"Host: [::1]:{port}") == 200
    for lines in (
        [],
        [foreign_host],
        [own_host, foreign_host],
        [foreign_host, own_host],
        ["Host:"],
        [f"Host: {port}"],
    ):
        assert status(f"GET {page} HTTP/1.1", *lines) == 403
    assert status(f"GET {page} HTTP/1.0") == 403
    assert status(f"GET http://evil.example{page} HTTP/1.1", foreign_host) == 403
    for path in ("/", "/messages", "/bodies?id=0"):  # and without the token nothing at all
        assert status(f"GET {path} HTTP/1.1", foreign_host) == 403
        assert status(f"GET {path} HTTP/1.1", own_host) == 403


def test_no_other_origin_may_read_or_frame_it(server: WatchServer) -> None:
    other = {**bearer(server), "Origin": "http://evil.example"}
    headers = {name.lower(): value for name, value in get(server, "/messages", other)[2].items()}
    assert not [name for name in headers if name.startswith("access-control-")]
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert headers["cache-control"] == "no-store"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert get(server, "/messages", other, "OPTIONS")[0] == 501
    assert get(server, "/messages", other, "POST")[0] == 501


@pytest.mark.parametrize(
    ("path", "status"),
    [("/messages?next=x", 400), ("/bodies?id=x", 400), ("/none", 404), ("/bodies?id=999999", 200)],
)
def test_odd_questions_have_plain_answers(server: WatchServer, path: str, status: int) -> None:
    assert get(server, path, bearer(server))[0] == status


def messages_of(feed: Feed, generation: str = "", start: int = 0) -> dict[str, Any]:
    return json.loads(feed.messages(generation, start))


def add(run: Path, step: int) -> None:
    logs = Logs(run)
    add_step(logs, step, 2)
    logs.close()


def test_a_page_is_told_only_what_is_new(run: Path) -> None:
    feed = Feed(run)
    first = messages_of(feed)
    nothing = messages_of(feed, first["generation"], first["next"])
    assert (nothing["messages"], nothing["next"]) == ([], first["next"])
    add(run, 3)
    new = messages_of(feed, first["generation"], first["next"])
    kinds = [message["kind"] for message in new["messages"]]
    assert kinds == ["metrics", "groups", "counts"]
    assert [line["step"] for line in new["messages"][0]["lines"]] == [3]
    everything = messages_of(feed)  # a second page
    assert everything["messages"] == first["messages"] + new["messages"]


def test_a_page_is_told_for_how_long_each_run_has_written_nothing(run: Path) -> None:
    for path in [run / "recipe.json", *run.glob("*.jsonl")]:
        os.utime(path, (1e9, 1e9))
    (silent,) = messages_of(Feed(run))["unwritten"]
    assert silent > 1e8
    add(run, 3)
    (after,) = messages_of(Feed(run))["unwritten"]
    assert after < silent / 1e3


def test_a_run_that_begins_anew_changes_the_generation(run: Path) -> None:
    feed = Feed(run)
    first = messages_of(feed)
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run / name).unlink()
    add(run, 1)
    anew = messages_of(feed, first["generation"], first["next"])
    assert anew["generation"] != first["generation"]
    assert next(message["kind"] for message in anew["messages"]) == "run"
    (metrics,) = [message for message in anew["messages"] if message["kind"] == "metrics"]
    assert [line["step"] for line in metrics["lines"]] == [1]


def test_while_there_is_no_run_a_page_is_told_so_and_loses_nothing_of_the_next(
    run: Path, server: WatchServer
) -> None:
    path = "/messages?generation=&next=0"
    before = json.loads(get(server, path, bearer(server))[1])
    shutil.rmtree(run)
    for page in ("/", path, "/bodies?run=0&id=0"):
        status, text, _ = get(server, page, bearer(server))
        assert status == 503
        assert str(run) in text
    assert 'http-equiv="refresh"' in get(server, "/", bearer(server))[1]
    made_run(run, steps=1)
    anew = json.loads(get(server, path, bearer(server))[1])
    assert anew["generation"] != before["generation"]
    steps = [m["lines"] for m in anew["messages"] if m["kind"] == "metrics"]
    assert [[line["step"] for line in lines] for lines in steps] == [[1]]


def test_the_cap_holds_while_a_run_goes_on(run: Path) -> None:
    feed = Feed(run, cap=Cap(samples=100 * GROUP))  # of a recipe of 100 steps
    shown = [
        message["shown"] for message in messages_of(feed)["messages"] if message["kind"] == "counts"
    ]
    add(run, 3)
    shown += [
        message["shown"] for message in messages_of(feed)["messages"] if message["kind"] == "counts"
    ]
    assert shown[-1] == 3 * GROUP


def test_no_run_and_no_port_are_told_plainly(
    tmp_path: Path, run: Path, server: WatchServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "it is not a run directory" in error
    assert "has not begun cannot be watched yet" in error
    with pytest.raises(UsageError, match="take another --port"):
        WatchServer(Feed(run), server.server_port)
    with pytest.raises(UsageError, match="from 0 to 65535"):
        WatchServer(Feed(run), 1 << 16)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(run: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "postgrad", "watch", str(run)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", line)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert "a run that is under way continues" in out
