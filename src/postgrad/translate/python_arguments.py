"""Command lines of Python programs: what their parsers give for the words behind a program."""

from collections.abc import Mapping
from typing import Any, cast

from postgrad.translate.python_expressions import Expressions
from postgrad.translate.python_values import Built, DefinedClass, Imported, Unread

_PARSERS = ("HfArgumentParser", "TrlParser", "ArgumentParser")
_CALLS = ("cli",)  # of tyro: it makes an object of a class
_OFF = {"store_true": False, "store_false": True}


class CommandLine:
    """A program's words by name, and what its parsers make of them.

    Fields of the program's own classes and options of argparse have their values, and their
    defaults where the words do not say them. An object of another package's class has the words
    that no class of the program takes, and its defaults as far as they are known.
    """

    def __init__(self, words: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> None:
        self._words = dict(words)
        self._defaults = defaults  # by the end of a class's name
        self._taken: set[str] = set()  # by the program's own classes and parsers
        self._objects: set[int] = set()  # numbers of objects of other packages' classes
        self.line: int | None = None  # where such an object was made

    @property
    def is_silent(self) -> bool:
        """Whether no word stands behind the program."""
        return not self._words

    @property
    def rest(self) -> dict[str, Any]:
        """The words that the program itself does not take."""
        return {name: value for name, value in self._words.items() if name not in self._taken}

    def says(self, value: Any) -> bool:
        """Whether a value is, or is made from, what only the command line says."""
        pending = [value]
        while pending:
            inner = pending.pop()
            if isinstance(inner, Built):
                if inner.number in self._objects:
                    return True
                pending += [inner.base, *inner.args, *inner.kwargs.values()]
            elif isinstance(inner, list):
                pending += cast(list[Any], inner)
        return False

    def answer(self, program: Expressions, built: Built) -> Any:
        """What a call returns that reads the command line; None for any other call."""
        if built.short in _CALLS and built.args and isinstance(built.args[0], DefinedClass):
            return self._object(program, built.args[0], built)
        if not built.name.startswith(".parse_"):
            return None
        parser = _origin(built)
        if parser.short not in _PARSERS:
            return None
        if parser.short == "ArgumentParser":
            namespace = self._namespace(program, parser, built)
            return [namespace, []] if built.short == "parse_known_args" else namespace
        kinds: Any = parser.args[0] if parser.args else parser.kwargs.get("dataclass_types")
        kinds = cast(list[Any], kinds) if isinstance(kinds, list) else [kinds]
        return [self._object(program, kind, built) for kind in kinds]

    def _object(self, program: Expressions, kind: Any, built: Built) -> Any:
        """An object of a class whose fields are words of the command line."""
        if isinstance(kind, DefinedClass):
            fields = {name: self._take(name, default) for name, default in kind.fields.items()}
            if kind.imported is None:
                return program.build(kind.name, built, fields)
            return self._build(program, kind.imported, built, fields)
        if isinstance(kind, Imported):
            return self._build(program, kind.name, built, {})
        return None

    def _build(
        self, program: Expressions, name: str, built: Built, fields: dict[str, Any]
    ) -> Built:  # fmt: skip
        ends = (end for end in self._defaults if name.endswith(end))
        default = self._defaults.get(next(ends, ""), {})
        result = program.build(name, built, {**default, **fields, **self.rest})
        self._objects.add(result.number)
        self.line = built.line
        return result

    def _namespace(self, program: Expressions, parser: Built, built: Built) -> Built:
        """argparse's object: the options that were added to the parser and to its groups."""
        values: dict[str, Any] = {}
        for call in program.calls.values():
            if call.name not in (".add_argument", ".set_defaults"):
                continue
            if _origin(call).number != parser.number:
                continue
            if call.short == "set_defaults":
                values |= call.kwargs
                continue
            names = [name for name in call.args if isinstance(name, str)]
            longest = max(names, key=lambda name: name.startswith("--"), default="")
            name = str(call.kwargs.get("dest") or longest.lstrip("-")).replace("-", "_")
            action = call.kwargs.get("action")
            default = _OFF.get(action) if isinstance(action, str) else None
            if call.kwargs.get("required") is True or longest[:1] not in ("-", ""):
                default = Unread(f"{longest} of the command line", call.line)
            values[name] = self._take(name, call.kwargs.get("default", default))
        return program.build("argparse.Namespace", built, values)

    def _take(self, name: str, default: Any) -> Any:
        self._taken.add(name)
        return self._words.get(name, default)


def _origin(call: Built) -> Built:
    """What the methods of a chain were called on: `a` of a.b(...).c(...)."""
    while isinstance(call.base, Built):
        call = call.base
    return call
