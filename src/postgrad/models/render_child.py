"""The process that renders chat templates. Templates are foreign programs: memory and time are
limited.

rendering.py starts it as a script. It imports nothing of postgrad, gets nothing of the run's
environment, and answers frames on its standard input until that is closed. A frame is eight bytes
of length (big-endian) and JSON:

    {"program": 3, "template": "...", "variables": "{...}", "rows": [[messages, wanted], ...]}

"template" and "variables" (JSON in JSON) come with the first frame of a program only. "wanted" is a
list of [n, generation]: for each pair the text of the first n messages, with generation with the
start of an answer. The reply holds for each text one byte, eight bytes of length, and content: b"T"
and the text, or b"E" and the reason why there is none, which ends the reply.
"""

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import orjson
from jinja2 import nodes, utils
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_REASON = 1000  # characters
HEAD = struct.Struct(">cQ")


class _Generation(Extension):
    """Renders {% generation %} blocks, which mark answers for loss masks, as their plain text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the class's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(utils.Namespace):
    """`namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name one `self`
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: Any, value: Any) -> None:
        _check_name(name)
        utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace has no attribute {name!r}: names with an underscore are refused"
        )


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates (utils/chat_template_utils.py): sandbox,
    functions and filters, white space around blocks.
    """
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    jinja.filters["tojson"] = _tojson
    jinja.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return jinja


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Arguments(dict[str, Any]):
    """The arguments of a call. DeepSeek's templates join them to text, as which servers return
    them: they get the JSON.
    """

    def __add__(self, after: Any) -> Any:
        return _tojson(self) + after

    def __radd__(self, before: Any) -> Any:
        return before + _tojson(self)


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls: list[Any] = message.get("tool_calls") or []
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    for function in functions:
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            function["arguments"] = _Arguments(function["arguments"])
    return message


def _raise(message: Any) -> None:
    raise TemplateError(message)


class TemplateProgram:
    """A template with the variables it is called with, compiled when it is first rendered."""

    def __init__(self, template: str, variables: Mapping[str, Any]) -> None:
        self._source = template
        self._variables = {"tools": None, "documents": None, **variables}
        self._compiled: Any = None

    def text(self, messages: list[Mapping[str, Any]], generation: bool) -> str:
        """The rendered text. generation: with the start of an answer. Raises whatever the template
        raises.
        """
        variables = self._variables
        if messages and "tools" in messages[0]:
            first = {key: value for key, value in messages[0].items() if key != "tools"}
            variables = {**variables, "tools": messages[0]["tools"]}
            messages = [first, *messages[1:]]
        if self._compiled is None:
            self._compiled = environment().from_string(self._source)
        return self._compiled.render(
            messages=messages, add_generation_prompt=generation, **variables
        )


def answered(
    program: TemplateProgram,
    row: tuple[list[Mapping[str, Any]], list[tuple[int, bool]]],
    longest: int,
) -> tuple[bytes, bool]:
    """The reply to a row, and whether it has all texts. longest: characters that a text may have,
    beyond four times those of the row.
    """
    messages, wanted = [_with_arguments(message) for message in row[0]], row[1]
    most = longest + 4 * sum(len(str(value)) for message in messages for value in message.values())
    reply = bytearray()
    for count, generation in wanted:
        try:
            text = program.text(messages[:count], generation)
            if len(text) > most:
                raise ValueError(f"it writes {len(text)} characters, the limit is {most}")
            written = text.encode()
        except BaseException as error:  # noqa: BLE001  a template can raise anything
            why = _reason(error).encode("utf-8", "backslashreplace")
            return bytes(reply + HEAD.pack(b"E", len(why)) + why), False
        reply += HEAD.pack(b"T", len(written)) + written
    return bytes(reply), True


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than it may have"
    if isinstance(error, RecursionError):
        return "it nests too deeply, or calls itself without end"
    if isinstance(error, UnicodeEncodeError):
        return "it writes half a surrogate pair, which is no character"
    if isinstance(error, TemplateSyntaxError):
        return f"its line {error.lineno} is no Jinja: {error.message}"[:LONGEST_REASON]
    try:
        return str(error)[:LONGEST_REASON] or type(error).__name__
    except Exception:  # noqa: BLE001  str() runs code of the template's values
        return type(error).__name__


def limit(memory: int) -> None:
    """Limits this process: `memory` bytes of address space (0: no limit), no files written, no
    other processes.
    """
    limits = {"RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0, "RLIMIT_NPROC": 0}
    if memory:
        limits["RLIMIT_AS"] = memory
    for name, most in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (most, most))


def main() -> None:
    """Answers frames. sys.argv: bytes of memory, CPU seconds of a row, characters of a text."""
    memory, seconds, longest = sys.argv[1:]
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills the process when a row takes too long
    limit(int(memory))
    programs: dict[int, TemplateProgram] = {}
    reads, writes = sys.stdin.buffer, sys.stdout.fileno()
    os.write(writes, b"R")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while head := reads.read(8):
        frame = orjson.loads(reads.read(int.from_bytes(head, "big")))
        if "template" in frame:
            variables = json.loads(frame["variables"])
            programs[frame["program"]] = TemplateProgram(frame["template"], variables)
        for row in frame["rows"]:
            signal.setitimer(signal.ITIMER_PROF, float(seconds))
            reply, complete = answered(programs[frame["program"]], row, int(longest))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            view = memoryview(reply)
            while view:
                view = view[os.write(writes, view) :]
            if not complete:
                break


if __name__ == "__main__":
    main()
