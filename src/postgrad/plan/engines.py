"""Rollout engines of a run: how many, on which cards, the memory of each, the seconds of sampling.

The built-in engine has one device, a vLLM engine `tensor_parallel` of them. Engines are in the
first process, in workers on the learner's cards (`cluster.policy.colocate`), or in workers on cards
of their own (`cluster.rollout`). Each samples its share of a step's prompts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from postgrad.core.batch import BatchGeometry
from postgrad.models.settings import LLAMA_TYPES
from postgrad.plan.activations import FLOAT32, Blocks, forward_only
from postgrad.plan.adapters import adapter_parameters, alike, merged_sizes
from postgrad.plan.hardware import Device, Hardware
from postgrad.plan.held import MemoryLine, MemoryPhase, always, awake, expanded
from postgrad.plan.passes import Passes
from postgrad.plan.reserved import VLLM
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import engine_sequences, width
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.local.budget import MAX_SLOTS, EngineSizes, choose_sizes, places_for
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.vllm.protocol import lora_room

ENGINE = "engine"  # the role of lines of engines
# Of a vLLM engine: tokens of its largest forward pass (max_num_batched_tokens, its default for all
# but the largest GPUs), which it keeps room for.
VLLM_TOKENS = 8192
# vLLM's share of a card: of one of its own (vLLM's default), and of one that a learner has too
# (the default of rollout.vllm.memory_fraction).
FULLEST, HALF = 0.9, 0.5


@dataclass(frozen=True, slots=True)
class EnginePlaces:
    """Where a run's engines are. The learner's cards come first, then those of engines alone."""

    engines: int = 0  # each samples its share of the prompts; 0: none works on these cards
    each: int = 1  # cards of an engine: its matrices are divided over them
    shared_cards: int = 0  # of the learner's cards, the first ones, that have an engine too
    own_cards: int = 0  # cards of engines alone
    is_vllm: bool = False
    apart: bool = False  # engines are not in the learner's process
    problem: str | None = None  # why a run refuses the placement
    first: int = 0  # engines that a run starts with: prompts are dealt to these until others join
    absent: int = 0  # rollout workers that have no cards on this hardware, and may come later

    @property
    def name(self) -> str:
        """What the engines are, for people: "2 vLLM engines of 4 cards"."""
        kind = "vLLM engine" if self.is_vllm else "built-in engine"
        plural = "s" if self.engines > 1 else ""
        over = f" of {self.each} cards" if self.each > 1 else ""
        return f"{self.engines} {kind}{plural}{over}" if plural or over else kind

    @classmethod
    def of(cls, recipe: Recipe, hardware: Hardware) -> "EnginePlaces":
        """Where the recipe puts its engines. On a CPU all processes share the machine, and one
        engine stands for all.
        """
        rollout, ranks = recipe.rollout_settings, recipe.learner.ranks
        if rollout is None or not recipe.samples_answers or rollout.type == "openai":
            return cls()
        is_vllm = rollout.type == "vllm"
        workers = recipe.cluster.engines(ranks)
        if hardware.device.is_cpu:
            return cls(1, shared_cards=1, is_vllm=is_vllm, apart=is_vllm or workers > 0)
        copies, each = 1, 1
        if is_vllm:
            copies, each = rollout.vllm.engines, rollout.vllm.tensor_parallel
        if not workers:
            needed = copies * each if is_vllm else 1
            beside = not is_vllm or needed >= hardware.count  # vLLM takes the last devices
            return cls(copies, each, int(beside), needed - beside, is_vllm, is_vllm)
        needed = copies * each
        if recipe.cluster.policy.colocate is not None:
            return cls(workers * copies, each, workers * needed, 0, is_vllm, True)
        return cls._on_own_cards(recipe, workers, copies, each, is_vllm, hardware.count)

    @classmethod
    def _on_own_cards(
        cls, recipe: Recipe, workers: int, copies: int, each: int, is_vllm: bool, cards: int
    ) -> "EnginePlaces":
        """Workers on cards of their own: all, or with cluster.rollout.least as many as the cards
        that learners leave have room for.
        """
        placed, cluster = recipe.cluster.rollout, recipe.cluster
        stated = None if placed is None else placed.gpus
        per_worker, needed = (stated or 0) // workers, copies * each
        problem = None
        if stated is not None and per_worker < needed:
            problem = (
                f"cluster.rollout.gpus = {stated}: {workers} workers that work on {needed} cards "
                f"each need {workers * needed}"
            )
        per_worker, least = max(per_worker, needed), cluster.first_engines(recipe.learner.ranks)
        left = cards - recipe.learner.ranks - sum(cluster.homes.values())
        here = min(workers, max(least, left // per_worker))
        own_cards, first, absent = here * per_worker, least * copies, workers - here
        return cls(here * copies, each, 0, own_cards, is_vllm, True, problem, first, absent)


def engine_width(rollout: RolloutSettings, policy: PlannedRole, *, cpu: bool) -> int:
    """Bytes of one number in the engine: of its weights and of its cache."""
    stated = rollout.dtype
    return width(policy.model.dtype if stated == "auto" else stated, cpu=cpu)


@dataclass(frozen=True, slots=True)
class VLLMShare:
    """What a vLLM process takes of one card: its share, and what that is divided into."""

    share: int  # bytes: memory_fraction of the card
    weights: int  # with the room for an adapter that it applies by itself
    activations: int  # of its largest pass
    sequence: int  # cache of the longest sequence
    token_bytes: float  # of the cache, of one token

    @classmethod
    def of(
        cls, rollout: RolloutSettings, policy: PlannedRole, device: Device, longest: int
    ) -> "VLLMShare":
        """longest: tokens of the longest sequence."""
        shape, b = policy.shape, engine_width(rollout, policy, cpu=False)
        each = rollout.vllm.tensor_parallel
        slots = rollout.stated_slots or MAX_SLOTS
        logits = slots * shape.vocab_size * (FLOAT32 + b)
        fused = replace(shape, counted=None)  # its kernels of experts gather no rows
        hidden = VLLM_TOKENS * forward_only(fused, b, Blocks(), cpu=False) // each
        token_bytes = max(1, shape.cache_bytes_per_token(b)) / min(each, shape.cache_heads)
        return cls(
            share=int(rollout.vllm.memory_fraction * device.memory_bytes),
            weights=shape.parameters() * b // each + _adapter_room(rollout, policy, b),
            activations=max(hidden, logits),
            sequence=int(places_for(longest) * token_bytes),
            token_bytes=token_bytes,
        )

    @property
    def cache(self) -> int:
        """Bytes that are left for keys and values; none where weights and passes fill the share."""
        return max(0, self.share - self.weights - self.activations)

    @property
    def least(self) -> int:
        """Bytes with which vLLM starts: its cache has to hold one sequence."""
        return self.weights + self.activations + self.sequence

    def least_fraction(self, device: Device) -> float:
        """The memory_fraction with which vLLM starts, up to the next hundredth; above 1: none."""
        return ceil(100 * self.least / device.memory_bytes) / 100

    def problem(self, fraction: float, device: Device) -> str | None:
        """Why vLLM would not start with this share; None where it does."""
        if self.least <= self.share:
            return None
        need = self.least_fraction(device)
        change = f"{need:g} or more" if need <= 1.0 else "more cards each (tensor_parallel)"
        return (
            f"vLLM's share of {self.share / 1e9:.1f} GB (rollout.vllm.memory_fraction = "
            f"{fraction:g}) has to hold {self.weights / 1e9:.1f} of weights, "
            f"{self.activations / 1e9:.1f} of a forward pass and {self.sequence / 1e9:.1f} of a "
            f"sequence's cache: {change}"
        )


def _adapter_room(rollout: RolloutSettings, policy: PlannedRole, b: int) -> int:
    """Bytes that vLLM keeps on each card for the one adapter that it applies: of the next rank that
    it has room for.
    """
    lora = policy.model.lora
    if lora is None or not rollout.sends_adapter:
        return 0
    room: dict[str, Any] = {"rank": lora_room(lora.largest_rank), "rank_pattern": {}}
    room["layers_to_transform"] = ()  # it has the same room in each
    return adapter_parameters(policy.shape, lora.model_copy(update=room)) * b


def dealt(sequences: int, answers: int, engines: int) -> int:
    """Most sequences of one engine: prompts are dealt with all of their answers."""
    return ceil(ceil(sequences / answers) / engines) * answers


def vllm_share(
    recipe: Recipe, policy: PlannedRole, device: Device, places: EnginePlaces, longest: int
) -> VLLMShare | None:
    """The share of a card that each of the run's vLLM processes takes; None where there are none,
    or the recipe states the cache, so that their sizes are counted as the built-in engine's are.
    """
    rollout = recipe.rollout_settings
    if rollout is None or not places.is_vllm or device.is_cpu or rollout.cache_tokens is not None:
        return None
    return VLLMShare.of(rollout, policy, device, longest)


def engine_sizes(
    recipe: Recipe,
    geometry: BatchGeometry,
    policy: PlannedRole,
    places: EnginePlaces,
    device: Device,
    free_bytes: int,
    longest: int,
) -> EngineSizes | None:
    """Slots and cache of each engine; None where nothing is sampled on these cards. free_bytes: of
    its card when it starts. longest: tokens of the longest sequence, of training or evaluations.
    """
    rollout = recipe.rollout_settings
    if rollout is None or not places.engines:
        return None
    answers = recipe.answers_per_prompt
    # its sizes stay as they are when others join
    sequences = dealt(engine_sequences(recipe, geometry), answers, places.first or places.engines)
    if share := vllm_share(recipe, policy, device, places, longest):
        tokens = int(max(share.cache, share.sequence) / share.token_bytes)
        return EngineSizes(rollout.stated_slots or min(MAX_SLOTS, sequences), tokens)
    b = engine_width(rollout, policy, cpu=device.is_cpu)
    token_bytes = policy.shape.cache_bytes_per_token(b)
    return choose_sizes(
        rollout,
        sequences=sequences,
        max_len=longest,
        token_bytes=token_bytes,
        free_bytes=max(0, free_bytes, places_for(longest) * token_bytes),
        row_bytes=policy.shape.state_bytes,
    )


def engine_lines(
    recipe: Recipe,
    policy: PlannedRole,
    passes: Passes,
    device: Device,
    places: EnginePlaces,
    *,
    shared: bool,
) -> Iterator[MemoryLine]:
    """Memory of an engine on one of its cards. shared: a learner works there too. While learners
    work, the built-in engine keeps its weights alone (Engine.sleep), and vLLM beside a learner
    nothing but its process.
    """
    rollout, cpu = recipe.rollout_settings, device.is_cpu
    if passes.sizes.engine is None or rollout is None:
        return
    share = vllm_share(recipe, policy, device, places, passes.sizes.places)
    if share is not None and shared:
        phases = always(share.share) if rollout.vllm.sleep is False else awake(share.share)
        yield MemoryLine(ENGINE, VLLM, phases)
        return
    if share is not None:
        sleeps = awake if rollout.vllm.sleep else always
        yield MemoryLine(ENGINE, "weights", sleeps(share.weights))
        yield MemoryLine(ENGINE, "activations", sleeps(share.activations))
        yield MemoryLine(ENGINE, "key-value cache", sleeps(share.cache))
        return
    b = engine_width(rollout, policy, cpu=cpu)
    weights = _weights(recipe, rollout, policy, b, cpu=cpu)
    yield from _divided(MemoryLine(ENGINE, "weights", weights), places)
    if not weights:
        yield MemoryLine(
            ENGINE, "a matrix of four bits, expanded", awake(expanded(policy, b, cpu=cpu))
        )
    elif cpu and b == FLOAT32 and policy.shape.model_type in LLAMA_TYPES:  # models.linear.in_order
        ordered = policy.shape.matrix_parameters * FLOAT32
        yield MemoryLine(ENGINE, "weights as products read them", awake(ordered))
    cache = MemoryLine(ENGINE, "key-value cache", awake(passes.cache(policy, b)))
    yield from _divided(cache, places)
    if states := passes.sizes.engine.slots * policy.shape.state_bytes:
        yield MemoryLine(ENGINE, "states of recurrent layers", awake(states))
    for purpose, count in passes.sampling(policy, b).items():
        yield MemoryLine(ENGINE, purpose, {"rollout": count})


def _divided(line: MemoryLine, places: EnginePlaces) -> Iterator[MemoryLine]:
    """The part of a line that each card of an engine has."""
    yield replace(line, bytes={phase: size // places.each for phase, size in line.bytes.items()})


def _weights(
    recipe: Recipe, rollout: RolloutSettings, policy: PlannedRole, b: int, *, cpu: bool
) -> Mapping[MemoryPhase, int]:
    """Bytes of the engine's copy of the policy's weights. Where both are float32 in one process,
    the first publish replaces the copy by the policy's matrices (LocalEngine's `borrows`). What
    stays are matrices that products read side by side, and those that an adapter is merged into.
    """
    shape, lora = policy.shape, policy.model.lora
    copied = always(shape.parameters() * b)
    if shares_weights(recipe, policy, cpu=cpu):
        return {}
    frozen_in = FLOAT32 if lora is None else width(policy.model.dtype, cpu=cpu)
    if not _samples_here(recipe, rollout) or b != FLOAT32 or frozen_in != FLOAT32:
        return copied
    outputs = shape.query_size + 2 * shape.key_size + 2 * shape.intermediate_size
    joined = shape.hidden_size * outputs if shape.model_type in LLAMA_TYPES else 0
    kinds = alike(shape, lora).items()
    merged = {n: sum(merged_sizes(shape, lora, n)) if lora is not None else 0 for n, _ in kinds}
    stays = sum(count * max(joined, merged[layer]) for layer, count in kinds)
    return {**always(stays * b), "load": copied["load"]}


def shares_weights(recipe: Recipe, policy: PlannedRole, *, cpu: bool) -> bool:
    """Whether the engine has no weights of its own (fleet.engines.shares_weights)."""
    rollout = recipe.rollout_settings
    if rollout is None or not _samples_here(recipe, rollout):
        return False
    alike = engine_width(rollout, policy, cpu=cpu) == width(policy.model.dtype, cpu=cpu)
    return policy.model.quantize != "none" or (policy.model.lora is None and alike and not cpu)


def _samples_here(recipe: Recipe, rollout: RolloutSettings) -> bool:
    """Whether the engine is in the policy's process."""
    alone = rollout.type == "local" and recipe.learner.ranks == 1
    return alone and not recipe.cluster.engines(1)
