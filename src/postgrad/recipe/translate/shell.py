"""Commands of a shell script, without running it.

Read are line continuations, comments, variables (`NAME=value`, `${NAME}`, `${NAME:-default}`),
arrays, and here-documents that `read` puts into a variable. What only a running shell knows is
marked or taken as its first way: the output of a command with UNKNOWN, a variable that the
script never sets by its own name, a loop by its first value.
"""

import re
import shlex
from collections.abc import Iterator

from postgrad.core.errors import UsageError

UNKNOWN = "\ue000"  # what $(command) would have printed
_ENDS = ("&&", "||", "|", ";", "&", "|&", "2>&1")  # of a command
_HERE = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1")
_ARRAY = re.compile(
    r"^\s*(?:(?:export|local|declare|readonly)\s+(?:-\w+\s+)*)?(\w+)(\+?)=\((.*)$", re.S
)
_SET = re.compile(r"^\s*(?:(?:export|local|readonly)\s+)?(\w+)=(.*)$", re.S)
_FOR = re.compile(r"^\s*for\s+(\w+)\s+in\s+(.*?)\s*(?:;\s*do\b.*)?$", re.S)
_READ = re.compile(r"^\s*read\b.*?(\w+)\s*<<")
_LIST = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
_VARIABLE = re.compile(r"\$\{(\w+|[@*#])(?::?[-=]([^{}]*))?\}|\$(\w+|[@*#])")
_PARTS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|[^\"']+|[\"']")

MOST_READ = 2**21  # characters that looking for the end of a quote reads
MOST_LINE = 2**14  # characters
MOST_TEXT = 2**16  # characters that variables stand for
MOST_ROUNDS = 100  # variables within variables

Variables = dict[str, str | list[str]]


def commands(text: str) -> list[list[str]]:
    """The words of every command in a script, variables filled in, in order.

    Raises UsageError for a quote or an array that never ends, and for what is longer than a person
    writes: patterns are tried at every place of a line.
    """
    variables: Variables = {}
    found: list[list[str]] = []
    for statement in _statements(text):
        if (array := _ARRAY.match(statement)) is not None:
            name, more, body = array.groups()
            words = _words(_filled(body.rstrip().removesuffix(")"), variables))
            before = variables.get(name, []) if more else []
            variables[name] = [*([before] if isinstance(before, str) else before), *words]
        elif (loop := _FOR.match(statement)) is not None:
            values = _words(_filled(loop.group(2), variables)) or [""]
            variables[loop.group(1)] = values[0].rstrip(";")
        elif (here := _READ.match(statement)) is not None:
            body = statement.partition("\n")[2].rpartition("\n")[0]
            variables[here.group(1)] = _filled(_joined(body), variables)
        elif (one := _SET.match(statement)) is not None and len(_words(one.group(2))) <= 1:
            words = _words(_filled(one.group(2), variables, quoted=True))
            variables[one.group(1)] = " ".join(words)
        else:
            found.append(_words(_filled(statement, variables)))
    return [words for words in found if words]


def arguments(words: list[str]) -> list[str]:
    """The words up to the end of their command."""
    for place, word in enumerate(words):
        if word in _ENDS or word.startswith(">"):
            return words[:place]
        if word.endswith(";") and len(word) > 1:
            return [*words[:place], word[:-1]]
    return words


def _statements(text: str) -> Iterator[str]:
    """Lines put together where a quote, an array or a here-document goes on."""
    lines = iter(_joined(_without_outputs(text)).splitlines())
    for line in lines:
        statement = line
        if (here := _HERE.search(line)) is not None:
            for more in lines:
                statement += "\n" + more
                if more.strip() == here.group(2):
                    break
        else:
            read = 0
            while not _whole(statement):
                read += len(statement)
                more = next(lines, None)
                if more is None or read > MOST_READ:
                    start = line.strip()[:60]
                    raise UsageError(f"the script ends within a quote or an array: {start!r} ...")
                statement += "\n" + more
        if any(len(part) > MOST_LINE for part in statement.splitlines()):
            raise UsageError(f"a line of over {MOST_LINE} characters: {line.strip()[:60]!r} ...")
        if statement.strip():
            yield statement


def _whole(statement: str) -> bool:
    try:
        shlex.split(statement, comments=True)
    except ValueError:
        return False
    if (array := _ARRAY.match(statement)) is None:
        return True
    return bool(_bare(array.group(3)).rstrip().endswith(")"))


def _bare(text: str) -> str:
    """Text without comments that stand on their own after a blank or a line's beginning."""
    return re.sub(r"(?m)(^|\s)#.*$", "", text)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:  # what its variables stand for has half a pair of quotes
        start = text.strip()[:60]
        raise UsageError(f"the script ends within a quote: {start!r} ...") from error


def _joined(text: str) -> str:
    return re.sub(r"\\\r?\n[ \t]*", " ", text)


def _without_outputs(text: str) -> str:
    """$(...) and `...` as UNKNOWN, whatever is within them."""
    text = re.sub(r"`[^`\n]*`", UNKNOWN, text)
    kept: list[str] = []
    done = 0
    while (start := text.find("$(", done)) >= 0:
        kept += [text[done:start], UNKNOWN]
        depth = 0
        for end in range(start + 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if depth == 0:
                break
        else:
            raise UsageError("the script ends within $( ... )")
        done = end + 1
    return "".join([*kept, text[done:]])


def _filled(text: str, variables: Variables, quoted: bool = False) -> str:
    """Variables in place of their names, but not within single quotes. quoted: keeps the value of
    an assignment one word.
    """
    parts = _PARTS.findall(text)
    text = "".join(
        part if len(part) > 1 and part[0] == "'" else _expanded(part, variables) for part in parts
    )
    return shlex.quote(text) if quoted and not re.search(r"[\"']", text) else text


def _expanded(text: str, variables: Variables) -> str:
    text = _LIST.sub(lambda found: _as_list(found.group(1), variables), text)
    before, start = "", text.strip()[:60]
    for _ in range(MOST_ROUNDS):  # a default may have variables of its own
        if text == before:
            return text
        before, text = text, _VARIABLE.sub(lambda found: _value(found, variables), text)
        if len(text) > MOST_TEXT:
            break
    raise UsageError(f"a variable stands for itself, or for too much: {start!r} ...")


def _as_list(name: str, variables: Variables) -> str:
    value = variables.get(name, [])
    return shlex.join([value] if isinstance(value, str) else value)


def _value(found: re.Match[str], variables: Variables) -> str:
    name, default = found.group(1) or found.group(3), found.group(2)
    value = variables.get(name)
    if isinstance(value, list):
        return shlex.join(value)
    if value is not None:
        return value
    if default is not None:
        return default.strip("\"'")
    return "" if name in ("@", "*", "#") or name.isdigit() else found.group()
