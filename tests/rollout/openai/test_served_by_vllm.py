"""A teacher behind vLLM's own server: its grades are those of the same model here."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.fleet.choices import Choices
from postgrad.fleet.loading import frozen_policy
from postgrad.fleet.teachers import spread_tokens
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit, ModelSettings
from postgrad.models.tokenizer import load_tokenizer
from postgrad.recipe.load import parse_recipe
from postgrad.rollout.openai.prompt_logprobs import ServedTeacher
from postgrad.rollout.openai.settings import TeacherServerSettings

pytestmark = pytest.mark.vllm

INIT = {  # heads as wide as vLLM's attention on CPUs wants them
    "type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "initializer_range": 0.2, "tokenizer": {"kind": "characters"},
}  # fmt: skip
SECONDS = 600.0  # until the server answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("teacher") / "model"
    make_fresh(ModelInit.model_validate(INIT), [], 0, path)
    return str(path)


@pytest.fixture(scope="module")
def url(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        os.environ["POSTGRAD_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server",
        "--model", model, "--served-model-name", "taught", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", "64", "--enforce-eager",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "server.txt"
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as written:
        server = subprocess.Popen(words, env=env, stdout=written, stderr=subprocess.STDOUT)
    try:
        _await(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def _await(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            log_end = log.read_text()[-3000:]
            assert server.poll() is None, log_end
            assert time.monotonic() < until, log_end
            time.sleep(1.0)


def test_vllm_s_grades_are_those_of_the_model_here(model: str, url: str) -> None:
    teacher = ServedTeacher(TeacherServerSettings(base_url=url), "teacher.server")
    tokenizer = load_tokenizer(model)
    teacher.require_same_tokens(tokenizer, ["Add 3+8+5.", spread_tokens(tokenizer)], "no")
    assert teacher.identity == f"server:taught ({model})"
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, len(tokenizer), n).astype(np.int32) for n in (5, 17, 40)]
    masks = [np.arange(len(row)) >= 2 for row in rows]
    sequences = Sequences(Ragged.of(rows), Ragged.of(masks), np.arange(3))
    table = {
        "job": "sft", "run_dir": "unused", "steps": 1, "model": {"path": model},
        "data": {"path": "unused.jsonl", "max_len": 64}, "batch": {"train_batch_size": 1},
    }  # fmt: skip
    choices = Choices("cpu", 1, True, "float32", None, 4096)
    here = frozen_policy(parse_recipe(table), ModelSettings(path=model), model, choices)
    wanted, graded = here.logprobs(sequences).result(), teacher.logprobs(sequences).result()
    np.testing.assert_allclose(graded.values, wanted.values, atol=1e-4)
    teacher.close()
