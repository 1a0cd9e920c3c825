"""Commands of a shell script, without running it.

Line continuations, comments, variables (`NAME=value`, `${NAME}`, `${NAME:-default}`,
`${NAME##*/}`), arithmetic (`$((4 * N))`), arrays, here-documents that `read` puts into a variable,
branches of `if` and `case`, and scripts in `bash -c` are understood. Of what only a running shell
knows, the output of a command becomes UNKNOWN, a variable that the script never sets keeps its
name, and a loop has its first value.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from postgrad.core.errors import UsageError
from postgrad.translate.branches import Branches
from postgrad.translate.expansion import UNKNOWN, Variables, filled, held, words_of

__all__ = ["ENDS", "UNKNOWN", "VISIBLE", "arguments", "commands", "named"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
Include = Callable[[str], str | None]  # of a file that a script sources, by its name there
_KEYWORDS = (
    "if", "then", "else", "elif", "fi", "while", "until", "do", "done", "case", "esac", "{", "}",
    "!",
)  # fmt: skip
_SETTERS = ("export", "unset", "local", "readonly", "declare", "function")
_STARTERS = ("python", "python3", "torchrun", "deepspeed", "accelerate", "srun", "uv", "uvx")
_OF_TWO_WORDS = ("pip", "ray", "docker", "git", "trl", "vllm", "conda", "beaker", "apt-get")
_SHELLS = ("bash", "sh", "zsh")
_RUNS = re.compile(r"-\w*c")  # of a shell: the next word is a script
ENDS = ("&&", "||", "|", ";", "&", "|&", "2>&1")  # of a command
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
MOST_DEPTH = 4  # of scripts within scripts


def commands(
    script: str, job: Mapping[str, str] | None = None, include: Include | None = None
) -> list[list[str]]:
    """The words of every command in a script, in order, with variables expanded. After the script
    exports CUDA_VISIBLE_DEVICES, each command starts with that assignment.

    job: variables that are set before the script begins. include: the text of a file that `source`
    names, or None where there is none; its variables are read, its commands are not. Raises
    UsageError for a quote or an array that never ends, and for lines over MOST_LINE characters:
    patterns are tried at every place of a line.
    """
    return _Script(dict(job or {}), include).read(script, 0)


class _Script:
    """The variables of a script while its statements are read."""

    def __init__(self, variables: Variables, include: Include | None) -> None:
        self._variables, self._include = variables, include
        self._exported: list[str] = []

    def read(self, script: str, depth: int) -> list[list[str]]:
        """The commands of a text. depth: how deep it lies in others, by `bash -c` and `source`."""
        if depth > MOST_DEPTH:
            raise UsageError(f"scripts within scripts, more than {MOST_DEPTH} deep")
        collected: list[list[str]] = []
        branches = Branches(lambda text: _words(filled(text, self._variables)))
        for line in _statements(script):
            statement = branches.after(line)
            if statement and not self._assigns(statement):
                words = _words(filled(statement, self._variables))
                collected += self._inner(words, depth) if words else []
        return collected

    def _assigns(self, statement: str) -> bool:
        """Takes over the variables that a statement sets; false for a command."""
        variables = self._variables
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
            if not re.search(r"[\"']", text):
                text = _bare(text)
            if name not in variables and "'" not in text:  # PATH=folder:$PATH
                text = re.sub(rf"\$\{{{name}\}}|\${name}\b", "", text)
            value = " ".join(_words(filled(text, variables, quoted=True)))
            before = variables.get(name) if more else None
            variables[name] = before + value if isinstance(before, str) else value
            if name == VISIBLE and statement.split()[0] == "export":
                self._exported = [f"{VISIBLE}={value}"]
        else:
            return False
        return True

    def _inner(self, words: list[str], depth: int) -> list[list[str]]:
        """A statement's commands: several where `bash -c TEXT` runs another script, after the
        words of what starts it; none for `source FILE`.
        """
        if words[0] in ("source", ".") and len(words) > 1:
            text = self._include(words[1]) if self._include else None
            if text is not None:
                self.read(text, depth + 1)
                return []
        for place, word in enumerate(words[:-2]):
            if PurePosixPath(word).name in _SHELLS and _RUNS.fullmatch(words[place + 1]):
                text = words[place + 2]
                if text[0] in "\"'":  # quotes that a shell on another machine takes off
                    text = " ".join(words[place + 2 :]).strip("\"'")
                inner = self.read(text, depth + 1)
                return [[*words[:place], *command] for command in inner]
        return [[*self._exported, *words]]


def arguments(words: list[str]) -> list[str]:
    """The words up to the end of their command."""
    for place, word in enumerate(words):
        if word in ENDS or word.startswith(">"):
            return words[:place]
        if word.endswith(";") and len(word) > 1:
            return [*words[:place], word[:-1]]
    return words


def named(lines: Sequence[list[str]]) -> list[str]:
    """What the commands of a script are called, in order: "mkdir", "ray start", "python a.py".

    Conditions, functions of the script itself and the shell's keywords are no commands.
    """
    functions = {line[0].removesuffix("()") for line in lines if line[0].endswith("()")}
    names = [_name(command) for line in lines for command in _parts(line)]
    return [name for name in names if name and name not in functions]


def _parts(words: list[str]) -> Iterator[list[str]]:
    """The single commands of a line, without what ends them and where their output goes."""
    part: list[str] = []
    for word in words:
        if word in ENDS:
            yield part
            part = []
        else:
            part.append(word.removesuffix(";"))
            if word.endswith(";"):
                yield part
                part = []
    yield part


def _name(words: list[str]) -> str:
    words = [word.strip(";") for word in words]
    while words and (words[0] in _KEYWORDS or re.match(r"\w+\+?=", words[0])):
        words = words[1:]
    is_set = bool(words) and (words[0] in _SETTERS or re.match(r"\w+\(\)|\d+$", words[0]))
    if not words or is_set or (re.match(r"\W", words[0]) and "/" not in words[0]):
        return ""
    program = PurePosixPath(words[0]).name
    if program in ("nohup", "sudo", "time", "exec", "env"):
        return _name(words[1:])
    if program in _STARTERS:
        inner = [word for word in words[1:] if word.endswith(".py")]
        module = [after for word, after in itertools.pairwise(words) if word in ("-m", "--module")]
        return f"{program} {(module or inner or [''])[0]}".strip()
    plain = [word for word in words[1:] if not word.startswith("-")]
    return f"{program} {plain[0]}" if program in _OF_TWO_WORDS and plain else program


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
    """Lines that end in a backslash with the next one; the last line of a script may too."""
    return re.sub(r"\\(?:\r?\n[ \t]*|\Z)", " ", text)
