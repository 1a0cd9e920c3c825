"""The lines of JSON between a scoring pool and its workers.

To the worker: one hello, then batches.

    {"rewards": [settings of each component], "sandboxed": whether the worker sandboxes itself}
    {"prompts": [PromptView, ...],
     "jobs": [[key, component, prompt number, [RolloutView, ...] | null], ...]}

From the worker: one answer to the hello, then one line for each job, in the batch's order. `cpu` is
the CPU seconds that the worker has used so far; differences are the time of a job.

    {"ready": [[whether component c checks answers, whether it scores groups], ...], "cpu": 0.1} or
    {"refused": message}
    {"key": 7, "cpu": 0.2, "scores": [[1.0, null], ...], "text": null}, or
    {"key": 7, "cpu": 0.2, "error": message, "cause": "error", "cpu_time" or "crash"}

A job has one sample, or for a verifier of groups all of a group; its scores are pairs of a value
and a detail, in the same order. A job with null asks for Verifier.check, one
with an empty list for Verifier.right_answer: they have a text and no scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from postgrad.core.settings import Settings
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView

if TYPE_CHECKING:  # workers do not import numpy
    import numpy as np
    from numpy.typing import NDArray

MAX_DETAIL = 65536  # characters of JSON: a detail is a note, not an artefact


class VerifierTraits(NamedTuple):
    """What a verifier does, as only who has imported it can tell."""

    checks_answers: bool
    scores_groups: bool


@dataclass(slots=True)
class ScoreJob:
    """Samples to score in one call of a verifier. Where `rollouts` is None it is one check of a
    reference answer, where it is empty the question for a right answer.
    """

    key: int  # unique in the pool; its outcome has the same
    component: int  # index of the verifier in the pool
    prompt: str  # JSON text of the PromptView
    rollouts: Sequence[str] | None  # JSON text of each RolloutView; see the class
    cpu_seconds: float  # limit
    wall_seconds: float  # limit
    second: bool = False  # it is tried again, alone in a fresh worker


@dataclass(frozen=True, slots=True)
class Returned:
    """What a verifier gave for a job."""

    scores: Sequence[tuple[float, Any]] = ()  # (value, detail) of each sample
    # Of a check: why the reference answer cannot be read, or None; else Verifier.right_answer's.
    text: Any = None


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended: with what the verifier gave, or with a cause of failure and a message."""

    key: int  # of the job
    returned: Returned = Returned()
    cause: str | None = None  # "error", "cpu_time", "wall_clock" or "crash"; None: no failure
    message: str = ""  # of a failure

    def outcomes(self, samples: int) -> list[Outcome]:
        """The outcome of each of the job's samples, by number; a failure is one of them all."""
        if self.cause is not None:
            failed = (None, None, self.cause, self.message)
            return [Outcome(place, *failed) for place in range(samples)]
        scores = zip(range(samples), self.returned.scores, strict=True)
        return [Outcome(place, value, detail) for place, (value, detail) in scores]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the score of a sample ended: with a value and a detail, or with a cause of failure and a
    message.
    """

    key: int  # number of the sample among those that were scored together
    value: float | None = None  # the score; None for a failure
    detail: Any = None  # JSON value of the verifier
    cause: str | None = None  # "error", "cpu_time", "wall_clock" or "crash"; None: no failure
    message: str = ""  # of a failure
    # [R] the parts of `value` by response token; None: all of it is of the whole sample
    parts: NDArray[np.float64] | None = None


def hello(rewards: Sequence[Settings], sandboxed: bool) -> bytes:
    """The first line to a worker. sandboxed: it puts sandbox/enclosure.py around itself."""
    dumped = [reward.model_dump(mode="json") for reward in rewards]
    return _line({"rewards": dumped, "sandboxed": sandboxed})


def batch(jobs: Sequence[ScoreJob]) -> bytes:
    """The line of several jobs; a prompt that several of them share is sent once."""
    prompts: dict[str, int] = {}
    rows = [
        f"[{job.key},{job.component},{prompts.setdefault(job.prompt, len(prompts))},"
        f"{'null' if job.rollouts is None else '[' + ','.join(job.rollouts) + ']'}]"
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


def ready(traits: Sequence[VerifierTraits], cpu: float) -> bytes:
    """Line of a worker that can score. traits: of each component."""
    return _line({"ready": list(traits), "cpu": cpu})


def refused(message: str) -> bytes:
    """The line of a worker that cannot build its verifiers."""
    return _line({"refused": message})


def result(key: int, cpu: float, returned: Returned) -> bytes:
    """The line of a job that has ended with scores or a check.

    Raises TypeError or ValueError where a detail is not JSON, or longer than MAX_DETAIL.
    """
    scores = ",".join(f"[{value!r},{_note(detail)}]" for value, detail in returned.scores)
    text = _note(returned.text)
    return f'{{"key":{key},"cpu":{cpu!r},"scores":[{scores}],"text":{text}}}\n'.encode()


def _note(detail: Any) -> str:
    text = "null" if detail is None else json.dumps(detail, allow_nan=False)
    if len(text) > MAX_DETAIL:
        raise ValueError(f"{len(text)} characters, at most {MAX_DETAIL}")
    return text


def error(key: int, cpu: float, message: str, cause: str = "error") -> bytes:
    """The line of a job that failed: the verifier raised, returned no scores, or its child died."""
    return _line({"key": key, "cpu": cpu, "error": message, "cause": cause})


def rewards_of(message: Mapping[str, Any]) -> list[RewardSettings]:
    """The settings of the components in a hello."""
    return [RewardSettings.model_validate(reward) for reward in message["rewards"]]


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
