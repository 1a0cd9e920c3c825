"""Expert parallelism: a mixture whose experts are divided over the ranks of an expert group.

GShard's all-to-all (arXiv:2006.16668), without a capacity: no token is dropped. Every rank keeps
its own tokens for attention, routers and shared experts, and has 1 / n of the experts of each
layer. In a layer it sends each token to the ranks that have the experts which its router chose,
computes its own experts for the tokens that arrive, and sends the outputs back, where they are
weighted and added. The weight stays with the token: so its gradient, that of the router, needs no
exchange.

A rank has as many rows as its experts are chosen, or none. It takes part in every exchange all the
same, in the same order, also when layers are computed again in the backward pass.

The products are transformers' own for experts of one choice each: grouped where the device has
them, else a loop over experts.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.learner.settings import require_shared_experts
from postgrad.models.supported import experts_of
from postgrad.parallel.exchange import counts_of_all, rows_of_experts
from postgrad.parallel.ranks import Ranks
from postgrad.parallel.sharding import is_of_experts


def require_experts(config: Any, size: int) -> None:
    """Raises UsageError where the experts of a mixture cannot be divided over `size` ranks, by its
    config; a dense model has none to divide.
    """
    text = config.get_text_config()
    if count := experts_of(text):
        require_shared_experts(text.model_type, count, size)


def require_mixture(config: Any, size: int) -> None:
    """Raises UsageError where the policy has no experts, so that `size` ranks share none."""
    text = config.get_text_config()
    require_shared_experts(text.model_type, experts_of(text), size)


def cut_experts(lm: Any, ranks: Ranks) -> list[nn.Module]:
    """Replaces the weights of all experts of each layer by those of this rank's experts, and has
    the ranks of an expert group exchange their tokens. Returns the modules of experts; [] where no
    ranks share any. To be called before an optimizer takes the weights. Raises UsageError for
    weights of experts that this type of model computes in another way, or that do not divide.
    """
    size = ranks.grid.expert
    if size == 1:
        return []
    kind, modules = lm.config.model_type, dict(lm.named_modules())
    names = [name for name, _ in lm.named_parameters() if is_of_experts(name)]
    owners = {name.rpartition(".")[0]: modules[name.rpartition(".")[0]] for name in names}
    if not owners and experts_of(lm.config.get_text_config()):
        require_shared_experts(kind, 0, size)
    for where, module in owners.items():
        _require_own_weights(kind, where, module, size)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        weight: nn.Parameter = getattr(owners[owner], attribute)
        count = len(weight) // size
        part = weight.detach().narrow(0, ranks.expert_rank * count, count).clone()
        setattr(owners[owner], attribute, nn.Parameter(part, weight.requires_grad))
    for module in owners.values():
        everywhere = module.num_experts
        module.num_experts = everywhere // size
        module.forward = partial(_exchanging, module, everywhere, ranks.groups.expert)
    return list(owners.values())


def _require_own_weights(kind: str, where: str, module: Any, size: int) -> None:
    """Raises UsageError unless a module of experts has transformers' interface, and nothing but
    weights of `num_experts` experts.
    """
    ours = hasattr(module, "is_concatenated")  # experts of transformers' interface
    count: int = module.num_experts if ours else 0
    require_shared_experts(kind, count, size)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.ndim == 0 or len(tensor) != count:
            raise UsageError(
                f"learner.expert_parallel = {size}: {where}.{name} of this {kind} model is not "
                f"divided by its {count} experts: use 1"
            )


def _exchanging(
    module: Any,
    everywhere: int,
    group: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The forward pass of a module of experts over the ranks of `group`, with transformers' names.
    hidden_states: [T, H] this rank's tokens. top_k_index, top_k_weights: [T, k] numbers of their
    experts among `everywhere`, and what the output of each counts for. Returns [T, H], the weighted
    sums.
    """
    tokens, each = top_k_index.shape
    ordered, order = torch.sort(top_k_index.reshape(-1), stable=True)  # by expert, so by rank too
    bounds = torch.arange(everywhere, device=order.device)
    counts = torch.searchsorted(ordered, bounds, right=True).diff(prepend=bounds.new_zeros(1))
    to_ranks = counts.view(-1, module.num_experts)
    from_ranks = counts_of_all(to_ranks, group)
    sent, received = torch.stack([to_ranks.sum(1), from_ranks.sum(1)]).tolist()  # the only wait
    arrived = rows_of_experts(hidden_states[order // each], sent, received, group)
    outputs = _of_own_experts(module, arrived, from_ranks)
    back = rows_of_experts(outputs, received, sent, group)
    weighted = back * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    summed = weighted[place].view(tokens, each, hidden_states.shape[1]).sum(1)
    return summed.to(hidden_states.dtype)


def _of_own_experts(module: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """[R, H] the outputs of this rank's experts. rows: [R, H] by sender, those of a sender by
    expert; counts: [senders, experts] how many. Where no row arrives a row of zeros is computed,
    and left out, so that every rank has gradients of its weights to add and nothing to wait for.
    """
    senders, experts = counts.shape
    numbers = torch.arange(experts, device=rows.device).repeat(senders)
    chosen = torch.repeat_interleave(numbers, counts.view(-1), output_size=len(rows))
    padded = rows if len(rows) else torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    if not len(rows):
        chosen = chosen.new_zeros(1)
    full = padded.new_ones(len(padded), 1)
    return type(module).forward(module, padded, chosen.unsqueeze(-1), full)[: len(rows)]
