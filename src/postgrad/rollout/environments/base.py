"""An environment that speaks in messages: what most people write. Free of torch and tokenizers.

The chat template turns its messages into tokens, see chat.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from postgrad.core.records import Prompt
from postgrad.core.settings import Settings
from postgrad.data.messages import Message


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment makes of one turn of the policy.

    messages: in the chat format, what the policy reads next; none where `done`. reward: for this
    turn alone. counts: what metrics should know of it, such as {"calls": 1}.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict[str, float])


class Course(Protocol):
    """One sample's way through the environment."""

    def step(self, text: str) -> Reply:
        """What follows a turn that says `text`; it is called for whole turns only."""
        ...


class ChatEnvironment(Settings, ABC):
    """Starts courses. An environment *is* its settings: fields are knobs, methods are the rules.

    The same prompt and the same turns must always have the same course: no clock, no generator of
    random numbers, nothing remembered from other samples.
    """

    role: ClassVar[str] = "user"  # of its messages, as the chat template calls it
    special_tokens: ClassVar[bool] = False  # whether `text` of a turn has special tokens in it

    @property
    def gives_rewards(self) -> bool:
        """Whether turns have rewards; without, only [[rewards]] say what is right."""
        return True

    def variables(self) -> Mapping[str, Any]:
        """Variables that the chat template needs beyond the recipe's, such as `tools`."""
        return {}

    def for_template(self, template: str) -> Self:
        """These settings with what they leave to the tokenizer's chat template filled in.

        Raises UsageError where the environment cannot speak through it.
        """
        del template
        return self

    def check(self, prompt: Prompt) -> str | None:
        """Why no course can start from the prompt's row, or None when one can."""
        del prompt
        return None

    @abstractmethod
    def start(self, prompt: Prompt, sample: int) -> Course:
        """A new course for a sample. `prompt.metadata`: the other columns of its row."""
