"""When a sample ends: end-of-sequence tokens, stop strings, the token limit."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.rollout.local.rows import Rows

MARGIN = 4  # tokens decoded before a stop string: the first of a text may decode differently


def eos_token_ids(lm: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response: the generation config's and the tokenizer's.

    Raises UsageError where there is none: every answer would run into the token limit.
    """
    config = getattr(lm, "generation_config", None)
    stated = getattr(config, "eos_token_id", None)
    ids = set(stated if isinstance(stated, Iterable) else [] if stated is None else [stated])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise UsageError(
            "neither the tokenizer nor generation_config.json names an end-of-sequence token: "
            "no answer could end; set eos_token in tokenizer_config.json"
        )
    return tuple(sorted(int(i) for i in ids))


class Stopper:
    """Finds rows that end by an end-of-sequence token or a stop string."""

    def __init__(self, eos: tuple[int, ...], tokenizer: Any) -> None:
        self._eos = np.array(eos, np.int64)
        self._tokenizer = tokenizer

    def stopped(self, rows: Rows) -> NDArray[np.bool_]:
        """[count] True where a row's newest token ends it; the token limit does not count."""
        ended = np.isin(rows.newest(rows.count), self._eos)
        watched = np.flatnonzero(rows.has_stop[: rows.count] & ~ended)
        if len(watched):
            ended[watched] = self._completes_stop_string(rows, watched)
        return ended

    def _completes_stop_string(self, rows: Rows, watched: NDArray[np.int64]) -> list[bool]:
        """[watched] whether the newest token completes a stop string. Only tails are decoded."""
        stops = [rows.requests[row].sampling.stop for row in watched]
        # A token that shows has at least one byte, so a string of B bytes ends within B tokens.
        reach = max(len(text.encode()) for texts in stops for text in texts) + MARGIN
        ends = rows.written[watched]
        tails = [
            rows.tokens[row, max(0, end - reach) : end].tolist()
            for row, end in zip(watched, ends, strict=True)
        ]
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=True)
        return [
            any(text in tail for text in row_stops)
            for row_stops, tail in zip(stops, texts, strict=True)
        ]
