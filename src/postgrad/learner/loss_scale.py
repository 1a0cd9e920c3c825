"""The dynamic scale of a loss whose gradients are computed in float16, which holds no number above
65504 and loses bits below 6e-5 (Micikevicius et al. 2018, Mixed Precision Training,
arXiv:1710.03740). The rule is that of torch.amp.GradScaler.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from postgrad.core.errors import Diverged, RunError

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
LEAST = 2.0**-14  # float16's smallest number that has all its bits: below it scaling loses some
SCALE, STEPS = "loss_scale", "loss_scale_steps"  # names of numbers in an optimizer's state
NUMBERS = (SCALE, STEPS)


class LossScale:
    """Doubles after INTERVAL updates in a row whose gradients were finite, and halves after one
    whose gradients were not, which is skipped. One scale holds for a whole update: gradients of all
    its micro-batches and ranks are summed in float32, divided by it once, and clipped then. It is a
    power of two, so that dividing rounds nothing.
    """

    def __init__(self) -> None:
        self.scale = FIRST
        self.steps = 0  # updates in a row that were taken since the scale changed

    @torch.no_grad()
    def unscale(self, masters: Iterable[nn.Parameter]) -> None:
        """Divides float32 gradients by the scale."""
        gradients = [master.grad for master in masters if master.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.scale)  # pyright: ignore[reportPrivateImportUsage]

    def taken(self) -> None:
        """Counts an update whose gradients were finite."""
        self.steps += 1
        if self.steps == INTERVAL:
            self.scale, self.steps = self.scale * GROWTH, 0

    def skipped(self, update: int) -> None:
        """After gradients that were not finite. Raises RunError where a lower scale is of no use:
        then not the scale is what overflows.
        """
        self.scale, self.steps = self.scale * BACKOFF, 0
        if self.scale < LEAST:
            raise Diverged(
                f"the gradient of update {update} is not finite in float16, whatever the scale of "
                f"the loss (it fell to {self.scale:.3g}): lower learner.lr, or use model.dtype = "
                '"bfloat16" or "float32", which hold larger numbers'
            )

    def state(self) -> dict[str, Tensor]:
        """Both numbers by name, as a checkpoint holds them."""
        return {
            SCALE: torch.tensor(self.scale, dtype=torch.float64),
            STEPS: torch.tensor(self.steps),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave. Raises RunError for numbers that no run can have had."""
        scale, steps = float(state[SCALE]), int(state[STEPS])
        if not (LEAST <= scale < float("inf") and 0 <= steps < INTERVAL):
            raise RunError(f"the checkpoint's loss scale is {scale:g} after {steps} updates")
        self.scale, self.steps = scale, steps
