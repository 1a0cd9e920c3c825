"""An OpenEnv server as the environment: a fake of its client, and, slowly, the package itself.

POSTGRAD_OPENENV_PYTHON names the Python of an environment that has the package openenv.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from helpers.chat import chat_tokenizer
from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.rollout.engine import Completion
from postgrad.rollout.environments.base import build
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.openenv import rows
from postgrad.rollout.settings import EnvironmentSettings

TOKENIZER = chat_tokenizer()
SERVER = Path(__file__).parent / "openenv_server.py"
PYTHON = os.environ.get("POSTGRAD_OPENENV_PYTHON")
SCHEMA = {"properties": {"number": {"type": "string"}}, "required": ["number"]}
CLIENT = """
from types import SimpleNamespace


class GenericEnvClient:
    def __init__(self, base_url):
        assert base_url.startswith("http://127.0.0.1:")

    async def connect(self):
        self.seed = None

    async def reset(self, seed):
        if seed == 404:
            raise RuntimeError("Server error: Server at capacity (code: CAPACITY_REACHED)")
        self.seed = seed
        return self.result(f"game {seed}", 0.0)

    async def step(self, action):
        if set(action) != {"number"}:
            raise RuntimeError("Server error: no number (code: VALIDATION_ERROR)")
        if action["number"] == "break":
            raise RuntimeError("Server error: the game is broken (code: EXECUTION_ERROR)")
        if action["number"] == "die":
            raise SystemExit(3)
        number = self.seed % 10
        if action["number"] == str(number):
            return self.result("right", 1.0, True)
        return self.result("higher" if int(action["number"]) < number else "lower", -0.25)

    async def close(self):
        pass

    def result(self, text, reward, done=False):
        return SimpleNamespace(observation={"text": text}, reward=reward, done=done)
"""


class Schema(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"action": SCHEMA}).encode())

    def log_message(self, format: str, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """(address, Python): a server that has only the schema, and a client that is the game."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "openenv.py").write_text(CLIENT, "utf-8")
    python = folder / "python"  # with -I, which hides the fake
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={folder} exec {sys.executable} -P "$@"\n')
    python.chmod(0o755)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Schema)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", str(python)
    server.shutdown()


@pytest.fixture(scope="module")
def real():
    """(address, Python) of the package itself."""
    if not PYTHON:
        pytest.skip("POSTGRAD_OPENENV_PYTHON names no Python that has openenv")
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    process = subprocess.Popen([PYTHON, str(SERVER), str(port)])
    for _ in range(1200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}", PYTHON
    process.kill()
    process.wait()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slow)])
def server(request):
    return request.getfixturevalue(request.param)


def world(server, **options):
    address, python = server
    settings = {
        "type": "openenv",
        "url": address,
        "python": python,
        "observation": "text",
        **options,
    }
    return dialogue(EnvironmentSettings.model_validate(settings), TOKENIZER, {})


def prompt(seed, **row):
    about = {"reset": {"seed": seed}, **row}
    messages = ({"role": "user", "content": "Find it."},)
    return Prompt(seed, np.array([4], np.int32), "?", None, "rows", 0, about, messages)


def begun(played, asked, sample=0):
    """An episode behind the reset of its server."""
    episode = played.reset(asked, sample)
    first = episode.begin().result()
    assert first.failure is None
    return episode


def turn(text, number=0):
    ids = np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    return Completion(5, 0, number, ids, logprobs, "stop", ((0, len(ids)),), text)


def seen(observation):
    return TOKENIZER.decode(observation.token_ids)


def test_turns_are_actions_and_observations_are_read(server):
    played = world(server)
    assert not played.deterministic
    episode = played.reset(prompt(17), 0)
    first = episode.begin().result()
    assert (first.failure, first.behind) == (None, "nothing")
    assert seen(first) == (
        "<|im_start|>user\nFind it.<|im_end|>\n<|im_start|>user\ngame 17<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    low = episode.step(turn("3")).result()
    assert (low.failure, low.done, low.reward) == (None, False, -0.25)
    assert "user\nhigher<" in seen(low)
    high = episode.step(turn("9", 1)).result()
    assert "user\nlower<" in seen(high)
    right = episode.step(turn("7", 2)).result()
    assert (right.done, right.reward, right.failure) == (True, 1.0, None)
    played.close()


def test_each_sample_has_a_session_of_its_own(server):
    played = world(server)
    episodes = [begun(played, prompt(seed), seed) for seed in range(6)]
    steps = [episode.step(turn("3")) for episode in episodes]
    ends = [step.result() for step in steps]
    assert [end.done for end in ends] == [False, False, False, True, False, False]
    assert ["higher" in seen(end) for end in ends] == [False] * 4 + [True] * 2
    played.close()


def test_what_the_server_cannot_do_is_a_failure_of_its_sample(server):
    played = world(server)
    broken = begun(played, prompt(1)).step(turn("break")).result()
    assert broken.failure is not None
    assert (broken.done, broken.failure.cause) == (True, "error")
    assert begun(played, prompt(4), 1).step(turn("4")).result().reward == 1.0  # others go on
    played.close()


def test_a_server_with_too_few_sessions_is_told_with_what_to_do(fake):
    played = world(fake)
    full = played.reset(prompt(404), 0).begin().result()
    assert full.failure is not None
    assert "start the server with as many (max_concurrent_envs of its app)" in full.failure.message
    played.close()


def test_a_turn_that_is_no_action_costs_what_the_recipe_says(server):
    played = world(server, action="", malformed_reward=-1.0)
    episode = begun(played, prompt(4))
    first = episode.step(turn("4")).result()
    assert first.done
    played.close()
    several = world(server, action="other")
    refused = begun(several, prompt(4)).step(turn("4")).result()
    assert "That is no action" in seen(refused)
    assert (refused.done, refused.reward) == (False, 0.0)
    assert refused.counts["malformed_actions"] == 1.0
    several.close()


def test_rows_show_what_a_reset_shows_and_another_observation_is_a_failure(server):
    address, python = server
    reset_rows = list(rows(3, 40, address, python, "text"))
    assert reset_rows[2] == {
        "question": "game 42", "reset": {"seed": 42}, "observation": "game 42", "answer": "",
    }  # fmt: skip
    played = world(server)
    episode = played.reset(prompt(42, observation="game 42"), 0)
    assert len(episode.begin().result().token_ids) == 0  # its messages show it
    assert episode.step(turn("2")).result().done
    other = played.reset(prompt(42, observation="game 1"), 0).begin().result()
    assert other.failure is not None
    assert "give the server's reset a seed" in other.failure.message
    played.close()


def test_a_client_that_dies_is_a_failure_with_its_exit_code(fake):
    played = world(fake)
    dead = begun(played, prompt(1)).step(turn("die")).result()
    assert dead.failure is not None
    assert dead.failure.cause == "crash"
    assert "exited with code 3" in dead.failure.message
    after = played.reset(prompt(1), 1).begin().result()
    assert after.failure is not None
    played.close()


def test_actions_with_several_fields_are_json(fake):
    chat = build(EnvironmentSettings.model_validate({"type": "openenv", "url": fake[0]}))
    schema = {
        "required": ["a", "b"],
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    }
    assert chat.action_of('{"a": 1, "b": "x"}', schema) == {"a": 1, "b": "x"}
    assert chat.action_of("[1]", schema) is None
    assert chat.action_of("hm", schema) is None
    number = {"required": ["a"], "properties": schema["properties"]}
    assert chat.action_of("12", number) == {"a": 12}
    assert chat.action_of("twelve", number) is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"url": "127.0.0.1:8000"}, "an address such as"),
        ({"url": "http://openenv.example:8000"}, "say remote = true"),
    ],
)
def test_a_wrong_address_is_refused(options, why):
    with pytest.raises(UsageError, match=why):
        build(EnvironmentSettings.model_validate({"type": "openenv", **options}))


def test_a_server_that_does_not_answer_is_named(fake):
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{chosen.getsockname()[1]}"
    with pytest.raises(UsageError, match="no OpenEnv server answers at http"):
        list(rows(1, 0, nobody, fake[1]))
    with pytest.raises(UsageError, match=r"environment.python = .*nowhere"):
        list(rows(1, 0, fake[0], "/nowhere/python"))
