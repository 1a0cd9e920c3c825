"""The reference that KL is measured from: one that follows the policy (`MovingReference`), and the
logprobs of one that never changes, computed once before the run (`ReferenceLogprobs`).
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postgrad.core.array_files import Arrays, pieces_of, read_arrays, write_arrays
from postgrad.core.errors import AS_IT_BEGAN, RunError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.data.packed import StoredBytes
from postgrad.learner.backbone import Backbone
from postgrad.learner.learner import MovingAverage
from postgrad.learner.policy import Policy
from postgrad.learner.protocols import PolicyRole
from postgrad.parallel.sharding import TensorPiece, local, piece_of

FIELD = "logprobs"
PART = 4096  # sequences of one file; so many at most are lost to a kill


class MovingReference(Policy):
    """A reference that follows the policy: it takes the policy's weights every `refresh_steps`
    steps, or, with `ema_decay` > 0, their moving average after every step, or every
    `refresh_steps` of them. It starts with the weights of its backbone.
    """

    def __init__(
        self,
        backbone: Backbone,
        temperature: float,
        *,
        refresh_steps: int,
        ema_decay: float,
        policy: Mapping[str, Tensor],
    ) -> None:
        """backbone: divided over its ranks already. policy: the float32 weights that it follows, by
        hub name, with which the moving average starts. What the policy does not train is the same
        in both.
        """
        super().__init__(backbone, temperature)
        self._followed = frozenset(policy)
        self._refresh_steps = refresh_steps
        self._average = MovingAverage(policy, ema_decay) if ema_decay else None
        # Where this rank's parts of the weights lie in the whole tensors, by name. Not looked up
        # later: while a checkpoint is written, a pass may have gathered the weights.
        self.pieces: Mapping[str, TensorPiece] = {
            name: piece_of(name, parameter, backbone.ranks)
            for name, parameter in backbone.lm.named_parameters()
            if name in self._followed
        }

    def after_step(self, step: int, policy: PolicyRole) -> None:
        """Follows the policy after step `step`; both have to be divided over ranks alike."""
        if self._refresh_steps and step % self._refresh_steps:
            return
        weights = policy.weights()
        if self._average is not None:
            self._average.update(weights)
            weights = self._average.weights
        self._take(weights)

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """For a checkpoint: the moving average in float32, or the weights in their dtype."""
        weights = self._parameters() if self._average is None else self._average.weights
        return {"reference.weights": weights}

    def state_bytes(self) -> int:
        """Bytes of `tensors`; of parts that several ranks hold, only on the first of them."""
        named, pieces = self.tensors()["reference.weights"], self.pieces
        return sum(tensor.nbytes for name, tensor in named.items() if pieces[name].first)

    def load(self, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Takes over the weights of a checkpoint. RunError where they are of another model."""
        saved, pieces = read("reference.weights"), self.pieces
        if {n: tuple(t.shape) for n, t in saved.items()} != {n: p.shape for n, p in pieces.items()}:
            raise RunError(f"the checkpoint's reference is of another model; {AS_IT_BEGAN}")
        parts = {name: piece.of(saved[name]) for name, piece in pieces.items()}
        if self._average is not None:
            self._average.load(parts)
        self._take(parts)

    def _parameters(self) -> dict[str, Tensor]:
        named = self.backbone.lm.named_parameters()
        return {name: local(p) for name, p in named if name in self._followed}

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters().items():
            parameter.copy_(weights[name])


class ReferenceLogprobs:
    """The reference's logprobs of every sequence that a run will read, or another column of a
    frozen model: [N] or [N, k] float32. They lie in a file, as the rows of the data do.
    """

    def __init__(self) -> None:
        self._stored = StoredBytes()
        self._begins: dict[bytes, int] = {}  # of each sequence, among the stored bytes
        self._of_a_token: tuple[int, ...] = ()  # () or (k,)

    def of(self, sequences: Sequences) -> Ragged:
        """Logprobs, float32 over the tokens. The sequences have to be among those prepared."""
        each = 4 * math.prod(self._of_a_token)
        columns = [
            self._stored.read(begin, begin + each * length)
            for key, length in zip(_keys(sequences), sequences.tokens.lengths.tolist(), strict=True)
            for begin in (self._begins[key],)
        ]
        values = np.frombuffer(bytearray().join(columns), np.float32)
        return sequences.tokens.like(values.reshape(-1, *self._of_a_token))

    def prepare(
        self,
        wanted: Iterable[Sequences],
        compute: Callable[[Sequences], Ragged],
        folder: Path | None,
        name: Mapping[str, Any],
    ) -> tuple[int, int]:
        """Reads or computes the logprobs of all `wanted` sequences, of equal ones once. Returns how
        many were computed and how many read.

        folder: where files are kept; None: nowhere. name: JSON values that decide the bits, the
        model's hash among them. A file that cannot be read is computed again; one that cannot be
        written raises OSError.
        """
        n_computed = n_read = 0
        for number, part in enumerate(_parts(wanted)):
            path = folder and folder / f"{_digest(name, part)}-{number:06d}.safetensors"
            logprobs = _read(path, part) if path else None
            if logprobs is not None:
                n_read += len(part)
            else:
                logprobs, n_computed = compute(part), n_computed + len(part)
                if path:
                    _write(path, logprobs)
            self._store(part, logprobs)
        return n_computed, n_read

    def _store(self, part: Sequences, logprobs: Ragged) -> None:
        values = np.ascontiguousarray(logprobs.values, np.float32)
        self._of_a_token = values.shape[1:]
        first, each = len(self._stored), 4 * math.prod(self._of_a_token)
        begins = first + each * part.tokens.offsets[:-1]
        self._begins |= dict(zip(_keys(part), begins.tolist(), strict=True))
        self._stored.add(values.data)


def _parts(wanted: Iterable[Sequences]) -> Iterable[Sequences]:
    """All different sequences in order, in parts of at most PART. A part comes from one element of
    `wanted`, so that groups stay together.
    """
    seen: set[bytes] = set()
    for sequences in wanted:
        fresh: list[int] = []
        for row, key in enumerate(_keys(sequences)):
            if key not in seen:
                seen.add(key)
                fresh.append(row)
        for start in range(0, len(fresh), PART):
            rows = np.array(fresh[start : start + PART], np.int64)
            yield sequences.take(rows)


def _keys(sequences: Sequences) -> list[bytes]:
    """A hash of each sequence's tokens, mask and images, which the tokens name no more than their
    places of, and of where further conversations begin in it.
    """
    pairs = zip(sequences.tokens, sequences.loss_mask, strict=True)
    return [
        hashlib.sha256(
            tokens.astype("<i4").tobytes()
            + mask.tobytes()
            + b"".join(bytes.fromhex(image.digest) for image in sequences.images_of(row))
            + np.array(sequences.openings[row] if sequences.openings else (), "<i8").tobytes()
        ).digest()
        for row, (tokens, mask) in enumerate(pairs)
    ]


def _digest(name: Mapping[str, Any], part: Sequences) -> str:
    """The name of a part's file. Groups are in it: sequences that share their beginning in one
    layout (DPO's pairs) have other last bits than the same ones apart (KTO).
    """
    digest = hashlib.sha256(json.dumps(name, sort_keys=True).encode())
    for key in _keys(part):
        digest.update(key)
    _, group = np.unique(part.group, return_inverse=True)
    digest.update(group.astype("<i8").tobytes())
    return digest.hexdigest()


def _read(path: Path, part: Sequences) -> Ragged | None:
    """The logprobs of each sequence; None where there is no such file, or a damaged one."""
    try:
        values = read_arrays(path, _sha256)[FIELD]
    except (FileNotFoundError, ValueError):
        return None
    if len(values) != len(part.tokens.values):
        return None
    return part.tokens.like(values)


def _write(path: Path, logprobs: Ragged) -> None:
    write_arrays(path, {FIELD: logprobs.values}, _sha256)


def _sha256(arrays: Arrays) -> str:
    """Over the values alone: so files of earlier versions are still read."""
    digest = hashlib.sha256()
    for piece in pieces_of(arrays[FIELD]):
        digest.update(piece)
    return digest.hexdigest()
