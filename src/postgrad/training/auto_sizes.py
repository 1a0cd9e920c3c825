"""Sizes that the recipe leaves "auto": planned for the free memory, then tried on the device.

A trial does the most that a step will do: two forward and backward passes over a full micro-batch
beside the optimizer's moments, or two tokens for as many sequences as there are slots. It changes
no weight, optimizer state or random number: a recipe that states the same sizes gives the same
bits.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from postgrad.core.errors import PostgradError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.fleet.choices import Choices
from postgrad.layout.layout import Layout
from postgrad.learner.backbone import MicroBatch
from postgrad.learner.distilled import DistilledLearner
from postgrad.learner.learner import Learner
from postgrad.learner.policy import Policy, PolicyLearner
from postgrad.learner.protocols import TrainedRole
from postgrad.learner.score import ScoreLearner, ScoreRole
from postgrad.plan.auto import AutoSizes, least_tokens
from postgrad.plan.lengths import row_lengths
from postgrad.plan.plan import make_plan
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.engine import Engine, Request
from postgrad.rollout.local.budget import PREFILL_TOKENS, places_for
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings
from postgrad.rollout.stats import EngineStats
from postgrad.training import estimates
from postgrad.training.out_of_memory import OutOfMemory, ran_out
from postgrad.training.run import Run

TOKENS, SLOTS = "micro_train_tokens", "slots"  # names of choices
NEW_TOKENS = 2  # that each slot decodes when slots are tried
CONTROL_GROUP = Path("/sys/fs/cgroup")

Fits = Callable[[int], bool]


def planned(
    recipe: Recipe, choices: Choices, recorded: Mapping[str, Any]
) -> tuple[Choices, frozenset[str]]:
    """The choices with the plan's sizes for the memory that is free now, and the names of the
    choices that have to be tried. Recorded sizes are used as they are. With several ranks, whose
    trials would have to agree, the plan alone decides.
    """
    rollout = recipe.rollout_settings
    asked = {
        TOKENS: recipe.batch.micro_train_tokens == "auto",
        SLOTS: rollout is not None and rollout.slots == "auto",
    }
    untried = frozenset(name for name, auto in asked.items() if auto and not recorded.get(name))
    if not untried:
        return choices, untried
    estimates.require_device(choices)
    sizes = AutoSizes.largest(recipe, cpu=choices.device == "cpu")
    with suppress(PostgradError):  # without a plan the trials start from the largest sizes
        sizes = _fitting(recipe, choices)
    updated = choices
    if TOKENS in untried:
        updated = replace(updated, micro_train_tokens=sizes.tokens)
    if SLOTS in untried and sizes.slots is not None:
        applied = sizes.applied(recipe).rollout_settings
        assert applied is not None  # what has slots has [rollout]
        updated = replace(updated, slots=sizes.slots, cache_tokens=applied.cache_tokens)
    return updated, untried & _tried_here(recipe)


def _tried_here(recipe: Recipe) -> set[str]:
    """The choices that this process can try. On several ranks trials would have to agree."""
    cluster = recipe.cluster
    if recipe.learner.ranks > 1:
        return set()
    if cluster.type == "local":
        return {TOKENS, SLOTS}
    return set() if cluster.engines(1) else {SLOTS}


def _fitting(recipe: Recipe, choices: Choices) -> AutoSizes:
    """The sizes that the plan gives for the free memory."""
    settled = estimates.settled(recipe, choices)
    facts = estimates.facts_here(choices, row_lengths(settled))
    device = facts.hardware.device.model_copy(update={"memory_bytes": free_bytes(choices.device)})
    hardware = facts.hardware.model_copy(update={"device": device})
    auto = make_plan(settled, replace(facts, hardware=hardware)).auto
    return AutoSizes(
        auto.get("batch.micro_train_tokens"), auto.get("rollout.slots"), least_tokens(recipe)
    )


def free_bytes(device: str) -> int:
    """Bytes of memory that this process may still take, within its container's limit."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = psutil.virtual_memory().available
    for limit, used in (
        ("memory.max", "memory.current"),  # control groups, version 2 and 1
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = ((CONTROL_GROUP / name).read_text("ascii") for name in (limit, used))
            free = min(free, max(0, int(most) - int(now)))
        except (OSError, ValueError):  # no container, or "max"
            continue
    return max(1, free)


def largest(start: int, floor: int, fits: Fits) -> int | None:
    """The first of start, start / 2, ..., floor that fits; None where not even `floor` does."""
    size = start
    while not fits(size):
        if size <= floor:
            return None
        size = max(floor, size // 2)
    return size


def try_tokens(run: Run, learners: Sequence[TrainedRole], readers: Sequence[object] = ()) -> None:
    """Finds the largest token budget with which all learners can learn, where it is untried, and
    sets it for them and for readers, roles that only compute forward.

    Raises OutOfMemory where not even the longest row has room.
    """
    start = run.choices.micro_train_tokens
    if TOKENS not in run.untried or start is None:
        return
    floor, longest = least_tokens(run.recipe), run.recipe.data.max_len
    here: list[Learner[Any]] = [role for role in learners if isinstance(role, Learner)]

    def fits(tokens: int) -> bool:
        def attempt() -> None:
            for learner in here:
                _try_learning(learner, tokens, longest, run)

        return _fits(run, "batch.micro_train_tokens", tokens, attempt)

    budget = largest(start, floor, fits)
    if budget is None:
        raise _out_of_memory(
            run, f"one forward and backward pass over {floor} tokens, the longest row"
        )
    run.choices = replace(run.choices, micro_train_tokens=budget)
    for role in (*here, *(role for role in readers if isinstance(role, Policy | ScoreRole))):
        role.backbone.micro = MicroBatch(budget)
    _report_size(run, "batch.micro_train_tokens", budget)


def engine(run: Run, path: str, stack: ExitStack, *, sequences: int, max_len: int) -> Engine:
    """Fleet.engine, with as many slots as can decode where that was open. Sets the run's choices.

    Raises OutOfMemory where not even one slot has room.
    """

    def build() -> Engine:
        return run.fleet.engine(path, stack, sequences=sequences, max_len=max_len)

    before, start = run.choices, run.choices.slots
    if SLOTS not in run.untried or start is None:
        return build()
    settings, fitting = run.recipe.rollout_settings, list[Engine]()
    assert settings is not None  # what has slots has [rollout]

    def fits(slots: int) -> bool:
        places = settings.cache_tokens or slots * places_for(max_len)

        def attempt() -> None:
            run.choices = replace(before, slots=slots, cache_tokens=places)
            tried = build()
            _try_decoding(tried, slots, max_len, PREFILL_TOKENS[before.device])
            fitting.append(tried)

        return _fits(run, "rollout.slots", slots, attempt)

    slots = largest(min(start, sequences), 1, fits)
    if slots is None:
        raise _out_of_memory(run, f"an engine for one sequence of {max_len} tokens")
    _report_size(run, "rollout.slots", slots)
    return fitting[0]


def _fits(run: Run, key: str, size: int, attempt: Callable[[], None]) -> bool:
    """Whether `attempt` has room. Where it runs out of memory an event says so. Random generators
    are put back.
    """
    why = ""
    state, states = torch.get_rng_state(), torch.cuda.get_rng_state_all()
    try:
        attempt()
    except Exception as error:
        if not ran_out(error):
            raise
        why = str(error).strip().partition("\n")[0] or type(error).__name__
    finally:
        torch.set_rng_state(state)
        torch.cuda.set_rng_state_all(states)
    if why:
        if run.choices.device == "cuda":
            torch.cuda.empty_cache()
        run.logs.event("size_lowered", f"{key} = {size} does not fit: {why}", key=key, size=size)
    return not why


def _try_learning(learner: Learner[Any], tokens: int, longest: int, run: Run) -> None:
    """Runs two passes, the second beside the gradients of the first. Raises MemoryError where a
    CPU's free memory could not hold both these passes and the optimizer's moments.
    """
    if learner.offload is not None:
        learner.offload.reload_all()
    backbone = learner.backbone
    before = backbone.micro
    moments = _moments_to_come(learner)
    device = run.choices.device
    gauge = run.clock.peaks.restarted() if device == "cpu" else None
    free, held = free_bytes(device), gauge.held() if gauge else 0
    reserved = torch.empty(0 if device == "cpu" else moments, dtype=torch.uint8, device=device)
    try:
        backbone.micro = MicroBatch(tokens)
        sequences = _rows(tokens, longest)
        for _ in range(2):
            for layout in backbone.micro_batches(
                sequences, np.arange(len(sequences)), reads=learner.reads
            ):
                torch.autograd.backward(_output(learner, layout).sum())
    finally:
        del reserved
        backbone.micro = before
        for weight in (*backbone.lm.parameters(), *learner.optimizer.master.values()):
            weight.grad = None
    if gauge is not None and (needed := gauge.peak() - held + moments) > free:
        raise MemoryError(f"{needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")


def _output(learner: Learner[Any], layout: Layout) -> torch.Tensor:
    """[tokens] outputs that the learner's loss is computed from."""
    if isinstance(learner, DistilledLearner):
        return learner.trial(layout)
    if isinstance(learner, PolicyLearner):
        logprobs, entropy = learner.backbone.logprobs(layout, learner.temperature, True)
        assert entropy is not None
        return logprobs + entropy
    assert isinstance(learner, ScoreLearner)
    return learner.backbone.scores(layout)


def _moments_to_come(learner: Learner[Any]) -> int:
    """Bytes that the optimizer will allocate at its first step; 0 where it has."""
    if learner.optimizer.updates or learner.optimizer.has_moments:
        return 0
    masters = sum(master.nbytes for master in learner.optimizer.master.values())
    return learner.optimizer.state_bytes() - masters


def _rows(tokens: int, longest: int) -> Sequences:
    """`tokens` zeros in rows of `longest` tokens and one shorter rest; every token but the first
    bears loss.
    """
    lengths = [longest] * (tokens // longest)
    lengths += [tokens % longest] if tokens % longest > 1 else []
    rows = [np.zeros(length, np.int32) for length in lengths]
    masks = [np.arange(length) > 0 for length in lengths]
    return Sequences(
        Ragged.of(rows, np.int32),
        Ragged.of(masks, np.bool_),
        np.arange(len(rows), dtype=np.int64),
    )


def _try_decoding(engine: Engine, slots: int, max_len: int, prefill: int) -> None:
    """Prompts of one prefill of so many tokens, and two tokens in every slot."""
    assert isinstance(engine, LocalEngine)  # others bring their sizes
    length = max(1, max_len - NEW_TOKENS)
    prompts = min(slots, max(1, prefill // length))
    sampling = SamplingSettings(max_new_tokens=NEW_TOKENS)
    for number, samples in enumerate(np.array_split(np.arange(slots), prompts)):
        prompt = np.zeros(length, np.int32)
        engine.submit(Request(number, tuple(samples.tolist()), prompt, sampling))
    while engine.completed():
        pass
    engine.stats = EngineStats()


def _report_size(run: Run, key: str, size: int) -> None:
    run.console.note(f"{key} = {size}: planned, and tried on this machine")
    run.logs.event("size_chosen", f"{key} = {size}", key=key, size=size)


def _out_of_memory(run: Run, purpose: str) -> OutOfMemory:
    room = free_bytes(run.choices.device) / 1e9
    return OutOfMemory(
        f"there is no memory for {purpose}; {room:.1f} GB are free beside what the run holds: see "
        "`postgrad plan` for what to change (a shorter data.max_len, "
        "model.gradient_checkpointing = true, an adapter)"
    )
