"""Functions in processes: what a call returns, how a process ends, what is left of it."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from postgrad.rollout.environments.base import StepFailed
from postgrad.rollout.environments.workers import FunctionWorkers


@pytest.fixture(autouse=True)
def _mine_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def within(calls, variables=()):
    """What `calls(workers)` returns, in a loop."""

    async def run():
        workers = FunctionWorkers(variables)
        try:
            return await calls(workers)
        finally:
            workers.close()

    return asyncio.run(run())


def own_function(name):
    return f"my_environments:{name}"


def test_a_process_is_used_again_and_what_it_prints_is_no_answer():
    async def calls(workers):
        return [
            await workers.call(own_function("prints"), {"text": '{"value": 3}'}) for _ in range(2)
        ]

    first, second = within(calls)
    assert first == second != os.getpid()
    assert not psutil.pid_exists(first)


def test_a_module_of_the_current_directory_takes_no_place_of_pythons(monkeypatch, tmp_path):
    (tmp_path / "random.py").write_text("raise RuntimeError('this is no module of Python')")
    monkeypatch.chdir(tmp_path)
    process = within(lambda workers: workers.call(own_function("prints"), {"text": "x"}))
    assert process != os.getpid()


def test_calls_at_the_same_time_have_processes_of_their_own():
    async def calls(workers):
        each = [workers.call(own_function("prints"), {"text": "x"}) for _ in range(3)]
        return await asyncio.gather(*each)

    assert len(set(within(calls))) == 3


def test_a_call_that_is_given_up_has_its_process_killed():
    async def calls(workers):
        hanging = asyncio.ensure_future(workers.call(own_function("sleeps"), {"seconds": 600.0}))
        while not workers._busy:
            await asyncio.sleep(0.01)
        (process,) = workers._busy
        pid = process._process.pid
        hanging.cancel()
        await asyncio.wait({hanging})
        return pid, len(workers._idle), await workers.call(own_function("prints"), {"text": "x"})

    pid, idle, other = within(calls)
    assert not psutil.pid_exists(pid)
    assert idle == 0
    assert other != pid


def test_a_process_that_ends_is_a_crash_with_its_last_words():
    async def calls(workers):
        with pytest.raises(StepFailed, match=r"exited with code 7.*last words") as failed:
            await workers.call(own_function("dies"), {"code": 7})
        return failed.value.cause

    assert within(calls) == "crash"


@pytest.mark.parametrize(
    ("name", "arguments", "error", "text"),
    [
        ("fails", {"how": "value"}, ValueError, "it failed"),
        ("fails", {"how": "type"}, StepFailed, r"TypeError: it failed \(my_environments.py:\d+\)"),
        ("nowhere", {}, StepFailed, "has no 'nowhere'"),
        ("Echo", {}, StepFailed, "which is not JSON"),
    ],
)
def test_what_a_function_raises_is_told_or_a_failure(name, arguments, error, text):
    async def calls(workers):
        with pytest.raises(error, match=text):
            await workers.call(own_function(name), arguments)
        return True

    assert within(calls)


def test_a_process_gets_only_the_variables_that_are_named(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")

    async def calls(workers):
        return await workers.call(own_function("variable"), {"name": "MY_KEY"})

    assert within(calls) == "nothing"
    assert within(calls, ["MY_KEY"]) == "secret"
