"""Python's plain values as JSON and back, so that only data leaves the sandbox.

null, booleans, numbers, strings and lists stand for themselves. Any other value is an object whose
single key is its type: {"tuple": [...]}, {"dict": [[key, value], ...]}; also integers with more
digits than Python parses or prints: {"integer": hexadecimal}.
"""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_AS_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "decimal": (Decimal, str, Decimal),
    "fraction": (Fraction, str, lambda text: Fraction(*map(int, text.split("/")))),
    "complex": (complex, str, complex),
    "integer": (int, hex, lambda text: int(text, 16)),
}
_SHORT_BITS = 14_280  # an integer of so many bits has at most 4300 digits
_COLLECTIONS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class NoPlainValue(TypeError):
    """A value that cannot be encoded: an object of a class, a function, a generator."""


def encode(value: Any, stranger: Callable[[Any], Any] | None = None) -> Any:
    """`value` as JSON. An object of a subclass is encoded as its base class.

    stranger: encodes values that are not plain. Without it they raise NoPlainValue.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and int.bit_length(value) > _SHORT_BITS:
        return {"integer": hex(value)}
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, list):
        return [encode(item, stranger) for item in value]
    if isinstance(value, dict):
        pairs = [[encode(k, stranger), encode(v, stranger)] for k, v in value.items()]
        return {"dict": pairs}
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [encode(item, stranger) for item in value]}
    for name, (kind, to_text, _) in _AS_TEXT.items():
        if isinstance(value, kind):
            return {name: to_text(value)}
    if stranger is None:
        raise NoPlainValue(f"{type(value).__name__} is no plain value")
    return stranger(value)


def decode(data: Any, stranger: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value that `encode` wrote as `data`. stranger: decodes objects of unknown types.

    Raises ValueError, TypeError or RecursionError for what `encode` never writes.
    """
    if isinstance(data, list):
        return [decode(item, stranger) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("an object with more than one key")
    ((name, inner),) = data.items()
    if name == "dict":
        return {decode(k, stranger): decode(v, stranger) for k, v in inner}
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](decode(item, stranger) for item in inner)
    if name in _AS_TEXT:
        return _AS_TEXT[name][2](inner)
    if stranger is None:
        raise ValueError(f"an unknown kind of value: {name[:40]}")
    return stranger(data)
