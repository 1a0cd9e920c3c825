"""Real sockets, a model that obeys its tokens: scores come back, everything else is refused."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from helpers.reward_server import NAN, POISON, TOKENIZER, FakeModel, reward_server, score_of
from postgrad.tools.serve.wire import ServerLimits

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
SMALL = ServerLimits(
    request_bytes=2000, request_seconds=20.0, inputs=4, input_tokens=30, batch_tokens=30,
    queue_tokens=60, requests=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def small():
    with reward_server(limits=SMALL) as server:
        yield server


@pytest.fixture
def hasty():
    """A server whose requests have to arrive within a second."""
    with reward_server(limits=replace(SMALL, request_seconds=1.0)) as server:
        yield server


def error_of(answer):
    """The code of an answer that has exactly the one shape of errors."""
    status, body, *_ = answer
    assert status >= 400
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message"}
    assert body["error"]["message"]
    return status, body["error"]["code"]


def test_one_request_scores_messages_text_and_token_ids_in_order(small):
    text = TOKENIZER.apply_chat_template(CHAT, tokenize=False).rstrip("\n")
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    status, body = small.scores({"messages": CHAT}, {"text": text}, ids, [3, 4])
    assert status == 200
    assert body == {
        "scores": [score_of(ids)] * 3 + [11.0],
        "model": "model-1",
        "mean": 10.0,
        "std": 4.0,
    }


def test_info_names_model_tokenizer_and_limits(small):
    status, body, _ = small.ask("/info")
    assert status == 200
    assert (body["name"], body["model"], body["mean"], body["std"]) == ("fake", "model-1", 10, 4)
    assert len(body["tokenizer"]) == 64
    assert body["limits"]["input_tokens"] == 30
    assert small.ask("/health")[:2] == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "malformed_json"),
        (b"{", 400, "malformed_json"),
        (b"\xff\xfe", 400, "malformed_json"),
        (b"[" * 1900, 400, "malformed_json"),
        (b'{"inputs": [{"text": "\\ud800"}]}', 400, "malformed_json"),
        (b"null", 422, "invalid_request"),
        ({}, 422, "invalid_request"),
        ({"inputs": []}, 422, "invalid_request"),
        ({"inputs": [{}]}, 422, "invalid_request"),
        ({"inputs": [{"text": ""}]}, 422, "invalid_request"),
        ({"inputs": [{"text": 3}]}, 422, "invalid_request"),
        ({"inputs": [{"token_ids": []}]}, 422, "invalid_request"),
        ({"inputs": [{"token_ids": [1.0]}]}, 422, "invalid_request"),
        ({"inputs": [{"token_ids": [True]}]}, 422, "invalid_request"),
        ({"inputs": [{"text": "a", "token_ids": [1]}]}, 422, "invalid_request"),
        ({"inputs": [{"text": "a"}], "model": "x"}, 422, "invalid_request"),
        ({"inputs": [{"messages": [{"role": "user"}]}]}, 422, "invalid_request"),
        ({"inputs": [{"token_ids": [-1]}]}, 422, "unknown_token"),
        ({"inputs": [{"token_ids": [len(TOKENIZER)]}]}, 422, "unknown_token"),
        ({"inputs": [{"token_ids": [2**63]}]}, 422, "unknown_token"),
        ({"inputs": [{"messages": CHAT[:1]}]}, 422, "cannot_encode"),
        ({"inputs": [{"messages": CHAT[1:]}]}, 422, "cannot_encode"),
        ({"inputs": [{"text": "日"}]}, 422, "cannot_encode"),
        ({"inputs": [{"token_ids": [1] * 31}]}, 422, "too_many_tokens"),
        ({"inputs": [{"text": "a"}] * 5}, 422, "too_many_inputs"),
        (b'{"inputs": [{"text": "a"}], "inputs": [{"text": "b"}]}', 422, "invalid_request"),
        (b'{"inputs": [{"text": "a", "text": "b"}]}', 422, "invalid_request"),
        (b" " * 2001, 413, "too_large"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused_with_a_code(small, body, status, code):
    assert error_of(small.ask("/score", body)) == (status, code)
    assert small.scores([1])[0] == 200


def test_a_refusal_names_the_input_and_never_its_content(small):
    def message(*inputs):
        return small.scores(*inputs)[1]["error"]["message"]

    assert message([1], [1] * 31) == "inputs.1: 31 tokens, at most 30 in one input"
    assert message([1], {"text": 77}) == "inputs.1.text: Input should be a valid string"
    assert "77" not in message({"token_ids": [777]})
    twice = small.ask("/score", b'{"inputs": [{"text": "a", "text": "b"}]}')[1]
    assert twice["error"]["message"] == "an object has the key 'text' twice"
    assert "nothing to score" in message({"messages": CHAT[:1]})


def test_wrong_pages_methods_and_kinds_are_refused(small):
    assert error_of(small.ask("/nowhere")) == (404, "no_such_page")
    assert error_of(small.ask("/score/", {})) == (404, "no_such_page")
    answer = small.ask("/score")
    assert error_of(answer) == (405, "wrong_method")
    assert answer[2]["allow"] == "POST"
    assert error_of(small.ask("/info", {})) == (405, "wrong_method")
    body = json.dumps({"inputs": [{"text": "a"}]}).encode()
    refused = small.ask("/score", body, **{"Content-Type": "text/plain"})
    assert error_of(refused) == (415, "not_json")


def test_whoever_sends_a_large_body_sees_why_it_is_refused(small):
    """No system buffers so much: without a reader the connection would be reset."""

    def refused(server, path="/score", **headers):
        return error_of(server.ask(path, b" " * 20_000_000, Connection="close", **headers))

    assert refused(small) == (413, "too_large")
    assert refused(small, "/nowhere") == (404, "no_such_page")
    assert refused(small, **{"Content-Type": "text/plain"}) == (415, "not_json")
    assert refused(small, Host="example.org") == (421, "wrong_host")
    with reward_server(token="s3cret") as server:
        assert refused(server) == (401, "unauthorized")


def test_a_client_that_asks_before_it_sends_a_body_is_answered_at_once(small):
    head = b"POST /score HTTP/1.1\r\nHost: OWN\r\nContent-Type: application/json\r\n"
    asking = b"Content-Length: 9999\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    reply = small.raw(head + asking)
    assert reply.startswith(b"HTTP/1.1 413 ")


@pytest.mark.slow
def test_a_body_that_is_larger_than_it_says_or_says_nothing_is_cut_at_the_limit(hasty):
    head = b"POST /score HTTP/1.1\r\nHost: OWN\r\nContent-Type: application/json\r\n"
    chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
    reply = hasty.raw(head + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk, chunk)
    assert reply.startswith(b"HTTP/1.1 413 ")
    reply = hasty.raw(head + b"Content-Length: 99999999999\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: OWN\r\nContent-Length: -1\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: OWN\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET /info HTTP/1.1\r\nHost: OWN\r\nX: " + b"a" * 100_000,
    ],
)
def test_what_is_no_http_is_a_400_in_the_same_shape(small, request_bytes):
    reply = small.raw(request_bytes)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "malformed_http"
    assert small.scores([1])[0] == 200


@pytest.mark.slow
def test_a_client_that_is_slow_is_cut_off_wherever_it_is_slow(hasty):
    """Slowloris: in the headers, in the body, before them, and after an early refusal."""
    head = b"POST /score HTTP/1.1\r\nHost: OWN\r\nContent-Type: application/json\r\n"
    with ThreadPoolExecutor(4) as together:
        silent = together.submit(hasty.raw)
        headers = together.submit(hasty.raw, *[b"GET", *[b"x"] * 30], pause=0.1)
        body = together.submit(
            hasty.raw, head + b"Content-Length: 50\r\n\r\n", *[b" "] * 30, pause=0.1
        )
        after = together.submit(
            hasty.raw, head + b"Content-Length: 5000\r\n\r\n", *[b" "] * 30, pause=0.1
        )
        for late in (silent, headers, body):
            assert late.result().startswith(b"HTTP/1.1 408 "), late.result()
            assert b'"slow_request"' in late.result()
        assert after.result().startswith(b"HTTP/1.1 413 ")
    assert hasty.raw(b"GET /health HTTP/1.1\r\nHost: OWN\r\nConnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 200 "
    )


@pytest.mark.slow
def test_a_connection_is_used_again_and_may_be_idle_between_requests(hasty):
    body = b'{"inputs": [{"token_ids": [5]}]}'
    request_bytes = (
        b"POST /score HTTP/1.1\r\nHost: OWN\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    last = b"GET /health HTTP/1.1\r\nHost: OWN\r\nConnection: close\r\n\r\n"
    pause = 2.3  # seconds: longer than a request may take to arrive
    reply = hasty.raw(request_bytes, request_bytes[:20], request_bytes[20:] + last, pause=0.0)
    assert reply.count(b"HTTP/1.1 200 OK") == 3
    reply = hasty.raw(request_bytes, last, pause=pause)
    assert reply.count(b"HTTP/1.1 200 OK") == 2


def raw_status(port: int, *lines: str) -> int:
    """The status that a request has which is made of these lines."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        return int(connection.recv(4096).split()[1])


@pytest.mark.parametrize("page", ["/info", "/metrics", "/health", "/none"])
def test_without_a_token_only_the_names_of_this_machine_are_answered(small, page):
    """A page of the web whose name resolves to 127.0.0.1 would read the answers (DNS rebinding)."""
    port = small.port
    good = 404 if page == "/none" else 200
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert raw_status(port, f"GET {page} HTTP/1.1", f"Host: {host}") == good
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1:{port + 1}", "127.0.0.1", ""):
        assert raw_status(port, f"GET {page} HTTP/1.1", f"Host: {host}") == 421
    assert raw_status(port, f"GET {page} HTTP/1.0") == 421
    evil = f"GET http://evil.example{page} HTTP/1.1"
    assert raw_status(port, evil, "Host: evil.example") == 421


def test_scores_are_not_given_under_another_name(small):
    label = '{path="/score",status="421"}'
    before = small.metric("requests_total", label)
    headers = {"Host": "evil.example", "Content-Type": "application/json"}
    status, reply, _ = small.ask("/score", {"inputs": [{"token_ids": [5]}]}, **headers)
    assert (status, reply["error"]["code"]) == (421, "wrong_host")
    assert small.metric("requests_total", label) == before + 1


def test_with_a_token_a_proxy_may_have_a_name_of_its_own():
    with reward_server(token="secret") as server:
        lines = ("GET /info HTTP/1.1", "Host: rewards.example", "Authorization: Bearer secret")
        assert raw_status(server.port, *lines) == 200
        assert raw_status(server.port, *lines[:2]) == 401


def test_a_bearer_token_is_needed_everywhere_but_for_health():
    with reward_server(token="s3cret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"},
                        {"Authorization": "Basic s3cret"}, {"Authorization": "Bearer"},
                        {"Authorization": "Bearer s3cret x"}):  # fmt: skip
            for path, body in (("/score", {}), ("/info", None), ("/metrics", None), ("/x", None)):
                answer = server.ask(path, body, **headers)
                assert error_of(answer) == (401, "unauthorized")
                assert answer[2]["www-authenticate"] == "Bearer"
        assert server.ask("/health")[0] == 200
        good = {"Authorization": "Bearer s3cret"}
        assert server.scores([2], **good) == (200, {"scores": [2.0], "model": "model-1",
                                                    "mean": 10.0, "std": 4.0})  # fmt: skip
        assert server.ask("/info", **good)[0] == 200
        assert error_of(server.ask("/x", **good)) == (404, "no_such_page")


def test_requests_of_several_clients_are_scored_together():
    model = FakeModel(gate=threading.Event())
    with reward_server(model) as server, ThreadPoolExecutor(8) as clients:
        first = clients.submit(server.scores, [1])
        assert model.entered.wait(20)
        others = [clients.submit(server.scores, [i], [i, i]) for i in range(2, 8)]
        wait_until(lambda: server.metric("queue_sequences") == 12)
        assert server.metric("queue_tokens") == 18
        model.gate.set()
        assert first.result()[1]["scores"] == [1.0]
        for i, other in enumerate(others, 2):
            assert other.result()[1]["scores"] == [i, 3.0 * i]
        assert [len(batch) for batch in model.batches] == [1, 12]
        assert server.metric("batches_total") == 2


def test_a_short_request_is_not_kept_waiting_by_a_long_one():
    model = FakeModel(gate=threading.Event())
    limits = ServerLimits(batch_tokens=4, input_tokens=4)
    with reward_server(model, limits=limits) as server, ThreadPoolExecutor(3) as clients:
        clients.submit(server.scores, [9])
        assert model.entered.wait(20)
        long = clients.submit(server.scores, *[[1, 1]] * 100)
        wait_until(lambda: server.metric("queue_sequences") == 100)
        short = clients.submit(server.scores, [2], [3, 3])
        wait_until(lambda: server.metric("queue_sequences") == 102)
        model.gate.set()
        assert short.result()[1]["scores"] == [2.0, 9.0]
        assert long.result()[1]["scores"] == [3.0] * 100
    assert all(sum(map(len, batch)) <= 4 for batch in model.batches)
    when = [i for i, batch in enumerate(model.batches) if [2] in batch or [3, 3] in batch]
    assert when == [1, 2]  # the next two batches, each shared with the long request


def test_a_full_queue_and_too_many_requests_are_told_to_come_again():
    model = FakeModel(gate=threading.Event())
    limits = ServerLimits(batch_tokens=30, input_tokens=30, queue_tokens=60, requests=4)
    with reward_server(model, limits=limits) as server, ThreadPoolExecutor(8) as clients:
        first = [clients.submit(server.scores, [1])]
        assert model.entered.wait(20)
        first += [clients.submit(server.scores, [1] * 29) for _ in range(2)]
        wait_until(lambda: server.metric("queue_tokens") == 58)
        status, body, headers = server.ask("/score", {"inputs": [{"token_ids": [1, 1, 1]}]})
        assert (status, body["error"]["code"]) == (503, "busy")
        assert 1 <= int(headers["retry-after"]) <= 60
        first.append(clients.submit(server.scores, [1]))
        wait_until(lambda: server.metric("open_requests") == 4)
        status, body, headers = server.ask("/score", {"inputs": [{"token_ids": [1]}]})
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "busy", "1")
        assert server.ask("/health")[0] == 200
        model.gate.set()
        assert [future.result()[0] for future in first] == [200] * 4
        assert server.scores([1])[0] == 200


def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits():
    limits = ServerLimits(batch_tokens=30, input_tokens=30, queue_tokens=60)
    with reward_server(limits=limits) as server:
        assert server.scores(*[[1] * 30] * 5) == (
            200,
            {"scores": [465.0] * 5, "model": "model-1", "mean": 10.0, "std": 4.0},
        )


def test_a_crash_on_one_sequence_fails_its_request_and_no_other():
    model = FakeModel(gate=threading.Event())
    with reward_server(model) as server, ThreadPoolExecutor(8) as clients:
        clients.submit(server.scores, [1])
        assert model.entered.wait(20)
        good = [clients.submit(server.scores, [i], [7]) for i in range(2, 6)]
        bad = clients.submit(server.scores, [1], [POISON, 1], [POISON, 2])
        wait_until(lambda: server.metric("queue_sequences") == 11)
        model.gate.set()
        for i, future in enumerate(good, 2):
            assert future.result()[1]["scores"] == [i, 7.0]
        assert error_of(bad.result()) == (500, "model_failed")
        message = bad.result()[1]["error"]["message"]
        assert message == "inputs.1, and 1 more: the model failed: RuntimeError"
        assert server.scores([4])[1]["scores"] == [4.0]


def test_nan_is_an_error_of_its_input_and_never_a_number(small):
    assert small.scores([NAN])[0] == 500
    answer = small.scores([1], [2], [NAN, 3])
    assert error_of(answer) == (500, "not_finite")
    assert answer[1]["error"]["message"] == "inputs.2: the model's score is nan"
    assert small.scores([1], [2])[1]["scores"] == [1.0, 2.0]


def test_scores_that_take_too_long_are_a_504_and_a_hanging_model_is_ill():
    model = FakeModel(gate=threading.Event())
    limits = ServerLimits(request_seconds=0.3)
    with reward_server(model, limits=limits) as server, ThreadPoolExecutor(2) as clients:
        both = [clients.submit(server.scores, [1]) for _ in range(2)]
        assert [error_of(future.result()) for future in both] == [(504, "timeout")] * 2
        assert server.metric("queue_sequences") == 0  # nobody waits for it any more
        wait_until(lambda: server.ask("/health")[0] == 503)  # the model began after the requests
        assert error_of(server.ask("/health")) == (503, "stuck")
        model.gate.set()
        wait_until(lambda: server.ask("/health")[0] == 200)
        # In 0.3 seconds: a busy machine may have to be asked again.
        wait_until(lambda: server.scores([3])[1].get("scores") == [3.0])
    assert all(ids == [3] for batch in model.batches[1:] for ids in batch)


def test_what_a_client_no_longer_waits_for_is_not_scored():
    model = FakeModel(gate=threading.Event())
    with reward_server(model) as server, ThreadPoolExecutor(2) as clients:
        first = clients.submit(server.scores, [1])
        assert model.entered.wait(20)
        body = b'{"inputs": [{"token_ids": [77]}]}'
        head = b"POST /score HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % server.port
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(head + body)
            wait_until(lambda: server.metric("queue_sequences") == 1)
        wait_until(lambda: server.metric("queue_sequences") == 0)
        model.gate.set()
        assert first.result()[0] == 200
        assert server.metric("requests_total", '{path="/score",status="499"}') == 1
    assert model.batches == [[[1]]]


def test_stopping_finishes_what_is_under_way_and_refuses_new():
    model = FakeModel(gate=threading.Event())
    with reward_server(model) as server, ThreadPoolExecutor(4) as clients:
        under_way = [clients.submit(server.scores, [i], [i]) for i in range(3)]
        assert model.entered.wait(20)
        wait_until(lambda: server.metric("open_requests") == 3)
        server.server.should_exit = True
        wait_until(lambda: refused(server))
        model.gate.set()
        assert [future.result()[1]["scores"] for future in under_way] == [[i, i] for i in range(3)]
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_metrics_count_what_was_done(small):
    before = {name: small.metric(f"{name}_total") for name in ("sequences", "tokens", "batches")}
    seconds = small.metric("request_seconds_count")
    scored = small.metric("requests_total", '{path="/score",status="200"}')
    refused_before = small.metric("requests_total", '{path="/score",status="422"}')
    small.scores([1, 2], [3])
    small.scores([1] * 31)
    assert small.metric("sequences_total") == before["sequences"] + 2
    assert small.metric("tokens_total") == before["tokens"] + 3
    assert small.metric("batches_total") == before["batches"] + 1
    assert small.metric("request_seconds_count") == seconds + 2
    assert small.metric("requests_total", '{path="/score",status="200"}') == scored + 1
    assert small.metric("requests_total", '{path="/score",status="422"}') == refused_before + 1
    assert 0 < small.metric("model_seconds_sum") < small.metric("request_seconds_sum") + 60
    kind = small.ask("/metrics")[2]["content-type"]
    assert kind == "text/plain; version=0.0.4; charset=utf-8"


def test_nothing_of_a_request_is_logged(caplog, capfd):
    with reward_server(token="s3cret") as server:
        server.scores({"text": "private"}, Authorization="Bearer s3cret")
        server.scores([POISON], Authorization="Bearer s3cret")
        server.ask("/private-path", b"private", Authorization="Bearer private")
        server.raw(b"private\r\n\r\n")
    logged = caplog.text + "".join(capfd.readouterr())
    assert logged == ""


def test_many_clients_get_their_own_scores():
    with reward_server(FakeModel(seconds=0.002)) as server, ThreadPoolExecutor(16) as clients:
        asked = [np.random.default_rng(i).integers(0, 90, 1 + i % 7).tolist() for i in range(200)]
        answers = list(clients.map(server.scores, asked))
    assert [body["scores"] for _, body in answers] == [[score_of(ids)] for ids in asked]


def refused(server):
    try:
        server.ask("/health")
    except ConnectionError:
        return True
    return False


def wait_until(true, seconds=60.0):
    late = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < late, "it does not become true"
        time.sleep(0.01)
