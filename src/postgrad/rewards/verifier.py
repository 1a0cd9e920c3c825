"""The base class of verifiers, and their views of a prompt and a sample.

Imports neither NumPy nor torch, since every worker loads it.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from postgrad.core.settings import Settings

LARGEST_SCORE = 3.4028234663852886e38  # of a float32, which rollouts and advantages hold

if TYPE_CHECKING:
    from postgrad.rewards.settings import RewardSettings


@dataclass(frozen=True, slots=True)
class PromptView:
    """A prompt as a verifier sees it."""

    question: str
    answer: str | None  # the reference answer
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # other columns: JSON
    dataset: str = ""
    row: int = 0  # its number in the data set
    images: Sequence[str] = ()  # the files of its images, in order: read them, never write


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A sample as a verifier sees it."""

    text: str  # without special tokens, unless the component has special_tokens = true
    finish_reason: str = "stop"  # of the last turn: "stop", "length", ...
    tokens: int = 0  # that the policy wrote, in all turns
    sample: int = 0  # its number in the group
    turn_tokens: Sequence[int] = ()  # that the policy wrote, in each turn

    @property
    def longest_turn(self) -> int:
        """Tokens of the policy's longest turn; all its tokens where `turn_tokens` is empty.

        `rollout.max_new_tokens` limits a turn, not the sample.
        """
        return max(self.turn_tokens, default=self.tokens)


@dataclass(frozen=True, slots=True)
class Score:
    """A score, a finite number of 32 bits, with a `detail` to record: any JSON value."""

    value: float
    detail: Any = None


def listed(answer: str | None) -> Any:
    """The reference answer parsed where it is a JSON list, else as it is."""
    if answer is None or not answer.lstrip().startswith("["):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):  # a text that begins with a bracket
        return answer


def only_answer(answer: str | None) -> str | None:
    """The text of a JSON list that has one text and no more, any other reference answer as it is:
    where some rows of a data set have several answers, every row has a list.
    """
    texts = listed(answer)
    single = isinstance(texts, list) and len(cast(list[Any], texts)) == 1
    return texts[0] if single and isinstance(texts[0], str) else answer


class Verifier(Settings):
    """Scores samples. Its fields are the settings in the recipe, its methods are the rule.

    It overrides `score`, or `score_group` where the score of a sample depends on the other samples
    of its prompt. The same prompt and samples must always give the same scores: no clock, no random
    numbers, nothing remembered from earlier calls. It runs in a worker process that may be killed
    at any moment. A setting `max_new_tokens` that is None is filled in from the rollout's.
    """

    waits: ClassVar[bool] = False  # waits for a server: no worker runs both it and computing ones
    sandboxed: ClassVar[bool] = False  # third-party code that may run a sample's text as code
    imports_bytes: ClassVar[int] = 0  # resident memory that its imports add to a worker
    compares: ClassVar[bool] = False  # the samples of a prompt: the score of one alone says nothing
    highest: ClassVar[float | None] = None  # no score is above it; None: that is not known

    @classmethod
    def check_component(cls, reward: "RewardSettings") -> None:
        """Raises UsageError for settings of its [[rewards]] entry that do not apply to it."""
        del reward

    @property
    def default_wall_seconds(self) -> float:
        """Wall-clock limit of one score, in seconds, where the recipe has none; of one group for a
        verifier of groups.
        """
        return 30.0

    def at_start(self) -> Mapping[str, Any]:
        """Settings that are looked up at the start of a run and hold for all of it, such as the
        hash of a server's model. Called once in the controller, for our own verifiers only.
        """
        return {}

    def prepare(self) -> None:
        """Called once in each worker, before any time limit runs: the place for slow imports."""

    def formulas(self) -> Collection[str] | None:
        """The names that a sample's text may use where it is run as code, for sandboxed verifiers.

        With such a list all samples share a process, since formulas change nothing. None: text may
        run any code, and each sample gets a child process. A list is only for verifiers in Python
        that run text by eval and exec.
        """
        return None

    def look_up(self, prompt: PromptView) -> None:
        """Called in a sandboxed worker before a check or score, outside of the child process: the
        place to cache slow work that depends on the row alone.
        """
        del prompt

    def check(self, prompt: PromptView) -> str | None:
        """Why the reference answer cannot be read, or None when it can."""
        del prompt
        return None

    def right_answer(self, prompt: PromptView) -> str | None:
        """A sample that has to score 1, built from the reference answer; None where that cannot be
        done. A dry run scores it.
        """
        del prompt
        return None

    def score(self, prompt: PromptView, rollout: RolloutView) -> float | Score:
        """The reward of one sample. An exception is a recorded failure, never a score of 0."""
        raise NotImplementedError

    def score_group(
        self, prompt: PromptView, rollouts: Sequence[RolloutView]
    ) -> Sequence[float | Score]:
        """The rewards of samples of one prompt, one each, in their order.

        A verifier that overrides it gets all samples of a group at once, by their numbers, without
        those whose environment failed; there is at least one. An exception, or a wrong number of
        scores, is a recorded failure of each of them. As it is here, each sample is scored alone,
        and a failure is that sample's.
        """
        return [self.score(prompt, rollout) for rollout in rollouts]

    @classmethod
    def scores_groups(cls) -> bool:
        """Whether it overrides `score_group`."""
        return cls.score_group is not Verifier.score_group
