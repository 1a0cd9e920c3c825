"""Time of a step, phase by phase: sampling, scores, logprobs and values, updates, a publish.

Roles on the same ranks work one after the other, those on ranks of their own at the same time. How
long a role's passes take is in plan.pass_time.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from postgrad.core.batch import BatchGeometry
from postgrad.plan import exchange
from postgrad.plan.adapters import start_seconds
from postgrad.plan.costs import CostModel
from postgrad.plan.engines import EnginePlaces
from postgrad.plan.lengths import RowLengths
from postgrad.plan.offload import HostShare
from postgrad.plan.pass_time import Samples, forward_seconds, optimizer_bytes, update_seconds
from postgrad.plan.publishing import PlannedPublish, planned_publish
from postgrad.plan.roles import PlannedRole, beside_student
from postgrad.plan.sampling import EngineCosts
from postgrad.plan.sizes import PlannedRanks, Sizes
from postgrad.recipe.recipe import Recipe, RLRecipe, SFTRecipe

REWARD = "reward"  # the phase in which the reward model of [[rewards]] computes
START = "start of the adapter"  # what PiSSA computes once, before the first step and at a resume


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
    offload: HostShare | None = None  # of learners that leave their cards to an engine

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
        if self.offload is not None and self.offload.bytes:
            yield self.offload.note

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
    once, step = _started(ranks, costs), dict[str, float]()
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
    elif (name := reads_once(recipe)) and (batches := _batches_once(recipe, geometry, lengths)):
        there = ranks[-1]
        on_them = replace(costs, sharing=there.sharing)
        once[name] = batches * forward_seconds(there.roles[-1], samples, there.sizes, on_them)

    def updating(role: PlannedRole, sizes: Sizes, costs: CostModel) -> float:
        updates = update_seconds(role, samples, geometry, sizes, costs) if role.learner else 0.0
        passes = _passes_beside(recipe, role)
        return updates + (passes * forward_seconds(role, samples, sizes, costs) if passes else 0.0)

    def on_host(role: PlannedRole, _: Sizes, costs: CostModel) -> float:
        if not (role.learner and costs.steps_on_host):
            return 0.0
        return geometry.updates_per_step * costs.steps(optimizer_bytes(role, costs))

    step["update"] = _at_once(ranks, costs, updating)
    exchanged = _exchanged(recipe, geometry, ranks[0], samples.tokens, costs)
    return Timing(
        step, geometry.steps, once, devices, recipe.samples_while_learning, staleness,
        longest, publish, _at_once(ranks, costs, on_host), exchanged,
    )  # fmt: skip


def _started(ranks: Sequence[PlannedRanks], costs: CostModel) -> dict[str, float]:
    """Seconds until adapters have begun; without an entry on GPUs, where nothing was measured."""
    seconds = _at_once(ranks, costs, _starting) if costs.device.is_cpu else 0.0
    return {START: seconds} if seconds else {}


def _starting(role: PlannedRole, _: Sizes, costs: CostModel) -> float:
    """Seconds until an adapter of PiSSA has begun, on every rank for itself."""
    lora = role.model.lora if role.learner else None
    return 0.0 if lora is None else start_seconds(role.shape, lora, costs.device.float32_flops)


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


def reads_once(recipe: Recipe) -> str | None:
    """The frozen role that reads all rows before the first update; None: there is none."""
    if recipe.trains_on_rollouts or recipe.reference_moves or beside_student(recipe):
        return None
    there = (name for name in ("reference", "teacher") if (name, "model") in recipe.loaded_models)
    return next(there, None)


def _batches_once(recipe: Recipe, geometry: BatchGeometry, lengths: RowLengths) -> float | None:
    """How many updates' samples the role reads that reads all rows once: each row, however many
    epochs the run has, and for KTO the prompts of every update with other answers. Rows of unknown
    number are assumed to be those of all steps; None where that is unknown too.
    """
    steps, rows = geometry.steps, lengths.rows
    if steps is None:
        return None
    mixed = steps if recipe.algorithm.needs().mismatched else 0
    return mixed + (steps if rows is None else rows / geometry.train_batch_size)


def _passes_beside(recipe: Recipe, role: PlannedRole) -> int:
    """Forward passes of a role over an update's samples within its phase, beside the update itself:
    of SFT's teacher; of preferences those of a reference that follows the policy, and the policy's
    own before the update (AOT, WPO, KTO). Those of RL are of the phase "score".
    """
    if isinstance(recipe, RLRecipe):
        return 0
    if role.name == "teacher":
        return int(beside_student(recipe))
    needs = recipe.algorithm.needs()
    if role.name == "policy":
        return len(needs.own_temperatures) + needs.mismatched
    return (1 + needs.mismatched) * role.follows


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
        return forward_seconds(role, groups, sizes, costs) if role.judges else 0.0

    # each teacher reads the samples of its datasets: alike many, for want of knowing
    teachers = sum(role.name.startswith("teacher") for role in roles)

    def reading(role: PlannedRole, sizes: Sizes, costs: CostModel) -> float:
        if role.name not in passes:
            return 0.0
        seconds = passes[role.name] * forward_seconds(role, samples, sizes, costs)
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


def _readers(
    recipe: RLRecipe, geometry: BatchGeometry, roles: Sequence[PlannedRole]
) -> Iterator[str]:
    """The roles that compute logprobs or values of a step's samples before the update, once for
    each pass over them: for those of the policy see training.rl.
    """
    needs, lora = recipe.algorithm.needs(), recipe.model.lora
    dropout = lora is not None and lora.dropout > 0.0
    logprobs = needs.reads_old(geometry.updates_per_step) or dropout
    of_own = {"policy": logprobs + needs.old_entropy, "reference": int(needs.reference)}
    for role in roles:
        yield from [role.name] * of_own.get(role.name, int(not role.judges))
        if role.name == needs.self_graded:
            yield role.name
