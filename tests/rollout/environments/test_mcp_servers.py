"""Tools of a real MCP server, over its standard input and output and over HTTP."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from helpers.chat import HERMES, chat_tokenizer
from helpers.packages import needs
from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.rollout.engine import Completion
from postgrad.rollout.environments.base import StepFailed
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.mcp_servers import MCPServer, ServerSessions, tools_of
from postgrad.rollout.settings import EnvironmentSettings

pytestmark = needs("mcp")
SERVER = Path(__file__).parent / "mcp_server.py"
COMMAND = [sys.executable, str(SERVER)]
PROMPT = Prompt(5, np.array([4], np.int32), "?", None, "rows", 0)


def within(calls, server):
    async def run():
        sessions = ServerSessions({"numbers": server})
        try:
            return await calls(sessions)
        finally:
            await sessions.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def address():
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_servers_tools_have_the_form_that_templates_read_and_some_may_be_chosen():
    (add,) = tools_of("numbers", MCPServer(command=tuple(COMMAND), tools=("add",)))
    function = add["function"]
    assert (add["type"], function["name"]) == ("function", "add")
    assert function["description"] == "Adds two numbers."
    assert function["parameters"]["required"] == ["a", "b"]
    with pytest.raises(UsageError, match=r"mcp\.numbers\.tools: it has no tool 'sub'; it has: add"):
        tools_of("numbers", MCPServer(command=tuple(COMMAND), tools=("sub",)))


def test_calls_go_through_one_session_side_by_side_and_errors_are_told():
    async def calls(sessions):
        with pytest.raises(ValueError, match="too hard"):
            await sessions.call("numbers", "fail", {"why": "too hard"})
        sums = [sessions.call("numbers", "add", {"a": n, "b": 1}) for n in range(5)]
        return await asyncio.gather(*sums)

    assert within(calls, MCPServer(command=tuple(COMMAND))) == ["1", "2", "3", "4", "5"]


@pytest.mark.slow
def test_after_a_call_that_was_given_up_the_next_one_has_another_process():
    async def calls(sessions):
        before = int(await sessions.call("numbers", "process", {}))
        hanging = asyncio.ensure_future(sessions.call("numbers", "hang", {}))
        await asyncio.sleep(0)
        hanging.cancel()
        await asyncio.wait({hanging})
        after = int(await sessions.call("numbers", "process", {}))
        return before, after

    before, after = within(calls, MCPServer(command=tuple(COMMAND)))
    assert before != after
    assert not psutil.pid_exists(before)
    assert not psutil.pid_exists(after)


@pytest.mark.slow
def test_a_server_that_ends_is_a_crash_and_the_next_call_starts_it_again():
    async def calls(sessions):
        with pytest.raises(StepFailed, match="the MCP server numbers") as failed:
            await sessions.call("numbers", "die", {})
        return failed.value.cause, await sessions.call("numbers", "add", {"a": 1, "b": 1})

    assert within(calls, MCPServer(command=tuple(COMMAND))) == ("crash", "2")


def test_a_server_at_an_address_is_asked_over_http(address):
    async def calls(sessions):
        return await sessions.call("numbers", "add", {"a": 20, "b": 22})

    assert within(calls, MCPServer(url=address)) == "42"


@pytest.mark.slow
def test_a_program_that_is_no_server_is_told_at_the_start():
    quick = MCPServer(command=(sys.executable, "-c", "print('hello')"), start_seconds=20.0)
    with pytest.raises(UsageError, match=r"mcp\.numbers: .*does not answer as an MCP server"):
        tools_of("numbers", quick)
    silent = ("-c", "import time; time.sleep(600)")
    with pytest.raises(UsageError, match=r"within start_seconds = 0\.5"):
        tools_of("numbers", MCPServer(command=(sys.executable, *silent), start_seconds=0.5))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "either command or url"),
        ({"command": ("x",), "url": "http://127.0.0.1/mcp"}, "either command or url"),
        ({"url": "http://example.org/mcp"}, "is not on this machine"),
        ({"url": "file:///etc/passwd"}, "an address such as"),
    ],
)
def test_a_server_is_a_program_or_an_address_of_this_machine(options, why):
    with pytest.raises(UsageError, match=why):
        MCPServer(**options)
    assert MCPServer(url="http://[::1]:80/mcp").url
    assert MCPServer(url="https://example.org/mcp", remote=True).url


@pytest.mark.slow
def test_the_policy_calls_a_servers_tools_and_a_hanging_one_is_a_failure():
    tokenizer = chat_tokenizer(HERMES)
    mcp_settings = {"type": "tools", "mcp": {"numbers": {"command": COMMAND}}}
    played = dialogue(EnvironmentSettings.model_validate(mcp_settings), tokenizer, {})
    hasty = dialogue(
        EnvironmentSettings.model_validate({**mcp_settings, "step_seconds": 1.0}), tokenizer, {}
    )
    assert not played.deterministic
    assert played.concurrent == 16
    episode = played.reset(PROMPT, 0)

    def turn(name, **arguments):
        call = {"name": name, "arguments": arguments}
        text = f"<tool_call>{json.dumps(call)}</tool_call>{tokenizer.eos_token}"
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        logprobs = np.zeros(len(ids), np.float32)
        return Completion(5, 0, 0, ids, logprobs, "stop", ((0, len(ids)),), text)

    seen = episode.step(turn("add", a=2, b=40)).result()
    assert "42" in tokenizer.decode(seen.token_ids)
    assert seen.counts["calls"] == 1.0
    late = hasty.reset(PROMPT, 0).step(turn("hang")).result()
    assert late.failure is not None
    assert late.failure.cause == "wall_clock"
    played.close()
    hasty.close()
