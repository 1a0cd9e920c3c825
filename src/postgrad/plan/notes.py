"""Sentences about a plan: what it assumes, and what a person should know."""

from collections.abc import Iterator, Sequence

from postgrad.core.process import usable_cpus
from postgrad.core.text import how_many
from postgrad.plan.adapters import start_seconds
from postgrad.plan.change import Advice, digits, gigabytes, long_as
from postgrad.plan.engines import FULLEST, EnginePlaces, dealt
from postgrad.plan.exchange import expert_notes
from postgrad.plan.hardware import catalogue
from postgrad.plan.host_inputs import host_input_notes
from postgrad.plan.lengths import RowLengths
from postgrad.plan.plan import RunPlan, full_logits_bytes
from postgrad.plan.publishing import PlannedPublish
from postgrad.plan.roles import stored_bytes
from postgrad.plan.sizes import ahead_bytes, mask_bytes
from postgrad.plan.timing import reads_once
from postgrad.plan.turns import longest_answer, most_turns, unknown_replies
from postgrad.recipe.recipe import Recipe, RLRecipe

QUICK_PISSA, LONG_START = "pissa_niter_4", 60.0  # advised where a start takes more seconds
LARGE = 4e9  # bytes of logits that are worth a note, though the run never holds them


def hours_problem(plan: RunPlan) -> str | None:
    """Why there are no hours, and what to do; None where there are."""
    if plan.timing.hours is not None:
        return None
    paths = ", ".join(dict.fromkeys(settings.path for settings in plan.recipe.data.sources))
    return (
        f"no hours: the steps of epochs = {plan.recipe.epochs:g} depend on the rows of "
        f"{paths}. "
        "They were not counted: they are not on this machine, or too many to read for a plan. "
        "State steps, or the rows of an epoch with --rows N"
    )


def plan_notes(plan: RunPlan, advice: Sequence[Advice]) -> Iterator[str]:
    """Sentences below the tables: what the plan assumes, and what a person should know."""
    if problem := hours_problem(plan):
        yield problem
    rows, shared = plan.lengths.rows, plan.lengths.shared
    yield f"lengths: {plan.lengths.source}" + (f"; {rows} rows an epoch" if rows else "")
    yield from _turns_note(plan)
    yield from expert_notes(plan.roles, plan.timing.exchanged, plan.recipe.learner)
    yield from _states_note(plan, shared=bool(shared))
    yield from _uncounted_notes(plan)
    if plan.calibrated is not None:
        yield f"times: {plan.calibrated}"
    if plan.auto:
        chosen = ", ".join(f"{key} = {size}" for key, size in plan.auto.items())
        yield f'"auto" chooses {chosen} here; a run tries them before its first step'
    if ahead := ahead_bytes(plan.recipe):
        yield (
            f"samples ahead take up to {ahead / 1e6:.3g} MB in the first process, and in each "
            "checkpoint"
        )
    yield from (*_threads_note(plan), *_dtype_note(plan))
    yield from _start_note(plan)
    yield from _mask_note(plan)
    yield from (*_teacher_note(plan.recipe), *_once_note(plan))
    if each := stored_bytes(plan.recipe):
        yield _stored(each, plan.lengths)
    if plan.timing.overlaps:
        yield (
            "engines sample later steps while the learner works: a step takes the longer of "
            "the two, and the publish"
        )
    if plan.timing.publish and (way := _publish(plan.timing.publish)):
        yield way
    yield from plan.timing.offload_notes
    yield from host_input_notes(plan.roles, plan.sizes, plan.hardware.device)
    if note := _no_place(plan):
        yield note
    if advice and not advice[-1].after.fits:
        after = advice[-1].after.memory
        peak, room = gigabytes(after.peak_bytes), gigabytes(after.capacity)
        yield f"with all of the advice it still does not fit: {peak} of {room}"
    yield from _engine_notes(plan)
    logits = full_logits_bytes(plan)
    if logits > LARGE:
        yield (
            f"all logits of {plan.sizes.micro_tokens} tokens over a vocabulary of "
            f"{plan.roles[0].shape.vocab_size} would take {gigabytes(logits)} with their "
            "gradient; they are made a chunk at a time and never kept"
        )


def _states_note(plan: RunPlan, *, shared: bool) -> Iterator[str]:
    """Of a policy whose layers carry a state. shared: whether the data's prompts can be shared."""
    shape = plan.roles[0].shape
    if not shape.state_bytes:
        return
    times = "once" if shared else f"{plan.recipe.answers_per_prompt} times"
    yield (
        f"layers of a {shape.model_type} model carry a state along the sequence, "
        f"{shape.state_bytes / 1e6:.3g} MB each: the learner computes a prompt {times}. What they "
        "keep for the backward pass is counted as plain torch computes them: kernels "
        "(flash-linear-attention, mamba-ssm) keep less"
    )


def _uncounted_notes(plan: RunPlan) -> Iterator[str]:
    """Of types whose layers could not be run without numbers (models.kept)."""
    counted = {role.shape.model_type: role.shape.counted for role in plan.roles}
    for kind, weights in counted.items():
        if weights is not None and not weights.kept:
            yield (
                f"what layers of a {kind} model keep for the backward pass is estimated as a dense "
                "decoder's of the same sizes"
            )


def _turns_note(plan: RunPlan) -> Iterator[str]:
    """What a plan assumes of samples with an environment, whose lengths no row shows."""
    recipe, lengths = plan.recipe, plan.lengths
    if not isinstance(recipe, RLRecipe) or most_turns(recipe) == 1:
        return
    images = ", images of replies" if plan.roles[0].shape.tower is not None else ""
    yield (
        f"turns: a mean sample counts with as many as it may have, {lengths.turns:.3g} of together "
        f"{lengths.written:.0f} tokens, and with {lengths.replies:.0f} tokens of replies. Not "
        f"counted: the time of replies, tools in prompts{images}. Memory has room for data.max_len "
        f"= {recipe.data.max_len}"
    )
    if unknown := unknown_replies(recipe):
        yield (
            f"replies of {' and '.join(unknown)}: nothing says before a run how long they are, so "
            "they are assumed as long as the prompt; environment.reply_tokens states it"
        )


def _threads_note(plan: RunPlan) -> Iterator[str]:
    """Of a CPU's threads that this machine has no CPUs for: its times are of a larger one."""
    threads, cpus = plan.recipe.learner.threads or 1, usable_cpus()
    if plan.hardware.device.is_cpu and threads > cpus:
        yield (
            f"learner.threads = {threads}: times are of a machine with as many cores; here a "
            f"process may use {how_many(cpus, 'CPU')}"
        )


def _dtype_note(plan: RunPlan) -> Iterator[str]:
    """Of GPUs that convert bfloat16 before they multiply."""
    name, dtype = plan.hardware.device.name, plan.recipe.model.dtype
    if plan.hardware.device.bfloat16 or dtype == "float16":
        return
    if dtype == "bfloat16":
        yield (
            f'model.dtype = "bfloat16": a {name} has no products of bfloat16 and converts each '
            'number, so that a run takes much longer than planned: use "float16" or "float32"'
        )
        return
    yield (
        f'a {name} has no products of bfloat16: model.dtype = "auto" is float32 there. "float16", '
        "with a scaled loss, is faster and rounds more (docs/gpus.md)"
    )


def _start_note(plan: RunPlan) -> Iterator[str]:
    """How long PiSSA takes before the first step, and a faster way where that is long."""
    trained = [role for role in plan.roles if role.learner]
    adapters = [(r.shape, r.model.lora) for r in trained if r.model.lora]
    if not any(lora.keeps_start for _, lora in adapters):
        return
    device = plan.hardware.device
    peak = device.float32_flops if device.is_cpu else catalogue({})["CPU-BF16"].float32_flops
    seconds = sum(start_seconds(shape, lora, peak) for shape, lora in adapters)
    where = "" if device.is_cpu else " of one core of a CPU; on a GPU it was not measured"
    note = (
        "model.lora.init: PiSSA computes where A and B begin from the weights in float64, at every "
        f"start, resume and export: about {long_as(seconds / 3600)}{where}"
    )
    quick = {"init": QUICK_PISSA}
    faster = sum(
        start_seconds(shape, lora.model_copy(update=quick if lora.keeps_start else {}), peak)
        for shape, lora in adapters
    )
    if seconds > LONG_START and seconds > 2 * faster:
        note += f'; init = "{QUICK_PISSA}" comes near it in {long_as(faster / 3600)}'
    yield note


def _mask_note(plan: RunPlan) -> Iterator[str]:
    recipe = plan.recipe
    if not isinstance(recipe, RLRecipe) or not recipe.rollout.keep_sampling_mask:
        return
    samples = recipe.batch.rollout_batch_size * recipe.batch.n_samples_per_prompt
    tokens = samples * longest_answer(recipe)
    if recipe.rollout.top_k:
        size = f"up to {tokens * mask_bytes(recipe) / 1e6:.3g} MB"
    else:
        most = 4 * tokens * recipe.rollout.top_p * plan.roles[0].shape.vocab_size
        size = (
            f"{4 * tokens / 1e6:.3g} MB for each token that filters leave on average "
            f"(sampling/mask_size), {gigabytes(most)} of an even distribution: rollout.top_k would "
            "bound them"
        )
    yield f"sampling masks of a step take {size}, in the first process and on each rank"


def _teacher_note(recipe: Recipe) -> Iterator[str]:
    """What is not counted of teachers with another tokenizer."""
    teachers = recipe.teacher.places if isinstance(recipe, RLRecipe) else []
    if any(teacher.align == "text" for _, teacher in teachers):
        yield (
            'a teacher with align = "text" is counted as if it read as many tokens as the policy, '
            "up to data.max_len each: its own tokens are more or fewer"
        )


def _once_note(plan: RunPlan) -> Iterator[str]:
    """Of a role that reads all rows before the first update, where nobody knows how many."""
    if (name := reads_once(plan.recipe)) is None or plan.lengths.rows is not None:
        return
    counted = "are not counted" if plan.geometry.steps is None else "are those of all steps' rows"
    yield (
        f"the {name} reads every row once before the first update; how many there are is unknown "
        f"here (--rows), so its seconds {counted}"
    )


def _stored(each: int, lengths: RowLengths) -> str:
    """Where what a teacher says of the rows is kept. each: bytes of a token."""
    where = "in a file in the cache folder"
    if not lengths.rows:
        unknown = "their number is unknown here (--rows)"
        return f"what the teacher says takes {each} bytes a token of all rows, {where}; {unknown}"
    kept = each * lengths.rows * lengths.computed(1)
    return f"what the teacher says of the rows takes {kept / 1e6:.3g} MB {where}"


def _no_place(plan: RunPlan) -> str | None:
    """What is wrong where ranks behind Ray leave the engine no GPU; None where nothing is."""
    recipe, places = plan.recipe, plan.places
    on_gpus = recipe.cluster.type == "ray" and not plan.hardware.device.is_cpu
    if not on_gpus or not places.engines or recipe.cluster.engines(recipe.learner.ranks):
        return None
    return (
        "the engine has no place of its own, and a run on GPUs refuses that; it is planned on card "
        "0. Let engines share the ranks' cards (--cluster.policy.colocate rollout), or give them "
        "their own (--cluster.rollout.workers 1)"
    )


def _publish(publish: PlannedPublish) -> str | None:
    """Which way weights go to the engines, and its seconds; None where they stay in a process."""
    if publish.way in ("none", "copy"):
        return None
    sent = f"a publish sends {gigabytes(publish.size)} to each engine"
    by_host = f"through the host's memory: {digits(publish.host_seconds)} s"
    if publish.way == "memory":
        return f"{sent} {by_host} of a step"
    name = "CUDA IPC" if publish.way == "ipc" else "NCCL"
    return (
        f"{sent} by {name}: {digits(publish.seconds)} s of a step; where versions or drivers do "
        f"not allow that, {by_host}"
    )


def _joining(places: EnginePlaces, recipe: Recipe) -> str:
    """How many rollout workers the plan has counted, of those that may come."""
    workers = recipe.cluster.engines(recipe.learner.ranks)
    least = recipe.cluster.first_engines(recipe.learner.ranks)
    lack = ", as many as have cards here" * (places.absent > 0)
    return (
        f"a step is counted with {workers - places.absent} of {workers} rollout workers{lack}; the "
        f"run starts with {least} (cluster.rollout.least), and the others join as there is room"
    )


def _engine_notes(plan: RunPlan) -> Iterator[str]:
    """Sentences for people about the recipe's engines; none where it is a single built-in one."""
    rollout, places = plan.recipe.rollout_settings, plan.places
    if rollout is None:
        return
    if rollout.type == "openai":
        yield (
            f"answers come from {rollout.openai.base_url}: what that server takes is not in this "
            "plan"
        )
    if not places.engines or (places.engines == 1 and not places.is_vllm):
        return
    size = plan.sizes.engine
    assert size is not None  # there are engines
    about = places.name + (", each" if places.engines > 1 else "") + " with all of the weights"
    if plan.recipe.trains_on_rollouts:
        answers = plan.recipe.answers_per_prompt
        share = dealt(plan.geometry.samples_per_step, answers, places.engines)
        about += f", {share} samples of a step and {size.slots} slots"
    if places.absent or 0 < places.first < places.engines:
        yield _joining(places, plan.recipe)
    if not places.is_vllm:
        yield about
        return
    device = plan.hardware.device
    if device.is_cpu or rollout.cache_tokens is not None:
        yield f"{about}; memory is counted as that of the built-in engine"
        return
    fraction = rollout.vllm.memory_fraction
    yield (
        f"{about}; vLLM reserves rollout.vllm.memory_fraction = {fraction:g} of a card, "
        f"{fraction * device.memory_bytes / 1e9:.1f} GB"
    )
    if places.own_cards and fraction < FULLEST:
        yield (
            f"engines have cards of their own: --rollout.vllm.memory_fraction {FULLEST:g} gives "
            "them more cache"
        )
