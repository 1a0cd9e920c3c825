"""Device, threads and determinism of a process: chosen once, recorded, used again at a resume."""

import os
from dataclasses import dataclass

import psutil
import torch

from postgrad.core.errors import RunError


@dataclass(frozen=True, slots=True)
class Placement:
    """The choices that decide rounding: the same placement gives the same bits."""

    device: str  # "cpu" or "cuda"
    threads: int  # CPU threads of torch
    deterministic: bool  # torch's deterministic algorithms

    def to_json(self) -> dict[str, object]:
        """JSON values for the run state."""
        return {
            "device": self.device,
            "threads": self.threads,
            "deterministic": self.deterministic,
        }


def choose(threads: int | None, deterministic: bool) -> Placement:
    """CUDA where there is a device; threads: as given, else one for each physical core that this
    process may use.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    physical = psutil.cpu_count(logical=False) or 1
    return Placement(device, threads or max(1, min(allowed or 1, physical)), deterministic)


def apply(placement: Placement) -> torch.device:
    """Sets torch up in this process as `placement` says. Raises RunError without the device."""
    if placement.device == "cuda" and not torch.cuda.is_available():
        raise RunError(
            "this run was started on a CUDA device and none is here; "
            "other hardware gives other bits: allow it with --allow-change device"
        )
    torch.set_num_threads(placement.threads)
    if placement.deterministic:  # before the first product: cuBLAS reads it with its first handle
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(placement.deterministic)
    # That mode also fills every new tensor with NaN, for debugging: one more pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    return torch.device(placement.device)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a recipe's "auto", "float32" or "bfloat16" means on `device`."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
