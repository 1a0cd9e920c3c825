"""Master weights and AdamW over them, with state that is nothing but named tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from postgrad.core.errors import RunError
from postgrad.learner.settings import LearnerSettings


class MasterOptimizer:
    """AdamW on float32 weights, whatever the model computes in.

    Where the model computes in float32 the master weights are the model's own. Otherwise each
    micro-batch's gradients are added to float32 ones as they appear, and after an update the
    model's weights are rounded from the master's: small steps are not lost to the narrow format.
    """

    def __init__(self, model: nn.Module, settings: LearnerSettings) -> None:
        self._settings = settings
        self._working = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.master = {name: self._master_of(p) for name, p in self._working.items()}
        decayed = [p for p in self.master.values() if p.ndim >= 2]
        plain = [p for p in self.master.values() if p.ndim < 2]  # norms and biases
        self._adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        self.updates = 0

    @staticmethod
    def _master_of(working: nn.Parameter) -> nn.Parameter:
        if working.dtype == torch.float32:
            return working
        master = nn.Parameter(working.detach().float())

        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

        working.register_post_accumulate_grad_hook(add)
        return master

    def step(self, rate: float) -> float:
        """One update at `rate` from the gradients gathered so far; returns their norm before
        clipping. A norm that is not finite is a RunError and changes nothing.
        """
        for master in self.master.values():
            if master.grad is None:  # an update without any gradient still decays and counts
                master.grad = torch.zeros_like(master)
        limit = self._settings.max_grad_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(list(self.master.values()), limit))
        if not norm < float("inf"):
            raise RunError(
                f"the gradient of update {self.updates} is not finite (norm {norm}): lower "
                "learner.lr, or start from a model whose outputs are finite"
            )
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._publish()
        self.updates += 1
        return norm

    @torch.no_grad()
    def _publish(self) -> None:
        for name, working in self._working.items():
            if working is not self.master[name]:
                working.copy_(self.master[name])

    def weights(self) -> dict[str, Tensor]:
        """The master weights by hub name."""
        return {name: p.detach() for name, p in self.master.items()}

    def state(self) -> dict[str, Tensor]:
        """AdamW's moments as NAME.exp_avg and NAME.exp_avg_sq; empty before the first update."""
        return {
            f"{name}.{moment}": self._adamw.state[p][moment]
            for name, p in self.master.items()
            for moment in ("exp_avg", "exp_avg_sq")
            if p in self._adamw.state
        }

    @torch.no_grad()
    def load(
        self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], updates: int
    ) -> None:
        """Go on from saved weights and moments. Missing or unknown names are RunErrors."""
        moments = ("exp_avg", "exp_avg_sq") if updates else ()
        wanted = {f"{name}.{moment}" for name in self.master for moment in moments}
        for what, have, want in (
            ("weights", set(weights), set(self.master)),
            ("optimizer state", set(state), wanted),
        ):
            if have != want:
                raise RunError(
                    f"the checkpoint's {what} are of another model: "
                    f"missing {sorted(want - have)[:3]}, unknown {sorted(have - want)[:3]}"
                )
        for name, master in self.master.items():
            if weights[name].shape != master.shape:
                raise RunError(
                    f"weight {name!r} of the checkpoint has shape {tuple(weights[name].shape)}, "
                    f"the model's has {tuple(master.shape)}"
                )
            master.copy_(weights[name])
            if updates:
                self._adamw.state[master] = {
                    "step": torch.tensor(float(updates), device=master.device),
                    **{m: state[f"{name}.{m}"].to(master.device).clone() for m in moments},
                }
        self._publish()
        self.updates = updates
