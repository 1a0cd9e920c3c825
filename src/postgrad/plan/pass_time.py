"""Time of a role's passes over the samples of a step, on its ranks: forward passes and updates."""

from dataclasses import dataclass

from postgrad.core.batch import BatchGeometry
from postgrad.models.towers import ImageCost
from postgrad.plan import exchange
from postgrad.plan.adapters import adapter_flops
from postgrad.plan.costs import CostModel
from postgrad.plan.host_inputs import waited_seconds
from postgrad.plan.lengths import RowLengths
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import Sizes, width
from postgrad.plan.towers import tower_seconds
from postgrad.recipe.recipe import Recipe

GRADIENT = 4  # bytes: ranks add gradients in float32


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a step as a forward pass computes them, over all ranks."""

    tokens: float  # computed tokens
    squares: float  # squared tokens of sequences, to which attention's cost is proportional
    learned: float  # tokens that a loss is computed of
    # Micro-batches of all ranks, where batches are cut by samples; None: they are cut by tokens.
    micro_batches: float | None = None
    calls: int = 1  # in which roles are asked for them
    images: ImageCost | None = None  # those of all rows; None: there are none
    written: float = 0.0  # tokens of answers, without the replies of environments

    @classmethod
    def of(cls, recipe: Recipe, geometry: BatchGeometry, lengths: RowLengths) -> "Samples":
        """The samples of one step. A prompt is computed once for its answers, and for a pair's."""
        answers = recipe.answers_per_prompt
        groups = geometry.samples_per_step / (geometry.n_samples_per_prompt or 1)
        size, sequences = geometry.micro_train_batch_size, groups * answers
        predicted = getattr(recipe.algorithm, "observation_coef", 0.0) > 0
        return cls(
            groups * lengths.computed(answers),
            groups * lengths.squares(answers),
            sequences * (lengths.answer if predicted else lengths.written),
            None if size is None else geometry.samples_per_step / size,
            images=None if lengths.images is None else lengths.images.times(groups),
            written=sequences * lengths.written,
        )


def _flops(role: PlannedRole, samples: Samples, costs: CostModel) -> float:
    """FLOPs of one forward pass over a step's samples, as `CostModel.as_products` counts them."""
    flops = role.shape.flops(samples.tokens, samples.squares, samples.learned)
    adapted = samples.tokens * adapter_flops(role.shape, role.model.lora)
    return costs.as_products(flops, head=not role.scores) + adapted


def _computing(role: PlannedRole, samples: Samples, times: int, costs: CostModel) -> float:
    """Seconds of `times` forward passes over a step's samples, communication apart."""
    b = width(role.model.dtype, cpu=costs.device.is_cpu)
    between = costs.between(role.shape, samples.tokens, b)
    return times * (costs.products(_flops(role, samples, costs), b) + between)


def forward_seconds(role: PlannedRole, samples: Samples, sizes: Sizes, costs: CostModel) -> float:
    """Seconds of one forward pass over a step's samples. Weights that are in the host's memory
    come to the device once a call.
    """
    b = width(role.model.dtype, cpu=costs.device.is_cpu)
    passes = rank_passes(samples, sizes, costs)
    seconds = _computing(role, samples, 1, costs)
    seconds += costs.sends(exchange.sent_bytes(role, samples.tokens, b, costs.sharing))
    seconds += tower_seconds(role, samples.images, b, costs, updating=False, passes=passes)
    if role.offload and not costs.sharing.gathers:
        seconds += costs.copies(samples.calls * role.parameters * b)
    return seconds + passes * (costs.overhead(role.shape) + _gathering(role, b, costs))


def rank_passes(samples: Samples, sizes: Sizes, costs: CostModel) -> float:
    """Micro-batches that one rank computes of a step's samples, at least one of each call. Where
    batches are cut by samples, short rows make as many micro-batches as long ones, and each gathers
    all weights under ZeRO-3.
    """
    if (count := samples.micro_batches) is None:
        count = samples.tokens / (sizes.micro_tokens * costs.sharing.context)
    return max(samples.calls, count / costs.sharing.replicas)


def _gathering(role: PlannedRole, b: int, costs: CostModel) -> float:
    """Seconds in which sharded weights are gathered for one pass, layer by layer (ZeRO-3)."""
    return _all_gather(role, b, costs) if costs.sharing.gathers else 0.0


def _all_gather(role: PlannedRole, b: int, costs: CostModel) -> float:
    """Seconds of one all-gather of the weights; frozen ones are sharded under ZeRO-3 alone."""
    sharing = costs.sharing
    count = role.parameters if sharing.gathers else role.trained
    size = count * b * exchange.tensor_share(role, sharing)
    offloads = sharing.offloads or role.offload
    from_host = costs.copies(size / sharing.divided) if offloads else 0.0
    others = exchange.lacking(role, sharing) * b if count == role.parameters else 0.0
    return from_host + costs.sends(size * (1 - 1 / sharing.divided) - others)


def update_seconds(
    role: PlannedRole,
    samples: Samples,
    geometry: BatchGeometry,
    sizes: Sizes,
    costs: CostModel,
) -> float:
    """Seconds of all updates of a step: products, gathers, sums over ranks, the optimizer's step.

    The backward pass costs two forward passes, and one where the weights are frozen under an
    adapter, which itself costs two. With checkpointing the forward pass is computed twice. The
    balance loss of a mixture of experts counts choices in a forward pass of its own.
    """
    b, model = width(role.model.dtype, cpu=costs.device.is_cpu), role.model
    counts = 1 if role.balances else 0
    times = (2 if model.lora else 3) + (1 if model.gradient_checkpointing else 0) + counts
    passes = rank_passes(samples, sizes, costs)
    seconds = _computing(role, samples, times, costs)
    seconds += waited_seconds(role, samples.tokens, seconds / times, times - 1 - counts, costs)
    seconds += costs.products(samples.tokens * adapter_flops(role.shape, model.lora), b)
    seconds += tower_seconds(role, samples.images, b, costs, updating=True, passes=passes)
    seconds += passes * (2 + counts) * (costs.overhead(role.shape) + _gathering(role, b, costs))
    sending = exchange.update_passes(role)
    seconds += costs.sends(exchange.sent_bytes(role, samples.tokens, b, costs.sharing, sending))
    seconds *= geometry.epochs_per_rollout
    micro_batches = passes * geometry.epochs_per_rollout / geometry.updates_per_step
    return seconds + geometry.updates_per_step * _stepping(role, micro_batches, costs)


def _stepping(role: PlannedRole, micro_batches: float, costs: CostModel) -> float:
    """Seconds of one optimizer step: sums of gradients over ranks, reads, writes."""
    sharing, trained = costs.sharing, role.trained
    seconds = costs.steps(optimizer_bytes(role, costs))
    together = sharing.replicas * sharing.context
    if together == 1:
        return seconds
    others = 0 if role.model.lora else exchange.lacking(role, sharing)  # others add these
    part = exchange.tensor_share(role, sharing)
    summed = trained * part * (1 - 1 / together) - others
    gradients = costs.sends(summed * GRADIENT)
    if sharing.divided == 1:  # all-reduce: gradients are summed and sent back to all ranks
        return seconds + 2 * gradients
    scattered = micro_batches if sharing.scatters else 1.0
    if sharing.offloads:
        gradients += costs.copies(trained * GRADIENT * part / sharing.divided)
    b = width(role.model.dtype, cpu=costs.device.is_cpu)
    weights = 0.0 if sharing.gathers else _all_gather(role, b, costs)
    return seconds + scattered * gradients + weights


def optimizer_bytes(role: PlannedRole, costs: CostModel) -> float:
    """Bytes that an optimizer step of one rank reads and writes: weights and moments, gradients."""
    sharing = costs.sharing
    trained = role.trained * exchange.trained_share(role, sharing)
    return trained * (3 * 4 + 4 * 4) / sharing.divided
