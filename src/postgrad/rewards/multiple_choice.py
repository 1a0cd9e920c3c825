"""Multiple choice: the option that a sample names, by its label or by its text."""

import json
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from postgrad.core.text import nearest
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier, only_answer

_LETTERS = string.ascii_uppercase
_MARKUP = " \t\r\n*_`$\"'“”‘’"
_WRAPPING = _MARKUP + "()[]{}<>.,:;!"  # around a label; in a text brackets may mean something
_GROUP = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|rm|it)|boxed)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:left|right|[,;! ])")
_MARKED = re.compile(
    r"\\boxed\s*\{(?P<boxed>(?:[^{}]|\{[^{}]*+\})*+)\}|<answer>(?P<tag>(?:[^<]|<(?!/?answer>))*+)</answer>",
    re.IGNORECASE,
)
_DECLARED = re.compile(
    r"\b(?:answer|(?:correct|right|best)\s+(?:option|choice))\b(?!\s+(?:choices|options))"
    # "cannot be B" declares nothing
    r"(?:(?!(?:not|never|n['’]t)\s+(?:\w+ly\s+)?be\b)[^.\n:=]){0,60}?"
    r"(?:\b(?:is|was|be)\b|[:=])[\s:*_]*+(?=(?P<rest>[^\n]{0,1000}))",
    re.IGNORECASE,
)
# words before an option: "the answer is therefore B"
_HEDGES = re.compile(
    r"^(?:(?:most|likely|probably|clearly|obviously|certainly|definitely|indeed|actually|simply|"
    r"therefore|thus|hence|then)\b[\s,*_]++)*+",
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

    The answer is searched in \\boxed{} and <answer>, then after words such as "the answer is", then
    in the first and the last line. The first of these three that names an option decides; where it
    names several, the sample is ambiguous and scores 0. Text before the last </think> is not read.
    """

    highest: ClassVar[float | None] = 1.0

    options: str = "choices"  # column of the options, "" where rows have none
    answer_is: Literal["label", "text", "index"] = "label"  # of the reference answer

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
        labels = named(rollout.text, options)
        answer = next(iter(labels)) if len(labels) == 1 else None
        detail: dict[str, Any] = {"answer": answer}
        if len(labels) > 1:
            detail["ambiguous"] = sorted(labels)
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
        options = _labelled(_from_json(prompt.metadata[self.options]))
        if options is None or len(options) < 2:
            raise ValueError(
                f"column {self.options!r}: texts of at least two options are wanted, not "
                f"{prompt.metadata[self.options]!r:.80}"
            )
        return options

    def _right(self, prompt: PromptView, options: Mapping[str, str]) -> str:
        """The label of the right option; ValueError where the reference answer is none."""
        if prompt.answer is None:
            raise ValueError("there is no reference answer")
        answer = (only_answer(prompt.answer) or "").strip()
        labels = list(options)
        if self.answer_is == "label":
            right = [label for label in labels if label.casefold() == _bare(answer)]
        elif self.answer_is == "text":
            wanted = _normal(answer)
            right = [label for label, text in options.items() if wanted and _normal(text) == wanted]
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
    # Sets, since a sample may repeat itself a hundred thousand times.
    marked = {match["boxed"] or match["tag"] or "" for match in _MARKED.finditer(text)}
    declared = {match["rest"] for match in _DECLARED.finditer(text)}
    for level in (marked, declared):
        labels = {label for passage in level for label in _read(passage, options)}
        if labels:
            return labels
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) == 1:
        return _alone(lines[0], options, sole=True)
    return {label for line in (*lines[:1], *lines[-1:]) for label in _alone(line, options)}


def _read(passage: str, options: Mapping[str, str]) -> set[str]:
    """The options at the start of a passage, the text after "the answer is" or in \\boxed{}."""
    entire = _plain(passage).lstrip(_MARKUP)
    behind = _HEDGES.sub("", entire, count=1).lstrip(_MARKUP)
    for start in dict.fromkeys((entire, behind)):  # an option's text may begin with such a word
        for label in options:
            if label.casefold() == _bare(start):
                return {label}
        texts = _texts(start, options)
        if texts:
            return texts
    labels: set[str] = set()
    passage = behind.lstrip(_WRAPPING)
    called = _CALLED.match(passage)
    passage = passage[called.end() if called else 0 :].lstrip(_WRAPPING)
    label, place = _labels(options), 0  # a place, since to cut a long list takes quadratic time
    while match := _label(label, passage, place):
        labels.add(match[0])
        further = _FURTHER.match(passage, match.end())
        if further is None:
            return labels | _texts(passage[match.end() :].lstrip(_AFTER_LABEL), options)
        place = further.end()
    return labels


def _alone(line: str, options: Mapping[str, str], sole: bool = False) -> set[str]:
    """The options that a line names and nothing more: "B", "(B)", "B. its text", or a text.

    sole: it is the only line; then any text may follow "B.".
    """
    line = _plain(line)
    for label in options:
        if label.casefold() == _bare(line):
            return {label}
    wanted = _normal(line)
    texts = {label for label, text in options.items() if wanted and _normal(text) == wanted}
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
    """The label at index `place` of `text`, in its own case; None where there is none."""
    match = labels.match(text, place)
    if match and match[0] in ("A", "I") and _PROSE.match(text, match.end()):
        return None
    return match


def _texts(passage: str, options: Mapping[str, str]) -> set[str]:
    """The options with the longest text that `passage` starts with.

    A text of one character counts only where it is the whole passage.
    """
    passage = _normal(passage)
    lengths: dict[str, int] = {}
    for label, option in options.items():
        text = _normal(option)
        is_all = passage == text
        if text and (is_all or (len(text) > 1 and _starts(passage, text))):
            lengths[label] = len(text)
    longest = max(lengths.values(), default=0)
    return {label for label, length in lengths.items() if length == longest}


def _starts(passage: str, text: str) -> bool:
    """Whether `passage` starts with `text` and a word ends there: 5.2 does not start with 5."""
    return passage.startswith(text) and _ENDED.match(passage, len(text)) is not None


def _plain(text: str) -> str:
    """Without the LaTeX commands that only set text."""
    return _SPACING.sub("", _GROUP.sub(r"\1", text))


def _normal(text: str) -> str:
    """A text for comparison: case-folded, without markup at its ends and final punctuation."""
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
        return None  # no options: the caller raises, with the text


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
    options = [(str(label).strip(), str(text)) for label, text in pairs]
    unlike = len({label.casefold() for label, _ in options}) == len(options)
    return dict(options) if unlike and all(label for label, _ in options) else None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(entry, str | int | float) for entry in value
    )
