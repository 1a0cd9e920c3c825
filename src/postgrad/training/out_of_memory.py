"""Memory ran out in a run: the error that says where it stands, and what to change to go on."""

import shlex
from dataclasses import asdict, replace

import torch

from postgrad.core.errors import RunError
from postgrad.plan.lengths import row_lengths
from postgrad.plan.plan import make_plan
from postgrad.plan.smaller import less_memory
from postgrad.training import estimates
from postgrad.training.peaks import DeviceFull
from postgrad.training.run import Run

# What torch's allocator for a CPU says in a plain RuntimeError.
REFUSALS = ("can't allocate memory", "not enough memory", "DefaultCPUAllocator")
LESS = 0.8  # of the peak that was estimated has to do: it was too much
# What a run that has begun can change: neither its data nor what is in its checkpoints.
CHANGEABLE = (
    "--batch.micro_", "--model.gradient_checkpointing", "--rollout.slots", "--learner.offload",
)  # fmt: skip
SAMPLING = ("sample", "publish", "evaluate")  # phases in which the engine works
GENERAL = "a smaller batch.micro_train_tokens, model.gradient_checkpointing = true"


class OutOfMemory(RunError):
    """Memory ran out; the message says where the run stands and what to change."""


def ran_out(error: BaseException) -> bool:
    """True where `error` means that memory ran out, on a device, a CPU or a rank."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if type(error) is RunError and error.__cause__ is not None:  # what a rank raised
        return ran_out(error.__cause__)
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in REFUSALS)


def phase_of(run: Run) -> str:
    """The phase, or part of one, that was under way when the run failed."""
    return run.clock.open[-1] if run.clock.open else "start"


def explain(run: Run, step: int, phase: str, error: BaseException, standing: str) -> OutOfMemory:
    """The error to raise in place of `error`, with advice. standing: a sentence that names what the
    run can go on from.
    """
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    where = f"{phase} of step {step + 1}" if "plan" in run.clock.total else f"phase {phase}"
    changes = overrides_for_less_memory(run, phase)
    if changes:
        keys = dict.fromkeys(flag[2:] for flag in changes if flag.startswith("--"))
        words = [*changes, *(word for key in keys for word in ("--allow-change", key))]
        command = shlex.join(["postgrad", "resume", str(run.directory.path), *words])
        advice = f"to continue with less memory: {command}"
    else:
        advice = f"what takes less: {GENERAL}; see postgrad plan"
    refusal = DeviceFull.of(error)
    if refusal is not None:  # its words in place of torch's
        reason = f"{reason.partition('. ')[0]}: {refusal.text()}"
    run.logs.event(
        "out_of_memory", reason, step=step, phase=phase, **(asdict(refusal) if refusal else {})
    )
    return OutOfMemory(f"out of memory in {where}: {reason}; {standing}; {advice}")


def overrides_for_less_memory(run: Run, phase: str) -> tuple[str, ...]:
    """Command-line overrides that make the run take less memory: fewer slots where the engine was
    at work, and the plan's advice for less memory, as far as a run that has begun can follow it.
    """
    sizes = run.choices.sizes
    flags: tuple[str, ...] = ()
    if phase.startswith(SAMPLING) and sizes is not None and sizes.slots > 1:
        slots = sizes.slots // 2
        places = sizes.cache_tokens // sizes.slots * slots
        flags = ("--rollout.slots", str(slots), "--rollout.cache_tokens", str(places))
    try:
        recipe = estimates.as_chosen(run.recipe, run.choices)
        facts = estimates.facts_here(run.choices, row_lengths(recipe))
        plan = make_plan(recipe, facts)
        room = int(min(plan.memory.peak_bytes, plan.memory.capacity) * LESS)
        device = facts.hardware.device.model_copy(update={"memory_bytes": max(1, room)})
        hardware = facts.hardware.model_copy(update={"device": device})
        facts = replace(facts, hardware=hardware)
        advised = less_memory(make_plan(recipe, facts), facts)
    except Exception:  # noqa: BLE001  # plan.json says why; what failed is told first
        return flags
    for change in advised:
        key = change.overrides[0]
        if key.startswith(CHANGEABLE) and key not in flags:
            flags += change.overrides
    return flags
