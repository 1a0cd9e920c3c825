"""The routers of a mixture of experts: what they gave in a forward pass, their two losses, and the
replay of choices that another forward pass made (Ma et al. 2025, arXiv:2510.11370).

Balance (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6), as transformers'
`load_balancing_loss_func` has it: E sum_e f_e P_e, with f_e the choices of expert e per row, and
P_e the mean of its probability. A row is one token in one layer. z (Zoph et al. 2022,
arXiv:2202.08906): the mean over rows of the squared log Z of the router's logits.

A router chooses by `topk` over its E scores. Replay stands in for that call: it gives the experts
that were chosen elsewhere, and the scores that the router has for them now, with their gradients.
So shares, biases and scales are computed as the model's own code computes them.
"""

import inspect
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from postgrad.core.errors import RunError, UsageError
from postgrad.models.attention import layers_of, text_config
from postgrad.models.linear import NARROW
from postgrad.models.refusals import no_balance_loss, no_replay, no_router_dtype, no_z_loss
from postgrad.models.router_dtype import route, widen
from postgrad.models.settings import ROUTER, ModelSettings, RouterDtype
from postgrad.models.supported import refused_types

# In the names of weights: what is added to a router's scores for its choice alone. It may lie
# beside the router, and in most types is no parameter.
CHOICE_BIAS = re.compile(r"\.(?:expert_bias|e_score_correction_bias)$")


@dataclass(frozen=True, slots=True)
class Routed:
    """What one layer's router gave in a forward pass over T packed tokens."""

    logits: Tensor  # [T, E], with their graph
    chosen: Tensor  # [T, k] numbers of experts
    layer: int = 0  # number of the router among those of the model


class Routers:
    """Records what the routers of a model give. balance, z: the coefficients of the two losses."""

    def __init__(self, lm: Any, balance: float = 0.0, z: float = 0.0) -> None:
        pairs = _routers(lm)
        self.balance = balance
        self.z = z
        self.layers = len(pairs)
        self._each = int(getattr(text_config(lm), "num_experts_per_tok", None) or 1)
        self._recorded: list[Routed] | None = None
        self._kind = lm.config.model_type
        self._experts = [_experts_of(module) for module, _ in pairs]
        self._choices: dict[int, Tensor] = {}  # by layer, of the forward pass that is recorded
        self._again: Tensor | None = None  # [T, layers, k] of the forward pass that replays
        self.replays = False  # whether choices are for a replay, so that none may be guessed
        for number, (module, index) in enumerate(pairs):
            # No closures: a twin of the model (models/four_bits.py) is a deep copy.
            module.forward = partial(self._forward, number, module)
            module.register_forward_hook(partial(self._record, number, index))

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

    @contextmanager
    def replaying(self, experts: Tensor) -> Generator[None]:
        """Inside, forward and backward passes send tokens to `experts` [T, layers, k]; where these
        are -1, to those that the routers choose. Raises RunError for those of another model.
        """
        if experts.shape[1] != self.layers:
            raise RunError(
                f"router replay: experts of {experts.shape[1]} layers were recorded, and the "
                f"policy has routers in {self.layers}: they are of another model"
            )
        self._again = experts
        try:
            yield
        finally:
            self._again = None

    @contextmanager
    def unwatched(self) -> Generator[None]:
        """Inside, a forward pass over something else is neither recorded nor a replay."""
        recorded, again = self._recorded, self._again
        self._recorded = self._again = None
        try:
            yield
        finally:
            self._recorded, self._again = recorded, again

    def _forward(self, number: int, module: nn.Module, *args: Any, **named: Any) -> Any:
        """What a router's own forward gives, with its choice noted, or replayed."""
        if self._recorded is None and self._again is None:
            return route(module, *args, **named)
        again = None if self._again is None else self._again[:, number].long()
        with _Choice(self._experts[number], again) as choice:
            outputs = route(module, *args, **named)
        if choice.chosen is not None:
            self._choices[number] = choice.chosen
        elif again is not None:
            raise _own_way(self._kind)
        return outputs

    def _record(self, number: int, index: int, _: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._recorded is None:
            return
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        logits: Tensor = parts[index].flatten(0, -2)
        chosen = self._choices.pop(number, None)
        if chosen is None and self.replays:
            raise _own_way(self._kind)
        if chosen is None:
            chosen = logits.detach().topk(self._each, -1).indices
        self._recorded.append(Routed(logits, chosen, number))


def _own_way(kind: str) -> UsageError:
    return UsageError(
        f"rollout.router_replay: the routers of a {kind} model choose experts in a way of their "
        "own, which is neither recorded nor replayed: leave it out"
    )


class _Choice(TorchFunctionMode):
    """The choice of one router in its forward pass. again: [T, k] the experts that it gives instead
    of its own, where they are not -1.
    """

    def __init__(self, experts: int, again: Tensor | None) -> None:
        super().__init__()
        self._experts = experts
        self._again = again
        self.chosen: Tensor | None = None  # [T, k]

    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores: Tensor = args[0] if args else kwargs["input"]
        if scores.ndim != 2 or scores.shape[1] != self._experts:  # groups of experts come before
            return result
        chosen: Tensor = result.indices
        if self._again is not None:
            if self._again.shape != chosen.shape:
                raise RunError(
                    f"router replay: experts [T, k] = {list(self._again.shape)} were recorded, and "
                    f"the policy chooses {list(chosen.shape)}: they are of another model"
                )
            chosen = torch.where(self._again < 0, chosen, self._again)
            result = torch.return_types.topk((scores.gather(1, chosen), chosen))
        self.chosen = chosen.detach()
        return result


def _experts_of(router: nn.Module) -> int:
    """How many experts a router chooses from."""
    return next(weight.shape[0] for weight in router.parameters() if weight.ndim == 2)


def chosen_of(recorded: list[Routed]) -> Tensor:
    """[T, layers, k] int16: the experts of a forward pass."""
    layers = sorted(recorded, key=lambda routed: routed.layer)
    return torch.stack([routed.chosen for routed in layers], 1).to(torch.int16)


def _routers(lm: Any) -> list[tuple[nn.Module, int]]:
    """The routers of a model in the order of its layers, each with the place of the logits in what
    it returns; [] of a dense model. transformers says where it records router logits.
    """
    recorders = (getattr(lm.get_decoder(), "_can_record_outputs", None) or {}).get("router_logits")
    places: dict[type, int] = {}
    for recorder in recorders if isinstance(recorders, list | tuple) else [recorders]:
        kind: Any = getattr(recorder, "target_class", recorder)
        if isinstance(kind, type):
            places[kind] = getattr(recorder, "index", 0)
    recorded = {  # FSDP2 gives what it divides a class below the model's own
        module: next(kind for kind in places if isinstance(module, kind))
        for module in lm.modules()
        if isinstance(module, tuple(places))
    }
    return [  # not what passes on the logits of a router within it (jetmoe's attention)
        (module, places[kind])
        for module, kind in recorded.items()
        if sum(inner in recorded for inner in module.modules()) == 1
    ]


def give_dtype(lm: Any, dtype: RouterDtype, key: str = "model.router_dtype") -> None:
    """From now on the routers of a model compute in this dtype. To be called before anything
    watches them. key: where it stands in the recipe.

    Raises UsageError where the model has no routers, and where something else than its routers
    chooses from what they give.
    """
    if dtype == "auto":
        return
    routers = [module for module, _ in _routers(lm)]
    if not routers or lm.config.model_type in refused_types()["without"]["router_dtype"]["types"]:
        raise no_router_dtype(lm.config.model_type, key)
    if lm.dtype in NARROW:  # in float32 they compute in it
        widen(routers)


def routers_in_float32(lm: Any) -> list[nn.Module]:
    """The routers that train in float32 in a model of a narrower dtype: those of types of which
    transformers keeps their weights in it.
    """
    if lm.dtype not in NARROW:
        return []
    return [
        router
        for router, _ in _routers(lm)
        if all(p.dtype == torch.float32 and p.requires_grad for p in router.parameters())
    ]


def router_weights(lm: Any) -> set[str]:
    """The names of the weights of all routers, with the biases that they choose by, where these are
    parameters; empty of a dense model.
    """
    inside = {id(weight) for router, _ in _routers(lm) for weight in router.parameters()}
    named = lm.named_parameters() if inside else ()
    return {name for name, weight in named if id(weight) in inside or CHOICE_BIAS.search(name)}


def routed_layers(lm: Any) -> tuple[int, ...]:
    """The numbers of the layers that have a router, in order. Raises UsageError as `replayable`."""
    routers = _required(lm)
    return tuple(
        number
        for number, layer in enumerate(layers_of(lm))
        if any(module is router for module in layer.modules() for router, _ in routers)
    )


def mixtures_of(lm: Any) -> list[nn.Module]:
    """The blocks of layers that have a router, with their experts; [] of a dense model."""
    routers = {module for module, _ in _routers(lm)}
    blocks = (block for layer in layers_of(lm) for block in layer.children())
    return [block for block in blocks if not routers.isdisjoint(block.modules())]


def balance_of(config: Any, settings: ModelSettings) -> float:
    """The coefficient of the balance loss: that of the recipe, or where it names none of the
    model's config, but 0 where routers are frozen. Raises UsageError for one of a type that
    transformers has no balance loss for.
    """
    stated = settings.router_aux_loss_coef
    if stated is None and ROUTER in settings.freeze:
        return 0.0
    text = config.get_text_config()
    if not hasattr(inspect.getmodule(_writer_of(config)), "load_balancing_loss_func"):
        if stated:
            raise no_balance_loss(stated, config.model_type)
        return 0.0
    return float(getattr(text, "router_aux_loss_coef", 0.0) if stated is None else stated)


def _writer_of(config: Any) -> Any:
    """transformers' class of a model that writes, by its config; None where it has none."""
    kind: Any = type(config)
    of_images: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    of_text: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return of_images.get(kind, None) or of_text.get(kind, None)


def routers_of(lm: Any, settings: ModelSettings, *, replays: bool = False) -> Routers | None:
    """The routers of a model that is trained, with the coefficients of the recipe, or where it
    names none of the model's config; None of a dense model. replays: they use experts again that
    were chosen elsewhere. Raises UsageError for a coefficient that this model has no loss for, and
    for a replay without routers.
    """
    kind, routers = lm.config.model_type, _routers(lm)
    balance, z = balance_of(lm.config, settings), settings.router_z_loss_coef
    if z and not routers:
        raise no_z_loss(z, kind)
    watched = replayable(lm) if replays else Routers(lm) if routers else None
    if watched is not None:
        watched.balance, watched.z = balance, z
    return watched


def replayable(lm: Any) -> Routers:
    """The routers of a model, whose choices are recorded or replayed. Raises UsageError where it
    has none.
    """
    _required(lm)
    routers = Routers(lm)
    routers.replays = True
    return routers


def _required(lm: Any) -> list[tuple[nn.Module, int]]:
    if not (routers := _routers(lm)):
        raise no_replay(lm.config.model_type)
    return routers


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
