"""The share of a device's peak figures that real work gets: guesses by kind of link."""

from postgrad.core.settings import Settings
from postgrad.plan.hardware import Device


class Efficiency(Settings):
    """Shares between 0 and 1 of a device's peak figures, and an overhead."""

    products: float  # of the peak of matrix products
    attention: float  # of the rate that matrix products reach
    between: float  # of the memory's bandwidth, in what layers do between products
    decoding: float  # of the memory's bandwidth, where one token a sequence is computed
    link: float  # of the bandwidth of the link between ranks
    overhead: float  # seconds of one layer of a forward pass, whatever its size


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
    """The guess for a device, by its kind of link."""
    return GUESSES[device.link]
