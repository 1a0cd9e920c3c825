"""Seconds of work on devices, from FLOPs, bytes and the speed of links.

A matrix product runs at a share of the device's peak. What layers do between products, and
decoding, which reads weights and cache, run at a share of its memory bandwidth. Ranks exchange at a
share of their link's bandwidth. The shares are `Efficiency`: guesses with a stated origin, which
`postgrad plan --calibrate` corrects by what a machine has measured.
"""

from dataclasses import dataclass

from postgrad.models.flops import ForwardFlops
from postgrad.models.shapes import ModelShape
from postgrad.plan.hardware import Device, Efficiency
from postgrad.plan.sizes import Sharing

# How often each number that a layer writes moves to or from memory in a pass: it is written and
# read, and norms, rotations and gates write and read temporary copies of it. benchmarks.growth.
MOVES = 6
# Bytes a second of the host's memory that an optimizer step of one rank gets there
# (learner.offload). An estimate: no vendor states it. Whole steps of Qwen2.5-3B, whose optimizer
# moves 43 GB on each of two ranks, took 2.4 to 3.1 s (DeepSpeed pull request 7474): at least 14 to
# 18 GB/s.
HOST_MEMORY = 20e9


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of work on devices that share it."""

    device: Device
    efficiency: Efficiency  # the share of the device's figures that work gets
    sharing: Sharing  # how many devices there are, and what each has of the weights

    def products(self, flops: float, b: int) -> float:
        """Seconds of matrix products that all ranks share. b: bytes of a number."""
        peak = self.device.bf16_flops if b == 2 else self.device.float32_flops
        return flops / (peak * self.efficiency.products * self.sharing.ranks)

    def as_products(self, flops: ForwardFlops, *, head: bool = True) -> float:
        """FLOPs of matrix products that take as long as a forward pass: attention is slower than
        products, and so its FLOPs count more. head: with the output head.
        """
        body = flops.body + flops.attention / self.efficiency.attention
        return body + (flops.head if head else 0.0)

    def between(self, shape: ModelShape, tokens: float, b: int) -> float:
        """Seconds of what layers do between products, in a forward pass that all ranks share. Small
        models spend a larger part of their time on it: it grows with a layer's width, products
        with its square.
        """
        written = 5 * shape.hidden_size + 2 * (shape.query_size + shape.key_size)
        numbers = tokens * shape.layers * (written + 4 * shape.intermediate_size)
        bandwidth = self.device.bandwidth * self.efficiency.between
        return MOVES * numbers * b / (bandwidth * self.sharing.ranks)

    def reads(self, count: float) -> float:
        """Seconds in which one device reads or writes `count` bytes of its memory."""
        return count / (self.device.bandwidth * self.efficiency.decoding)

    @property
    def steps_on_host(self) -> bool:
        """Whether optimizers step in the host's memory, beside the devices."""
        return self.sharing.offloads and not self.device.is_cpu

    def steps(self, count: float) -> float:
        """Seconds in which an optimizer step reads or writes `count` bytes of a rank's state."""
        return count / HOST_MEMORY if self.steps_on_host else self.reads(count)

    @staticmethod
    def note_on_host(seconds: float) -> str:
        """What a plan assumes of optimizers that step there. seconds: of a step."""
        return (
            f"learner.offload: optimizers step in the host's memory, {seconds:.2f} s of a "
            f"step; estimated, with {HOST_MEMORY / 1e9:g} GB/s for each rank, "
            "which no vendor states"
        )

    def sends(self, count: float) -> float:
        """Seconds in which every rank sends `count` bytes."""
        link = self.device.link_bytes_per_second * self.efficiency.link
        return count / link if link else 0.0

    def sends_to_one(self, count: float) -> float:
        """Seconds in which a device sends `count` bytes to one other."""
        link = self.device.link_bytes_per_second * self.efficiency.pair
        return count / link if link else 0.0

    def copies(self, count: float) -> float:
        """Seconds in which a device copies `count` bytes to its host's memory, or from it."""
        if self.device.is_cpu:
            return 0.0
        return count / (self.device.host_bytes_per_second * self.efficiency.host)

    def overhead(self, shape: ModelShape) -> float:
        """Seconds of overhead of one pass over all layers, whatever the number of tokens."""
        return self.efficiency.overhead * shape.layers
