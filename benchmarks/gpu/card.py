"""The speed of a card that measurements are held to: copies and matrix products."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.session import Session
from postgrad.plan.hardware import catalogue, find_device

ROUNDS = 6  # the first one warms up; the fastest of the others counts
COPIED = {False: 2**32, True: 2**24}  # bytes; several times the caches
SIDE = {False: 8192, True: 256}  # of square matrices


@dataclass(frozen=True, slots=True)
class Card:
    """Measured here, but `peak_flops`, which is the data sheet's where plans have the card.

    memory_bytes: as torch reports it. copy_bandwidth: bytes read and written a second by a copy on
    the device. flops: of products in bfloat16, a second; float32_flops: without TF32.
    """

    name: str
    memory_bytes: int
    copy_bandwidth: float
    flops: float
    float32_flops: float
    peak_flops: float
    peak_source: str


def measure(session: Session) -> Card:
    """Takes about a second."""
    name, memory = _name(session)
    flops = _products(session, torch.bfloat16)
    row = find_device(name, catalogue())
    peak, source = flops, "measured products: plans do not have this device"
    if row is not None:
        peak, source = row.bf16_flops, row.source
    return Card(
        name=name,
        memory_bytes=memory,
        copy_bandwidth=_copies(session),
        flops=flops,
        float32_flops=_products(session, torch.float32),
        peak_flops=peak,
        peak_source=source,
    )


def _name(session: Session) -> tuple[str, int]:
    if session.device == "cpu":
        return "this CPU", 0
    properties = torch.cuda.get_device_properties(0)
    return torch.cuda.get_device_name(0), properties.total_memory


def _copies(session: Session) -> float:
    size = COPIED[session.small]
    source = torch.empty(size, dtype=torch.uint8, device=session.device).fill_(1)
    to = torch.empty_like(source)
    return 2 * size / _fastest(session, lambda: to.copy_(source))


def _products(session: Session, dtype: torch.dtype) -> float:
    side = SIDE[session.small]
    left, right = (torch.randn(side, side, device=session.device).to(dtype) for _ in range(2))
    return 2 * side**3 / _fastest(session, lambda: left @ right)


def _fastest(session: Session, work: Callable[[], object]) -> float:
    took: list[float] = []
    for _ in range(ROUNDS):
        session.synchronize()
        began = time.perf_counter()
        work()
        session.synchronize()
        took.append(time.perf_counter() - began)
    return min(took[1:])
