"""Where a message stands in the text that a chat template wrote.

The span of an answer begins behind the generation prompt, that of another message with its content;
both end with the token that ends the turn. Where that cannot be told from the text, or a part of
the answer is missing in it, the conversation is refused: nothing is guessed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from postgrad.data.chat_format import REASONING, THINK, THOUGHT, Message, says_nothing
from postgrad.data.dropped import dropped_from, missing_call, written_forms

_OPENED = (
    ", which opens thoughts: begin the message's content with them, up to </think>, or take a "
    "template whose prompt opens none (data.chat_template)"
)
LONGEST_SHARED = 64  # characters that a generation prompt and an answer may both begin with
BLANK = "\ue000"  # stands for a content, to see where the template writes it


WeightedSpan = tuple[int, int, float]  # start and end in characters, what its tokens count


class Unmarkable(Exception):
    """A conversation whose learned tokens cannot be marked; the message says why."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the chat template writes it."""

    text: str
    spans: tuple[tuple[int, int], ...]  # [start, end) in characters, of what bears loss, rising
    prompt: str  # what the policy reads before the first span, the generation prompt included
    weights: tuple[float, ...] = ()  # what tokens of each span count; (): 1 each


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """What ends a turn."""

    tokens: re.Pattern[str]  # every special token
    of_text: Callable[[], str | None]  # the token after an answer of plain text; None: not known


def asked_texts(
    messages: Sequence[Message], learned: Sequence[int]
) -> list[tuple[Sequence[Message], list[tuple[int, bool]]]]:
    """What a template has to write for `answer_texts`: each time messages, and of how many of them
    the text is wanted, with or without the generation prompt. learned: see there.
    """
    answers = [i for i in learned if messages[i]["role"] == "assistant"]
    wanted = [(len(messages), False)]
    for i in (i for i in answers if i):
        wanted.append((i, True))
        if i < len(messages) - 1:  # the last message needs no rendering of its own
            wanted.append((i + 1, False))
    others = _others(messages, learned)
    if not others:
        return [(messages, wanted)]
    blank = [{**m, "content": BLANK} if i in others else m for i, m in enumerate(messages)]
    places = [(i + 1, False) for i in others] + [(i, True) for i in answers if i]
    return [(messages, wanted), (blank, [*places, (len(messages), False)])]


def _others(messages: Sequence[Message], learned: Sequence[int]) -> list[int]:
    """The learned messages that are no answers; a blank one has nothing to learn."""
    others = (i for i in learned if messages[i]["role"] != "assistant")
    return [i for i in others if not says_nothing(messages[i])]


def answer_texts(
    messages: Sequence[Message],
    learned: Sequence[int],
    texts: Sequence[str],
    blanks: Sequence[str],
    ends: TurnEnds,
) -> list[Rendered]:
    """A conversation as one text, or as one for each answer where the template writes an answer
    differently once more messages follow. Then another message bears loss in the text of the next
    answer that does, and those behind the last answer in a text of their own.

    learned: indices of the messages that bear loss. texts, blanks: of each of asked_texts, what the
    template writes. Raises Unmarkable.
    """
    answers = [i for i in learned if messages[i]["role"] == "assistant"]
    others = _OtherMessages(messages, _others(messages, learned), blanks, ends)
    if not answers and not others.numbers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise Unmarkable(f"there is no message to learn from (its roles are {roles[:200]})")
    text, *renderings = texts
    if problem := dropped_from(messages, text):
        raise Unmarkable(problem)
    parts: list[tuple[str, list[WeightedSpan]]] = []
    completed = False  # whether an answer got its thoughts back
    for i in answers:
        if i == 0:
            raise Unmarkable("it begins with the assistant, so it answers nothing")
        prompt = renderings.pop(0)
        turn_text = text if i == len(messages) - 1 else renderings.pop(0)
        answered = _answered(messages[i], i, turn_text, prompt, ends)
        completed |= answered.text != turn_text
        span = *answered.spans[0], messages[i].get("weight", 1)
        parts.append((answered.text, [*others.spans(i, prompt), span]))
    behind = others.spans(len(messages), text)
    if not completed and all(text.startswith(part[: spans[-1][1]]) for part, spans in parts):
        parts = [(text, [span for _, spans in parts for span in spans] + behind)]
    elif behind:
        parts.append((text, behind))
    return [_rendered(*part) for part in parts]


def _rendered(text: str, spans: Sequence[WeightedSpan]) -> Rendered:
    """The text with its spans; of those that touch and count the same one is made, so that a token
    may lie in both.
    """
    joined: list[WeightedSpan] = []
    for start, end, weight in spans:
        if joined and joined[-1][1:] == (start, weight):
            start = joined.pop()[0]
        joined.append((start, end, weight))
    weights = tuple(weight for _, _, weight in joined)
    places = tuple((start, end) for start, end, _ in joined)
    return Rendered(text, places, text[: places[0][0]], weights if {*weights} != {1} else ())


class _OtherMessages:
    """Learned messages that are no answers, as a template writes them.

    They are told from a second rendering, in which a BLANK stands for each of their contents: where
    the two texts differ in nothing else, they show where each content stands. Behind it, what the
    template writes up to the token that ends the turn belongs to the message.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        numbers: Sequence[int],
        blanks: Sequence[str],
        ends: TurnEnds,
    ) -> None:
        """numbers: of the messages. blanks: see asked_texts. Raises Unmarkable for images."""
        self.numbers = numbers
        self._messages = messages
        self._waiting = list(numbers)  # without a span
        self._blanks = list(blanks[len(numbers) :])
        self._closings: dict[int, str] = {}  # what the template writes behind a content
        for i, text in zip(numbers, blanks, strict=False):
            if "images" in messages[i]:
                raise Unmarkable(
                    f"message {i} has images, and the loss on what it says beside them is not "
                    "supported: give it a weight of 0"
                )
            behind = text.rpartition(BLANK)[2] if BLANK in text else ""
            end = ends.tokens.search(behind)
            self._closings[i] = behind[: end.end()] if end else behind

    def spans(self, limit: int, text: str) -> list[WeightedSpan]:
        """Of those before message `limit` that have no span yet. text: of all messages before it,
        as asked_texts has them in this order. Raises Unmarkable.
        """
        if not self.numbers:
            return []
        blank = self._blanks.pop(0)
        fresh = [i for i in self._waiting if i < limit]
        self._waiting = self._waiting[len(fresh) :]
        if not fresh:
            return []
        places = self._places([i for i in self.numbers if i < limit], text, blank)
        spans: list[WeightedSpan] = []
        for i in fresh:
            start, end, after = places[i]
            closing = self._closings[i]
            message, follower = self._messages[i], self._messages[min(i + 1, limit - 1)]
            if after.startswith(closing):
                end += len(closing)
            elif i + 1 in places and follower["role"] == message["role"]:
                end = places[i + 1][0]  # one turn, as of several results of tools
            else:
                alike = takewhile(
                    lambda pair: pair[0] == pair[1], zip(after, closing, strict=False)
                )
                end += sum(1 for _ in alike)
            spans.append((start, end, message.get("weight", 1)))
        return spans

    def _places(
        self, numbers: Sequence[int], text: str, blank: str
    ) -> dict[int, tuple[int, int, str]]:
        """Where the contents of messages begin and end in `text`, and what follows up to the next.
        A blank or a quote in front belongs to a content: tokenizers join it with the first word.
        """
        before, *afters = blank.split(BLANK)
        place = len(before)
        places: dict[int, tuple[int, int, str]] = {}
        written: str | None = before if text.startswith(before) else None
        for i, after in zip(numbers, afters, strict=False):
            forms = written_forms(self._messages[i]["content"]) if written is not None else ()
            written = next((f for f in forms if text.startswith(f + after, place)), None)
            if written is None:
                break
            start = place
            while place - start < len(before) and text[start - 1] in ' "':
                start -= 1
            place += len(written)
            places[i] = start, place, after
            before, place = after, place + len(after)
        if len(places) < max(len(numbers), len(afters)) or place != len(text):
            roles = " and the ".join(dict.fromkeys(self._messages[i]["role"] for i in numbers))
            raise Unmarkable(
                f"the chat template does not write what the {roles} says once and as it is, so its "
                "tokens cannot be told: leave the role out of data.loss_turns, give the messages "
                "a weight of 0, or take another data.chat_template"
            )
        return places


def _answered(message: Message, i: int, turn_text: str, prompt: str, ends: TurnEnds) -> Rendered:
    """The text up to message i, with its span. Raises Unmarkable where that cannot be told."""
    try:
        return Rendered(turn_text, (_span(message, i, turn_text, prompt, ends),), prompt)
    except Unmarkable:
        completed = _with_thoughts(message, turn_text, prompt, ends)
        if completed is None:
            raise
        return completed


def _with_thoughts(
    message: Message, turn_text: str, prompt: str, ends: TurnEnds
) -> Rendered | None:
    """The text up to an answer of which the template keeps only what stands behind its thoughts, as
    DeepSeek-R1's does: `content.split('</think>')[-1]`, in earlier turns and in the newest alike.
    None where it does anything else.

    The policy reads the generation prompt and writes thoughts, answer and end: so that is the text.
    A tag that opens the thoughts is written once, by the prompt where that has it. Thoughts in a
    key of their own are written as R1 writes them, where the prompt begins them so.
    """
    content = message["content"].strip()
    named = [key for key in REASONING if message.get(key)]
    if len(named) == 1 and THOUGHT not in content and prompt.endswith(f"{THINK}\n"):
        content, named = f"{str(message[named[0]]).strip()}\n{THOUGHT}\n\n{content}", []
    thoughts, mark, answer = content.rpartition(THOUGHT)
    answer = answer.strip()
    opened = prompt.rstrip().endswith(THINK)
    before = prompt.rstrip().removesuffix(THINK) if opened else prompt
    place = len(turn_text) - len(turn_text[len(before) :].lstrip())
    if not mark or not answer or named or message.get("tool_calls"):
        return None
    if not turn_text.startswith(before) or not turn_text.startswith(answer, place):
        return None
    end = ends.tokens.search(turn_text, place + len(answer))
    closing = turn_text[place + len(answer) : end.end() if end else len(turn_text)]
    if opened:
        content = thoughts.removeprefix(THINK).lstrip("\n") + content[len(thoughts) :]
    text = prompt + content + closing
    return Rendered(text, ((len(prompt), len(text)),), prompt)


def _span(message: Message, i: int, turn_text: str, prompt: str, ends: TurnEnds) -> tuple[int, int]:
    """[start, end) of message i in `turn_text`, which ends with it; prompt: the text before it.

    Raises Unmarkable where it cannot be told.
    """
    if not prompt:
        raise Unmarkable(f"the chat template writes nothing before message {i}")
    if not turn_text.startswith(prompt):
        raise Unmarkable(
            f"the chat template does not begin message {i} with its generation prompt "
            f"{prompt[-40:]!r}{_OPENED if prompt.rstrip().endswith(THINK) else ''}"
        )
    start = len(prompt)
    thought = _after_thoughts(message, i, turn_text, prompt)
    content = message["content"].strip()
    place = turn_text.find(content, thought) if thought > start else -1
    if place < 0:
        place = _begin(content, turn_text, prompt)
    if place < 0:
        raise Unmarkable(f"the chat template drops text of message {i}: {content[:60]!r}")
    if message.get("tool_calls"):
        if problem := missing_call(message, i, turn_text[start:]):
            raise Unmarkable(problem)
        return start, _end_of_calls(turn_text, start, ends)
    end = ends.tokens.search(turn_text, max(place + len(content), thought))
    return start, end.end() if end else len(turn_text)


def _after_thoughts(message: Message, i: int, turn_text: str, prompt: str) -> int:
    """Where the answer's reasoning ends in `turn_text`; len(prompt) where it has none."""
    end = len(prompt)
    for key in REASONING:
        thought = message.get(key)
        if not isinstance(thought, str) or not thought.strip():
            continue
        place = _begin(thought.strip(), turn_text, prompt)
        if place < 0:
            raise Unmarkable(
                f"the chat template drops {key} of message {i}: {thought.strip()[:60]!r}; take the "
                "template of a model that thinks, or remove the key with data.map"
            )
        end = max(end, place + len(thought.strip()))
    return end


def _begin(content: str, turn_text: str, prompt: str) -> int:
    """Where the content begins in `turn_text`: behind the prompt, or inside its end where the two
    overlap (generation prompt and answer may both have <think>); -1: nowhere.
    """
    place = turn_text.find(content, len(prompt))
    shared = range(1, min(len(content), len(prompt), LONGEST_SHARED) + 1) if place < 0 else ()
    for count in shared:
        if turn_text.startswith(content, len(prompt) - count):
            return len(prompt) - count
    return place


def _end_of_calls(turn_text: str, start: int, ends: TurnEnds) -> int:
    """Where an answer with calls ends.

    Templates write calls in many ways, with special tokens in between. So the end is looked for
    from behind, in the run of special tokens and white space that ends the text: the token that
    ends answers of plain text, else the first of the run.
    """
    run: list[re.Match[str]] = []
    edge = len(turn_text)
    for match in reversed(list(ends.tokens.finditer(turn_text, start))):
        if turn_text[match.end() : edge].strip():
            break
        run.insert(0, match)
        edge = match.start()
    if not run:
        return len(turn_text)
    usual = [match for match in run if match.group() == ends.of_text()]
    return (usual or run)[0].end()
