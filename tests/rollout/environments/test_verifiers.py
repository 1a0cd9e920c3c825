"""Tasksets of the package verifiers as the environment: a fake of the package, and, slowly, itself.

POSTGRAD_VERIFIERS_PYTHON names the Python of an environment that has the package verifiers.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.chat import HERMES, chat_tokenizer
from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.data.prompts import load_prompts
from postgrad.data.settings import DataSettings
from postgrad.rollout.engine import Completion
from postgrad.rollout.environments.base import build
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.verifiers import rows
from postgrad.rollout.settings import EnvironmentSettings

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
HERE = Path(__file__).parent
FAKE = HERE / "verifiers_fake.py"
PYTHON = os.environ.get("POSTGRAD_VERIFIERS_PYTHON")
TOKENIZER = chat_tokenizer(HERMES)
SCHEMA = {
    "type": "function",
    "function": {
        "name": "arithmetic_double",
        "description": "Twice a number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"title": "Number", "type": "integer"}},
            "required": ["number"],
            "title": "doubleArguments",
        },
    },
}


def python_with(folder: Path, interpreter: str, *paths: Path) -> str:
    """A Python that finds these folders, although it is started with -I."""
    python = folder / "python"
    places = os.pathsep.join(map(str, paths))
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={places} exec {interpreter} -P "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """A Python with a package that has the few names of verifiers which the client asks for."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "verifiers").mkdir()
    (folder / "verifiers" / "__init__.py").write_text(FAKE.read_text("utf-8"), "utf-8")
    return python_with(folder, sys.executable, folder, HERE)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A Python with the package itself."""
    if not PYTHON:
        pytest.skip("POSTGRAD_VERIFIERS_PYTHON names no Python that has verifiers")
    return python_with(tmp_path_factory.mktemp("real"), PYTHON, HERE)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slow)])
def python(request):
    return request.getfixturevalue(request.param)


def world(python, **options):
    settings = {"type": "verifiers", "taskset": "doubled", "python": python, **options}
    return dialogue(EnvironmentSettings.model_validate(settings), TOKENIZER, {})


def prompt(number):
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Twice {number}?"},
    )
    ids = np.array([4], np.int32)
    return Prompt(number, ids, "?", None, "rows", 0, {"task": number}, messages)


def turn(text, number=0):
    ids = TOKENIZER(text + TOKENIZER.eos_token, add_special_tokens=False)["input_ids"]
    logprobs = np.zeros(len(ids), np.float32)
    return Completion(
        5, 0, number, np.array(ids, np.int32), logprobs, "stop", ((0, len(ids)),), text
    )


def begun(played, asked):
    """An episode whose task has asked the policy."""
    episode = played.reset(asked, 0)
    first = episode.begin().result()
    assert (first.failure, first.behind, len(first.token_ids)) == (None, "newest", 0)
    return episode


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_task_scores_what_the_policy_answers(python):
    played = world(python)
    assert not played.deterministic
    episodes = [(begun(played, prompt(n)), text) for n, text in ((3, "6"), (4, "8"), (2, "5"))]
    ends = [step.result() for step in [episode.step(turn(text)) for episode, text in episodes]]
    assert [end.failure for end in ends] == [None, None, None]
    assert [(end.done, end.reward) for end in ends] == [(True, 2.0), (True, 2.0), (True, 0.0)]
    assert ends[0].counts["turns"] == 1.0
    broken = begun(played, prompt(1)).step(turn("break")).result()
    assert broken.failure is not None
    assert broken.failure.cause == "error"
    assert "division by zero" in broken.failure.message
    played.close()


def test_the_policy_calls_the_tools_of_a_task(python):
    settings = {"task": {"with_tools": True}}
    played = world(python, settings=settings, tools=[SCHEMA])
    assert played.chat.variables() == {"tools": [SCHEMA]}
    episode = begun(played, prompt(4))
    seen = episode.step(turn(call("arithmetic_double", number=4))).result()
    assert seen.failure is None
    assert "8" in TOKENIZER.decode(seen.token_ids)
    wrong = episode.step(turn(call("nothing", number=4), 1)).result()
    assert "no such tool" in TOKENIZER.decode(wrong.token_ids)
    end = episode.step(turn("8", 2)).result()
    assert (end.failure, end.done, end.reward) == (None, True, 2.0)
    # The task's own metric "turns" (3 of them) does not mix with the turns that the run counts.
    assert (end.counts["turns"], end.counts["task_turns"]) == (1.0, 3.0)
    played.close()
    unstated = world(python, settings=settings)  # its requests have the tools
    first = unstated.reset(prompt(4), 0).begin().result()
    assert (first.failure, first.tools) == (None, (SCHEMA,))
    assert "arithmetic_double" in TOKENIZER.decode(first.token_ids)
    unstated.close()
    unlike = world(python, settings=settings, tools=[{**SCHEMA, "more": 1}])
    failure = unlike.reset(prompt(4), 0).begin().result().failure
    assert failure is not None
    assert f"say tools = {json.dumps([SCHEMA])}" in failure.message
    unlike.close()


def test_rows_are_the_tasks_from_the_seed_on(python):
    assert list(rows(9, 3, "doubled", python)) == [
        {"messages": list(prompt(number).messages), "task": number} for number in (3, 4)
    ]
    assert len(list(rows(9, 3, "doubled", python, {"size": 6}))) == 3
    with pytest.raises(UsageError, match="has no task 5"):
        list(rows(1, 5, "doubled", python))


def test_prompts_of_these_rows_can_be_played(fake):
    settings = DataSettings(
        path="postgrad.rollout.environments.verifiers:rows",
        size=2,
        seed=3,
        task={"taskset": "doubled", "python": fake},
    )
    loaded = load_prompts(settings, TOKENIZER, max_prompt_tokens=100)
    played = world(fake)
    for asked, (number, text) in zip(loaded.all(), ((3, "6"), (4, "8")), strict=True):
        assert (asked.metadata["task"], played.chat.check(asked)) == (number, None)
        assert begun(played, asked).step(turn(text)).result().reward == 2.0
    played.close()


def test_the_policy_reads_the_task_whatever_the_messages_of_its_row_are(python):
    played = world(python)
    other = played.reset(
        Prompt(9, np.array([4], np.int32), "?", None, "rows", 0, {"task": 1}, prompt(2).messages), 0
    )
    first = other.begin().result()
    assert first.behind == "nothing"
    assert "Twice 1?" in TOKENIZER.decode(first.token_ids)
    none = played.reset(Prompt(9, np.array([4], np.int32), "?", None, "rows", 0, {"task": 77}), 0)
    missing = none.begin().result().failure
    assert missing is not None
    assert "has no task 77" in missing.message
    played.close()


def test_an_episode_that_ends_early_ends_its_task(fake):
    played = world(fake, settings={"task": {"with_tools": True}}, tools=[SCHEMA], max_turns=1)
    end = begun(played, prompt(4)).step(turn(call("arithmetic_double", number=4))).result()
    assert (end.done, end.reward, end.counts["out_of_turns"]) == (True, 0.0, 1.0)
    played.close()


def test_what_cannot_be_loaded_is_told(fake):
    with pytest.raises(UsageError, match=r"environment.taskset = 'nobody' cannot be loaded"):
        list(rows(1, 0, "nobody", fake))
    with pytest.raises(UsageError, match=r"environment.python = .*nowhere"):
        list(rows(1, 0, "doubled", "/nowhere/python"))
    chat = build(EnvironmentSettings.model_validate({"type": "verifiers", "taskset": "doubled"}))
    bare = Prompt(9, np.array([4], np.int32), "?", None, "rows", 0, {}, prompt(2).messages)
    assert chat.check(bare) == "its column task is no number"
    assert chat.check(prompt(2)) is None
