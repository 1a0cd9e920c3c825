"""Expansion of $NAME, ${NAME...}, $(( ... )) and $(command) in the words of a shell script.

No command is run. The output of seq, basename, dirname and echo is computed from their words; that
of all others is UNKNOWN, or what stands behind it for the case that it fails, `|| echo WORD`.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from fnmatch import translate
from pathlib import PurePosixPath

from postgrad.core.errors import UsageError
from postgrad.translate.arithmetic import compute

UNKNOWN = "\ue000"  # what $(command) would have printed
_KEPT, _END = "\ue001", "\ue002"  # around a command or an expression, until variables are known
_HELD = re.compile(f"{_KEPT}([0-9a-f]*){_END}")
_UNSET, _UNSET_END = "\ue005", "\ue006"  # around the name of a variable without a value, as ${NAME}
_FALLBACK = re.compile(r"\|\|\s*echo\s+([\w./-]+)\s*$")
_LIST = re.compile(r"(\"?)\$\{(\w+)\[([@*])\]\}\1")
_VARIABLE = re.compile(
    r"\$\{(?P<length>#)?(?P<name>\w+|[@*#])(?:\[(?P<index>\d+|[@*])\])?"
    r"(?:(?P<operator>:?[-=+?]|##?|%%?|//?|:|\^\^?|,,?)(?P<word>[^{}]*))?\}|\$(?P<plain>\w+|[@*#])"
)
_MOST = 10_000  # numbers of a seq
MOST_TEXT = 2**16  # characters that variables stand for
MOST_ROUNDS = 100  # variables within variables

Variables = dict[str, str | list[str]]


def words_of(text: str) -> list[str]:
    """The words of a statement, quotes and comments taken off. ValueError for an open quote."""
    return shlex.split(text, comments=True)


def held(text: str) -> str:
    """The text with each $(...), $((...)) and `...` encoded as one word without blanks or quotes,
    which `filled` decodes. Raises UsageError where one never ends.
    """
    text = re.sub(r"`([^`\n]*)`", lambda match: _hold(f"$({match[1]})"), text)
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
    """The text with variables and commands expanded, but not within single quotes. quoted: quotes
    the result, so that the value of an assignment stays one word. Raises UsageError for a variable
    that holds itself, or too much.
    """
    text = "".join(
        _shown(part) if is_literal else _expanded(part, variables)
        for part, is_literal in _parts(text)
    )
    if len(text) > MOST_TEXT:
        raise _endless(text)
    return shlex.quote(text) if quoted and not re.search(r"[\"']", text) else text


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The text in parts: (part, whether it stands in single quotes, which keep it as it is). Quotes
    within double quotes and within `${NAME:-'default'}` are not such.
    """
    start, place, depth, is_double = 0, 0, 0, False
    while place < len(text):
        letter = text[place]
        if letter == "\\":
            place += 1
        elif letter == '"':
            is_double = not is_double
        elif text.startswith("${", place):
            depth += 1
        elif letter == "}" and depth:
            depth -= 1
        elif letter == "'" and not is_double and not depth:
            end = text.find("'", place + 1)
            if end < 0:
                break
            yield text[start:place], False
            yield text[place : end + 1], True
            start = place = end + 1
            continue
        place += 1
    yield text[start:], False


def _hold(text: str) -> str:
    return f"{_KEPT}{_shown(text).encode().hex()}{_END}"


def _shown(text: str) -> str:
    """The text as the script has it: what `held` encoded, decoded."""
    return _HELD.sub(lambda match: bytes.fromhex(match[1]).decode(), text)


def _expanded(text: str, variables: Variables) -> str:
    text = _LIST.sub(lambda match: _as_list(match, variables), text)
    text = _HELD.sub(lambda match: _printed(bytes.fromhex(match[1]).decode(), variables), text)
    before, written = "", text
    for _ in range(MOST_ROUNDS):  # a default may have variables of its own
        if text == before:
            return text.replace(_UNSET, "${").replace(_UNSET_END, "}")
        before, text = text, _VARIABLE.sub(lambda match: _value(match, variables), text)
        if len(text) > MOST_TEXT:
            break
    raise _endless(written)


def _endless(text: str) -> UsageError:
    return UsageError(
        f"a variable refers to itself, or expands to too much: {_shown(text).strip()[:60]!r} ..."
    )


def _as_list(match: re.Match[str], variables: Variables) -> str:
    """The words of an array; as one text for `${NAME[*]}` within other quotes."""
    quote, name, form = match.groups()
    value = variables.get(name, [])
    words = [value] if isinstance(value, str) else value
    return shlex.join(words) if quote or form == "@" else " ".join(words)


def _printed(text: str, variables: Variables) -> str:
    """The output of "$((expression))" or "$(command)"; UNKNOWN where it would have to be run."""
    inner = text[2:-1]
    try:
        if inner.startswith("(") and inner.endswith(")"):
            return str(compute(filled(held(inner[1:-1]), variables), variables))
        if (fallback := _FALLBACK.search(inner)) is not None:
            return fallback[1]
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


def _value(match: re.Match[str], variables: Variables) -> str:
    """The value of a variable, with its operator applied; one without a value stays as it is."""
    name = match["name"] or match["plain"]
    value, operator, word = variables.get(name), match["operator"] or "", match["word"] or ""
    if match["index"] is not None and match["index"].isdigit():
        values = [value] if isinstance(value, str) else value or []
        value = values[int(match["index"])] if int(match["index"]) < len(values) else None
    if match["length"]:
        return match.group() if value is None else str(len(value))
    if isinstance(value, list):
        value = shlex.join(value)
    if operator[-1:] in ("-", "=", "+", "?"):
        return _or_else(match, value, operator, word, variables)
    if value is not None:
        return _cut(value, operator, word, match.group()) if operator else value
    if name in ("@", "*", "#") or name.isdigit():
        return ""
    is_plain = bool(match["name"]) and not operator and match["index"] is None
    return f"{_UNSET}{name}{_UNSET_END}" if is_plain else match.group()


def _or_else(
    match: re.Match[str], value: str | None, operator: str, word: str, variables: Variables
) -> str:
    """${NAME-word}, ${NAME=word}, ${NAME+word} and ${NAME?word}; a colon before the operator takes
    an empty value for none.
    """
    is_set = value is not None and (value != "" or not operator.startswith(":"))
    if operator.endswith("+"):
        return word.strip("\"'") if is_set else ""
    if is_set:
        return value or ""
    if operator.endswith("?"):
        return match.group()
    if operator.endswith("="):
        variables[match["name"]] = word.strip("\"'")
    return word.strip("\"'")


def _cut(value: str, operator: str, word: str, text: str) -> str:
    """${NAME#pattern}, ${NAME/old/new}, ${NAME:start:count} and ${NAME^}; `text`, as the script has
    it, for forms that are not read.
    """
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
    """The value without the shortest beginning (#) or end (%) that matches the pattern; with ## and
    %% the longest.
    """
    matches = re.compile(translate(pattern)).match
    front = operator[0] == "#"
    lengths = range(len(value) + 1) if len(operator) == 1 else range(len(value), -1, -1)
    for length in lengths:
        part = value[:length] if front else value[len(value) - length :]
        if matches(part):
            return value[length:] if front else value[: len(value) - length]
    return value
