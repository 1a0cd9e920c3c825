"""The reward model behind the server: packed, without padding, a common opening computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError, UsageError
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.score import ScoreRole, score_sequences
from postgrad.models.load import load_config
from postgrad.models.rope import max_positions
from postgrad.models.save import model_hash
from postgrad.models.score import load_score_model, scale_of
from postgrad.parallel import device as devices


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The ScoringModel of a directory: a frozen score role and what its files say."""

    role: ScoreRole
    tokenizer: Any
    hash: str  # SHA-256 (hex) of the files, and of the base's where they are an adapter's
    mean: float | None  # of the scores on data like the training data; None where no file says it
    std: float | None  # of the same scores
    max_tokens: int | None  # the positions that the model knows; None where it knows any

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        """[len(sequences)] the score at each last token; see score_sequences."""
        return score_sequences(self.role, sequences)


def load_reward_model(path: Path, dtype: str, batch_tokens: int) -> ServedModel:
    """The reward model of a directory, on CUDA where there is one, proved by a first score.

    dtype: "auto", "float32", "bfloat16". batch_tokens: of one forward. Raises UsageError where the
    directory holds no reward model, RunError where its first score is no number.
    """
    if not path.is_dir():  # a hub id has no files to hash
        raise UsageError(f"no reward model at {path}: there is no such directory")
    scale = scale_of(load_config(str(path)))
    device = devices.apply(devices.choose(None, False))
    loaded = load_score_model(
        str(path),
        dtype=devices.compute_dtype(dtype, device),
        device=device,
        fresh_head=False,
    )
    loaded.lm.requires_grad_(False)
    model = ServedModel(
        role=ScoreRole(Backbone(loaded.lm, device, MicroBatch(max_tokens=batch_tokens)), "at"),
        tokenizer=loaded.tokenizer,
        hash=model_hash(path),
        mean=None if scale is None else scale.mean,
        std=None if scale is None else scale.std,
        max_tokens=max_positions(loaded.config),
    )
    first = float(model.score([np.zeros(1, np.int32)])[0])
    if not np.isfinite(first):
        raise RunError(f"the reward model {path} gives {first} for one token: its weights are bad")
    return model
