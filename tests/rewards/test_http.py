"""Several servers, a deadline, a circuit breaker: who is asked when, and what is told."""

import json
import re
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from helpers.chat_server import Answer, chat_server
from postgrad.rewards import http
from postgrad.rewards.http import Breaker, ServerError, Servers

DOWN = "http://127.0.0.1:9"


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now, self.waits = 100.0, []

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake_clock = Clock()
    monkeypatch.setattr(
        http, "time", SimpleNamespace(sleep=fake_clock.sleep, monotonic=fake_clock.monotonic)
    )
    return fake_clock


@pytest.fixture
def serving():
    """serving(script): a server that does so until the test ends."""
    with ExitStack() as stack:
        yield lambda script: stack.enter_context(chat_server(script))


def answering(raw=b"1", **more):
    return lambda request_text, times: Answer(raw=raw, **more)


def number(reply):
    try:
        return int(reply)
    except ValueError as error:
        raise ServerError("no number") from error


def servers(*urls, breaker=None, **settings):
    options = {"key": None, "timeout": 60.0, "retries": 3, "backoff": 0.0} | settings
    return Servers(tuple(urls), breaker=breaker or Breaker(100, 30.0), **options)


def ask(pool, text="x"):
    return pool.ask("/score", {"text": text}, number)


def error_of(pool, text="x"):
    with pytest.raises(ServerError) as error:
        ask(pool, text)
    return str(error.value)


def test_servers_share_the_work_and_the_same_request_goes_to_the_same_one(serving):
    both = [serving(answering()), serving(answering())]
    pool = servers(both[0].url, both[1].url)
    for i in range(40):
        assert ask(pool, str(i)) == 1
    counts = [len(server.requests) for server in both]
    assert sum(counts) == 40
    assert min(counts) >= 8
    ask(pool, "7")
    ask(pool, "7")
    again = [[body["text"] for _, _, body in s.requests].count("7") for s in both]
    assert sorted(again) == [0, 3]


def test_a_server_that_is_down_or_talks_nonsense_is_passed_over_without_a_wait(serving, clock):
    good, mad = serving(answering()), serving(answering(b"?"))
    refusing = serving(answering(b"no", status=401))
    pool = servers(DOWN, mad.url, refusing.url, good.url)
    assert [ask(pool, str(i)) for i in range(20)] == [1] * 20
    assert clock.waits == []
    assert len(good.requests) == 20


def test_each_try_goes_to_the_next_server_and_waits_are_of_each_server(serving, clock):
    a, b = serving(answering(status=500)), serving(answering(status=500))
    text = error_of(servers(a.url, b.url, retries=5, backoff=1.0))
    assert text.endswith(": HTTP 500 Internal Server Error: 1 (6 tries)")
    assert text.startswith((f"{a.url}: ", f"{b.url}: "))
    assert (len(a.requests), len(b.requests)) == (3, 3)
    assert clock.waits == [1.0, 1.0, 2.0, 2.0]


def test_a_deadline_ends_the_tries(serving, clock):
    busy = serving(answering(status=503, headers={"Retry-After": "24"}))
    text = error_of(servers(busy.url, retries=10, deadline=60.0))
    assert text == "HTTP 503 Service Unavailable: 1 (3 tries in 60 s)"
    assert clock.waits == [24.0, 24.0]


def test_a_try_lasts_no_longer_than_what_is_left_of_the_deadline(serving, clock, monkeypatch):
    lasted, post = [], Servers.post

    def timed(self, url, path, data, timeout):
        lasted.append(timeout)
        return post(self, url, path, data, 60.0)

    monkeypatch.setattr(Servers, "post", timed)
    busy = serving(answering(status=503, headers={"Retry-After": "4"}))
    error_of(servers(busy.url, retries=10, timeout=7.0, deadline=10.0))
    assert lasted == [7.0, 6.0, 2.0]  # 10, 6 and 2 seconds are left


def test_a_server_that_is_slower_than_the_deadline_is_an_error(serving):
    slow = serving(answering(delay=600.0))
    text = error_of(servers(slow.url, timeout=300.0, deadline=0.4))
    assert text.startswith("TimeoutError")


def test_a_server_that_fails_in_a_row_is_left_alone_for_a_while(serving, clock):
    state = {"status": 500}
    ill = serving(lambda request_text, times: Answer(raw=b"1", status=state["status"]))
    pool = servers(ill.url, retries=0, breaker=Breaker(3, 30.0))
    for _ in range(3):
        assert "HTTP 500" in error_of(pool)
    text = error_of(pool)
    assert text == (
        f"{ill.url} is left alone for another 30 s: 3 tries in a row failed, the last with "
        "HTTP 500 Internal Server Error: 1"
    )
    assert len(ill.requests) == 3
    clock.now += 31
    assert "HTTP 500" in error_of(pool)  # one try is let through, and fails
    assert "is left alone" in error_of(pool)
    assert len(ill.requests) == 4
    clock.now += 31
    state["status"] = 200
    assert ask(pool) == 1
    state["status"] = 500
    for _ in range(3):  # it begins to count anew
        assert "HTTP 500" in error_of(pool)


def test_a_request_under_way_goes_on_with_its_tries(serving, clock):
    """A short outage is what retries are for: the breaker spares only later requests."""
    ill = serving(lambda request_text, times: Answer(raw=b"1", status=500 if times < 4 else 200))
    assert ask(servers(ill.url, retries=4, breaker=Breaker(2, 30.0))) == 1


def test_a_server_that_answers_again_is_asked_by_the_next_request(serving, clock):
    ill = serving(lambda request_text, times: Answer(raw=b"1", status=500 if times < 4 else 200))
    pool = servers(ill.url, retries=4, breaker=Breaker(2, 30.0))
    assert [ask(pool), ask(pool)] == [1, 1]  # the breaker had opened during the first


def test_a_server_that_is_not_there_is_tried_until_the_deadline(clock):
    text = error_of(servers(DOWN, retries=1, backoff=1.0, deadline=120.0))
    assert re.fullmatch(r"URLError: .*refused.* \(8 tries in 120 s\)", text)
    assert clock.waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    clock.waits.clear()
    text = error_of(servers(DOWN, retries=1, backoff=1.0))
    assert text.endswith("(2 tries)")
    assert clock.waits == [1.0]


def test_a_server_that_is_not_there_is_asked_ten_times_a_second_at_most(clock):
    error_of(servers(DOWN, retries=0, backoff=0.0, deadline=0.95))
    assert clock.waits == [0.1] * 9


def test_tries_that_reach_a_server_count_beside_those_that_reach_none(serving, clock):
    ill = serving(answering(status=500))
    text = error_of(servers(DOWN, ill.url, retries=2, backoff=1.0, deadline=1000.0))
    assert "HTTP 500" in text
    assert len(ill.requests) == 3


def test_a_server_that_is_left_alone_is_not_asked_while_others_work(serving, clock):
    ill, good = serving(answering(status=500)), serving(answering())
    pool = servers(ill.url, good.url, breaker=Breaker(2, 1000.0))
    assert [ask(pool, str(i)) for i in range(30)] == [1] * 30
    assert len(ill.requests) == 2


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 400},
        {"status": 413},
        {"status": 422},
        {"status": 429},
        {"status": 503, "headers": {"Retry-After": "1"}},
        {"status": 500, "raw": json.dumps({"error": {"code": "not_finite"}}).encode()},
    ],
)
def test_what_a_server_is_not_to_blame_for_is_not_counted_against_it(serving, clock, answer):
    well = serving(lambda request_text, times: Answer(**answer))
    breaker = Breaker(1, 1000.0)
    final = frozenset({"not_finite"})
    pool = servers(well.url, retries=2, breaker=breaker, final_codes=final)
    for _ in range(3):
        assert f"HTTP {answer['status']}" in error_of(pool)
    busy = answer["status"] in (429, 503)
    assert len(well.requests) == (9 if busy else 3)  # what the request is to blame for is final


@pytest.mark.parametrize("raw", [b"?", b"", b"\xff"])
def test_nonsense_counts_against_a_server(serving, clock, raw):
    mad = serving(answering(raw))
    pool = servers(mad.url, breaker=Breaker(1, 1000.0))
    assert error_of(pool) == "no number"
    assert "is left alone" in error_of(pool)


def test_the_key_is_told_to_nobody(serving):
    echo = serving(answering(b"bad key s3cret", status=403))
    assert error_of(servers(echo.url, key="s3cret")) == "HTTP 403 Forbidden: bad key ***"
    assert echo.requests[0][1]["Authorization"] == "Bearer s3cret"
