"""The lines of JSON between a scoring pool and its workers.

To the worker: one hello, then batches.

    {"rewards": [settings of each component], "sandboxed": whether the worker sandboxes itself}
    {"prompts": [PromptView, ...], "jobs": [[key, component, prompt number, RolloutView | null]]}

From the worker: one answer to the hello, then one line for each job, in the batch's order. `cpu` is
the CPU seconds that the worker has used so far; differences are the time of a job.

    {"ready": [whether component c checks answers, ...], "cpu": 0.1} or {"refused": message}
    {"key": 7, "cpu": 0.2, "value": 1.0, "detail": null}, or
    {"key": 7, "cpu": 0.2, "error": message, "cause": "error", "cpu_time" or "crash"}

A job without a sample asks for Verifier.check: its value is null and its detail the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from postgrad.core.settings import Settings
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView

if TYPE_CHECKING:  # workers do not import numpy
    import numpy as np
    from numpy.typing import NDArray

MAX_DETAIL = 65536  # characters of JSON: a detail is a note, not an artefact


@dataclass(slots=True)
class ScoreJob:
    """One score to compute, or one check of a reference answer where `rollout` is None."""

    key: int  # unique in the pool; its outcome has the same
    component: int  # index of the verifier in the pool
    prompt: str  # JSON text of the PromptView
    rollout: str | None  # JSON text of the RolloutView
    cpu_seconds: float  # limit
    wall_seconds: float  # limit
    second: bool = False  # it is tried again, alone in a fresh worker


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: with a value and a detail, or with a cause of failure and a message."""

    key: int  # of the job
    value: float | None = None  # the score; None for a check and a failure
    detail: Any = None  # JSON value of the verifier; of a check the reason, or None
    cause: str | None = None  # "error", "cpu_time", "wall_clock" or "crash"; None: no failure
    message: str = ""  # of a failure
    # [R] the parts of `value` by response token; None: all of it is of the whole sample
    parts: NDArray[np.float64] | None = None


def hello(rewards: Sequence[Settings], sandboxed: bool) -> bytes:
    """The first line to a worker. sandboxed: it puts a sandbox around itself (enclosure.py)."""
    dumped = [reward.model_dump(mode="json") for reward in rewards]
    return _line({"rewards": dumped, "sandboxed": sandboxed})


def batch(jobs: Sequence[ScoreJob]) -> bytes:
    """The line of several jobs; a prompt that several of them share is sent once."""
    prompts: dict[str, int] = {}
    rows = [
        f"[{job.key},{job.component},{prompts.setdefault(job.prompt, len(prompts))},"
        f"{job.rollout or 'null'}]"
        for job in jobs
    ]
    return f'{{"prompts":[{",".join(prompts)}],"jobs":[{",".join(rows)}]}}\n'.encode()


def prompt_text(view: PromptView) -> str:
    """A prompt as JSON text. Raises TypeError or ValueError where its metadata is not JSON."""
    return json.dumps(
        {
            "question": view.question,
            "answer": view.answer,
            "metadata": dict(view.metadata),
            "dataset": view.dataset,
            "row": view.row,
            "images": list(view.images),
        }
    )


def rollout_text(view: RolloutView) -> str:
    """A sample as the JSON text of a job."""
    return json.dumps(
        {
            "text": view.text,
            "finish_reason": view.finish_reason,
            "tokens": view.tokens,
            "sample": view.sample,
            "turn_tokens": list(view.turn_tokens),
        }
    )


def ready(checks: Sequence[bool], cpu: float) -> bytes:
    """Line of a worker that can score. checks: for each component, whether it checks answers."""
    return _line({"ready": list(checks), "cpu": cpu})


def refused(message: str) -> bytes:
    """The line of a worker that cannot build its verifiers."""
    return _line({"refused": message})


def result(key: int, cpu: float, value: float | None, detail: Any) -> bytes:
    """The line of a job that has ended with a score or a check.

    Raises TypeError or ValueError where `detail` is not JSON, or longer than MAX_DETAIL.
    """
    text = "null" if detail is None else json.dumps(detail, allow_nan=False)
    if len(text) > MAX_DETAIL:
        raise ValueError(f"{len(text)} characters, at most {MAX_DETAIL}")
    number = "null" if value is None else repr(value)
    return f'{{"key":{key},"cpu":{cpu!r},"value":{number},"detail":{text}}}\n'.encode()


def error(key: int, cpu: float, message: str, cause: str = "error") -> bytes:
    """The line of a job that failed: the verifier raised, returned no score, or its child died."""
    return _line({"key": key, "cpu": cpu, "error": message, "cause": cause})


def rewards_of(message: Mapping[str, Any]) -> list[RewardSettings]:
    """The settings of the components in a hello."""
    return [RewardSettings.model_validate(reward) for reward in message["rewards"]]


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
