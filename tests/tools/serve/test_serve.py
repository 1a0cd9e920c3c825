"""`postgrad serve-reward`, served and as a process, and what it refuses to start with."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from postgrad.cli.main import main
from postgrad.tools.serve.serve import TOKEN

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


@pytest.fixture
def serve(reward_dir):
    """serve(*arguments, env): a running server and its address."""
    running = []

    def start(*arguments, **env):
        command = [sys.executable, "-m", "postgrad", "serve-reward", str(reward_dir), "--json"]
        child = subprocess.Popen(
            [*command, "--port", "0", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env,
        )  # fmt: skip
        running.append(child)
        line = child.stderr.readline()
        announcement = re.fullmatch(r"serving my-reward at http://(.+):(\d+), (.+)\n", line)
        assert announcement, line + child.stderr.read()
        return child, announcement[1], int(announcement[2]), announcement[3]

    yield start
    for server_process in running:
        server_process.kill()
        server_process.communicate()


def ask(port, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    data = None if body is None else json.dumps(body)
    headers["Content-Type"] = "application/json"
    connection.request("GET" if data is None else "POST", path, data, headers)
    with connection.getresponse() as reply:
        return reply.status, json.loads(reply.read())


class Told(NamedTuple):
    """What the command said of itself, and what its server answered."""

    serving: str
    info: tuple[int, Any]
    scored: tuple[int, Any]
    stopped: str


def use(stderr: int) -> Told:
    """Waits for the server of this process, asks it, and tells it to stop."""
    with os.fdopen(stderr) as stderr_pipe:
        serving = stderr_pipe.readline()
        assert serving.startswith("serving "), serving + stderr_pipe.read()
        try:
            port = int(serving.split(",")[0].rpartition(":")[2])
            info = ask(port, "/info")
            scored = ask(port, "/score", {"inputs": [{"messages": CHAT}, {"token_ids": [5, 6]}]})
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        return Told(serving, info, scored, stderr_pipe.read())


@pytest.fixture
def used(reward_dir, monkeypatch, capsys):
    """used(*arguments): exit code, standard output and `Told`, of the command in this process."""

    def run(*arguments):
        readable, writable = os.pipe()
        with ThreadPoolExecutor(1) as other:
            with os.fdopen(writable, "w", buffering=1) as stderr, monkeypatch.context() as patch:
                person = other.submit(use, readable)
                patch.setattr(sys, "stderr", stderr)
                code = main(["serve-reward", str(reward_dir), "--json", "--port", "0", *arguments])
            return code, capsys.readouterr().out, person.result()

    return run


def test_it_serves_a_real_model_until_it_is_told_to_stop(used, reward_dir, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    code, out, log = used("--dtype", "float32")
    assert code == 0
    where = r"http://127\.0\.0\.1:\d+, without a token"
    assert re.fullmatch(rf"serving my-reward at {where}\n", log.serving)
    status, info = log.info
    assert (status, info["name"], info["mean"], info["std"]) == (200, "my-reward", 0.5, 2.0)
    assert info["limits"]["input_tokens"] == 64  # the positions that the model knows
    status, body = log.scored
    assert status == 200
    plain = AutoModelForSequenceClassification.from_pretrained(reward_dir, dtype=torch.float32)
    with torch.no_grad():
        wanted = float(plain.eval()(torch.tensor([[5, 6]])).logits[0, 0])
    assert body["scores"][1] == pytest.approx(wanted, rel=1e-5)
    assert body["model"] == info["model"]
    assert json.loads(out)["sequences"] == 2
    assert re.fullmatch(r"stopped: \d requests?, 2 sequences, \d+ tokens\n", log.stopped)


@pytest.mark.slow
def test_with_a_token_it_may_be_bound_anywhere(serve, tmp_path):
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    process, host, port, secured = serve("--host", "0.0.0.0", "--token-file", str(file))
    assert (host, secured) == ("0.0.0.0", "with a token")
    assert ask(port, "/info")[0] == 401
    assert ask(port, "/info", Authorization="Bearer s3cret")[0] == 200
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 0


def refusal(capsys, *arguments):
    assert main(["serve-reward", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_other_machines_are_not_let_in_without_a_token(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    for host in ("0.0.0.0", "::", "192.0.2.7", "some-name"):
        assert "give a token in --token-file" in refusal(capsys, tmp_path, "--host", host)


@pytest.mark.parametrize("text", ["", " \n", "two words", "tab\tbed", "café"])
def test_a_token_that_is_none_is_refused(capsys, tmp_path, monkeypatch, text):
    file = tmp_path / "token"
    file.write_text(text, "utf-8")
    assert "holds no token" in refusal(capsys, tmp_path, "--token-file", file)
    monkeypatch.setenv(TOKEN, text)
    assert TOKEN in refusal(capsys, tmp_path)


def test_what_cannot_work_is_told_before_a_model_is_read(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    assert "cannot be read" in refusal(capsys, tmp_path, "--token-file", tmp_path / "none")
    assert "--request-seconds 0" in refusal(capsys, tmp_path, "--request-seconds", 0)
    assert "--max-batch-tokens -1" in refusal(capsys, tmp_path, "--max-batch-tokens", -1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refusal(capsys, tmp_path, "--port", port)
        assert f"cannot listen at 127.0.0.1:{port}" in message
    assert "--port 70000" in refusal(capsys, tmp_path, "--port", 70000)
    assert "no model at" in refusal(capsys, tmp_path, "--port", 0)


def test_without_its_libraries_it_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.delitem(sys.modules, "postgrad.tools.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    message = refusal(capsys, tmp_path, "--port", 0)
    assert "pip install 'postgrad[serve]'" in message
