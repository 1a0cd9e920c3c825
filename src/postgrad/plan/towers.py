"""Memory and time of the tower of a model that reads images, as plan.activations counts a layer.

A forward pass of a learner encodes the images of its sequences in calls of `AT_ONCE` numbers, an
engine one after the other. What autograd keeps of all of them waits for the end of the backward
pass.
"""

from dataclasses import replace
from math import ceil

from postgrad.models.image_sizes import image_sizes
from postgrad.models.towers import AT_ONCE, ImageCost, TowerShape
from postgrad.plan.activations import in_host_memory
from postgrad.plan.costs import MOVES, CostModel
from postgrad.plan.lengths import RowLengths
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import Sharing

FLOAT32 = 4
# Pixels of a picture that no row says anything of: the side.
ASSUMED_SIDE = 1024


def encodes(role: PlannedRole) -> tuple[bool, bool]:
    """Whether the tower's weights train, and the projector's. An adapter stands on neither."""
    trains = role.learner is not None and role.model.lora is None
    freeze = role.model.freeze
    return trains and "vision" not in freeze, trains and "projector" not in freeze


def kept_by_layer(tower: TowerShape, b: int) -> int:
    """Bytes a patch that one layer keeps for its backward pass. b: bytes of a number."""
    hidden, inner = tower.hidden_size, tower.intermediate_size
    norms = (
        2 * hidden * ((FLOAT32 if tower.rms else 0) + b)
    )  # RMSNorm: the stream in float32, scaled
    inputs = 2 * hidden * b  # of queries, keys and values, and of the feed-forward
    # What attends: q, k, v and the result. Qwen's are parts of one product, of which v keeps all,
    # and the results of windows and images are joined in a copy.
    attention = (7 if tower.cut == "grid" else 4) * hidden * b
    if tower.scaled:
        attention += 2 * hidden * b  # what attention and feed-forward add, before it is scaled
    # gate, up, the activated gate and their product; or an input of the activation and its result,
    # and the factor of a quick GELU
    feedforward = (4 if tower.gated else 3 if "quick" in tower.activation else 2) * inner * b
    return norms + inputs + attention + feedforward


def kept(
    tower: TowerShape, cost: ImageCost, b: int, role: PlannedRole, *, cpu: bool = False
) -> int:
    """Bytes that a forward pass over images keeps until its backward pass: of a tower that trains
    its pixels and what layers keep, or with checkpointing only their inputs (of all layers, or
    where these are in the host's memory of one); of a projector, also of a frozen one behind a
    tower that trains, what its products read. A frozen tower keeps none.
    """
    encoder, projector = encodes(role)
    size = 0.0
    if encoder:
        layer, layers = tower.hidden_size * b, tower.layers
        if not role.model.gradient_checkpointing:
            layer = kept_by_layer(tower, b)
        if in_host_memory(role.model.gradient_checkpointing, cpu=cpu):
            layers = 1
        size += cost.patches * tower.patch_values * b + tower.encoded(cost) * layers * layer
    if encoder or projector:
        size += kept_by_projector(tower, cost, b)
    return int(size)


def kept_by_projector(tower: TowerShape, cost: ImageCost, b: int) -> float:
    """Bytes of what the projector keeps of images: the last norm of the tower, and the inputs of
    its products and of the activation between two.
    """
    last = tower.hidden_size * ((FLOAT32 if tower.rms else 0) + b)  # of the norm, a patch
    # Of deeper layers the same norm, over as many numbers.
    inputs = sum(m for m, _ in tower.projections)
    activated = sum(n for _, n in tower.projections[-2::-2])
    return cost.patches * last * tower.mergers + cost.tokens * b * (inputs + activated)


def in_a_call(tower: TowerShape, cost: ImageCost) -> ImageCost:
    """Those of the images of a micro-batch that a learner's tower encodes in one call."""
    images = max(cost.images, 1.0)
    numbers = cost.patches / images * tower.patch_values
    together = max(1.0, AT_ONCE // numbers) if numbers else 1.0
    return cost.times(min(images, together) / images)


def calls(tower: TowerShape, cost: ImageCost, passes: float) -> float:
    """Calls of a learner's tower over images that are in so many micro-batches."""
    images = cost.images / max(in_a_call(tower, cost).images, 1.0)
    return min(cost.images, max(passes, images))


def working(tower: TowerShape, cost: ImageCost, b: int, role: PlannedRole) -> int:
    """Bytes of work on the images of a call beside what is kept: of the backward pass of a layer,
    or of its forward pass where nothing trains.
    """
    hidden, inner = tower.hidden_size, tower.intermediate_size
    each = (3 if tower.gated else 2) * inner + 4 * hidden
    size = max(each, 10 * hidden) * b
    if encodes(role)[0]:
        size = (2 * inner + 2 * hidden) * b
        if role.model.gradient_checkpointing:
            size += kept_by_layer(tower, b)
    pixels = tower.patch_values * FLOAT32
    return int(in_a_call(tower, cost).patches * (size + pixels))


def allocated(tower: TowerShape, cost: ImageCost, b: int) -> int:
    """Bytes that layers make of images, at the same time, or one after the other."""
    return int(tower.encoded(cost) * tower.layers * kept_by_layer(tower, b))


def _unevenly(cost: ImageCost, sharing: Sharing, passes: float | None) -> float:
    """How many times as long images take as if each rank had alike many: ranks that share rows wait
    for the one that encodes most of a micro-batch.
    """
    sharers = sharing.tensor * sharing.context
    if passes is None or sharers == 1:
        return 1.0
    together = max(1.0, cost.images / sharing.replicas / max(1.0, passes))
    return ceil(together / sharers) * sharers / together


def tower_seconds(
    role: PlannedRole,
    cost: ImageCost | None,
    b: int,
    costs: CostModel,
    *,
    updating: bool,
    passes: float | None = None,
) -> float:
    """Seconds of the passes of the role's tower over images: a forward pass; in an update also a
    backward pass, of two forward passes, of what trains, with checkpointing once more the layers.
    passes: micro-batches of a learner that the images are in; None: an engine encodes each alone.
    """
    tower = role.shape.tower
    if tower is None or cost is None:
        return 0.0
    encoder, projector = encodes(role) if updating else (False, False)
    again = 1 if role.model.gradient_checkpointing else 0
    encoded = 3 + again if encoder else 1
    projected = 3 if encoder or projector else 1
    flops = encoded * costs.as_products(tower.encoding(cost))
    flops += projected * tower.projecting(cost)
    flops *= _unevenly(cost, costs.sharing, passes)
    inner = (4 if tower.gated else 2) * tower.intermediate_size
    numbers = cost.patches * tower.layers * (9 * tower.hidden_size + inner)
    moved = MOVES * encoded * numbers * b
    bandwidth = costs.device.bandwidth * costs.efficiency.between * costs.sharing.ranks
    called = cost.images if passes is None else calls(tower, cost, passes * costs.sharing.replicas)
    called *= 2 if encoder else 1
    overhead = called / costs.sharing.replicas * costs.efficiency.overhead * tower.layers
    return costs.products(flops, b) + moved / bandwidth + overhead


def assumed_images(lengths: RowLengths, tower: TowerShape, source: str | None) -> RowLengths:
    """The lengths of rows that are not at hand, each with an image: of ASSUMED_SIDE pixels, or of
    as many as its tokens fit into the prompt of the row. source: the model, whose processor sizes
    images.
    """
    sizes = image_sizes(tower, source)
    side = ASSUMED_SIDE
    token = tower.patch_size * tower.merged
    while side > token and sizes.cost(side, side).tokens > lengths.prompt:
        side -= token
    cost = sizes.cost(side, side)
    note = (
        f"{lengths.source}; assumed: an image of {side} x {side} pixels in each, "
        f"{cost.tokens:.0f} of its tokens"
    )
    return replace(lengths, images=cost, source=note)
