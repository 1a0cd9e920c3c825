"""A remote reward model: the real server, and servers that are hostile."""

import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from helpers.chat_server import Answer, chat_server
from helpers.reward_server import NAN, POISON, TOKENIZER, FakeModel, reward_server, score_of
from postgrad.core.errors import RunError, UsageError
from postgrad.core.progress import reported_to
from postgrad.rewards.http import ServerError
from postgrad.rewards.remote import Remote
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView

PROMPT = PromptView("Why?", "because")
QUICK = {"timeout": 60.0, "retries": 1, "backoff": 0.01, "deadline": 300.0}


@contextmanager
def held_port():
    """A port at which nobody listens until the test's own server does. Inside, the system gives it
    to no other process: a free port that is merely looked up may be another's by the time that its
    server starts. A server may share it, because all of them set SO_REUSEADDR.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def reward(**settings):
    return RewardSettings(**({"type": "remote"} | QUICK | settings))


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def chat_of(question, response, system=None):
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": question}]
    messages += [{"role": "assistant", "content": response}]
    return TOKENIZER.apply_chat_template(messages, tokenize=False).rstrip("\n")


def first_token(text):
    """The text whose first token makes the model behave badly."""
    return TOKENIZER.decode([text])


def test_scores_come_from_the_server(make_scorer, make_prompt, make_rollouts):
    texts = ["So.", "It is", "x" * 50, "So."]
    with reward_server() as server:
        scorer = make_scorer(reward(url=server.url, weight=0.5))
        (group,) = scorer.score([(make_prompt(), make_rollouts(texts))])
    wanted = [score_of(ids_of(chat_of("What?", text))) for text in texts]
    np.testing.assert_allclose(group.rewards["remote"], wanted, rtol=1e-12)
    np.testing.assert_allclose(group.total, 0.5 * np.array(wanted), rtol=1e-12)
    assert group.failures == ()


def test_what_is_sent_is_the_recipes_choice():
    with reward_server() as server:
        for settings, text in (
            ({"system": "Be."}, chat_of("Why?", "So.", "Be.")),
            ({"text": "Q: {question} A: {response} ({answer})"}, "Q: Why? A: So. (because)"),
            ({"text": "{response}"}, "So."),
        ):
            remote = Remote(url=server.url, **settings)
            assert remote.score(PROMPT, RolloutView("So.")).value == score_of(ids_of(text))
    with pytest.raises(UsageError, match=r"leave out /score"):
        Remote(url="http://127.0.0.1:8000/score")
    evil = Remote(url="http://x", text="{question}|{response}")
    asked = evil._input(PromptView("{response}", None), "{question}{answer}")
    assert asked == {"text": "{response}|{question}{answer}"}


def test_normalised_scores_use_what_is_kept_with_the_model():
    with reward_server(FakeModel(mean=-3.0, std=0.5)) as server:
        score = Remote(url=server.url, text="{response}", normalise=True).score(
            PROMPT, RolloutView("ab")
        )
    raw = score_of(ids_of("ab"))
    assert score.value == (raw + 3.0) / 0.5
    assert score.detail == {"raw": raw}


@pytest.mark.parametrize(("mean", "std"), [(None, 1.0), (0.0, None), (0.0, 0.0), (0.0, -1.0)])
def test_a_model_without_mean_and_std_cannot_normalise(make_scorer, mean, std):
    with reward_server(FakeModel(mean=mean, std=std)) as server:
        make_scorer(reward(url=server.url))
        with pytest.raises(UsageError, match="normalise = true, and the server's"):
            make_scorer(reward(url=server.url, normalise=True))


def test_inputs_on_which_the_model_fails_are_recorded_and_never_zeros(
    make_scorer, make_prompt, make_rollouts
):
    texts = ["a", first_token(NAN), first_token(POISON), "b"] * 3
    with reward_server() as server:
        scorer = make_scorer(reward(url=server.url, text="{response}", breaker_failures=1))
        (group,) = scorer.score([(make_prompt(), make_rollouts(texts))])
        asked = server.metric("request_seconds_count")
    a, b = score_of(ids_of("a")), score_of(ids_of("b"))
    np.testing.assert_array_equal(group.total, [a, np.nan, np.nan, b] * 3)
    assert [failure.sample for failure in group.failures] == [1, 2, 5, 6, 9, 10]
    assert {failure.cause for failure in group.failures} == {"error"}
    assert "inputs.0: the model's score is nan" in group.failures[0].message
    assert "inputs.0: the model failed: RuntimeError" in group.failures[1].message
    assert asked == len(texts)  # neither is tried again, and the server is not to blame


GOOD = {"scores": [1.5], "model": "m1", "mean": None, "std": None}


@pytest.fixture
def hostile():
    """A server that has model m1 and answers as the sample's text says."""

    def script(request_text, times):
        replies = {
            "/v1/info": GOOD,
            "good": GOOD,
            "two": GOOD | {"scores": [1.0, 2.0]},
            "none": GOOD | {"scores": []},
            "bare": 1.5,
            "string": GOOD | {"scores": ["1.5"]},
            "true": GOOD | {"scores": [True]},
            "null": GOOD | {"scores": [None]},
            "nan": GOOD | {"scores": [float("nan")]},
            "inf": GOOD | {"scores": [float("inf")]},
            "long": GOOD | {"scores": [10**400]},
            "other": GOOD | {"model": "m2"},
            "nameless": {"scores": [1.5]},
        }
        if request_text in replies:
            return Answer(raw=json.dumps(replies[request_text]).encode())
        return {
            "html": Answer(raw=b"<html>"),
            "deep": Answer(raw=b"[" * 100_000),
            "cut": Answer(raw=json.dumps(GOOD).encode(), cut=5),
            "slow": Answer(raw=json.dumps(GOOD).encode(), delay=600.0),
            "drip": Answer(raw=json.dumps(GOOD).encode(), drip=0.05),
            "denied": Answer(status=401, raw=b"no token"),
            "broken": Answer(status=500, raw=b"out of memory"),
            "moved": Answer(status=307, headers={"Location": "http://127.0.0.1:9/"}),
            "busy": Answer(raw=json.dumps(GOOD).encode()) if times else Answer(status=503),
        }[request_text]

    with chat_server(script) as server:
        yield server


CAUSES = {
    "two": "one score was wanted",
    "none": "one score was wanted",
    "bare": "the reply is no JSON object",
    "string": "the score '1.5' is no finite number",
    "true": "the score True is no finite number",
    "null": "the score None is no finite number",
    "nan": "the score nan is no finite number",
    "inf": "the score inf is no finite number",
    "long": "is no finite number",
    "other": "the server has another model: m2, and this run began with m1",
    "nameless": "the server has another model: None",
    "html": "the reply is no JSON: '<html>'",
    "deep": "the reply is no JSON",
    "cut": "IncompleteRead",
    "denied": "HTTP 401 Unauthorized: no token",
    "broken": "HTTP 500 Internal Server Error: out of memory (2 tries)",
    "moved": "HTTP 307",
}


@pytest.mark.slow
def test_whatever_a_hostile_server_does_is_a_recorded_failure_with_its_cause(
    hostile, make_scorer, make_prompt, make_rollouts
):
    texts = ["good", "busy", *CAUSES, "good"]
    settings = reward(url=hostile.url, breaker_failures=1000)
    scorer = make_scorer(settings, waiting_workers=4)
    (group,) = scorer.score([(make_prompt(), make_rollouts(texts))])
    np.testing.assert_array_equal(group.total, [1.5, 1.5, *[np.nan] * len(CAUSES), 1.5])
    assert [failure.sample for failure in group.failures] == list(range(2, 2 + len(CAUSES)))
    for failure, wanted in zip(group.failures, CAUSES.values(), strict=True):
        assert failure.cause == "error"
        assert wanted in failure.message
    hasty = make_scorer(reward(url=hostile.url, timeout=0.5), waiting_workers=2)
    (late,) = hasty.score([(make_prompt(), make_rollouts(["slow", "drip"]))])
    np.testing.assert_array_equal(late.total, [np.nan, np.nan])
    assert ["TimeoutError" in failure.message for failure in late.failures] == [True, True]


def test_failures_are_dealt_with_by_policy(hostile, make_scorer, make_prompt, make_rollouts):
    scorer = make_scorer(reward(url=hostile.url, on_failure="score", failure_score=-2.0))
    (group,) = scorer.score([(make_prompt(), make_rollouts(["good", "html"]))])
    np.testing.assert_array_equal(group.total, [1.5, -2.0])
    np.testing.assert_array_equal(group.rewards["remote"], [1.5, np.nan])
    scorer = make_scorer(reward(url=hostile.url, on_failure="stop_run"))
    with pytest.raises(RunError, match="on_failure of 'remote' is stop_run"):
        scorer.score([(make_prompt(), make_rollouts(["good", "html"]))])


def test_a_server_that_stays_down_at_the_start_is_told_at_the_deadline(make_scorer):
    with pytest.raises(
        RunError,
        match=r"no reward server says which model it has: .*127.0.0.1:9: .*refused.*; the run "
        r"waited \d+ s \(rewards.deadline\): start the server",
    ):
        make_scorer(reward(url="http://127.0.0.1:9", deadline=0.6))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunError, match="TimeoutError"):
            make_scorer(reward(url=url, timeout=0.2, deadline=0.3))


def test_the_start_waits_for_a_server_that_comes_later_and_says_so(
    make_scorer, make_prompt, make_rollouts
):
    reports: list[tuple[str, int, int | None]] = []
    with held_port() as port, ExitStack() as stack:

        def start_at_the_first_report(*text):
            if not reports:
                stack.enter_context(reward_server(port=port))
            reports.append(text)

        with reported_to(start_at_the_first_report):
            scorer = make_scorer(reward(url=f"http://127.0.0.1:{port}", deadline=60.0))
        (group,) = scorer.score([(make_prompt(), make_rollouts(["a"]))])
    assert group.kept.all()
    work, waited, most = reports[0]
    assert work.startswith(f"seconds waited for http://127.0.0.1:{port} (URLError: ")
    assert 0 <= waited < most == 60


def test_a_score_waits_for_a_server_that_restarts(make_scorer, make_prompt, make_rollouts):
    """Longer than `retries` would: so long that the circuit breaker opens meanwhile."""
    with held_port() as port:
        with reward_server(port=port) as server:
            scorer = make_scorer(reward(url=server.url, retries=0))
            assert scorer.check([make_prompt()]) == []
        scorer.submit(make_prompt(), make_rollouts(["a"] * 20))
        assert scorer.completed(wait=False) == []
        time.sleep(0.7)
        with reward_server(port=port):
            (group,) = scorer.completed(wait=True)
    assert group.kept.all()


def test_a_server_that_goes_down_fails_samples_and_the_step(
    make_scorer, make_prompt, make_rollouts
):
    with held_port() as port:
        with reward_server(port=port) as server:
            scorer = make_scorer(reward(url=server.url, deadline=0.5))
            assert scorer.check([make_prompt()]) == []
        groups = scorer.score([(make_prompt(), make_rollouts(["a"] * 20))])
    with pytest.raises(RunError, match=r"failed on 20 of 20 scored samples .*refused"):
        scorer.require_scored(groups)
    assert np.isnan(groups[0].total).all()
    messages = [failure.message for failure in groups[0].failures]
    assert sum("is left alone for another" in message for message in messages) >= 10


def test_another_model_than_at_the_start_of_the_run_fails(make_scorer, make_prompt, make_rollouts):
    with held_port() as port:
        with reward_server(port=port) as server:
            scorer = make_scorer(reward(url=server.url))
            assert scorer.score([(make_prompt(), make_rollouts(["a"]))])[0].kept.all()
        with reward_server(FakeModel(hash="model-2"), port=port):
            (group,) = scorer.score([(make_prompt(1), make_rollouts(["a"], 1))])
    (failure,) = group.failures
    assert "another model: model-2, and this run began with model-1" in failure.message


def test_a_model_that_the_recipe_names_is_the_only_one_that_may_answer(
    make_scorer, make_prompt, make_rollouts
):
    with reward_server() as server:
        named = make_scorer(reward(url=server.url, model="model-1"))
        assert named.score([(make_prompt(), make_rollouts(["a"]))])[0].kept.all()
        other = make_scorer(reward(url=server.url, model="model-0"))
        (group,) = other.score([(make_prompt(), make_rollouts(["a"]))])
    assert "another model: model-1" in group.failures[0].message


def test_several_servers_share_the_work_and_stand_in_for_each_other(
    make_scorer, make_prompt, make_rollouts
):
    texts = [f"{i}" for i in range(30)]
    with reward_server() as a, reward_server() as b:
        urls = [a.url, b.url, "http://127.0.0.1:9"]
        scorer = make_scorer(reward(urls=urls))
        (group,) = scorer.score([(make_prompt(), make_rollouts(texts))])
        counts = [s.metric("sequences_total") for s in (a, b)]
    assert group.kept.all()
    assert len(set(group.total.tolist())) == 30
    assert sum(counts) == 30
    assert min(counts) >= 5


def test_servers_of_several_models_are_refused(make_scorer):
    with reward_server() as a, reward_server(FakeModel(hash="model-2")) as b:  # noqa: SIM117
        with pytest.raises(UsageError, match=r"have several models: .*model-1.*model-2"):
            make_scorer(reward(urls=[a.url, b.url]))


def test_the_token_comes_from_the_environment(make_scorer, make_prompt, make_rollouts, monkeypatch):
    with reward_server(token="s3cret") as server:
        with pytest.raises(RunError, match="HTTP 401 Unauthorized"):
            make_scorer(reward(url=server.url))
        monkeypatch.delenv("MY_TOKEN", raising=False)
        with pytest.raises(UsageError, match=r"variable MY_TOKEN \(token_env\), which is not set"):
            make_scorer(reward(url=server.url, token_env="MY_TOKEN"))
        monkeypatch.setenv("MY_TOKEN", "s3cret\n")
        scorer = make_scorer(reward(url=server.url, token_env="MY_TOKEN"))
        (group,) = scorer.score([(make_prompt(), make_rollouts(["a"]))])
    assert group.kept.all()


def test_waiting_workers_ask_side_by_side_and_the_server_batches_them(
    make_scorer, make_prompt, make_rollouts
):
    model = FakeModel(gate=threading.Event())
    with reward_server(model) as server:
        patient = reward(url=server.url, timeout=100, deadline=100)
        scorer = make_scorer(patient, waiting_workers=4)
        assert scorer.check([make_prompt()]) == []
        scorer.submit(make_prompt(), make_rollouts([f"{i}" for i in range(24)]))
        late = time.monotonic() + 90
        # Those that came before the model was free are in it, together or alone.
        while sum(map(len, model.batches)) + server.metric("queue_sequences") < 4:
            scorer.completed(wait=False)
            assert time.monotonic() < late, "they do not ask side by side"
            time.sleep(0.02)
        model.gate.set()
        (group,) = scorer.completed(wait=True)
    assert group.kept.all()
    assert len(model.batches[0]) + len(model.batches[1]) >= 4


@pytest.mark.slow
def test_a_reply_whose_headers_never_end_is_a_wall_clock_failure(
    make_scorer, make_prompt, make_rollouts
):
    """No timeout of a socket is met: the pool's own limit is the last resort."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stopped = threading.Event()

        def drip():
            listening.settimeout(0.1)
            open_ones = []
            while not stopped.wait(0.05):
                try:
                    connection, _ = listening.accept()
                    connection.sendall(b"HTTP/1.1 200 OK\r\n")
                    open_ones.append(connection)
                except TimeoutError:
                    pass
                for connection in open_ones:
                    with suppress(OSError):
                        connection.sendall(b"X: y\r\n")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            scorer = make_scorer(reward(url=url, model="m", wall_seconds=0.8))
            (group,) = scorer.score([(make_prompt(), make_rollouts(["a"]))])
        finally:
            stopped.set()
            thread.join()
    assert group.failures[0].cause in ("wall_clock", "error")  # 100 headers end it too
    assert np.isnan(group.total).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "one server is `url`, several are `urls`"),
        ({"url": "http://a", "urls": ("http://b",)}, "one server is `url`"),
        ({"urls": ("http://a", "http://a")}, "two of `urls` are the same"),
        ({"url": "localhost:8000"}, "an address such as"),
        ({"urls": ("http://a", "ftp://b")}, "an address such as"),
        (
            {"url": "http://user:key@host"},
            "keys into the environment variable that token_env names",
        ),
        ({"url": "http://a", "text": "{question}"}, "the sample would not be sent"),
        ({"url": "http://a", "text": "{response}", "system": "x"}, "write it into `text`"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        Remote(**settings)


def test_text_with_an_answer_needs_one():
    remote = Remote(url="http://a", text="{answer} {response}")
    assert remote.check(PromptView("q", None)) is not None
    assert remote.check(PromptView("q", "a")) is None
    assert Remote(url="http://a").check(PromptView("q", None)) is None


def test_a_score_may_last_as_long_as_its_deadline():
    assert Remote(url="http://a", deadline=7.0).default_wall_seconds == 12.0


def test_a_reply_that_names_no_model_is_no_start():
    with chat_server(lambda request_text, times: Answer(raw=b'{"name": "x"}')) as server:
        with pytest.raises(RunError, match="the reply names no model"):
            Remote(url=server.url).at_start()
        with pytest.raises(ServerError):
            Remote(url=server.url, model="m").score(PROMPT, RolloutView("x"))
