"""Which branches of `if` and `case` a script takes, as far as its text says it.

Lines that begin with `if`, `elif`, `else`, `fi`, `case` and `esac` are understood, with the tests
`[ ... ]` and `[[ ... ]]` of texts and numbers, `!`, `&&` and `||`. Where a test cannot be known (a
file, the output of a command, a variable that is never set), every branch of an `if` is read, and
the first of a `case`.
"""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from postgrad.translate.expansion import UNKNOWN

_IF = re.compile(r"^\s*(if|elif)\s+(.*?)\s*(?:;\s*then\s*)?$", re.S)
_CASE = re.compile(r"^\s*case\s+(.*?)\s+in\s*$")
_PATTERN = re.compile(r"^\s*\(?([^()=\s]+(?:\s*\|\s*[^()=\s]+)*)\)(.*)$", re.S)
_ENDS_BRANCH = re.compile(r";;&?\s*$")
_TEXTS: dict[str, Callable[[str, str], bool]] = {
    "=": fnmatchcase, "==": fnmatchcase, "!=": lambda a, b: not fnmatchcase(a, b),
}  # fmt: skip
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt,
    "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


@dataclass(slots=True)
class _Fork:
    """An `if` or a `case` that is being read."""

    subject: str | None  # of a `case`; None for an `if`
    reads: bool  # the present branch
    taken: bool  # a branch is known to be the one
    inside: bool  # what lies around it is read


class Branches:
    """Follows a script line by line. fills: a line's words, variables expanded."""

    def __init__(self, fills: Callable[[str], list[str]]) -> None:
        self._fills = fills
        self._forks: list[_Fork] = []

    @property
    def reads(self) -> bool:
        """Whether the lines at this place are of a branch that is taken, or may be."""
        return not self._forks or (self._forks[-1].reads and self._forks[-1].inside)

    def after(self, statement: str) -> str:
        """What is left of a statement to read: "" for one of a branch that is not taken, and for
        the words that only say where branches begin and end.
        """
        first = (statement.split(maxsplit=1) or [""])[0].rstrip(";")
        if (case := _CASE.match(statement)) is not None:
            subject = " ".join(self._fills(case[1])) if self.reads else ""
            self._forks.append(_Fork(subject, reads=False, taken=False, inside=self.reads))
            return ""
        if first in ("if", "elif", "else") and "fi" not in statement.replace(";", " ").split():
            self._branch(first, statement)
            return ""
        if first in ("fi", "esac"):
            if self._forks:
                self._forks.pop()
            return ""
        if self._forks and self._forks[-1].subject is not None:
            return self._of_case(statement, self._forks[-1])
        return statement if self.reads else ""

    def _branch(self, word: str, statement: str) -> None:
        if word == "if":
            self._forks.append(_Fork(None, reads=False, taken=False, inside=self.reads))
        if not self._forks or self._forks[-1].subject is not None:
            return  # no `if` that was seen
        fork = self._forks[-1]
        match = _IF.match(statement)
        holds: bool | None = True
        if match is not None and fork.inside and not fork.taken:
            holds = _truth(self._fills(match[2]))
        fork.reads = holds is not False and not fork.taken
        fork.taken = fork.taken or holds is True

    def _of_case(self, statement: str, fork: _Fork) -> str:
        rest = statement
        if not fork.reads and (match := _PATTERN.match(statement)) is not None:
            subject = fork.subject or ""
            patterns = [pattern.strip(" \"'") for pattern in match[1].split("|")]
            unknown = UNKNOWN in subject or "$" in subject
            chosen = unknown or any(fnmatchcase(subject, pattern) for pattern in patterns)
            fork.reads = chosen and not fork.taken
            fork.taken = fork.taken or chosen
            rest = match[2]
        reads, ends = self.reads, _ENDS_BRANCH.search(rest)
        if ends is not None:
            fork.reads = False
            rest = rest[: ends.start()]
        return rest if reads else ""


def _truth(words: Sequence[str]) -> bool | None:
    """Whether a condition holds; None where that is not known. `&&` and `||` bind alike, from the
    left, as in the shell.
    """
    value, joined, part = None, "", list[str]()
    for word in (*words, "&&"):
        if word not in ("&&", "||"):
            part.append(word)
            continue
        now = _holds(part)
        if joined == "&&":
            now = False if False in (value, now) else None if None in (value, now) else True
        elif joined == "||":
            now = True if True in (value, now) else None if None in (value, now) else False
        value, joined, part = now, word, []
    return value


def _holds(words: Sequence[str]) -> bool | None:
    """Whether a single test holds."""
    if words and words[0] == "!":
        inner = _holds(words[1:])
        return None if inner is None else not inner
    if len(words) < 3 or (words[0], words[-1]) not in (("[", "]"), ("[[", "]]")):
        return None
    test = words[1:-1]
    if any(UNKNOWN in word or "$" in word for word in test):
        return None
    match list(test):
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [left, sign, right] if sign in _TEXTS:
            return _TEXTS[sign](left, right)
        case [left, sign, right] if sign in _NUMBERS and _is_integer(left) and _is_integer(right):
            return _NUMBERS[sign](int(left), int(right))
        case _:
            return None


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", text) is not None
