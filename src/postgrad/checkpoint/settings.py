"""What a recipe says about checkpoints."""

from typing import Literal

from pydantic import Field

from postgrad.core.settings import Settings


class CheckpointSettings(Settings):
    """When to save, how many to keep, and which one is best. Names are the field's.

    The newest `max_ckpt_num` checkpoints are kept, and always the best and the latest one.
    """

    save_steps: int = Field(default=0, ge=0)  # 0: only at the end
    max_ckpt_num: int = Field(default=3, ge=1)
    load_checkpoint: bool = True
    ckpt_path: str | None = None  # default: run_dir/checkpoints
    best_metric: str | None = None  # such as "eval/accuracy"
    best_mode: Literal["max", "min"] = "max"
    save_hf: bool = False  # also write the Hugging Face directory run_dir/model at the end
