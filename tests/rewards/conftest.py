"""Scorers and rollouts for the tests of this room."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.core.records import Prompt, Rollout, ScoredGroup, Turn
from postgrad.rewards import worker
from postgrad.rewards.call import call
from postgrad.rewards.protocol import ScoreJob
from postgrad.rewards.registry import build
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rewards.verifier import PromptView, RolloutView

OBEY = "misbehaving:obey"


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    """make_prompt(ticket=0, answer="#### 7", **metadata); its row is 10 + ticket."""

    def make(ticket: int = 0, answer: str | None = "#### 7", **metadata: Any) -> Prompt:
        ids = np.arange(3, dtype=np.int32)
        return Prompt(ticket, ids, "What?", answer, "set", 10 + ticket, metadata)

    return make


@pytest.fixture
def make_rollouts() -> Callable[..., list[Rollout]]:
    """make_rollouts(texts, ticket=0): one sample a text, of four tokens."""

    def rollout(sample: int, text: str, ticket: int) -> Rollout:
        turn = Turn("policy", np.zeros(4, np.int32), np.zeros(4, np.float32))
        return Rollout(ticket, sample, (turn,), "stop", ((0, 4),), text)

    def make(texts: Sequence[str], ticket: int = 0) -> list[Rollout]:
        return [rollout(sample, text, ticket) for sample, text in enumerate(texts)]

    return make


@pytest.fixture
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets workers import the verifiers beside this file."""
    here, before = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, before])))


@pytest.fixture
def make_scorer(own_modules: None) -> Iterator[Callable[..., Scorer]]:
    """make_scorer(*rewards, workers=1, waiting_workers=1, ...); closed when the test ends."""
    scorers: list[Scorer] = []
    few = {"workers": 1, "waiting_workers": 1}

    def make(*rewards: RewardSettings, **scoring: Any) -> Scorer:
        scorers.append(Scorer(rewards, ScoringSettings(**(few | scoring))))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """timed(text): wall_seconds holds for samples of that text alone. Others may take the time that
    a busy machine needs, however short the limit is of those that are to exceed it.
    """
    right = Scorer._job

    def only(text: str) -> None:
        def job(scorer: Scorer, name: str, prompt: str, rollouts: Sequence[str] | None) -> ScoreJob:
            scored = right(scorer, name, prompt, rollouts)
            texts = [json.loads(rollout)["text"] for rollout in rollouts or ()]
            return scored if text in texts else replace(scored, wall_seconds=600.0)

        monkeypatch.setattr(Scorer, "_job", job)

    return only


@pytest.fixture
def obeying() -> Callable[..., RewardSettings]:
    """obeying(**settings): the reward that does what a sample's text says, with short limits."""

    def make(**settings: Any) -> RewardSettings:
        options = {
            "type": OBEY,
            "name": "obey",
            "cpu_seconds": 0.15,
            "wall_seconds": 60.0,
        } | settings
        return RewardSettings(**options)

    return make


@pytest.fixture
def score(
    make_scorer: Callable[..., Scorer],
    make_prompt: Callable[..., Prompt],
    make_rollouts: Callable[..., list[Rollout]],
    obeying: Callable[..., RewardSettings],
) -> Callable[..., ScoredGroup]:
    """score(*texts, **settings): one group scored by an obeying reward in one worker."""

    def run(*texts: str, workers: int = 1, **settings: Any) -> ScoredGroup:
        scorer = make_scorer(obeying(**settings), workers=workers)
        return scorer.score([(make_prompt(), make_rollouts(texts))])[0]

    return run


@pytest.fixture
def worker_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """worker_answer(text): the line that a worker would answer to that sample, made in process."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def run(text: str) -> dict[str, Any]:
        verifier = build(RewardSettings(type=OBEY))
        line = worker.answer(1, partial(call, verifier), PromptView("?", None), [RolloutView(text)])
        assert line.count(b"\n") == 1
        return json.loads(line)

    yield run
    sys.modules.pop("misbehaving", None)
