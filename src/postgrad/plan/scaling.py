"""`postgrad plan --scale`: seconds of a step on more devices, with samples ahead or without."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from postgrad.cluster.settings import PolicyPlacement, RolloutPlacement
from postgrad.core.errors import UsageError
from postgrad.core.members import has_lines, open_lines
from postgrad.core.untrusted import parse_json
from postgrad.observe.console import Console
from postgrad.plan.costs import CostModel
from postgrad.plan.engines import EnginePlaces, engine_width
from postgrad.plan.hardware import efficiency_of, parse_hardware, this_machine
from postgrad.plan.plan import FREE, RunPlan, make_plan
from postgrad.plan.planner import facts_of
from postgrad.plan.sampling import EngineCosts
from postgrad.plan.scale_picture import write_picture
from postgrad.plan.simulate import (
    AnswerLengths,
    BatchLoad,
    Pace,
    Simulated,
    Simulation,
    drawn_lengths,
    recorded_lengths,
)
from postgrad.plan.sizes import ALONE
from postgrad.plan.timing import REWARD, step_floor
from postgrad.recipe.load import load_recipe
from postgrad.recipe.placement import engine_problems
from postgrad.recipe.recipe import RLRecipe
from postgrad.rollout.local.budget import MAX_SLOTS

STALENESS = (0, 1, 2, 4, 8)
SHARES = (0.35, 0.5, 0.65)  # of the devices that have engines, where learner and engines are apart
MEASURED = 6  # steps at least: whole rounds of staleness + 1, after which a run repeats itself
MEAN_SHARE = 0.25  # of max_new_tokens: the mean of answers, where no run says it
WORTH = 1.1  # a staleness is enough where no other is this much faster
LEARNED = (REWARD, "score", "update")  # phases of a step in which the learner works
MOST_DEVICES = 65_536
HEADER = (
    "engines + learner", "stale", "step", "faster", "floor", "empty", "idle", "sent", "age",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scaled:
    """A way to use some devices, and what the simulation says of it."""

    devices: int
    engines: int
    learners: int
    staleness: int
    apart: bool  # engines and learner have devices of their own; else both have all, in turns
    free: bool  # rollout.schedule, where they are apart
    floor: float  # seconds of a step that the longest answer allows, whatever the devices
    simulated: Simulated

    @property
    def schedule(self) -> str:
        """Of the recipe key, where engines and learner are apart."""
        return "free" if self.free else "fixed"

    def row(self, synchronous: float) -> list[str]:
        """Its row of the table. synchronous: seconds of a step of as many devices at 0."""
        result = self.simulated
        return [
            f"{self.engines} + {self.learners} {self.schedule}" if self.apart else "in turns",
            str(self.staleness),
            f"{result.seconds:.3g}",
            f"{synchronous / result.seconds:.2f}x",
            f"{self.floor:.3g}",
            f"{result.engine_idle:.0%}",
            f"{result.learner_idle:.0%}",
            f"{result.publish:.1%}",
            f"{result.age:.1f}",
        ]


def scale(
    path: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    counts: str,
    hardware: str | None = None,
    run: Path | None = None,
    svg: Path | None = None,
) -> dict[str, Any]:
    """Prints a table for each number of devices in `counts` ("8,64,512"), and one of all; the same
    as JSON values.

    hardware: the device; where left out, this machine's. run: a run directory whose samples.jsonl
    says how long answers are; without it they are log-normal. svg: a file for a picture of the last
    table. Raises UsageError for a recipe that does not sample, a wrong count, a run without
    samples, or a file that cannot be written.
    """
    recipe = load_recipe(path, overrides)
    if not isinstance(recipe, RLRecipe):
        raise UsageError(f'--scale simulates job = "rl", and {path} is job = "{recipe.job}"')
    numbers = _counts(counts)
    available = parse_hardware(hardware) if hardware else this_machine()
    planned = make_plan(*facts_of(recipe, available))
    load, most, text = _load(recipe, planned, run)
    console.note(
        f"simulated, on {available.device.name}: steps of {load.groups} x {load.samples} samples, "
        f"{text}; efficiencies are those of the plan, the learner divides without loss"
    )
    ways = [way for devices in numbers for way in _shown(planned, load, most, devices, console)]
    best = fastest(ways)
    title = f"seconds of a step of {path}, the faster way"
    console.table(title, ("devices", *map(str, STALENESS)), seconds_rows(best))
    helps = _helps(best)
    console.note(_enough_devices(helps))
    if any(way.apart for way in ways) and (refusal := _refusal(recipe)):
        console.note(
            f"a learner of its own, with engines that continue, is not supported yet: {refusal}"
        )
    if svg is not None:
        write_picture(svg, f"{path}, {available.device.name}", _curves(best))
        console.note(f"wrote {svg}")
    flags = [*(["--hardware", hardware] if hardware else []), "--scale", counts]
    lengths = ["--lengths", str(run)] if run else []
    command = shlex.join(["postgrad", "plan", str(path), *flags, *lengths, *overrides, "--json"])
    helping = {str(staleness): devices for staleness, devices in helps.items()}
    scaled = [asdict(way) for way in ways]
    return {"command": command, "lengths": text, "devices_that_help": helping, "scale": scaled}


def _shown(
    planned: RunPlan, load: BatchLoad, most: int, devices: int, console: Console
) -> list[Scaled]:
    """Prints the ways to use so many devices, and returns them."""
    ways = list(_ways(planned, load, most, devices))
    synchronous = ways[0].simulated.seconds
    console.table(f"{devices} devices", HEADER, [way.row(synchronous) for way in ways])
    enough = _enough(ways)
    console.note(
        f"{devices} devices: max_staleness = {enough.staleness} is enough, with "
        f"{enough.engines} engines {_words(enough)}: "
        f"{enough.simulated.seconds:.3g} s a step for {synchronous:.3g}"
    )
    return ways


def _words(way: Scaled) -> str:
    """How engines and learner work together."""
    return f'beside the learner, schedule = "{way.schedule}"' if way.apart else "in turns"


def fastest(ways: Sequence[Scaled]) -> dict[int, dict[int, Scaled]]:
    """By number of devices and staleness the fastest way: in turns, or apart, fixed or free."""
    best: dict[int, dict[int, Scaled]] = {}
    for way in ways:
        there = best.setdefault(way.devices, {})
        other = there.get(way.staleness)
        if other is None or way.simulated.seconds < other.simulated.seconds:
            there[way.staleness] = way
    return best


def _curves(best: Mapping[int, Mapping[int, Scaled]]) -> dict[int, dict[int, float]]:
    """Staleness -> devices -> seconds of a step."""
    return {
        staleness: {devices: by[staleness].simulated.seconds for devices, by in best.items()}
        for staleness in STALENESS
    }


def seconds_rows(best: Mapping[int, Mapping[int, Scaled]]) -> list[list[str]]:
    """A row for each number of devices: seconds of a step at each staleness."""
    return [
        [str(devices), *(f"{by[staleness].simulated.seconds:.3g}" for staleness in STALENESS)]
        for devices, by in best.items()
    ]


def _helps(best: Mapping[int, Mapping[int, Scaled]]) -> dict[int, int]:
    """By staleness, how many devices are enough: with more, hardly a step is faster."""
    enough: dict[int, int] = {}
    for staleness in STALENESS:
        seconds = {devices: by[staleness].simulated.seconds for devices, by in best.items()}
        least = min(seconds.values())
        enough[staleness] = min(n for n, value in seconds.items() if value <= WORTH * least)
    return enough


def _enough_devices(helps: Mapping[int, int]) -> str:
    parts = ", ".join(f"{devices} at {staleness}" for staleness, devices in helps.items())
    return (
        f"with more devices than these no step is a tenth faster, by max_staleness: {parts}; the "
        "time of the longest answer stays"
    )


def _refusal(recipe: RLRecipe) -> str | None:
    """Why a run refuses engines that sample while the learner works; None where it does not."""
    ahead = recipe.rollout.model_copy(update={"max_staleness": 1})
    placed = recipe.cluster.model_copy(
        update={"type": "ray", "policy": PolicyPlacement(), "rollout": RolloutPlacement()}
    )
    apart = recipe.model_copy(update={"rollout": ahead, "cluster": placed})
    problems = (text for place, text in engine_problems(apart) if place[-1] == "max_staleness")
    return next(problems, None)


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= MOST_DEVICES for part in parts):
        raise UsageError(f"--scale {text}: numbers of devices from 1 to {MOST_DEVICES}: 8,64,512")
    return [int(part) for part in parts]


def _load(recipe: RLRecipe, planned: RunPlan, run: Path | None) -> tuple[BatchLoad, int, str]:
    """The load, tokens of the longest answer that it can have, and words for its lengths."""
    most = max(recipe.rollout.max_new_tokens, round(planned.lengths.written))  # of all turns
    samples = recipe.batch.n_samples_per_prompt
    groups = recipe.batch.rollout_batch_size
    prompt = max(1, round(planned.lengths.prompt))
    if run is not None:
        answers = _answers(run)
        most = max(max(group) for group in answers)
        lengths: AnswerLengths = recorded_lengths(answers)
        text = f"answers as long as the {len(answers)} groups of {run}"
    else:
        mean = max(1.0, MEAN_SHARE * most)
        lengths = drawn_lengths(mean, most, samples)
        text = (
            f"answers log-normal with a mean of {mean:.0f} tokens before they are cut at {most}: "
            "give --lengths RUN_DIR for those of a run"
        )
    return BatchLoad(groups, samples, prompt, lengths), most, text


def _answers(run: Path) -> list[list[int]]:
    """The tokens of each sample, by group, of a run's samples.jsonl."""
    path = run / "samples.jsonl"
    if not has_lines(path):
        raise UsageError(f"--lengths {run}: no file {path}; give the directory of an RL run")
    groups: dict[int, list[int]] = {}
    with open_lines(path) as file:
        for number, line in enumerate(file, 1):
            try:
                sample = parse_json(line)
                written = (turn for turn in sample["turns"] if turn["author"] == "policy")
                tokens = sum(len(turn["token_ids"]) for turn in written)
                groups.setdefault(int(sample["ticket"]), []).append(tokens)
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{path}:{number}: not a sample: {error!r}") from error
    if not groups:
        raise UsageError(f"--lengths {run}: {path} holds no samples")
    return [groups[ticket] for ticket in sorted(groups)]


def _ways(planned: RunPlan, load: BatchLoad, most: int, devices: int) -> Iterator[Scaled]:
    """In turns at every staleness, then apart, with a fixed schedule and a free one: the best split
    at 2, kept for the others.
    """
    for staleness in STALENESS:
        yield _simulated(planned, load, most, (devices, devices), staleness, apart=False)
    if devices == 1:
        return
    splits = {max(1, min(devices - 1, round(share * devices))) for share in SHARES}
    for free in (False, True):
        tried = [
            _simulated(planned, load, most, (engines, devices - engines), 2, apart=True, free=free)
            for engines in sorted(splits)
        ]
        best = min(tried, key=lambda way: way.simulated.seconds)
        split = (best.engines, best.learners)
        for staleness in STALENESS[1:]:
            if staleness == best.staleness:
                yield best
            else:
                yield _simulated(planned, load, most, split, staleness, apart=True, free=free)


def _enough(ways: Sequence[Scaled]) -> Scaled:
    """The smallest staleness at which hardly another is faster; of its ways the fastest."""
    fastest = min(way.simulated.seconds for way in ways)
    near = [way for way in ways if way.simulated.seconds <= WORTH * fastest]
    return min(near, key=lambda way: (way.staleness, way.simulated.seconds))


def _simulated(
    planned: RunPlan,
    load: BatchLoad,
    most: int,
    split: tuple[int, int],
    staleness: int,
    *,
    apart: bool,
    free: bool = False,
) -> Scaled:
    engines, learners = split
    pace = _pace(planned, load, learners)
    first = staleness + 1  # batches begin together at the start of a run
    steps = first * (1 + -(-MEASURED // first))
    result = Simulation(load, pace, engines, staleness, apart=apart, free=free).run(steps, first)
    longest = most * pace.decode(1, load.prompt + most / 2)
    floor = step_floor(longest, result.seconds * (1 - result.learner_idle), staleness)
    devices = engines + learners if apart else engines
    return Scaled(devices, engines, learners, staleness, apart, free, floor, result)


def _pace(planned: RunPlan, load: BatchLoad, learners: int) -> Pace:
    """What one engine and so many learners do in a second, by the plan's rates. Weights go to each
    engine over the cards' link.
    """
    recipe, policy, device = planned.recipe, planned.roles[0], planned.hardware.device
    engine = planned.sizes.engine
    assert isinstance(recipe, RLRecipe)
    assert engine is not None  # of every recipe that samples on these devices
    costs = CostModel(device, efficiency_of(device), ALONE)
    places = EnginePlaces(1, is_vllm=planned.places.is_vllm)
    engine_costs = EngineCosts(recipe, policy, engine, planned.lengths, costs, places)
    b = engine_width(recipe.rollout, policy, cpu=device.is_cpu)
    weights, token = policy.shape.parameters() * b, policy.shape.cache_bytes_per_token(b)
    work = sum(planned.timing.step.get(phase, 0.0) for phase in LEARNED)
    device_seconds = work * recipe.learner.ranks
    mean = load.prompt + load.samples * planned.lengths.written
    per_token = device_seconds / (load.groups * mean) / learners
    return Pace(
        slots=min(load.groups * load.samples, recipe.rollout.stated_slots or MAX_SLOTS),
        cache_tokens=max(1.0, (device.memory_bytes * FREE - weights) / max(1, token)),
        decode=engine_costs.decoding,
        prefill=engine_costs.prefill,
        learn=lambda tokens: tokens * per_token,
        publish=costs.sends(weights) + costs.reads(2 * weights),
    )
