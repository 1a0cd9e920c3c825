"""JSON as rows have it, read strictly: what another reader would change in silence is an error."""

import json
import math
from typing import Any, NoReturn

DEEPEST = 100  # levels of lists and objects


def parsed_json(text: str) -> Any:
    """The value of JSON text. Raises ValueError for what is not JSON (NaN is not), a number that no
    float holds, a name that an object has twice, half a surrogate pair, and more than DEEPEST
    levels.
    """
    try:
        # one decoder for all texts; json.loads has its own error for a byte order mark
        value = json.loads(text) if text.startswith(_MARK) else _DECODER.decode(text)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(value)
    # JSON can write half a surrogate pair, tokenizers read none
    if "\\u" in text and "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_depth(value: Any) -> None:
    """Raises ValueError where lists and objects are nested deeper than DEEPEST: the writers of run
    files have limits too (orjson 254, json 1000 less the depth of the call).
    """
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                inner += node.values()
            elif isinstance(node, list):
                inner += node
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {DEEPEST} levels")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    """A number with a fraction or an exponent. Raises ValueError for 1e400, which would be read as
    infinity.
    """
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:80]} is larger than any float")
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a repeated name, whose last value would win silently."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twice[:80]!r} twice")
    return members


_MARK = "\ufeff"
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse, object_pairs_hook=_members)
