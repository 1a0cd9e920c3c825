"""Which share of a device's figures real work gets: a guess, or what the machine has shown."""

from postgrad.core.settings import Settings
from postgrad.plan.hardware import Device


class Efficiency(Settings):
    """products: of the peak of matrix products, in training and prefill; decoding: of the memory's
    bandwidth while one token a sequence is computed; link: of what ranks exchange with; overhead:
    seconds of a forward pass, whatever its size.
    """

    products: float
    decoding: float
    link: float
    overhead: float


# Matrix products: prime-rl publishes 0.11 to 0.27 for a 0.6B model, large models get 0.4 to 0.5.
# PCIe without peer access goes through the host's memory, and all ranks share that way.
GUESSES = {
    "nvlink": Efficiency(products=0.4, decoding=0.5, link=0.7, overhead=0.02),
    "xgmi": Efficiency(products=0.35, decoding=0.5, link=0.6, overhead=0.02),
    "pcie": Efficiency(products=0.4, decoding=0.5, link=0.15, overhead=0.02),
    "none": Efficiency(products=0.4, decoding=0.4, link=0.5, overhead=0.005),
}


def efficiency_of(device: Device) -> Efficiency:
    """The guess for its kind of link."""
    return GUESSES[device.link]
