"""The routers of a mixture of experts: what they gave in a forward pass, and their two losses.

Balance (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6), as transformers'
`load_balancing_loss_func` has it: E sum_e f_e P_e, with f_e the choices of expert e per row, and
P_e the mean of its probability. A row is one token in one layer. z (Zoph et al. 2022,
arXiv:2202.08906): the mean over rows of the squared log Z of the router's logits.
"""

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from postgrad.core.errors import UsageError
from postgrad.models.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Routed:
    """What one layer's router gave in a forward pass over T packed tokens."""

    logits: Tensor  # [T, E], with their graph
    chosen: Tensor  # [T, k] numbers of experts


class Routers:
    """Records what the routers of a model give. balance, z: the coefficients of the two losses."""

    def __init__(self, lm: Any, balance: float = 0.0, z: float = 0.0) -> None:
        pairs = _routers(lm)
        self.balance = balance
        self.z = z
        self.layers = len(pairs)
        self._each = int(getattr(lm.config, "num_experts_per_tok", None) or 1)
        self._recorded: list[Routed] | None = None
        for module, index in pairs:
            module.register_forward_hook(partial(self._record, index))

    @contextmanager
    def recording(self) -> Generator[list[Routed]]:
        """Inside, a forward pass adds what each layer's router gives, in the order of layers. The
        backward pass has to lie outside, where it computes layers again.
        """
        recorded: list[Routed] = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def _record(self, index: int, _: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._recorded is None:
            return
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        logits: Tensor = parts[index].flatten(0, -2)
        chosen = next((part for part in parts if _is_choice(part, len(logits))), None)
        if chosen is None:
            chosen = logits.detach().topk(self._each, -1).indices
        self._recorded.append(Routed(logits, chosen))


def _is_choice(part: Any, rows: int) -> bool:
    """Whether a part of what a router returns are the experts [T, k] that it chose."""
    integers = isinstance(part, Tensor) and not part.is_floating_point()
    return integers and part.ndim == 2 and len(part) == rows


def _routers(lm: Any) -> list[tuple[nn.Module, int]]:
    """The routers of a model in the order of its layers, each with the place of the logits in what
    it returns; [] of a dense model. transformers says where it records router logits.
    """
    recorders = (getattr(lm.get_decoder(), "_can_record_outputs", None) or {}).get("router_logits")
    places = {
        getattr(recorder, "target_class", recorder): getattr(recorder, "index", 0)
        for recorder in (recorders if isinstance(recorders, list | tuple) else [recorders])
        if recorder is not None
    }
    routers = [module for module in lm.modules() if type(module) in places]
    return [  # not what passes on the logits of a router within it (jetmoe's attention)
        (module, places[type(module)])
        for module in routers
        if sum(type(inner) in places for inner in module.modules()) == 1
    ]


def balance_of(config: Any, settings: ModelSettings) -> float:
    """The coefficient of the balance loss: that of the recipe, or where it names none of the
    model's config. Raises UsageError for one of a type that transformers has no balance loss for.
    """
    stated = settings.router_aux_loss_coef
    causal = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not hasattr(inspect.getmodule(causal), "load_balancing_loss_func"):
        if stated:
            raise UsageError(
                f"model.router_aux_loss_coef = {stated:g}: transformers has no balance loss for a "
                f"{config.model_type} model; leave it out"
            )
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) if stated is None else stated)


def routers_of(lm: Any, settings: ModelSettings, *, compiled: bool) -> Routers | None:
    """The routers of a model that is trained, with the coefficients of the recipe, or where it
    names none of the model's config; None of a dense model, and of layers that are compiled, whose
    routers cannot be watched. Raises UsageError for a coefficient that this model has no loss for.
    """
    kind, routers = lm.config.model_type, _routers(lm)
    balance, z = balance_of(lm.config, settings), settings.router_z_loss_coef
    if z and not routers:
        raise UsageError(
            f"model.router_z_loss_coef = {z:g}: a {kind} model has no routers here; leave it out"
        )
    if compiled and (balance or z):
        raise UsageError(
            "model.compile: the routers of compiled layers cannot be watched: set "
            "model.router_aux_loss_coef and router_z_loss_coef to 0, or model.compile to false"
        )
    return None if compiled or not routers else Routers(lm, balance, z)


def loss_of(
    recorded: list[Routed], copies: Tensor, shares: Tensor | None, z: float, rows: float
) -> Tensor:
    """A micro-batch's part of the losses of an update, times their coefficients.

    copies: [T] float32, how often each token counts. shares: [E] what a unit of each expert's
    probability costs: coefficient E f_e / rows; None: no balance loss. rows: of the whole update.
    """
    total = copies.new_zeros(())
    for routed in recorded:
        logits = routed.logits.to(torch.promote_types(routed.logits.dtype, torch.float32))
        weight = copies.to(logits.dtype)
        if shares is not None:
            total = total + (weight @ logits.softmax(-1)) @ shares.to(logits.dtype)
        if z:
            total = total + (weight @ logits.logsumexp(-1).square()) * (z / rows)
    return total


@torch.no_grad()
def sums_of(recorded: list[Routed], copies: Tensor) -> Tensor:
    """[3, layers, E] float64, sums over a micro-batch's rows: of choices, of probabilities, and of
    the squared log Z, which stands in the first column alone.
    """
    weight = copies.double()
    layers: list[Tensor] = []
    for routed in recorded:
        logits = routed.logits.detach().double()
        sums = logits.new_zeros(3, logits.shape[1])
        times = weight[:, None].expand(routed.chosen.shape).flatten()
        sums[0].index_add_(0, routed.chosen.flatten().long(), times)
        sums[1] = weight @ logits.softmax(-1)
        sums[2, 0] = weight @ logits.logsumexp(-1).square()
        layers.append(sums)
    return torch.stack(layers, 1)
