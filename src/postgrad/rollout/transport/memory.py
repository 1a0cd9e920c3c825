"""Payloads in host memory: files without a name (memfd), which receivers of one machine map.

The kernel frees a file when the last process that holds it ends, so a killed run leaves nothing.
Each payload is a file of its own: a receiver may keep what it mapped.
"""

import mmap
import os
from typing import Any

import torch
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.rollout.transport.parcel import Parcel

KEPT = 2  # newest payloads that can still be opened


class MemoryCarrier:
    """Carrier over files in memory. Receivers run on the same machine, as the same user."""

    way: str = "memory"

    def __init__(self) -> None:
        self._files: list[int] = []  # descriptors, the newest last

    def room(self, size: int) -> Tensor:
        file = os.memfd_create("postgrad-weights")
        self._files.append(file)
        for old in self._files[:-KEPT]:
            os.close(old)
        del self._files[:-KEPT]
        os.ftruncate(file, size)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)

    def where(self) -> dict[str, Any]:
        return {"path": f"/proc/{os.getpid()}/fd/{self._files[-1]}"}

    def pass_on(self, payload: Tensor) -> None: ...

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


class MemoryFetcher:
    """Fetcher over files in memory. device: where the payload is expected."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def fetch(self, parcel: Parcel) -> Tensor:
        path = parcel.where["path"]
        try:
            with open(path, "rb") as file:  # noqa: PTH123  vLLM's environment has it too
                mapped = mmap.mmap(file.fileno(), parcel.size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise RunError(
                f"weights: parcel {parcel.number} at {path} cannot be read: {error}; did the "
                "process that sends weights end, or is it on another machine?"
            ) from error
        return torch.frombuffer(mapped, dtype=torch.uint8)[: parcel.size].to(self._device)

    def close(self) -> None: ...
