"""Time of a step, phase by phase, from FLOPs, bytes and the speed of links.

A matrix product runs at a share of the device's peak. What layers do between products, and
decoding, which reads weights and cache, run at a share of its memory bandwidth. Ranks exchange at a
share of their link's bandwidth. The shares are `Efficiency`: guesses with a stated origin, which
`postgrad plan --calibrate` corrects by what a machine has measured.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from postgrad.core.batch import BatchGeometry
from postgrad.models.shapes import ForwardFlops, ModelShape
from postgrad.plan.engines import EnginePlaces, SampledShare, engine_width, reduced_bytes
from postgrad.plan.hardware import Device, Efficiency
from postgrad.plan.lengths import RowLengths
from postgrad.plan.publishing import publish_seconds
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import ALONE, Sharing, Sizes, width
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.local.budget import LANES

GRADIENT = 4  # bytes: ranks add gradients in float32
# How often each number that a layer writes moves to or from memory in a pass: it is written and
# read, and norms, rotations and gates write and read temporary copies of it. benchmarks.growth.
MOVES = 6
# Guesses where state lies with the host: PCIe 4.0 x16, as copies from pinned memory get it, and a
# rank's share of a server's memory bandwidth while the optimizer steps there.
HOST_LINK, HOST_MEMORY = 25e9, 20e9
# Of a layer's overhead, what is left where decoding is a CUDA graph: kernels follow each other
# without the host. A guess.
GRAPHED = 0.1


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a run takes."""

    step: Mapping[str, float]  # seconds of one step by phase: "sample", "score", "update"
    steps: int | None  # of the run; None: only the data says how many
    once: Mapping[str, float]  # seconds of what comes once, before the first step
    devices: int  # all cards of the run: of ranks and of engines
    overlaps: bool = False  # engines sample the next step while learners work on this one

    @property
    def step_seconds(self) -> float:
        """Seconds of one step of the loop."""
        sampled = self.step.get("sample", 0.0)
        learned = sum(self.step.values()) - sampled
        return max(sampled, learned) if self.overlaps else sampled + learned

    @property
    def device_seconds(self) -> float:
        """Seconds of a step times the cards of the run."""
        return self.step_seconds * self.devices

    @property
    def hours(self) -> float | None:
        """Hours of the run; None where its steps are not known."""
        if self.steps is None:
            return None
        return (self.steps * self.step_seconds + sum(self.once.values())) / 3600

    def to_json(self) -> dict[str, Any]:
        """The value of "time" in plan.json: seconds, hours and device-hours."""
        hours = self.hours
        return {
            "step_seconds": {name: round(value, 6) for name, value in self.step.items()},
            "once_seconds": {name: round(value, 6) for name, value in self.once.items()},
            "hours": hours,
            "device_hours": None if hours is None else hours * self.devices,
        }


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of work on devices that share it."""

    device: Device
    efficiency: Efficiency  # the share of the device's figures that work gets
    sharing: Sharing  # how many devices there are, and what each has of the weights

    def products(self, flops: float, b: int) -> float:
        """Seconds of matrix products that all ranks share. b: bytes of a number."""
        peak = self.device.bf16_flops if b == 2 else self.device.float32_flops
        return flops / (peak * self.efficiency.products * self.sharing.ranks)

    def as_products(self, flops: ForwardFlops, *, head: bool = True) -> float:
        """FLOPs of matrix products that take as long as a forward pass: attention is slower than
        products, and so its FLOPs count more. head: with the output head.
        """
        body = flops.body + flops.attention / self.efficiency.attention
        return body + (flops.head if head else 0.0)

    def between(self, shape: ModelShape, tokens: float, b: int) -> float:
        """Seconds of what layers do between products, in a forward pass that all ranks share. Small
        models spend a larger part of their time on it: it grows with a layer's width, products
        with its square.
        """
        written = 5 * shape.hidden_size + 2 * (shape.query_size + shape.key_size)
        numbers = tokens * shape.layers * (written + 4 * shape.intermediate_size)
        bandwidth = self.device.bandwidth * self.efficiency.between
        return MOVES * numbers * b / (bandwidth * self.sharing.ranks)

    def reads(self, count: float) -> float:
        """Seconds in which one device reads or writes `count` bytes of its memory."""
        return count / (self.device.bandwidth * self.efficiency.decoding)

    def sends(self, count: float) -> float:
        """Seconds in which every rank sends `count` bytes."""
        link = self.device.link_bytes_per_second * self.efficiency.link
        return count / link if link else 0.0


def timing(
    recipe: Recipe,
    geometry: BatchGeometry,
    roles: tuple[PlannedRole, ...],
    sizes: Sizes,
    lengths: RowLengths,
    costs: CostModel,
    places: EnginePlaces,
) -> Timing:
    """The time of a run that has the machine to itself. Evaluations are not counted. Neither are
    saves, which are written during the next step.
    """
    step: dict[str, float] = {}
    once: dict[str, float] = {}
    samples = Samples.of(recipe, geometry, lengths)
    if isinstance(recipe, RLRecipe):
        step["sample"] = _sampling(recipe, geometry, roles[0], sizes, lengths, costs, places)
        readers = list(_readers(recipe, geometry, roles))
        step["score"] = sum(_forward(role, samples, sizes, costs) for role in readers)
        step["publish"] = publish_seconds(recipe, roles[0], costs, places)
    elif ("reference", "model") in recipe.loaded_models:
        reference = roles[-1] if roles[-1].name == "reference" else roles[0]
        once["reference"] = (geometry.steps or 0) * _forward(reference, samples, sizes, costs)
    step["update"] = sum(
        _updating(role, samples, geometry, sizes, costs)
        for role in roles
        if role.learner is not None
    )
    return Timing(step, geometry.steps, once, recipe.learner.ranks + places.own_cards)


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a step as a forward pass computes them, over all ranks."""

    tokens: float  # computed tokens
    squares: float  # squared tokens of sequences, to which attention's cost is proportional
    learned: float  # tokens of answers
    # Micro-batches of all ranks, where batches are cut by samples; None: they are cut by tokens.
    micro_batches: float | None = None

    @classmethod
    def of(cls, recipe: Recipe, geometry: BatchGeometry, lengths: RowLengths) -> "Samples":
        """The samples of one step. A prompt is computed once for its answers, and for a pair's."""
        answers = recipe.answers_per_prompt
        groups = geometry.samples_per_step / (geometry.n_samples_per_prompt or 1)
        size = geometry.micro_train_batch_size
        return cls(
            groups * lengths.computed(answers),
            groups * lengths.squares(answers),
            groups * answers * lengths.answer,
            None if size is None else geometry.samples_per_step / size,
        )


def _readers(
    recipe: RLRecipe, geometry: BatchGeometry, roles: tuple[PlannedRole, ...]
) -> Iterator[PlannedRole]:
    """The roles that compute logprobs or values of a step's samples before the update."""
    for role in roles:
        needs = recipe.algorithm.needs()
        several = geometry.updates_per_step > 1 and not needs.sampled_is_old
        needed = needs.old_logprobs or several
        if role.name != "policy" or needed:
            yield role


def _flops(role: PlannedRole, samples: Samples, costs: CostModel) -> float:
    """FLOPs of one forward pass over a step's samples, as `CostModel.as_products` counts them."""
    flops = role.shape.flops(samples.tokens, samples.squares, samples.learned)
    return costs.as_products(flops, head=not role.scores)


def _computing(role: PlannedRole, samples: Samples, times: int, costs: CostModel) -> float:
    """Seconds of `times` forward passes over a step's samples, communication apart."""
    b = width(role.model.dtype, cpu=costs.device.is_cpu)
    between = costs.between(role.shape, samples.tokens, b)
    return times * (costs.products(_flops(role, samples, costs), b) + between)


def _forward(role: PlannedRole, samples: Samples, sizes: Sizes, costs: CostModel) -> float:
    b = width(role.model.dtype, cpu=costs.device.is_cpu)
    passes = _passes(samples, sizes, costs)
    seconds = _computing(role, samples, 1, costs)
    return seconds + passes * (_overhead(role.shape, costs) + _gathering(role, b, costs))


def _overhead(shape: ModelShape, costs: CostModel) -> float:
    """Seconds of overhead of one pass over all layers, whatever the number of tokens."""
    return costs.efficiency.overhead * shape.layers


def _passes(samples: Samples, sizes: Sizes, costs: CostModel) -> float:
    """Micro-batches that one rank computes of a step's samples. Where batches are cut by samples,
    short rows make as many micro-batches as long ones, and each gathers all weights under ZeRO-3.
    """
    if samples.micro_batches is not None:
        return max(1.0, samples.micro_batches / costs.sharing.replicas)
    return max(1.0, samples.tokens / costs.sharing.replicas / sizes.micro_tokens)


def _gathering(role: PlannedRole, b: int, costs: CostModel) -> float:
    """Seconds in which sharded weights are gathered for one pass, layer by layer (ZeRO-3)."""
    return _all_gather(role, b, costs) if costs.sharing.gathers else 0.0


def _all_gather(role: PlannedRole, b: int, costs: CostModel) -> float:
    """Seconds of one all-gather of the weights; frozen ones are sharded under ZeRO-3 alone."""
    sharing = costs.sharing
    count = role.parameters if sharing.gathers else role.trained
    size = count * b / sharing.tensor
    from_host = size / sharing.divided / HOST_LINK if sharing.offloads else 0.0
    return from_host + costs.sends(size * (1 - 1 / sharing.divided))


def _updating(
    role: PlannedRole,
    samples: Samples,
    geometry: BatchGeometry,
    sizes: Sizes,
    costs: CostModel,
) -> float:
    """Seconds of all updates of a step: products, gathers, sums over ranks, the optimizer's step.

    The backward pass costs two forward passes, and one where the weights are frozen under an
    adapter. With checkpointing the forward pass is computed twice.
    """
    b = width(role.model.dtype, cpu=costs.device.is_cpu)
    model = role.model
    times = (2 if model.lora else 3) + (1 if model.gradient_checkpointing else 0)
    passes = _passes(samples, sizes, costs)
    seconds = _computing(role, samples, times, costs)
    seconds += passes * 2 * (_overhead(role.shape, costs) + _gathering(role, b, costs))
    seconds *= geometry.epochs_per_rollout
    micro_batches = passes * geometry.epochs_per_rollout / geometry.updates_per_step
    return seconds + geometry.updates_per_step * _stepping(role, micro_batches, costs)


def _stepping(role: PlannedRole, micro_batches: float, costs: CostModel) -> float:
    """Seconds of one optimizer step: gradients are summed over ranks; weights and moments are read
    and written.
    """
    sharing, trained = costs.sharing, role.trained
    moved = trained * (3 * 4 + 4 * 4) / sharing.tensor / sharing.divided
    seconds = moved / HOST_MEMORY if sharing.offloads else costs.reads(moved)
    together = sharing.replicas * sharing.context
    if together == 1:
        return seconds
    gradients = costs.sends(trained * GRADIENT / sharing.tensor * (1 - 1 / together))
    if sharing.divided == 1:  # all-reduce: gradients are summed and sent back to all ranks
        return seconds + 2 * gradients
    scattered = micro_batches if sharing.scatters else 1.0
    if sharing.offloads:
        gradients += trained * GRADIENT / sharing.tensor / sharing.divided / HOST_LINK
    b = width(role.model.dtype, cpu=costs.device.is_cpu)
    weights = 0.0 if sharing.gathers else _all_gather(role, b, costs)
    return seconds + scattered * gradients + weights


def _sampling(
    recipe: RLRecipe,
    geometry: BatchGeometry,
    policy: PlannedRole,
    sizes: Sizes,
    lengths: RowLengths,
    costs: CostModel,
    places: EnginePlaces,
) -> float:
    """Seconds in which each engine samples its share of the prompts, all of them at once.

    Every prompt is computed once. Then each pass reads the weights, and of every sequence it reads
    keys and values and computes one token; on a CPU core the times of the two add up
    (benchmarks.growth). Cards of one engine divide all of that and add up their sums.
    """
    if sizes.engine is None:
        return 0.0
    shape, answers = policy.shape, recipe.answers_per_prompt
    cpu, each = costs.device.is_cpu, places.each
    b = engine_width(recipe.rollout, policy, cpu=cpu)
    longest = recipe.sampled_tokens
    share = SampledShare.of(geometry, lengths, sizes.engine, places, answers, longest)
    costs = replace(costs, sharing=replace(ALONE, tensor=each))
    tokens = share.prompts * lengths.prompt
    first = shape.flops(tokens, share.prompts * lengths.prompt**2, share.prompts)
    seconds = costs.products(costs.as_products(first), b) + costs.between(shape, tokens, b)
    seconds += costs.sends(tokens * reduced_bytes(shape, b, each))
    overhead = _overhead(shape, costs)
    if not cpu and not (places.is_vllm and recipe.rollout.vllm.eager):
        overhead *= GRAPHED
    one_pass = costs.reads(shape.parameters() * b / each) + overhead
    seconds += share.passes * one_pass
    seen = lengths.prompt + lengths.answer / 2
    shared = 1 if places.is_vllm else min(answers, LANES)
    held = (lengths.prompt / shared + lengths.answer / 2) * shape.cache_bytes_per_token(b)
    one_token = costs.reads(held / each) + costs.sends(reduced_bytes(shape, b, each))
    one_token += costs.products(costs.as_products(shape.flops(1, 2 * seen, 1)), b)
    return seconds + share.sequences * share.mean * one_token
