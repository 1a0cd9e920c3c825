"""Logprobs of a frozen reference: computed once before the first step, kept on disk.

An entry is named by the model, by what else decides bits, and by every token and mask (so by data
and template too); it is found again by another run, and by a run that was killed while it was made.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.array_files import Arrays, read_arrays, write_arrays
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences

FIELD = "logprobs"
PART = 4096  # sequences of one file: what a kill costs at most
Floats = NDArray[np.float32]


class ReferenceLogprobs:
    """What the reference says of every sequence that a run will read."""

    def __init__(self) -> None:
        self._known: dict[bytes, Floats] = {}

    def of(self, sequences: Sequences) -> Ragged:
        """float32 over the tokens of sequences that were prepared."""
        return sequences.tokens.like(np.concatenate([self._known[key] for key in _keys(sequences)]))

    def prepare(
        self,
        wanted: Iterable[Sequences],
        compute: Callable[[Sequences], Ragged],
        folder: Path | None,
        name: Mapping[str, Any],
    ) -> tuple[int, int]:
        """Reads or computes what is `wanted`, once each; how many were computed and how many read.

        folder: where files are kept, None: nowhere. name: JSON values that decide bits, the model's
        hash first. A file that cannot be read is computed again; one that cannot be written raises
        OSError.
        """
        made = read = 0
        for number, part in enumerate(_parts(wanted)):
            path = folder and folder / f"{_digest(name, part)}-{number:06d}.safetensors"
            found = _read(path, part) if path else None
            if found is not None:
                read += len(part)
            else:
                computed, made = compute(part), made + len(part)
                if path:
                    _write(path, computed)
                found = list(computed)
            self._known |= dict(zip(_keys(part), found, strict=True))
        return made, read


def _parts(wanted: Iterable[Sequences]) -> Iterable[Sequences]:
    """Each sequence once, in order, in parts; groups stay together, for their common openings."""
    seen: set[bytes] = set()
    for sequences in wanted:
        fresh: list[int] = []
        for row, key in enumerate(_keys(sequences)):
            if key not in seen:
                seen.add(key)
                fresh.append(row)
        for start in range(0, len(fresh), PART):
            rows = np.array(fresh[start : start + PART], np.int64)
            yield Sequences(
                sequences.tokens.take(rows), sequences.loss_mask.take(rows), sequences.group[rows]
            )


def _keys(sequences: Sequences) -> list[bytes]:
    pairs = zip(sequences.tokens, sequences.loss_mask, strict=True)
    return [
        hashlib.sha256(tokens.astype("<i4").tobytes() + mask.tobytes()).digest()
        for tokens, mask in pairs
    ]


def _digest(name: Mapping[str, Any], part: Sequences) -> str:
    whole = hashlib.sha256(json.dumps(name, sort_keys=True).encode())
    for key in _keys(part):
        whole.update(key)
    return whole.hexdigest()


def _read(path: Path, part: Sequences) -> Sequence[Floats] | None:
    """None where nothing is there, or not what was written."""
    try:
        values = read_arrays(path, _sha256)[FIELD]
    except (FileNotFoundError, ValueError):
        return None
    if len(values) != len(part.tokens.values):
        return None
    return list(part.tokens.like(values))


def _write(path: Path, logprobs: Ragged) -> None:
    write_arrays(path, {FIELD: logprobs.values}, _sha256)


def _sha256(arrays: Arrays) -> str:
    """Over the values alone: so files of earlier versions are still read."""
    return hashlib.sha256(arrays[FIELD].astype("<f4").tobytes()).hexdigest()
