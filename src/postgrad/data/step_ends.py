"""Where the steps of an answer end in token ids: of samples, and of training rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from postgrad.data.answer_spans import Rendered, Unmarkable


def step_ends(tokenizer: Any, ids: NDArray[np.int32], separator: str) -> NDArray[np.int64]:
    """[steps] the place of the last token of each step of an answer, [R] token ids as they were
    sampled. A step ends behind a separator, at the token that completes it; the last one ends with
    the answer. Where nothing is written between two ends there is no step.
    """
    stream = DecodeStream(skip_special_tokens=True)
    text, begin = "", 0
    ends: list[int] = []
    for place, token in enumerate(ids.tolist()):
        text += stream.step(tokenizer.backend_tokenizer, token) or ""
        while (edge := text.find(separator, begin)) >= 0:
            if text[begin:edge].strip():
                ends.append(place)
            begin = edge + len(separator)
    if len(ids) and (text[begin:].strip() or not ends):
        ends.append(len(ids) - 1)
    return np.array(sorted(set(ends)), np.int64)


def marked_ends(
    steps: Sequence[str], text: Rendered, spans: NDArray[np.int64], separator: str
) -> NDArray[np.bool_]:
    """[T] True at the last token of each step. spans: [T, 2] of the tokens, in characters. Raises
    Unmarkable where two steps end in one token.
    """
    content = separator.join(steps)
    bare = content.strip()
    begin = text.text.find(bare, text.spans[-1][0]) - content.find(bare)
    places = np.array([begin + end for end in _boundaries(steps, separator)], np.int64)
    ends = np.zeros(len(spans), np.bool_)
    reached = np.maximum.accumulate(spans[:, 1])
    ends[np.searchsorted(reached, places)] = True
    ends[-1] = True
    if ends.sum() != len(steps):
        raise Unmarkable("two of its steps end in one token: choose another data.separator")
    return ends


def _boundaries(path: Sequence[str], separator: str) -> list[int]:
    """Where each step but the last ends in the joined text: behind the separator that follows it.

    >>> _boundaries(["a", "bc", "d"], "; ")
    [3, 7]
    """
    ends: list[int] = []
    for step in path[:-1]:
        ends.append((ends[-1] if ends else 0) + len(step) + len(separator))
    return ends
