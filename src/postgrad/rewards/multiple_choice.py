"""Multiple choice: the option that a sample names, by its label or by its text."""

import json
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from postgrad.core.names import nearest
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

_LETTERS = string.ascii_uppercase
_MARKUP = " \t\r\n*_`$\"'“”‘’"
_WRAPPING = _MARKUP + "()[]{}<>.,:;!"  # around a label; in a text brackets may mean something
_GROUP = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|rm|it)|boxed)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:left|right|[,;! ])")
_MARKED = re.compile(
    r"\\boxed\s*\{(?P<boxed>(?:[^{}]|\{[^{}]*+\})*+)\}|<answer>(?P<tag>[^<]*+)</answer>",
    re.IGNORECASE,
)
_DECLARED = re.compile(
    r"\b(?:answer|(?:correct|right|best)\s+(?:option|choice))\b(?!\s+(?:choices|options))"
    r"[^.\n:=]{0,60}?(?:\b(?:is|was|be)\b|[:=])[\s:*_]*+(?=(?P<rest>[^\n]{0,1000}))",
    re.IGNORECASE,
)
_ENDED = re.compile(r"[.,:;!?)*_`$\"'”’]*(?:\s|$)")
_AFTER_LABEL = _MARKUP + ".,:;)]}-–—="
_CALLED = re.compile(r"(?:option|choice|letter)\s+", re.IGNORECASE)
_FURTHER = re.compile(r"\W*(?:\bor\b|\band\b|[/,&+])\W*")
# "A" and "I" are words too: read as labels before a small word only where it goes on about them.
_PROSE = re.compile(r"\s+(?!(?:as|and|because|but|due|for|given|is|or|since|which|with)\b)[a-z]")


class MultipleChoice(Verifier):
    """1 where a sample names the right option and no other, else 0.

    `options` is the column of the options: a list of texts, which are A, B, C ..., a mapping of
    labels to texts, {"label": [...], "text": [...]}, or JSON text of one of these; "" where rows
    have none, and A to Z are labels without a text. The reference answer is an option's label, its
    text, or its index from 0, as `answer_is` says.

    The answer is looked for in \\boxed{} and <answer>, then after words such as "the answer is",
    then in the first and the last line. Of these the first that name an option decide; where they
    name several, the sample is ambiguous and scores 0. What precedes a last </think> is not read.
    """

    options: str = "choices"
    answer_is: Literal["label", "text", "index"] = "label"

    def check(self, prompt: PromptView) -> str | None:
        try:
            self._right(prompt, self._options(prompt))
        except ValueError as error:
            return str(error)
        return None

    def right_answer(self, prompt: PromptView) -> str | None:
        return f"<answer>{self._right(prompt, self._options(prompt))}</answer>"

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        options = self._options(prompt)
        right = self._right(prompt, options)
        found = named(rollout.text, options)
        answer = next(iter(found)) if len(found) == 1 else None
        detail: dict[str, Any] = {"answer": answer}
        if len(found) > 1:
            detail["ambiguous"] = sorted(found)
        return Score(float(answer == right), detail)

    def _options(self, prompt: PromptView) -> dict[str, str]:
        """Label to text; ValueError where the column cannot be read."""
        if not self.options:
            return dict.fromkeys(_LETTERS, "")
        if self.options not in prompt.metadata:
            close = nearest(self.options, prompt.metadata)
            hint = f"; the nearest is {close!r}" if close else ""
            raise ValueError(
                f"no column {self.options!r}{hint}; name it with the setting `options`, or say "
                'options = "" where rows have no texts of options'
            )
        found = _labelled(_from_json(prompt.metadata[self.options]))
        if found is None or len(found) < 2:
            raise ValueError(
                f"column {self.options!r}: texts of at least two options are wanted, not "
                f"{prompt.metadata[self.options]!r:.80}"
            )
        return found

    def _right(self, prompt: PromptView, options: Mapping[str, str]) -> str:
        """The label of the right option; ValueError where the reference answer is none."""
        if prompt.answer is None:
            raise ValueError("there is no reference answer")
        answer = prompt.answer.strip()
        labels = list(options)
        if self.answer_is == "label":
            right = [label for label in labels if label.casefold() == _bare(answer)]
        elif self.answer_is == "text":
            said = _normal(answer)
            right = [label for label, text in options.items() if said and _normal(text) == said]
        else:
            right = labels[int(answer) :][:1] if answer.isdecimal() else []
        if len(right) != 1:
            raise ValueError(
                f"the reference answer {answer[:80]!r} is the {self.answer_is} of "
                f"{len(right) or 'none'} of the options {', '.join(labels)}; "
                "`answer_is` says what it is: label, text or index"
            )
        return right[0]


def named(text: str, options: Mapping[str, str]) -> set[str]:
    """The labels of the options that `text` gives as its answer: one, none, or several."""
    text = text.rpartition("</think>")[2]
    # Each text once: a sample may say the same a hundred thousand times.
    marked = {match["boxed"] or match["tag"] or "" for match in _MARKED.finditer(text)}
    declared = {match["rest"] for match in _DECLARED.finditer(text)}
    for level in (marked, declared):
        found = {label for said in level for label in _read(said, options)}
        if found:
            return found
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) == 1:
        return _alone(lines[0], options, sole=True)
    return {label for line in (*lines[:1], *lines[-1:]) for label in _alone(line, options)}


def _read(said: str, options: Mapping[str, str]) -> set[str]:
    """The options at the beginning of what stands after a mark."""
    said = _plain(said).lstrip(_MARKUP)
    for label in options:
        if label.casefold() == _bare(said):
            return {label}
    texts = _texts(said, options)
    if texts:
        return texts
    found: set[str] = set()
    said = said.lstrip(_WRAPPING)
    called = _CALLED.match(said)
    said = said[called.end() if called else 0 :].lstrip(_WRAPPING)
    label, place = _labels(options), 0  # a place, since to cut a long list takes quadratic time
    while match := _label(label, said, place):
        found.add(match[0])
        further = _FURTHER.match(said, match.end())
        if further is None:
            return found | _texts(said[match.end() :].lstrip(_AFTER_LABEL), options)
        place = further.end()
    return found


def _alone(line: str, options: Mapping[str, str], sole: bool = False) -> set[str]:
    """The options that a line names where it says nothing else: "B", "(B)", "B. its text", a text.

    `sole`: it is the only line, and after "B." it may say what it wants.
    """
    line = _plain(line)
    for label in options:
        if label.casefold() == _bare(line):
            return {label}
    said = _normal(line)
    texts = {label for label, text in options.items() if said and _normal(text) == said}
    line = line.lstrip(_WRAPPING)
    match = _label(_labels(options), line)
    if texts or not match or line[match.end() : match.end() + 1] not in (".", ")", ":"):
        return texts
    texts = _texts(line[match.end() :].lstrip(_AFTER_LABEL), options)
    return {match[0]} | texts if texts or sole else set()


def _labels(options: Mapping[str, str]) -> re.Pattern[str]:
    longest_first = sorted(options, key=len, reverse=True)
    return re.compile(rf"(?:{'|'.join(map(re.escape, longest_first))})(?![\w'’-])")


def _label(labels: re.Pattern[str], text: str, place: int = 0) -> re.Match[str] | None:
    """The label that stands at a place of `text`, in its own case."""
    match = labels.match(text, place)
    if match and match[0] in ("A", "I") and _PROSE.match(text, match.end()):
        return None
    return match


def _texts(said: str, options: Mapping[str, str]) -> set[str]:
    """The options with the longest text that `said` starts with; one character must be all."""
    said = _normal(said)
    found: dict[str, int] = {}
    for label, option in options.items():
        text = _normal(option)
        whole = said == text
        if text and (whole or (len(text) > 1 and _starts(said, text))):
            found[label] = len(text)
    longest = max(found.values(), default=0)
    return {label for label, length in found.items() if length == longest}


def _starts(said: str, text: str) -> bool:
    """Whether `text` is a whole beginning: 5 is none of 5.2."""
    return said.startswith(text) and _ENDED.match(said, len(text)) is not None


def _plain(text: str) -> str:
    """Without the LaTeX commands that only set text."""
    return _SPACING.sub("", _GROUP.sub(r"\1", text))


def _normal(text: str) -> str:
    """A text as it is compared: without case, markup and marks at its end."""
    text = " ".join(_plain(text).casefold().split())
    return text.lstrip(_MARKUP).rstrip(_MARKUP + ".,:;")


def _bare(text: str) -> str:
    return text.strip(_WRAPPING).casefold()


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None  # no options: told by who asked, with the text


def _labelled(value: Any) -> dict[str, str] | None:
    """Options by label; None where `value` is in none of the forms."""
    if isinstance(value, Mapping) and {"label", "text"} <= value.keys():
        labels, texts = value["label"], value["text"]
        if not _are_texts(labels) or not _are_texts(texts) or len(labels) != len(texts):
            return None
        pairs: Iterator[tuple[Any, Any]] = zip(labels, texts, strict=True)
    elif isinstance(value, Mapping):
        pairs = iter((label, text) for label, text in value.items() if text is not None)
    elif _are_texts(value) and len(value) <= len(_LETTERS):
        pairs = zip(_LETTERS, value, strict=False)
    else:
        return None
    found = [(str(label).strip(), str(text)) for label, text in pairs]
    unlike = len({label.casefold() for label, _ in found}) == len(found)
    return dict(found) if unlike and all(label for label, _ in found) else None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(one, str | int | float) for one in value
    )
