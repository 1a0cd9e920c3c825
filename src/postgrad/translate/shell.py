"""Commands of a shell script, without running it.

Line continuations, comments, variables (`NAME=value`, `${NAME}`, `${NAME:-default}`,
`${NAME##*/}`), arithmetic (`$((4 * N))`), arrays, and here-documents that `read` puts into a
variable are understood. Of what only a running shell knows, the output of a command becomes
UNKNOWN, a variable that the script never sets keeps its name, and a loop has its first value.
"""

import re
from collections.abc import Iterator

from postgrad.core.errors import UsageError
from postgrad.translate.expansion import UNKNOWN, Variables, filled, held, words_of

__all__ = ["UNKNOWN", "VISIBLE", "arguments", "commands"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENDS = ("&&", "||", "|", ";", "&", "|&", "2>&1")  # of a command
_HERE = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1")
_ARRAY = re.compile(
    r"^\s*(?:(?:export|local|declare|readonly)\s+(?:-\w+\s+)*)?(\w+)(\+?)=\((.*)$", re.S
)
_SET = re.compile(
    r"^\s*(?:(?:export|local|readonly|declare|typeset)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(.*)$", re.S
)
_FOR = re.compile(r"^\s*for\s+(\w+)\s+in\s+(.*?)\s*(?:;\s*do\b.*)?$", re.S)
_COUNT = re.compile(r"^\s*for\s*\(\(\s*(\w+)\s*=\s*([^;]*);.*$", re.S)
_RANGE = re.compile(r"\{(-?\d+)\.\.-?\d+(?:\.\.-?\d+)?\}")
_READ = re.compile(r"^\s*read\b.*?(\w+)\s*<<")

MOST_READ = 2**21  # characters that looking for the end of a quote reads
MOST_LINE = 2**14  # characters


def commands(script: str) -> list[list[str]]:
    """The words of every command in a script, in order, with variables expanded. After the script
    exports CUDA_VISIBLE_DEVICES, each command starts with that assignment.

    Raises UsageError for a quote or an array that never ends, and for lines over MOST_LINE
    characters: patterns are tried at every place of a line.
    """
    variables: Variables = {}
    exported: list[str] = []
    collected: list[list[str]] = []
    for statement in _statements(script):
        if (array := _ARRAY.match(statement)) is not None:
            name, more, body = array.groups()
            words = _words(filled(body.rstrip().removesuffix(")"), variables))
            before = variables.get(name, []) if more else []
            variables[name] = [*([before] if isinstance(before, str) else before), *words]
        elif (loop := _COUNT.match(statement) or _FOR.match(statement)) is not None:
            values = _words(filled(loop.group(2), variables)) or [""]
            variables[loop.group(1)] = _RANGE.sub(r"\1", values[0].rstrip(";"))
        elif (here := _READ.match(statement)) is not None:
            body = statement.partition("\n")[2].rpartition("\n")[0]
            variables[here.group(1)] = filled(_joined(body), variables)
        elif (assignment := _SET.match(statement)) is not None and _is_one_word(assignment[3]):
            name, more, text = assignment.groups()
            value = " ".join(_words(filled(text, variables, quoted=True)))
            before = variables.get(name) if more else None
            variables[name] = before + value if isinstance(before, str) else value
            if name == VISIBLE and statement.split()[0] == "export":
                exported = [f"{VISIBLE}={value}"]
        elif words := _words(filled(statement, variables)):
            collected.append([*exported, *words])
    return collected


def arguments(words: list[str]) -> list[str]:
    """The words up to the end of their command."""
    for place, word in enumerate(words):
        if word in _ENDS or word.startswith(">"):
            return words[:place]
        if word.endswith(";") and len(word) > 1:
            return [*words[:place], word[:-1]]
    return words


def _statements(text: str) -> Iterator[str]:
    """Lines, joined where a quote, an array or a here-document continues over several."""
    lines = iter(_joined(held(text)).splitlines())
    for line in lines:
        statement = line
        if (here := _HERE.search(line)) is not None:
            for more in lines:
                statement += "\n" + more
                if more.strip() == here.group(2):
                    break
        else:
            read = 0
            while not _is_complete(statement):
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


def _is_one_word(text: str) -> bool:
    return len(_words(text)) <= 1


def _is_complete(statement: str) -> bool:
    """Whether its quotes and arrays are closed."""
    try:
        words_of(statement)
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
        return words_of(text)
    except ValueError as error:  # what its variables stand for has half a pair of quotes
        start = text.strip()[:60]
        raise UsageError(f"the script ends within a quote: {start!r} ...") from error


def _joined(text: str) -> str:
    return re.sub(r"\\\r?\n[ \t]*", " ", text)
