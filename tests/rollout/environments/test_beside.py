"""Steps side by side: limits, causes of failures, and the end of the thread."""

import asyncio
import threading
import warnings
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from helpers.chat import chat_tokenizer
from postgrad.core.errors import RunError
from postgrad.core.records import EpisodeFailure, Prompt
from postgrad.rollout.engine import Completion
from postgrad.rollout.environments import beside
from postgrad.rollout.environments.base import Reply
from postgrad.rollout.environments.beside import SideBySide, at_once_replied
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.settings import EnvironmentSettings

PROMPT = Prompt(5, np.array([4], np.int32), "?", None, "rows", 0)


@pytest.fixture(autouse=True)
def _mine_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def world(warn=None, **options):
    settings = EnvironmentSettings.model_validate({"type": "my_environments:Awaiting", **options})
    return dialogue(settings, chat_tokenizer(), {}, warn=warn)


def turn(text="hello", finish="stop"):
    ids = np.array([*chat_tokenizer()(text, add_special_tokens=False)["input_ids"]], np.int32)
    return Completion(5, 0, 0, ids, np.zeros(len(ids), np.float32), finish, ((0, len(ids)),), text)


@asynccontextmanager
async def nothing():
    yield


def test_an_async_step_is_a_reply_as_any_other():
    played = world()
    seen = played.reset(PROMPT, 0).step(turn()).result()
    assert (seen.done, seen.reward, seen.failure) == (False, 1.0, None)
    assert (played.concurrent, played.deterministic) == (16, False)
    played.close()


@pytest.mark.parametrize("kind", ["never", "stubborn"])
@pytest.mark.parametrize("limit", ["step_seconds", "episode_seconds"])
def test_a_reply_that_does_not_come_is_a_failure_with_its_limit(kind, limit):
    played = world(kind=kind, **{limit: 0.05})
    seen = played.reset(PROMPT, 0).step(turn("end")).result()
    assert seen.done
    assert seen.reward == 0.0
    assert seen.failure is not None
    assert seen.failure.cause == "wall_clock"
    assert f"environment.{limit}" in seen.failure.message
    played.close()


def test_all_replies_of_an_episode_together_have_a_limit():
    played = world(episode_seconds=5.0)
    episode = played.reset(PROMPT, 0)
    assert episode.step(turn()).result().failure is None
    episode._seconds = 5.0  # as if the first reply had taken that long
    late = episode.step(turn()).result()
    assert late.failure is not None
    assert "episode_seconds" in late.failure.message
    played.close()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("raises", "OSError: the disk is gone"),
        ("leaks", "CancelledError: "),
        ("exits", "SystemExit: bye"),
    ],
)
def test_what_a_step_raises_is_a_failure_that_says_where_and_others_go_on(kind, why):
    played = world(kind=kind)
    for _ in range(2):
        seen = played.reset(PROMPT, 0).step(turn()).result()
        assert seen.failure is not None
        assert seen.failure.cause == "error"
        assert f"{why} (my_environments.py:" in seen.failure.message
    played.close()


def test_an_environment_that_cannot_start_ends_the_run_and_is_named():
    played = world(kind="closed")
    why = r"the environment could not start .*ConnectionRefusedError: nobody listens at port 9"
    with pytest.raises(RunError, match=why):
        played.reset(PROMPT, 0).step(turn())


def test_a_step_that_fails_at_once_is_a_failure_too_and_errors_of_the_run_end_it():
    def broken(text):
        raise KeyError(text)

    def stops(text):
        raise RunError("no more")

    reply, _ = at_once_replied(lambda: broken("x"))
    assert isinstance(reply, EpisodeFailure)
    assert reply.message.startswith("KeyError: 'x'")
    with pytest.raises(RunError, match="no more"):
        at_once_replied(lambda: stops("x"))


@pytest.mark.parametrize("seconds", [0, 0.01])
def test_an_async_step_that_says_it_does_not_wait_must_not(seconds):
    async def waits(text):
        await asyncio.sleep(seconds)
        return Reply()

    async def quick(text):
        return Reply(reward=2.0)

    with pytest.raises(RunError, match="set its `waits = True`"):
        at_once_replied(lambda: waits("x"))
    reply, _ = at_once_replied(lambda: quick("x"))
    assert isinstance(reply, Reply)
    assert reply.reward == 2.0


def test_only_so_many_steps_are_inside_at_once_and_all_of_them_are():
    inside, most = 0, 0

    async def step():
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if most == 4:
            opened.set()
        await opened.wait()  # opens when four are inside
        await asyncio.sleep(0)
        inside -= 1
        return Reply()

    opened = asyncio.Event()
    side = SideBySide(nothing, 4)
    handles = [side.begin(step, 30.0, "limit") for _ in range(9)]
    assert all(isinstance(handle.result()[0], Reply) for handle in handles)
    assert most == 4
    side.close()


@pytest.mark.slow
def test_a_step_that_blocks_all_others_ends_the_run_with_the_reason(monkeypatch):
    monkeypatch.setattr(beside, "_BEAT", 0.05)
    monkeypatch.setattr(beside, "_STUCK", 2)
    played = world(kind="blocks")
    step = played.reset(PROMPT, 0).step(turn())
    with pytest.raises(RunError, match="has blocked all others"):
        step.result()
    played.close()


@pytest.fixture
def side():
    """A thread in which a step has run."""

    async def step():
        return Reply()

    running = SideBySide(nothing, 1)
    running.begin(step, 30.0, "limit").result()
    yield running
    running.close()


def test_what_is_called_later_may_be_async(side):
    called = threading.Event()

    async def close():
        await asyncio.sleep(0)
        called.set()

    side.later(close, pytest.fail)
    assert called.wait(30.0)


def test_what_was_called_before_the_end_ends_itself(side):
    ended = []

    async def close():
        await asyncio.sleep(0.3)
        ended.append("container")

    side.later(close, pytest.fail)
    side.close()
    assert ended == ["container"]


def test_what_is_called_later_and_fails_is_told(side, monkeypatch):
    reports = []

    def plain():
        raise OSError("no such container")

    async def late():
        raise SystemExit("bye")

    async def never():
        await asyncio.Event().wait()

    monkeypatch.setattr(beside, "_CLOSING", 0.4)
    for call in (plain, late, never):
        side.later(call, reports.append)
    side.close()
    assert [text.partition(" (")[0] for text in reports] == [
        "OSError: no such container",
        "SystemExit: bye",
        "it had not ended when the run did",
    ]


@pytest.mark.parametrize("warned", [True, False])
def test_a_course_that_cannot_close_is_told_with_its_environment(warned):
    reports = []
    played = world(kind="unclosable", warn=reports.append if warned else None)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        played.reset(PROMPT, 0).step(turn(finish="length"))  # no thread yet, nothing is open
        played.reset(PROMPT, 0).step(turn()).result()
        played.reset(PROMPT, 0).step(turn(finish="length"))
        played.close()
    (text,) = reports if warned else [str(each.message) for each in raised]
    assert text.startswith(
        "environment 'my_environments:Awaiting': close failed: OSError: it is stuck (my_env"
    )
    assert text.endswith("; what the episode holds may stay open")


def test_what_opening_raises_is_told_to_the_first_step():
    @asynccontextmanager
    async def broken():
        raise RunError("no server")
        yield

    side = SideBySide(broken, 1)
    with pytest.raises(RunError, match="no server"):
        side.begin(lambda: Reply(), 1.0, "limit")
    side.close()


def test_closing_ends_open_steps_the_context_and_the_thread():
    closed = threading.Event()

    @asynccontextmanager
    async def context():
        try:
            yield
        finally:
            closed.set()

    async def never():
        await asyncio.Event().wait()
        return Reply()

    side = SideBySide(context, 1)
    handle = side.begin(never, 60.0, "limit")
    side.close()
    assert closed.is_set()
    assert side._thread is not None
    assert not side._thread.is_alive()
    with pytest.raises(RunError, match="was closed"):
        handle.result()
    with pytest.raises(RunError, match="was closed"):
        side.begin(never, 60.0, "limit")


def test_an_environment_that_is_forgotten_ends_its_thread():
    played = world()
    played.reset(PROMPT, 0).step(turn()).result()
    thread = played.beside._thread
    assert thread is not None
    del played
    thread.join(10.0)
    assert not thread.is_alive()


def test_an_environment_that_is_forgotten_in_its_own_thread_ends_it_without_an_error():
    errors = []
    side = SideBySide(nothing, 1)

    async def forgets():  # as the collector of garbage does, which may run there
        try:
            side.close()
        except RuntimeError as error:
            errors.append(error)
        return Reply()

    handle = side.begin(forgets, 30.0, "limit")
    thread = side._thread
    assert thread is not None
    thread.join(10.0)
    assert (thread.is_alive(), handle.done(), errors) == (False, True, [])
