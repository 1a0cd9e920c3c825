"""The [checkpoint] section of a recipe."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from postgrad.core.settings import Settings


class CheckpointSettings(Settings):
    """When to save, how many checkpoints to keep, and which one is best.

    The newest `max_ckpt_num` checkpoints are kept, and always the best and the latest one, and
    those of every `keep_steps` steps.
    """

    save_steps: int = Field(default=0, ge=0)  # 0: not by steps
    save_minutes: float = Field(default=0.0, ge=0.0)  # 0: not by the clock
    save_epochs: int = Field(default=0, ge=0)  # after so many passes over the data; 0: not by them
    max_ckpt_num: int = Field(default=3, ge=1)  # the newest so many are kept
    keep_steps: int = Field(default=0, ge=0)  # those of multiples of it are never removed; 0: none
    load_checkpoint: bool = True  # continue where run_dir already holds this run
    ckpt_path: str | None = None  # default: run_dir/checkpoints
    # A folder in an object store, "s3://bucket/folder" or any other URL that fsspec opens: each
    # checkpoint is uploaded there, with logs and all else that another machine resumes from.
    mirror: str = ""
    best_metric: str | None = None  # such as "eval/accuracy"
    best_mode: Literal["max", "min"] = "max"  # whether more is better, or less
    early_stop: int = Field(default=0, ge=0)  # evaluations without a better one; 0: never
    grace_seconds: float = Field(default=30.0, ge=0.0)  # to end a step after SIGTERM or SIGINT
    # How long the last save of a run waits for room on a full disk; 0: it fails at once.
    wait_for_room_minutes: float = Field(default=10.0, ge=0.0)
    # Also write what is trained as a Hugging Face directory: run_dir/model at the end, and with
    # "each" run_dir/hf/step-000010 beside every checkpoint.
    save_hf: bool | Literal["each"] = False
    # A repository of the hub, "org/name", for run_dir/model with its card at the end; "": none.
    push_to_hub: str = Field(default="", pattern=r"^([\w.-]+(/[\w.-]+)?)?$")
    push_private: bool = False  # where that repository is made: a private one

    @model_validator(mode="after")
    def _steps_to_keep(self) -> Self:
        if not self.keep_steps:
            return self
        if not self.save_steps:
            raise ValueError(
                f"keep_steps = {self.keep_steps} keeps the checkpoints of these steps, and nothing "
                f"saves at them: say save_steps too, {self.keep_steps} or a divisor of it"
            )
        if self.keep_steps % self.save_steps:
            most = self.keep_steps - self.keep_steps % self.save_steps
            nearest = [str(n) for n in (most, most + self.save_steps) if n]
            raise ValueError(
                f"keep_steps = {self.keep_steps} is no multiple of save_steps = {self.save_steps}, "
                f"so that no checkpoint is saved after some of these steps: take "
                f"{' or '.join(nearest)}, or another save_steps"
            )
        return self

    @field_validator("mirror")
    @classmethod
    def _plain_url(cls, mirror: str) -> str:
        if not mirror:
            return mirror
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s?#]+", mirror) or "::" in mirror:
            raise ValueError(
                "a URL of a folder is expected, such as s3://bucket/folder or file:///folder"
            )
        if mirror.startswith("memory://"):
            raise ValueError(
                f"{mirror!r} is a folder in this process, which is gone when the run ends: name "
                "one that another machine can read, such as s3://bucket/folder or file:///folder"
            )
        if re.match(r"[^/]+://[^/]*:[^/]*@", mirror):
            raise ValueError(
                "a password in it would be in every recipe.json: leave it to the environment, or "
                "to the configuration file of the package that opens the URL"
            )
        return mirror

    @property
    def mirror_folder(self) -> Path | None:
        """The folder of this machine that is the mirror; None where it is a store's, or absent."""
        scheme, _, place = self.mirror.partition("://")
        return Path(place).expanduser().resolve() if scheme in ("file", "local") else None

    def most_kept(self, steps: int) -> int:
        """How many checkpoints a run of `steps` steps keeps at a time, at most: the newest, the
        best, those that are never removed, and the one that is being uploaded.
        """
        always = steps // self.keep_steps if self.keep_steps else 0
        return self.max_ckpt_num + (self.best_metric is not None) + always + bool(self.mirror)

    @model_validator(mode="after")
    def _model_to_push(self) -> Self:
        if self.push_to_hub and not self.save_hf:
            raise ValueError("push_to_hub pushes run_dir/model: say save_hf = true too")
        return self
