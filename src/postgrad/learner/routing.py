"""The routers of a mixture of experts in one update: the load of every expert, and their losses.

The balance loss (models/routers.py) multiplies two sums over every row of the update, so it is no
sum over micro-batches. But its gradient is that of one, sum_e (E f_e) p_e / rows, once the choices
f_e are known: a forward pass without gradients counts them first. Rows are those of sequences
without padding or sharing: a token that n sequences share counts n times. So neither the cut into
micro-batches nor ranks change the losses.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from postgrad.layout.layout import Layout
from postgrad.learner.backbone import Backbone
from postgrad.learner.update import Update
from postgrad.models.routers import Routed, loss_of, sums_of


class Routing:
    """What the routers do in an update; of a dense model nothing, and no loss."""

    def __init__(self, backbone: Backbone, update: Update) -> None:
        self._backbone = backbone
        self._routers = backbone.routers if len(update.rows_with_gradient) else None
        lengths = update.experience.sequences.tokens.lengths
        self._tokens = float(lengths[update.rows_with_gradient].sum())
        self._recorded: list[Routed] = []
        self._sums: Tensor | None = None  # sums_of this rank's micro-batches so far
        self._shares: Tensor | None = None  # see loss_of

    @property
    def counts_first(self) -> bool:
        """Whether a pass over all micro-batches has to count choices before the first loss."""
        return self._routers is not None and self._routers.balance > 0

    @contextmanager
    def watching(self, layout: Layout) -> Generator[None]:
        """Inside is one forward pass over a layout, and no backward pass."""
        if self._routers is None:
            yield
            return
        with self._routers.recording() as self._recorded:
            yield
        sums = sums_of(self._recorded, self._backbone.copies(layout))
        self._sums = sums if self._sums is None else self._sums + sums

    def have_counted(self) -> None:
        """The pass that counts has ended: now `loss` can be asked for, and sums begin again."""
        assert self._routers is not None
        choices = self._over_ranks()[0].sum(0)
        factor = self._routers.balance * len(choices) / self._rows**2
        self._shares, self._sums = choices * factor, None

    def loss(self, layout: Layout) -> Tensor | float:
        """The losses of the layout that was last watched, times their coefficients."""
        if self._routers is None or not (self._routers.balance or self._routers.z):
            return 0.0
        copies = self._backbone.copies(layout)
        return loss_of(self._recorded, copies, self._shares, self._routers.z, self._rows)

    def metrics(self, name: str) -> dict[str, float]:
        """Of the role `name`, over all ranks: both losses without coefficients, the load of the
        busiest expert of any layer as a multiple of an even share, and the share of experts that
        got no token.
        """
        if self._routers is None:
            return {}
        choices, probabilities, squares = self._over_ranks().unbind(0)
        experts, rows = choices.shape[1], self._rows
        busiest = choices.amax(1) * experts / choices.sum(1)
        return {
            f"{name}/router_balance": experts
            * float(choices.sum(0) @ probabilities.sum(0))
            / rows**2,
            f"{name}/router_z": float(squares.sum()) / rows,
            f"{name}/router_max_load": float(busiest.max()),
            f"{name}/router_unused": float((choices == 0).double().mean()),
        }

    @property
    def _rows(self) -> float:
        """Tokens of the update times layers with routers."""
        assert self._routers is not None
        return self._tokens * self._routers.layers

    def _over_ranks(self) -> Tensor:
        assert self._sums is not None  # every rank computes layouts, if only empty ones
        total = self._sums.clone()
        with torch.no_grad():
            self._backbone.ranks.sum_([total])
        return total
