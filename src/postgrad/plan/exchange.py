"""The share of the weights that a rank has where ranks share matrices or the experts of a mixture
(learner.tensor, learner.experts), and the bytes of tokens that ranks exchange for experts.

A layer sends the hidden state of each token to each expert that its router chooses, and its output
comes back: two exchanges a forward pass, and two of gradients a backward pass. Experts are taken to
be chosen alike often, so that of n ranks each sends 1 - 1 / n of its rows to others.
"""

from collections.abc import Iterator, Sequence

from postgrad.core.batch import BatchGeometry
from postgrad.learner.settings import (
    LearnerSettings,
    require_no_sharers,
    require_shared_experts,
)
from postgrad.plan.roles import PlannedRole, mixture_notes
from postgrad.plan.sizes import PlannedRanks, Sharing, width

# Rows that a layer holds beside those of one process when they are sent on: as they leave, as they
# arrive, the outputs, and as these come back.
BUFFERS = 4
THERE_AND_BACK = 2


def require_shareable(roles: Sequence[PlannedRole], sharing: Sharing) -> None:
    """Raises UsageError where the policy has no experts for ranks to share, those of a role do not
    divide, or its layers carry a state and ranks would share rows or matrices. The policy comes
    first.
    """
    for role in roles:
        experts = 0 if role.shape.counted is None else role.shape.counted.experts
        if role.shape.state_bytes:
            require_no_sharers(role.shape.model_type, sharing.tensor * sharing.context)
        if role is roles[0] or experts:
            require_shared_experts(role.shape.model_type, experts, sharing.expert)


def cut_weights(role: PlannedRole, sharing: Sharing) -> int:
    """Weights of experts that the ranks of an expert group divide; 0 where none share any."""
    counted = role.shape.counted
    return 0 if counted is None or sharing.expert == 1 else counted.routed


def lacking(role: PlannedRole, sharing: Sharing) -> int:
    """Of these, those that are on other ranks of the group."""
    routed = cut_weights(role, sharing)
    return routed - routed // sharing.expert


def lacking_matrices(role: PlannedRole, sharing: Sharing) -> int:
    """Weights of the matrices that tensor parallelism divides which are on other ranks of a tensor
    group: those of layers, and of a mixture's layers those of attention.
    """
    shape, counted = role.shape, role.shape.counted
    divided = [(shape.layers, shape.layer_parameters)]  # layers, weights of each
    if counted is not None and counted.routed:
        divided = [
            (
                len(kind.numbers),
                sum(m * n for name, m, n in kind.linears if name.startswith("self_attn.")),
            )
            for kind in counted.adaptable
        ]
    return sum(layers * (layer - layer // sharing.tensor) for layers, layer in divided)


def layer_weights(role: PlannedRole, sharing: Sharing) -> int:
    """Weights of a decoder layer that a rank computes with when they are gathered."""
    others = lacking(role, sharing) + lacking_matrices(role, sharing)
    return role.shape.layer_parameters - others // role.shape.layers


def tensor_share(role: PlannedRole, sharing: Sharing) -> float:
    """The share of the weights that a rank has under tensor parallelism, before they are sharded:
    it divides no embeddings and no head.
    """
    return 1 - lacking_matrices(role, sharing) / role.parameters


def share(role: PlannedRole, sharing: Sharing, shards: int) -> float:
    """The share of the weights that `shards` ranks divide. Experts that ranks share are sharded
    over fewer ranks, and over those of a tensor group too, so that a shard of them is as large as
    if all ranks divided them.
    """
    there, cut = tensor_share(role, sharing), cut_weights(role, sharing)
    if shards > 1:
        return there - (cut - cut // sharing.tensor) / role.parameters
    return there - lacking(role, sharing) / role.parameters


def trained_share(role: PlannedRole, sharing: Sharing) -> float:
    """The same of what trains, and of its gradients and moments."""
    if role.model.lora is not None:  # no experts
        return tensor_share(role, sharing)
    return share(role, sharing, sharing.divided)


def rows_bytes(role: PlannedRole, tokens: float, b: int) -> float:
    """Bytes of the hidden states of `tokens` tokens, once for each expert of every layer that they
    are sent to. b: bytes of a number.
    """
    counted = role.shape.counted
    return 0.0 if counted is None else tokens * counted.choices * role.shape.hidden_size * b


def buffers(role: PlannedRole, tokens: int, b: int, sharing: Sharing) -> int:
    """Bytes of the rows that a layer exchanges in a forward pass over `tokens` tokens, which the
    ranks of a tensor group share.
    """
    if not cut_weights(role, sharing):
        return 0
    return int(BUFFERS * rows_bytes(role, tokens, b) / role.shape.layers / sharing.tensor)


def sent_bytes(
    role: PlannedRole, tokens: float, b: int, sharing: Sharing, passes: float = 1.0
) -> float:
    """Bytes that each rank sends to others in `passes` passes over `tokens` tokens of all ranks; a
    backward pass is one too.
    """
    if not cut_weights(role, sharing):
        return 0.0
    of_rank = tokens / sharing.ranks
    leaving = 1 - 1 / sharing.expert
    return passes * THERE_AND_BACK * rows_bytes(role, of_rank, b) * leaving


def update_passes(role: PlannedRole) -> int:
    """Passes of an update that exchange tokens: forward, backward, with checkpointing forward once
    more, and for the balance loss once more.
    """
    return 2 + (1 if role.model.gradient_checkpointing else 0) + (1 if role.balances else 0)


def exchanged_bytes(
    ranks: PlannedRanks,
    readers: Sequence[str],
    tokens: float,
    geometry: BatchGeometry,
    *,
    cpu: bool,
) -> float:
    """Bytes that each rank sends in a step over `tokens` tokens. readers: names of the roles that
    read them before an update, for each pass.
    """
    total = 0.0
    for role in ranks.roles:
        passes = geometry.epochs_per_rollout * update_passes(role) if role.learner else 0
        passes += 1 if role.judges else readers.count(role.name)
        b = width(role.model.dtype, cpu=cpu)
        total += sent_bytes(role, tokens, b, ranks.sharing, passes)
    return total


def expert_notes(
    roles: Sequence[PlannedRole], sent: float, learner: LearnerSettings
) -> Iterator[str]:
    """Sentences on mixtures of experts, and on the volume of a step where ranks share experts.
    sent: bytes of a rank.
    """
    yield from mixture_notes(roles)
    if sent:
        yield (
            f"learner.expert_parallel = {learner.expert_parallel}: each rank sends "
            f"{sent / 1e9:.3g} GB of hidden states and gradients to others in a step, all "
            f"{learner.ranks} ranks together {learner.ranks * sent / 1e9:.3g} GB, if all experts "
            "are chosen alike often"
        )
