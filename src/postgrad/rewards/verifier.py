"""What a verifier is, and what it sees of a prompt and a sample. Imports no NumPy, no torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from postgrad.core.settings import Settings


@dataclass(frozen=True, slots=True)
class PromptView:
    """What a verifier sees of a prompt: JSON values. `answer` is the reference answer."""

    question: str
    answer: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dataset: str = ""
    row: int = 0


@dataclass(frozen=True, slots=True)
class RolloutView:
    """What a verifier sees of a sample. `tokens` counts what the policy wrote, of all turns, and
    `turn_tokens` each turn's; `text` has no special tokens. finish_reason: how the last turn ended.
    """

    text: str
    finish_reason: str = "stop"
    tokens: int = 0
    sample: int = 0
    turn_tokens: Sequence[int] = ()

    @property
    def longest_turn(self) -> int:
        """Tokens of the longest turn that the policy wrote; of the whole where turns are not told.

        `rollout.max_new_tokens` limits a turn, not the sample.
        """
        return max(self.turn_tokens, default=self.tokens)


@dataclass(frozen=True, slots=True)
class Score:
    """A finite number, and what else is worth recording about it: `detail`, a JSON value."""

    value: float
    detail: Any = None


class Verifier(Settings):
    """Scores a sample. A verifier *is* its settings: fields are knobs, methods are the rule.

    The same prompt and sample must always give the same score: no clock, no random numbers, nothing
    remembered from other samples. It runs in a worker process that may be killed at any moment.
    A setting `max_new_tokens` that is None is filled in from the rollout's.
    """

    waits: ClassVar[bool] = False  # for a server: it shares no worker with those that compute
    sandboxed: ClassVar[bool] = False  # code of others that may run a sample's text as code
    imports_bytes: ClassVar[int] = 0  # that it adds to a worker which has scored for a while

    @property
    def default_wall_seconds(self) -> float:
        """How long one score may last where the recipe does not say."""
        return 30.0

    def at_start(self) -> Mapping[str, Any]:
        """Called once in the controller, for our own verifiers: settings that are found out at the
        start of a run and hold for all of it, such as which model a server has.
        """
        return {}

    def prepare(self) -> None:
        """Called once in each worker, before any time limit: the place for slow imports."""

    def formulas(self) -> Collection[str] | None:
        """In the sandbox, what text may name that is run as code: then all samples may share a
        process, since formulas change nothing. None: text may do anything, in a process of its own.

        For verifiers in Python whose text can only become code by eval and exec.
        """
        return None

    def look_up(self, prompt: PromptView) -> None:
        """Called before a check or a score in a sandbox, outside of the process that is gone with
        it: the place to remember what depends on the row alone, and is slow.
        """
        del prompt

    def check(self, prompt: PromptView) -> str | None:
        """Why the reference answer cannot be read, or None when it can."""
        del prompt
        return None

    def right_answer(self, prompt: PromptView) -> str | None:
        """A sample that has to score 1, made of the row's reference answer; None where none can be
        made of it. A dry run tries it.
        """
        del prompt
        return None

    def score(self, prompt: PromptView, rollout: RolloutView) -> float | Score:
        """The reward of one sample. What it raises is a recorded failure, never a score of 0."""
        raise NotImplementedError
