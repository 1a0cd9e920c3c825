"""Which share of a device's figures real work gets: a guess, or what the machine has shown."""

from postgrad.core.settings import Settings
from postgrad.plan.hardware import Device


class Efficiency(Settings):
    """products: of the peak of matrix products; attention: of what those get; between: of the
    memory's bandwidth, what layers do between products; decoding: of the same, weights and cache
    while one token a sequence is computed; link: of what ranks exchange with; overhead: seconds of
    one layer of a forward pass, whatever its size.
    """

    products: float
    attention: float
    between: float
    decoding: float
    link: float
    overhead: float


# Matrix products of GPUs: with what layers do between them, 0.55 makes 0.4 of the peak of an 8B
# model and a quarter of a 0.6B one; large models get 0.4 to 0.5, prime-rl publishes 0.11 to 0.27
# for 0.6B. PCIe without peer access goes through the host's memory, and all ranks share that way. A
# layer starts some forty kernels. All of a CPU: benchmarks.growth.
GUESSES = {
    "nvlink": Efficiency(
        products=0.55, attention=0.6, between=0.6, decoding=0.5, link=0.7, overhead=4e-4
    ),
    "xgmi": Efficiency(
        products=0.45, attention=0.5, between=0.5, decoding=0.5, link=0.6, overhead=4e-4
    ),
    "pcie": Efficiency(
        products=0.55, attention=0.6, between=0.6, decoding=0.5, link=0.15, overhead=4e-4
    ),
    "none": Efficiency(
        products=0.9, attention=0.25, between=0.5, decoding=0.7, link=0.5, overhead=5e-4
    ),
}


def efficiency_of(device: Device) -> Efficiency:
    """The guess for its kind of link."""
    return GUESSES[device.link]
