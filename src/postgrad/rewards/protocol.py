"""The lines of JSON between a scoring pool and its workers.

To the worker: one hello, then batches.

    {"rewards": [settings of each component], "sandboxed": does the worker shut itself in}
    {"prompts": [PromptView, ...], "jobs": [[key, component, prompt number, RolloutView | null]]}

From the worker: one answer to the hello, then one line a job, in the batch's order. `cpu` is the
CPU seconds that the worker has used so far, so that each job's own time can be told.

    {"ready": [does component c have a check of its own, ...], "cpu": 0.1} or {"refused": message}
    {"key": 7, "cpu": 0.2, "value": 1.0, "detail": null}, or
    {"key": 7, "cpu": 0.2, "error": message, "cause": "error", "cpu_time" or "crash"}

A job without a sample asks for Verifier.check: its value is null and its detail the reason.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.core.settings import Settings
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView

MAX_DETAIL = 65536  # characters of JSON: a detail is a note, not an artefact


@dataclass(slots=True)
class Job:
    """One score, or one check where `rollout` is None. prompt, rollout: JSON text of the views.

    `second` is True once the job has been given back to be tried again, alone.
    """

    key: int
    component: int
    prompt: str
    rollout: str | None
    cpu_seconds: float
    wall_seconds: float
    second: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: a value and a detail, or a cause of failure with a message."""

    key: int
    value: float | None = None
    detail: Any = None
    cause: str | None = None
    message: str = ""


def hello(rewards: Sequence[Settings], sandboxed: bool) -> bytes:
    """The first line to a worker. sandboxed: whether it shuts itself in (sandbox/enclosure.py)."""
    dumped = [reward.model_dump(mode="json") for reward in rewards]
    return _line({"rewards": dumped, "sandboxed": sandboxed})


def batch(jobs: Sequence[Job]) -> bytes:
    """One line with several jobs; a prompt that several of them share stands in it once."""
    prompts: dict[str, int] = {}
    rows = [
        f"[{job.key},{job.component},{prompts.setdefault(job.prompt, len(prompts))},"
        f"{job.rollout or 'null'}]"
        for job in jobs
    ]
    return f'{{"prompts":[{",".join(prompts)}],"jobs":[{",".join(rows)}]}}\n'.encode()


def prompt_text(view: PromptView) -> str:
    """A prompt as JSON; TypeError or ValueError where its metadata is not JSON."""
    return json.dumps(
        {
            "question": view.question,
            "answer": view.answer,
            "metadata": dict(view.metadata),
            "dataset": view.dataset,
            "row": view.row,
        }
    )


def rollout_text(view: RolloutView) -> str:
    """A sample as JSON."""
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
    """The worker can score."""
    return _line({"ready": list(checks), "cpu": cpu})


def refused(message: str) -> bytes:
    """The worker cannot build a verifier."""
    return _line({"refused": message})


def result(key: int, cpu: float, value: float | None, detail: Any) -> bytes:
    """A job ended; TypeError or ValueError where `detail` is not JSON or too long."""
    text = "null" if detail is None else json.dumps(detail, allow_nan=False)
    if len(text) > MAX_DETAIL:
        raise ValueError(f"{len(text)} characters, at most {MAX_DETAIL}")
    number = "null" if value is None else repr(value)
    return f'{{"key":{key},"cpu":{cpu!r},"value":{number},"detail":{text}}}\n'.encode()


def error(key: int, cpu: float, message: str, cause: str = "error") -> bytes:
    """A verifier raised, or returned what is no score; or the process of one score crashed."""
    return _line({"key": key, "cpu": cpu, "error": message, "cause": cause})


def rewards_of(message: Mapping[str, Any]) -> list[RewardSettings]:
    """The components that a hello names."""
    return [RewardSettings.model_validate(reward) for reward in message["rewards"]]


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
