"""Text: the object that a recipe names, the nearest known name, sizes in bytes, lines of a
terminal's width, and Unicode's composed form.
"""

import difflib
import importlib
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Literal

from postgrad.core.errors import PostgradError, UsageError, described

LEAST_WIDTH = 20  # columns of a line, however narrow the terminal


def in_lines(text: str, width: int) -> str:
    """The text with its lines cut at words to `width` columns, further ones indented as the first.
    A word that is too long, a path say, is not cut.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        folded = textwrap.wrap(
            line,
            max(LEAST_WIDTH, width),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            expand_tabs=False,
        )
        lines += folded if len(line) > width and folded else [line]
    return "\n".join(lines)


def fixed(value: float, form: str) -> str:
    """A number by a format such as "{:.4f}". Where that would show zeros alone, two significant
    digits ("3.2e-05"), and "0" below 1e-6. Never "-0.0000". Percentages stay as they are.
    """
    text = form.format(round(value, 6) + 0.0)
    if "%" in form or any(digit in text for digit in "123456789"):
        return text
    return f"{value:.2g}" if abs(value) >= 1e-6 else "0"


def size_text(size: int) -> str:
    """A number of bytes for people: "1.6 MiB"."""
    if size < 2**20 / 20:  # which would be 0.0 MiB
        return f"{size} bytes"
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def how_many(count: float, noun: str) -> str:
    """A count with its noun: "1 row", "2 rows", "40,960 rows"."""
    return f"{count:,.0f} {noun}{'' if count == 1 else 's'}"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is most like `name`; None where none is close. Capitals do not count.
    A name of the same letters in another order is preferred: letters are often swapped in typing.
    """
    wanted = name.casefold()
    by_folded = {each.casefold(): each for each in names}
    close = difflib.get_close_matches(wanted, list(by_folded), n=3, cutoff=0.6)
    swapped = [match for match in close if sorted(match) == sorted(wanted)]
    return next((by_folded[match] for match in [*swapped, *close]), None)


HERE = "`PYTHONPATH=. postgrad ...` if that is the current one"


def require_module(name: str, kind: str) -> None:
    """Raises UsageError where `name` is not "package.module:attribute", or has a file in place of
    the module. Imports nothing. kind: as of `resolve`.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise UsageError(f"no {kind} is called {name!r}: your own is 'package.module:Name'")
    dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
    if module_name.endswith(".py") or "/" in module_name:
        raise UsageError(
            f"{kind} {name!r} names a file: name its module, as {f'{dotted}:{attribute}'!r} with "
            f"the folder that it begins in on PYTHONPATH: {HERE}"
        )


def resolve(name: str, registered: Mapping[str, str], kind: str) -> Any:
    """The object that `name` stands for: a key of `registered`, or `package.module:attribute`.

    kind: what the message calls it, "algorithm". Raises UsageError where there is no such name,
    module or attribute, or the module raises as it is imported.
    """
    target = registered.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        close = nearest(name, registered)
        listed = ", ".join(sorted(registered))
        hint = f"did you mean {close!r}? Your" if close else f"known: {listed}; your"
        raise UsageError(f"no {kind} is called {name!r}: {hint} own is 'package.module:Name'")
    require_module(target, kind)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{kind} {name!r}: module {error.name!r} cannot be imported; "
            f"install it or put its folder on PYTHONPATH: {HERE}"
        ) from error
    except PostgradError:
        raise
    except (Exception, SystemExit) as error:  # importing runs the module
        raise UsageError(
            f"{kind} {name!r}: its module cannot be imported: {described(error)}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        close = nearest(attribute, vars(module))
        hint = f"; did you mean {close!r}?" if close else ""
        raise UsageError(f"{kind} {name!r}: {module_name} has no {attribute!r}{hint}") from error


_MARKS = 30
_PAIRS_OF_MARKS = "\u0f73\u0f75\u0f81"  # Tibetan: in class 0, but each decomposes into two marks


def composed(text: str, form: Literal["NFC", "NFKC"] = "NFC") -> str:
    """`text` in a normal form, with at most 30 combining marks in a row.

    That is the limit of the stream-safe text format (Unicode Standard Annex 15): no writing system
    needs more, and sorting a long run of marks takes quadratic time.
    """
    if text.isascii():
        return text
    runs = ((is_mark, "".join(run)) for is_mark, run in groupby(text, _is_mark))
    return unicodedata.normalize(form, "".join(run[:_MARKS] if mark else run for mark, run in runs))


def _is_mark(character: str) -> bool:
    return unicodedata.combining(character) > 0 or character in _PAIRS_OF_MARKS
