"""Embeds data in HTML so that it cannot end its element, become markup, or be executed.

Large blocks are JSON, compressed with gzip, in base64, whose alphabet has no `<`; the browser
unpacks one when it is needed. The table of contents is JSON in which `<` is escaped.
"""

import base64
import gzip
import json
from typing import Any

from postgrad.core.files import finite

LEVEL = 6  # of gzip: 9 takes three times as long for 2% less


def to_json(value: Any) -> str:
    """ASCII JSON without `<`, `>` and `&`. Half a surrogate pair is kept, and numbers that are not
    finite become null.
    """
    text = _dumps(value)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def packed(value: Any) -> str:
    """`value` as JSON, gzipped, in base64. Equal values give equal text."""
    return base64.b64encode(gzip.compress(_dumps(value).encode(), LEVEL, mtime=0)).decode()


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
