"""A reward model read with plain transformers: padded on the right, read at the last token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification

from postgrad.core.errors import UsageError
from postgrad.models.hashes import directory_hash
from postgrad.models.load import load_config, load_tokenizer
from postgrad.parallel import device as placing


@dataclass(frozen=True, slots=True)
class PaddedRewardModel:
    """AutoModelForSequenceClassification with one label. batch_tokens: of one forward, padding
    counted; a longer sequence has a forward of its own.
    """

    lm: Any
    tokenizer: Any
    hash: str
    mean: float | None
    std: float | None
    max_tokens: int | None
    batch_tokens: int

    @torch.inference_mode()
    def score(self, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        """[len(sequences)]; the head computes in float32."""
        scores = np.empty(len(sequences), np.float64)
        for places in _padded(sequences, self.batch_tokens):
            scores[places] = self._forward([sequences[place] for place in places])
        return scores

    def _forward(self, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        device = self.lm.device
        lengths = torch.tensor([len(one) for one in sequences], device=device)
        rows = [torch.tensor(one, dtype=torch.int64) for one in sequences]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        # The body alone: the head of transformers finds the last token by the padding's id, which
        # is wrong where that is the end-of-sequence token too.
        body = getattr(self.lm, self.lm.base_model_prefix)
        hidden = body(input_ids=ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(rows), device=device), lengths - 1]
        found = last.float() @ self.lm.score.weight.float().T
        return found[:, 0].double().cpu().numpy()


def load_reward_model(path: Path, dtype: str, batch_tokens: int) -> PaddedRewardModel:
    """The reward model of a directory, on CUDA where there is one. dtype: "auto", "float32",
    "bfloat16". Raises UsageError where it holds none.
    """
    config = load_config(str(path))
    tokenizer = load_tokenizer(str(path))
    placement = placing.choose(None, False)
    device = placing.apply(placement)
    try:
        read = cast(Any, AutoModelForSequenceClassification).from_pretrained(
            path,
            config=config,
            dtype=placing.compute_dtype(dtype, device),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError, RuntimeError) as error:
        raise UsageError(f"no reward model at {path}: {error}") from error
    lm, found = read
    if found["missing_keys"] or getattr(lm, "score", None) is None or lm.config.num_labels != 1:
        raise UsageError(
            f"{path} holds no reward model: wanted is AutoModelForSequenceClassification with "
            f'num_labels = 1 and a head `score`, as the job "reward" writes it'
        )
    lm.to(device)
    lm.eval()
    return PaddedRewardModel(
        lm=lm,
        tokenizer=tokenizer,
        hash=directory_hash(path),
        mean=getattr(config, "reward_mean", None),
        std=getattr(config, "reward_std", None),
        max_tokens=getattr(config, "max_position_embeddings", None),
        batch_tokens=batch_tokens,
    )


def _padded(sequences: Sequence[NDArray[np.int32]], batch_tokens: int) -> list[list[int]]:
    """Places of the sequences, longest first, cut so that no cut has more tokens with its padding
    than wanted.
    """
    order = sorted(range(len(sequences)), key=lambda place: -len(sequences[place]))
    cuts: list[list[int]] = []
    for place in order:
        longest = len(sequences[cuts[-1][0]]) if cuts else 0
        if cuts and (len(cuts[-1]) + 1) * longest <= batch_tokens:
            cuts[-1].append(place)
        else:
            cuts.append([place])
    return cuts
