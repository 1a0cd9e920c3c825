"""Episodes in the chat format: what was read and said, as rows of SFT have it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.core.records import Behind
from postgrad.data.chat_format import Message
from postgrad.rollout.environments.tool_calls import ids_of, written_call
from postgrad.rollout.environments.tool_formats import Call


@dataclass(slots=True)
class EpisodeConversation:
    """A conversation of an episode. Answers that it did not sample have the weight 0."""

    messages: list[Message]
    tools: Sequence[Mapping[str, Any]]  # JSON schemas that it shows


class EpisodeMessages:
    """The conversations of an episode, while they are held."""

    def __init__(
        self, messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """messages, tools: of the prompt."""
        self.conversations = [EpisodeConversation(unlearned(messages), tools)]
        self._tools = tools
        self._turns: list[tuple[int, int]] = []  # of each its conversation, and messages up to it

    def write(self, text: str, calls: Sequence[Call]) -> None:
        """Adds a turn of the policy."""
        messages = self.conversations[-1].messages
        before = sum(len(message.get("tool_calls", ())) for message in messages)
        message: Message = {"role": "assistant", "content": text}
        if calls:
            by_id = zip(ids_of(calls, before), calls, strict=True)
            message["tool_calls"] = [written_call(identifier, call) for identifier, call in by_id]
        messages.append(message)
        self._turns.append((len(self.conversations) - 1, len(messages)))

    def read(
        self,
        messages: Sequence[Message],
        behind: Behind,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Adds what the environment says. behind, tools: as of a Reply."""
        if behind == "newest":
            self.conversations[-1].messages += unlearned(messages)
            return
        begin: list[Message] = []
        shown = self._tools if tools is None else tools
        if behind != "nothing":
            number, length = self._turns[behind]
            earlier = self.conversations[number]
            begin, shown = earlier.messages[:length], earlier.tools
        if not self._turns:  # nobody has read the prompt
            self.conversations.clear()
        self.conversations.append(EpisodeConversation(unlearned([*begin, *messages]), shown))


# By ticket and sample, of all episodes that were begun.
EpisodeRecords = dict[tuple[int, int], EpisodeMessages]


def unlearned(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Messages whose answers bear no loss in SFT."""
    return [
        {**message, **({"weight": 0} if message["role"] == "assistant" else {})}
        for message in messages
    ]
