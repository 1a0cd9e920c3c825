"""Time of a step, phase by phase: sampling, scores, logprobs and values, updates, a publish.

Roles on the same ranks work one after the other, those on ranks of their own at the same time. How
long what takes, in FLOPs and bytes, is said by plan.costs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from postgrad.core.batch import BatchGeometry
from postgrad.models.towers import ImageCost
from postgrad.plan import exchange
from postgrad.plan.costs import CostModel
from postgrad.plan.engines import EnginePlaces
from postgrad.plan.host_inputs import waited_seconds
from postgrad.plan.lengths import RowLengths
from postgrad.plan.publishing import PlannedPublish, planned_publish
from postgrad.plan.resting import HostShare
from postgrad.plan.roles import PlannedRole, adapter_flops, beside_student
from postgrad.plan.sampling import EngineCosts
from postgrad.plan.sizes import PlannedRanks, Sizes, width
from postgrad.plan.towers import tower_seconds
from postgrad.recipe.placement import overlaps
from postgrad.recipe.recipe import Recipe, RLRecipe, SFTRecipe

GRADIENT = 4  # bytes: ranks add gradients in float32
REWARD = "reward"  # the phase in which the reward model of [[rewards]] computes


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a run takes."""

    step: Mapping[str, float]  # seconds of one step by phase: "sample", "score", "update"
    steps: int | None  # of the run; None: only the data says how many
    once: Mapping[str, float]  # seconds of what comes once, before the first step
    devices: int  # all cards that the run has, idle ones too
    overlaps: bool = False  # engines sample later steps while learners work on this one
    staleness: int = 0  # steps that samples may be ahead: rollout.max_staleness
    longest: float = 0.0  # seconds in which the longest answer is decoded
    publish: PlannedPublish | None = None  # of the job that samples; before a calibration
    on_host: float = 0.0  # seconds of "update" in which optimizers step in the host's memory
    exchanged: float = 0.0  # bytes of tokens that a rank sends to those that share its experts
    resting: HostShare | None = None  # of learners that leave their cards to an engine

    @property
    def step_seconds(self) -> float:
        """Seconds of one step of the loop. Where engines and learners work at once it takes the
        longer of the two, and the publish, for which both wait.
        """
        sampled, published = self.step.get("sample", 0.0), self.step.get("publish", 0.0)
        learned = sum(self.step.values()) - sampled - published
        working = max(sampled, learned) if self.overlaps else sampled + learned
        return max(working + published, self.floor)

    @property
    def floor(self) -> float:
        """Seconds of a step that its longest answer allows with samples ahead, however many cards
        there are; without them, sampling has the longest answer in it already.
        """
        if not self.staleness:
            return 0.0
        learned = sum(self.step.values()) - self.step.get("sample", 0.0)
        return step_floor(self.longest, learned, self.staleness)

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

    @property
    def offload_notes(self) -> Iterator[str]:
        """What is in the host's memory for the whole run, or while an engine samples."""
        if self.on_host:
            yield CostModel.note_on_host(self.on_host)
        if self.resting is not None and self.resting.bytes:
            yield self.resting.note

    def to_json(self) -> dict[str, Any]:
        """The value of "time" in plan.json: seconds, hours and device-hours."""
        hours = self.hours
        return {
            "step_seconds": {name: round(value, 6) for name, value in self.step.items()},
            "once_seconds": {name: round(value, 6) for name, value in self.once.items()},
            "hours": hours,
            "device_hours": None if hours is None else hours * self.devices,
            "exchanged_bytes": round(self.exchanged),
        }


def step_floor(longest: float, learned: float, staleness: int) -> float:
    """Least seconds of a step (docs/async.md): a ticket that starts with version v is waited for
    `staleness` + 1 steps later. longest: seconds of the longest answer. learned: of what a step
    does beside sampling.
    """
    return (longest + learned) / (staleness + 1)


def timing(
    recipe: Recipe,
    geometry: BatchGeometry,
    ranks: Sequence[PlannedRanks],
    lengths: RowLengths,
    costs: CostModel,
    places: EnginePlaces,
    devices: int,
) -> Timing:
    """The time of a run that has the machine to itself. Evaluations are not counted. Neither are
    saves, which are written during the next step. ranks: the policy's first. costs: of these.
    devices: all cards of the run.
    """
    once, step = dict[str, float](), dict[str, float]()
    samples = Samples.of(recipe, geometry, lengths)
    staleness, longest, publish = 0, 0.0, None
    if isinstance(recipe, RLRecipe):
        policy = ranks[0].roles[0]
        engine = EngineCosts.of(recipe, policy, ranks[0].sizes, lengths, costs, places)
        step["sample"] = engine.sampling(geometry) if engine else 0.0
        step |= _reading(recipe, geometry, ranks, samples, costs)
        publish = planned_publish(recipe, policy, costs, places)
        step["publish"] = publish.seconds
        staleness, longest = recipe.rollout.max_staleness, engine.longest() if engine else 0.0
    elif isinstance(recipe, SFTRecipe) and recipe.algorithm.needs().own_answers:
        step |= _answering(recipe, geometry, ranks[0], lengths, costs, places)
    elif (name := _read_once(recipe)) is not None:
        there = ranks[-1]
        on_them = replace(costs, sharing=there.sharing)
        each = _forward(there.roles[-1], samples, there.sizes, on_them)
        once[name] = (geometry.steps or 0) * each

    def updating(role: PlannedRole, sizes: Sizes, costs: CostModel) -> float:
        if role.learner:
            return _updating(role, samples, geometry, sizes, costs)
        taught = role.name == "teacher" and beside_student(recipe)
        return _forward(role, samples, sizes, costs) if taught else 0.0

    def on_host(role: PlannedRole, sizes: Sizes, costs: CostModel) -> float:
        del sizes
        there = role.learner and costs.steps_on_host
        return geometry.updates_per_step * costs.steps(_moved(role, costs)) if there else 0.0

    step["update"] = _at_once(ranks, costs, updating)
    exchanged = _exchanged(recipe, geometry, ranks[0], samples.tokens, costs)
    return Timing(
        step, geometry.steps, once, devices, overlaps(recipe), staleness, longest, publish,
        _at_once(ranks, costs, on_host), exchanged,
    )  # fmt: skip


def _exchanged(
    recipe: Recipe, geometry: BatchGeometry, ranks: PlannedRanks, tokens: float, costs: CostModel
) -> float:
    """Bytes that each rank sends in a step to those that share its experts."""
    reading = _readers(recipe, geometry, ranks.roles) if isinstance(recipe, RLRecipe) else ()
    readers = (*reading, "teacher") if beside_student(recipe) else tuple(reading)
    return exchange.exchanged_bytes(ranks, readers, tokens, geometry, cpu=costs.device.is_cpu)


def _answered_rows(recipe: Recipe, geometry: BatchGeometry) -> int:
    return ceil(recipe.own_answers * geometry.train_batch_size)


def answered_tokens(recipe: Recipe, geometry: BatchGeometry) -> int:
    """Most tokens of the answers that the policy gives in a step in place of the rows'."""
    rollout = recipe.rollout_settings
    return 0 if rollout is None else _answered_rows(recipe, geometry) * rollout.max_new_tokens


def _answering(
    recipe: SFTRecipe,
    geometry: BatchGeometry,
    ranks: PlannedRanks,
    lengths: RowLengths,
    costs: CostModel,
    places: EnginePlaces,
) -> dict[str, float]:
    """Seconds of a publish and of the answers of the rows that the policy answers itself, each as
    long as may be.
    """
    answered = _answered_rows(recipe, geometry)
    lengths = replace(lengths, answer=recipe.rollout.max_new_tokens)
    policy = ranks.roles[0]
    engine = EngineCosts.of(recipe, policy, ranks.sizes, lengths, costs, places)
    sampled = engine.sampling(replace(geometry, rollout_batch_size=answered)) if engine else 0.0
    return {"sample": sampled, "publish": planned_publish(recipe, policy, costs, places).seconds}


def _read_once(recipe: Recipe) -> str | None:
    """The frozen role that reads all rows before the first update; None: there is none."""
    for name in ("reference", "teacher"):
        if (name, "model") in recipe.loaded_models and not beside_student(recipe):
            return name
    return None


def _reading(
    recipe: RLRecipe,
    geometry: BatchGeometry,
    ranks: Sequence[PlannedRanks],
    samples: "Samples",
    costs: CostModel,
) -> dict[str, float]:
    """Seconds of the passes before the update: of the reward model, group by group while samples
    are drawn, which wait for it; and of the roles that compute columns.
    """
    roles = [role for there in ranks for role in there.roles]
    groups = replace(samples, calls=recipe.batch.rollout_batch_size)
    passes = Counter(_readers(recipe, geometry, roles))

    def judging(role: PlannedRole, sizes: Sizes, costs: CostModel) -> float:
        return _forward(role, groups, sizes, costs) if role.judges else 0.0

    # each teacher reads the samples of its datasets: alike many, for want of knowing
    teachers = sum(role.name.startswith("teacher") for role in roles)

    def reading(role: PlannedRole, sizes: Sizes, costs: CostModel) -> float:
        if role.name not in passes:
            return 0.0
        seconds = passes[role.name] * _forward(role, samples, sizes, costs)
        return seconds / teachers if role.name.startswith("teacher") else seconds

    judged = {REWARD: _at_once(ranks, costs, judging)} if recipe.asks_reward_model else {}
    return judged | {"score": _at_once(ranks, costs, reading)}


def _at_once(
    ranks: Sequence[PlannedRanks],
    costs: CostModel,
    seconds: Callable[[PlannedRole, Sizes, CostModel], float],
) -> float:
    """Seconds until all ranks have done their roles' work, each one role after the other. All are
    asked before any is waited for (training.rl).
    """
    return max(
        sum(
            seconds(role, there.sizes, replace(costs, sharing=there.sharing))
            for role in there.roles
        )
        for there in ranks
    )


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a step as a forward pass computes them, over all ranks."""

    tokens: float  # computed tokens
    squares: float  # squared tokens of sequences, to which attention's cost is proportional
    learned: float  # tokens of answers
    # Micro-batches of all ranks, where batches are cut by samples; None: they are cut by tokens.
    micro_batches: float | None = None
    calls: int = 1  # in which roles are asked for them
    images: ImageCost | None = None  # those of all rows; None: there are none

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
            images=None if lengths.images is None else lengths.images.times(groups),
        )


def _readers(
    recipe: RLRecipe, geometry: BatchGeometry, roles: Sequence[PlannedRole]
) -> Iterator[str]:
    """The roles that compute logprobs or values of a step's samples before the update, once for
    each pass over them.
    """
    needs = recipe.algorithm.needs()
    several = needs.ratio and geometry.updates_per_step > 1 and not needs.sampled_is_old
    of_own = {
        "policy": needs.old_logprobs or needs.old_entropy or several,
        "reference": needs.reference,
    }
    for role in roles:
        if of_own.get(role.name, not role.judges):
            yield role.name
        if role.name == needs.self_graded:
            yield role.name


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


def _forward(role: PlannedRole, samples: Samples, sizes: Sizes, costs: CostModel) -> float:
    """Seconds of one forward pass over a step's samples. Weights that rest in the host's memory
    come to the device once a call.
    """
    b = width(role.model.dtype, cpu=costs.device.is_cpu)
    passes = _passes(samples, sizes, costs)
    seconds = _computing(role, samples, 1, costs)
    seconds += costs.sends(exchange.sent_bytes(role, samples.tokens, b, costs.sharing))
    seconds += tower_seconds(role, samples.images, b, costs, updating=False, passes=passes)
    if role.rests and not costs.sharing.gathers:
        seconds += costs.copies(samples.calls * role.parameters * b)
    return seconds + passes * (costs.overhead(role.shape) + _gathering(role, b, costs))


def _passes(samples: Samples, sizes: Sizes, costs: CostModel) -> float:
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
    offloads = sharing.offloads or role.rests
    from_host = costs.copies(size / sharing.divided) if offloads else 0.0
    others = exchange.lacking(role, sharing) * b if count == role.parameters else 0.0
    return from_host + costs.sends(size * (1 - 1 / sharing.divided) - others)


def _updating(
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
    passes = _passes(samples, sizes, costs)
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
    seconds = costs.steps(_moved(role, costs))
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


def _moved(role: PlannedRole, costs: CostModel) -> float:
    """Bytes that an optimizer step of one rank reads and writes: weights and moments, gradients."""
    sharing = costs.sharing
    trained = role.trained * exchange.trained_share(role, sharing)
    return trained * (3 * 4 + 4 * 4) / sharing.divided
