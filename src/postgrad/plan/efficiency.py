"""Which share of a device's figures real work gets: a guess, or what the machine has shown."""

from postgrad.core.settings import Settings
from postgrad.plan.hardware import Device


class Efficiency(Settings):
    """products: of the peak of matrix products, in training and prefill; attention: of what those
    get; decoding: of the memory's bandwidth while one token a sequence is computed; link: of what
    ranks exchange with; overhead: seconds of one layer of a forward pass, whatever its size.
    """

    products: float
    attention: float
    decoding: float
    link: float
    overhead: float


# Matrix products: prime-rl publishes 0.11 to 0.27 for a 0.6B model, large models get 0.4 to 0.5.
# PCIe without peer access goes through the host's memory, and all ranks share that way. Attention
# and a layer's overhead on a CPU: benchmarks.growth; a layer starts some forty kernels.
GUESSES = {
    "nvlink": Efficiency(products=0.4, attention=0.6, decoding=0.5, link=0.7, overhead=4e-4),
    "xgmi": Efficiency(products=0.35, attention=0.5, decoding=0.5, link=0.6, overhead=4e-4),
    "pcie": Efficiency(products=0.4, attention=0.6, decoding=0.5, link=0.15, overhead=4e-4),
    "none": Efficiency(products=0.65, attention=0.6, decoding=0.6, link=0.5, overhead=1e-3),
}


def efficiency_of(device: Device) -> Efficiency:
    """The guess for its kind of link."""
    return GUESSES[device.link]
