"""Time of a step, phase by phase, from FLOPs, bytes and the speed of links.

A matrix product runs at a share of the device's peak; what layers do between products, and
decoding, which reads weights and cache, run at a share of its bandwidth; ranks exchange at a share
of their link's. The shares are `Efficiency`, guesses with a stated origin until `postgrad plan
--calibrate` learns a machine's own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from postgrad.core.batch import BatchGeometry
from postgrad.models.shapes import ForwardFlops, ModelShape
from postgrad.plan.efficiency import Efficiency
from postgrad.plan.hardware import Device
from postgrad.plan.lengths import Lengths
from postgrad.plan.memory import engine_width
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sharing import ALONE, Sharing
from postgrad.plan.sizes import Sizes, width
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.local.shared import LANES

GRADIENT = 4  # bytes: ranks add gradients in float32
# How often each number that a layer writes goes to or comes from memory in a pass: it is written
# and read, and norms, rotations and gates make more of it that is gone again. benchmarks.growth.
MOVES = 6
# Guesses where state lies with the host: PCIe 4.0 x16, as copies from pinned memory get it, and a
# rank's share of a server's memory bandwidth while the optimizer steps there.
HOST_LINK, HOST_MEMORY = 25e9, 20e9


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step by phase, of the whole run, and of what comes once, before it."""

    step: Mapping[str, float]
    steps: int | None
    once: Mapping[str, float]
    devices: int

    @property
    def step_seconds(self) -> float:
        """One pass of the loop."""
        return sum(self.step.values())

    @property
    def hours(self) -> float | None:
        """The whole run; None where its steps are not known."""
        if self.steps is None:
            return None
        return (self.steps * self.step_seconds + sum(self.once.values())) / 3600

    def to_json(self) -> dict[str, Any]:
        """Seconds, hours and device-hours."""
        hours = self.hours
        return {
            "step_seconds": {name: round(value, 6) for name, value in self.step.items()},
            "once_seconds": {name: round(value, 6) for name, value in self.once.items()},
            "hours": hours,
            "device_hours": None if hours is None else hours * self.devices,
        }


@dataclass(frozen=True, slots=True)
class Machine:
    """What computes, how well, and how it is divided."""

    device: Device
    efficiency: Efficiency
    sharing: Sharing

    def alone(self) -> "Machine":
        """One device of it."""
        return replace(self, sharing=ALONE)

    def products(self, flops: float, b: int) -> float:
        """Seconds of matrix products that all ranks share; b: bytes of a number."""
        peak = self.device.bf16_flops if b == 2 else self.device.float32_flops
        return flops / (peak * self.efficiency.products * self.sharing.ranks)

    def as_products(self, flops: ForwardFlops, *, head: bool = True) -> float:
        """Of a forward pass, attention's counted as often as they are slower than products."""
        whole = flops.body + flops.attention / self.efficiency.attention
        return whole + (flops.head if head else 0.0)

    def between(self, shape: ModelShape, tokens: float, b: int) -> float:
        """Seconds of what layers do between products in a forward pass that all ranks share. Small
        models spend more of their time on it: it grows with a layer's width, products with its
        square.
        """
        written = 5 * shape.hidden_size + 2 * (shape.query_size + shape.key_size)
        numbers = tokens * shape.layers * (written + 4 * shape.intermediate_size)
        bandwidth = self.device.bandwidth * self.efficiency.between
        return MOVES * numbers * b / (bandwidth * self.sharing.ranks)

    def reads(self, count: float) -> float:
        """Seconds in which one device reads or writes that many bytes."""
        return count / (self.device.bandwidth * self.efficiency.decoding)

    def sends(self, count: float) -> float:
        """Seconds in which every rank hands on that many bytes."""
        link = self.device.link_bytes_per_second * self.efficiency.link
        return count / link if link else 0.0


def timing(
    recipe: Recipe,
    geometry: BatchGeometry,
    roles: tuple[PlannedRole, ...],
    sizes: Sizes,
    lengths: Lengths,
    machine: Machine,
) -> Timing:
    """Of a run that has the machine to itself. Evaluations are left out, and saves, which are
    written behind the next step.
    """
    step: dict[str, float] = {}
    once: dict[str, float] = {}
    samples = Samples.of(recipe, geometry, lengths)
    if isinstance(recipe, RLRecipe):
        step["sample"] = _sampling(recipe, geometry, roles[0], sizes, lengths, machine)
        readers = list(_readers(recipe, geometry, roles))
        step["score"] = sum(_forward(role, samples, sizes, machine) for role in readers)
    elif ("reference", "model") in recipe.loaded_models:
        reference = roles[-1] if roles[-1].name == "reference" else roles[0]
        once["reference"] = (geometry.steps or 0) * _forward(reference, samples, sizes, machine)
    step["update"] = sum(
        _updating(role, samples, geometry, sizes, machine)
        for role in roles
        if role.learner is not None
    )
    return Timing(step, geometry.steps, once, machine.sharing.ranks)


@dataclass(frozen=True, slots=True)
class Samples:
    """What a step's samples are to a forward pass, over all ranks. micro_batches: where they are
    cut by samples and not by tokens.
    """

    tokens: float
    squares: float
    learned: float
    micro_batches: float | None = None

    @classmethod
    def of(cls, recipe: Recipe, geometry: BatchGeometry, lengths: Lengths) -> "Samples":
        """Prompts stand once for their answers, and for the two of a pair."""
        answers = recipe.answers_per_prompt
        of_a_sample = geometry.n_samples_per_prompt or 1
        groups = geometry.samples_per_step / of_a_sample
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
    """Who reads a step's samples before anybody learns from them."""
    for role in roles:
        needed = recipe.algorithm.needs().old_logprobs or geometry.updates_per_step > 1
        if role.name != "policy" or needed:
            yield role


def _flops(role: PlannedRole, samples: Samples, machine: Machine) -> float:
    """Of one forward pass over a step's samples, as many as products do in the same time."""
    found = role.shape.flops(samples.tokens, samples.squares, samples.learned)
    return machine.as_products(found, head=not role.scores)


def _computing(role: PlannedRole, samples: Samples, times: int, machine: Machine) -> float:
    """Seconds of as many forward passes over a step's samples."""
    b = width(role.model.dtype, cpu=machine.device.is_cpu)
    between = machine.between(role.shape, samples.tokens, b)
    return times * (machine.products(_flops(role, samples, machine), b) + between)


def _forward(role: PlannedRole, samples: Samples, sizes: Sizes, machine: Machine) -> float:
    b = width(role.model.dtype, cpu=machine.device.is_cpu)
    passes = _passes(samples, sizes, machine)
    seconds = _computing(role, samples, 1, machine)
    return seconds + passes * (_overhead(role.shape, machine) + _gathering(role, b, machine))


def _overhead(shape: ModelShape, machine: Machine) -> float:
    """Seconds of one pass over all layers that no figure of a device says."""
    return machine.efficiency.overhead * shape.layers


def _passes(samples: Samples, sizes: Sizes, machine: Machine) -> float:
    """Micro-batches that one rank computes of a step's samples. Those of one short row each are as
    many as those of one long row, and each gathers all weights under ZeRO-3.
    """
    if samples.micro_batches is not None:
        return max(1.0, samples.micro_batches / machine.sharing.replicas)
    return max(1.0, samples.tokens / machine.sharing.replicas / sizes.micro_tokens)


def _gathering(role: PlannedRole, b: int, machine: Machine) -> float:
    """Seconds in which divided weights come together for one pass, layer by layer."""
    return _coming(role, b, machine) if machine.sharing.gathers else 0.0


def _coming(role: PlannedRole, b: int, machine: Machine) -> float:
    """Seconds in which they come together once; frozen ones are whole but for ZeRO-3."""
    sharing = machine.sharing
    count = role.parameters if sharing.gathers else role.trained
    own = count * b / sharing.tensor
    from_host = own / sharing.divided / HOST_LINK if sharing.offloads else 0.0
    return from_host + machine.sends(own * (1 - 1 / sharing.divided))


def _updating(
    role: PlannedRole,
    samples: Samples,
    geometry: BatchGeometry,
    sizes: Sizes,
    machine: Machine,
) -> float:
    """Of all updates of a step: products, gathers, sums over ranks, the optimizer's step.

    Backward costs twice the forward, once where the weights are frozen under an adapter; the
    activations that were not kept cost the forward again.
    """
    b = width(role.model.dtype, cpu=machine.device.is_cpu)
    model = role.model
    times = (2 if model.lora else 3) + (1 if model.gradient_checkpointing else 0)
    passes = _passes(samples, sizes, machine)
    seconds = _computing(role, samples, times, machine)
    seconds += passes * 2 * (_overhead(role.shape, machine) + _gathering(role, b, machine))
    seconds *= geometry.epochs_per_rollout
    micro_batches = passes * geometry.epochs_per_rollout / geometry.updates_per_step
    return seconds + geometry.updates_per_step * _stepping(role, micro_batches, machine)


def _stepping(role: PlannedRole, micro_batches: float, machine: Machine) -> float:
    """One optimizer step: gradients are added over ranks, weights and moments read and written."""
    sharing, trained = machine.sharing, role.trained
    moved = trained * (3 * 4 + 4 * 4) / sharing.tensor / sharing.divided
    seconds = moved / HOST_MEMORY if sharing.offloads else machine.reads(moved)
    together = sharing.replicas * sharing.context
    if together == 1:
        return seconds
    gradients = machine.sends(trained * GRADIENT / sharing.tensor * (1 - 1 / together))
    if sharing.divided == 1:  # gradients are summed, and spread
        return seconds + 2 * gradients
    scattered = micro_batches if sharing.scatters else 1.0
    if sharing.offloads:
        gradients += trained * GRADIENT / sharing.tensor / sharing.divided / HOST_LINK
    b = width(role.model.dtype, cpu=machine.device.is_cpu)
    weights = 0.0 if sharing.gathers else _coming(role, b, machine)
    return seconds + scattered * gradients + weights


def _sampling(
    recipe: RLRecipe,
    geometry: BatchGeometry,
    policy: PlannedRole,
    sizes: Sizes,
    lengths: Lengths,
    machine: Machine,
) -> float:
    """Prompts once each; then one pass a token for as many sequences as there are slots: it reads
    weights, keys and values, and multiplies with them (benchmarks.growth: a core does one after the
    other). The built-in engine is one, on one device, however many ranks train.
    """
    assert sizes.engine is not None
    shape, answers = policy.shape, recipe.batch.n_samples_per_prompt
    b = engine_width(recipe, policy, cpu=machine.device.is_cpu)
    prompts = geometry.rollout_batch_size or 0
    first = shape.flops(prompts * lengths.prompt, prompts * lengths.prompt**2, prompts)
    machine = machine.alone()
    seconds = machine.products(machine.as_products(first), b)
    seconds += machine.between(shape, prompts * lengths.prompt, b)
    sequences = geometry.samples_per_step
    together = min(sequences, sizes.engine.slots)
    passes = lengths.answer * max(1.0, sequences / together)
    seen = lengths.prompt + lengths.answer / 2
    held = together * (lengths.prompt / min(answers, LANES) + lengths.answer / 2)
    one = shape.flops(together, together * 2 * seen, together)
    read = shape.parameters() * b + held * shape.cache_bytes_per_token(b)
    computed = machine.reads(read) + machine.products(machine.as_products(one), b)
    return seconds + passes * (computed + _overhead(shape, machine))
