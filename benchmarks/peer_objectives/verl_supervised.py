"""verl's loss of SFT."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peer_objectives.comparing import Case
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.ours import Outcome
from benchmarks.peer_objectives.ours_texts import logits_outcome, sft_outcome
from benchmarks.peer_objectives.texts import Texts, token_logprobs, written

WORDS = ("sft_trainer", "model.path=m", "optim.lr=1e-5", "data.train_files=a.parquet",
         "data.train_batch_size=16", "data.max_length=64", "trainer.n_gpus_per_node=1",
         "trainer.total_epochs=1")  # fmt: skip


def cases(checkout: Path) -> Iterator[Case]:
    """sft_loss of a batch without padding, over two micro-batches."""
    space: dict[str, Any] = {
        "torch": torch, "TensorDict": Any, "ActorConfig": Any,
        "DatasetPadMode": SimpleNamespace(NO_PADDING="none"),
        "tu": SimpleNamespace(get_non_tensor_data=lambda data, key, default: default),
    }  # fmt: skip
    statements(checkout / "verl" / "utils" / "torch_functional.py", "def masked_sum")(space)
    statements(checkout / "verl" / "workers" / "utils" / "losses.py", "def sft_loss")(space)

    def peer(texts: Texts) -> Outcome:
        leaf, total = texts.leaf(), torch.zeros((), dtype=torch.float64)
        logprobs = token_logprobs(leaf, texts.ids).roll(-1, 1)  # of the token after each
        inside = texts.attention.bool()
        for rows in np.split(np.arange(len(texts)), 2):
            flat = (column[rows][inside[rows]] for column in (logprobs, texts.answers))
            nested = [SimpleNamespace(values=lambda column=column: column) for column in flat]
            data = {"dp_size": 1, "batch_num_tokens": texts.answers.sum(), "loss_mask": nested[1]}
            total = total + space["sft_loss"](None, {"log_probs": nested[0]}, data)[0]
        return logits_outcome(total, leaf, texts)

    yield Case("sft", WORDS, peer, written, ours=sft_outcome)
