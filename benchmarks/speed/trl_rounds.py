"""TRL's trainers round by round: `train` itself, which waits at the end of an optimizer step."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.speed.rounds import Ended, Rounds
from benchmarks.speed.side import Options, Round

Make = Callable[[Counter[str]], Any]  # a trainer that adds to the counts


class Waiting(TrainerCallback):
    """At the end of a step the round has ended."""

    def __init__(self, ended: Ended, counts: Counter[str]) -> None:
        self._ended = ended
        self._counts = counts

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        done = dict(self._counts)
        self._counts.clear()
        self._ended(done)


def rounds(options: Options, make: Make) -> Round:
    """One optimizer step of the trainer that `make` makes a round."""

    def loop(ended: Ended) -> None:
        torch.set_num_threads(options.threads)  # a thread does not inherit it
        counts: Counter[str] = Counter()
        trainer = make(counts)
        trainer.add_callback(Waiting(ended, counts))
        trainer.train()

    return Rounds(loop)


def common(folder: Path, options: Options, *, update: int, micro_batch: int) -> dict[str, Any]:
    """Arguments of every trainer: AdamW as postgrad's, nothing written, nothing recomputed.

    update, micro_batch: samples of an optimizer step and of a forward.
    """
    return {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": update // micro_batch,
        "max_steps": 1_000_000,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": options.precision == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
