"""What stands in place of $NAME, ${NAME...}, $(( ... )) and $(command) in a shell's words.

No command is run. What a few of them print follows from their words alone (seq, basename, dirname,
echo); of all others UNKNOWN stands in place of the output.
"""

import re
import shlex
from collections.abc import Callable
from fnmatch import translate
from pathlib import PurePosixPath

from postgrad.core.errors import UsageError
from postgrad.recipe.translate.arithmetic import compute

UNKNOWN = "\ue000"  # what $(command) would have printed
_KEPT, _END = "\ue001", "\ue002"  # around a command or an expression, until variables are known
_HELD = re.compile(f"{_KEPT}([0-9a-f]*){_END}")
_LIST = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
_VARIABLE = re.compile(
    r"\$\{(?P<length>#)?(?P<name>\w+|[@*#])(?:\[(?P<index>\d+|[@*])\])?"
    r"(?:(?P<operator>:?[-=+?]|##?|%%?|//?|:|\^\^?|,,?)(?P<word>[^{}]*))?\}|\$(?P<plain>\w+|[@*#])"
)
_PARTS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|[^\"']+|[\"']")
_MOST = 10_000  # numbers of a seq
MOST_TEXT = 2**16  # characters that variables stand for
MOST_ROUNDS = 100  # variables within variables

Variables = dict[str, str | list[str]]


def words_of(text: str) -> list[str]:
    """The words of a statement, quotes and comments taken off. ValueError for an open quote."""
    return shlex.split(text, comments=True)


def held(text: str) -> str:
    """$(...), $((...)) and `...` as one piece each, whatever is within them, for `filled`.

    Raises UsageError where one never ends.
    """
    text = re.sub(r"`([^`\n]*)`", lambda found: _hold(f"$({found[1]})"), text)
    pieces: list[str] = []
    done = 0
    while (start := text.find("$(", done)) >= 0:
        depth = 0
        for end in range(start + 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if depth == 0:
                break
        else:
            raise UsageError("the script ends within $( ... )")
        pieces += [text[done:start], _hold(text[start : end + 1])]
        done = end + 1
    return "".join([*pieces, text[done:]])


def filled(text: str, variables: Variables, quoted: bool = False) -> str:
    """Values in place of names, but not within single quotes. quoted: keeps the value of an
    assignment one word. Raises UsageError for one that grows without end.
    """
    parts = _PARTS.findall(text)
    text = "".join(
        _shown(part) if len(part) > 1 and part[0] == "'" else _expanded(part, variables)
        for part in parts
    )
    if len(text) > MOST_TEXT:
        raise _endless(text)
    return shlex.quote(text) if quoted and not re.search(r"[\"']", text) else text


def _hold(text: str) -> str:
    return f"{_KEPT}{_shown(text).encode().hex()}{_END}"


def _shown(text: str) -> str:
    """As the script has it."""
    return _HELD.sub(lambda found: bytes.fromhex(found[1]).decode(), text)


def _expanded(text: str, variables: Variables) -> str:
    text = _LIST.sub(lambda found: _as_list(found.group(1), variables), text)
    text = _HELD.sub(lambda found: _printed(bytes.fromhex(found[1]).decode(), variables), text)
    before, written = "", text
    for _ in range(MOST_ROUNDS):  # a default may have variables of its own
        if text == before:
            return text
        before, text = text, _VARIABLE.sub(lambda found: _value(found, variables), text)
        if len(text) > MOST_TEXT:
            break
    raise _endless(written)


def _endless(text: str) -> UsageError:
    return UsageError(
        f"a variable stands for itself, or for too much: {_shown(text).strip()[:60]!r} ..."
    )


def _as_list(name: str, variables: Variables) -> str:
    value = variables.get(name, [])
    return shlex.join([value] if isinstance(value, str) else value)


def _printed(text: str, variables: Variables) -> str:
    """Of "$((expression))" and "$(command)"."""
    inner = text[2:-1]
    try:
        if inner.startswith("(") and inner.endswith(")"):
            return str(compute(filled(held(inner[1:-1]), variables), variables))
        words = words_of(filled(held(inner), variables))
        if UNKNOWN in inner or any(UNKNOWN in word or "$" in word for word in words):
            return UNKNOWN
        return _PRINTS[words[0]](words[1:])
    except (ValueError, KeyError, IndexError, RecursionError):  # the last: $( within $( for ever
        return UNKNOWN


def _seq(words: list[str]) -> str:
    numbers = [int(word) for word in words]
    if not 1 <= len(numbers) <= 3:
        raise ValueError("seq takes one to three numbers")
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) == 3 else 1
    values = range(first, numbers[-1] + (1 if step > 0 else -1), step)
    return " ".join(map(str, values[:_MOST]))


def _echo(words: list[str]) -> str:
    if any(re.search(r"[|<>&;]", word) or word in ("-e", "-E") for word in words):
        raise ValueError("another command reads it")
    return " ".join(words[1:] if words[:1] == ["-n"] else words)


def _basename(words: list[str]) -> str:
    path, *suffix = words
    if path.startswith("-") or len(suffix) > 1:
        raise ValueError("with options")
    return PurePosixPath(path).name.removesuffix(*suffix or [""])


def _dirname(words: list[str]) -> str:
    (path,) = words
    return str(PurePosixPath(path).parent)


_PRINTS: dict[str, Callable[[list[str]], str]] = {
    "seq": _seq, "echo": _echo, "basename": _basename, "dirname": _dirname,
}  # fmt: skip


def _value(found: re.Match[str], variables: Variables) -> str:
    name = found["name"] or found["plain"]
    value, operator, word = variables.get(name), found["operator"] or "", found["word"] or ""
    if found["index"] is not None and found["index"].isdigit():
        several = [value] if isinstance(value, str) else value or []
        value = several[int(found["index"])] if int(found["index"]) < len(several) else None
    if found["length"]:
        return found.group() if value is None else str(len(value))
    if isinstance(value, list):
        value = shlex.join(value)
    if operator[-1:] in ("-", "=", "+", "?"):
        return _or_else(found, value, operator, word, variables)
    if value is not None:
        return _cut(value, operator, word, found.group()) if operator else value
    return "" if name in ("@", "*", "#") or name.isdigit() else found.group()


def _or_else(
    found: re.Match[str], value: str | None, operator: str, word: str, variables: Variables
) -> str:
    """${NAME-word}, =, + and ?; with a colon an empty value is none."""
    there = value is not None and (value != "" or not operator.startswith(":"))
    if operator.endswith("+"):
        return word.strip("\"'") if there else ""
    if there:
        return value or ""
    if operator.endswith("?"):
        return found.group()
    if operator.endswith("="):
        variables[found["name"]] = word.strip("\"'")
    return word.strip("\"'")


def _cut(value: str, operator: str, word: str, text: str) -> str:
    """${NAME#pattern} and its kin; those that are not read stay as they are (`text`)."""
    word = word.strip("\"'")
    if operator in ("#", "##", "%", "%%"):
        return _trimmed(value, operator, word)
    if operator in ("/", "//"):
        old, _, new = word.partition("/")
        if re.search(r"[*?\[]", old) or not old:
            return text
        return value.replace(old, new) if operator == "//" else value.replace(old, new, 1)
    if operator == ":":
        start, _, count = word.partition(":")
        if not start.strip().isdigit() or (count and not count.strip().isdigit()):
            return text
        rest = value[int(start) :]
        return rest[: int(count)] if count else rest
    if word:
        return text
    first = len(value) if len(operator) == 2 else 1
    changed = value[:first].upper() if operator[0] == "^" else value[:first].lower()
    return changed + value[first:]


def _trimmed(value: str, operator: str, pattern: str) -> str:
    """Without the shortest beginning (#) or end (%) of that pattern; signs twice: the longest."""
    matches = re.compile(translate(pattern)).match
    front = operator[0] == "#"
    lengths = range(len(value) + 1) if len(operator) == 1 else range(len(value), -1, -1)
    for length in lengths:
        part = value[:length] if front else value[len(value) - length :]
        if matches(part):
            return value[length:] if front else value[: len(value) - length]
    return value
