"""Which roles share ranks, and how much these compute at once: tokens of a forward pass, places of
the engine's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from postgrad.cluster.settings import POLICY
from postgrad.core.batch import MICRO_TRAIN_TOKENS, BatchGeometry
from postgrad.learner.settings import LearnerSettings
from postgrad.plan.hardware import Device
from postgrad.plan.roles import PlannedRole
from postgrad.plan.turns import longest_answer
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.local.budget import PREFILL_TOKENS, EngineSizes

EVALUATION_SEQUENCES = 512  # assumed of an evaluation: its rows are not read before the run
DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """The arrangement of the learner's ranks."""

    replicas: int  # data parallel ranks: into how many parts a batch is divided
    tensor: int  # tensor parallel ranks
    context: int  # context parallel ranks, which share one sequence
    # Shards of weights, masters and moments within each group of ranks that holds all of them,
    # beside tensor parallelism; 1: nothing is sharded.
    divided: int
    scatters: bool  # gradients are summed and scattered in every micro-batch (from ZeRO-2 on)
    gathers: bool  # weights are gathered layer by layer (ZeRO-3)
    offloads: bool = False  # sharded state lies in the host's memory
    expert: int = 1  # expert parallel ranks, which share the experts of a mixture

    @classmethod
    def of(cls, learner: LearnerSettings) -> "Sharing":
        """The arrangement that the settings state. That the ranks divide was checked with them."""
        tensor, context = learner.tensor_parallel, learner.context_parallel
        replicas = max(1, learner.ranks // (tensor * context))
        stage = ("none", "zero1", "zero2", "zero3").index(learner.sharding)
        # Ranks of a sequence hold the same weights.
        divided = max(1, replicas * context // learner.shard_groups) if stage else 1
        return cls(
            replicas=replicas,
            tensor=tensor,
            context=context,
            divided=divided,
            scatters=stage >= 2,
            gathers=stage >= 3 and divided > 1,
            offloads=learner.offload is True and divided > 1,
            expert=learner.expert_parallel,
        )

    @property
    def ranks(self) -> int:
        """How many ranks train."""
        return self.replicas * self.context * self.tensor


ALONE = Sharing(replicas=1, tensor=1, context=1, divided=1, scatters=False, gathers=False)


def width(dtype: DType, *, cpu: bool) -> int:
    """Bytes of one number of a dtype; "auto" is float32 on a CPU, else bfloat16."""
    if dtype == "auto":
        return 4 if cpu else 2
    return 4 if dtype == "float32" else 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many tokens are computed or cached at once."""

    micro_tokens: int  # most tokens of one forward pass of the learner on one rank
    longest: int  # tokens of the longest sequence
    engine: EngineSizes | None = None  # slots and cache of an engine; None: nothing is sampled
    prefill_tokens: int = 0  # most prompt tokens of one forward pass of the engine
    places: int = 0  # tokens of the longest sequence that the engine samples


def sizes(
    recipe: Recipe,
    geometry: BatchGeometry,
    sharing: Sharing,
    *,
    device: Device,
    engine: EngineSizes | None,
) -> Sizes:
    """The sizes that the recipe states, else those that the run would choose at its start.

    engine: the sizes of each engine; None: nothing is sampled.
    """
    longest = recipe.data.max_len
    sample = longest * recipe.sequences_per_sample
    share = -(-geometry.train_batch_size // sharing.replicas) * sample
    if recipe.batch.micro_train_batch_size is not None:
        stated = recipe.batch.micro_train_batch_size * sample
    else:
        stated = recipe.batch.stated_tokens or max(
            recipe.min_micro_tokens,
            MICRO_TRAIN_TOKENS["cpu" if device.is_cpu else "cuda"],
        )
    tokens = -(-min(stated, share) // sharing.context)
    if engine is None:
        return Sizes(tokens, longest)
    places = longest_sampled(recipe)
    prefill = max(PREFILL_TOKENS["cpu" if device.is_cpu else "cuda"], places)
    return Sizes(tokens, longest, engine, prefill, places)


@dataclass(frozen=True, slots=True)
class PlannedRanks:
    """Ranks, with a device each, and the roles that lie on all of them."""

    home: str  # the role whose ranks they are
    roles: tuple[PlannedRole, ...]
    sharing: Sharing
    sizes: Sizes

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.sharing.ranks


def planned_ranks(
    recipe: Recipe,
    geometry: BatchGeometry,
    roles: Sequence[PlannedRole],
    *,
    device: Device,
    engine: EngineSizes | None,
) -> tuple[PlannedRanks, ...]:
    """The ranks of the policy, then those of roles that have some of their own, as fleet.ranked
    starts them. engine: as `sizes` takes it.
    """
    sharing = Sharing.of(recipe.learner)
    policy = tuple(role for role in roles if role.home == POLICY)
    chosen = sizes(recipe, geometry, sharing, device=device, engine=engine)
    ranks = [PlannedRanks(POLICY, policy, sharing, chosen)]
    for home, count in recipe.cluster.homes.items():
        there = tuple(role for role in roles if role.home == home)
        trained = (role.learner for role in there if role.learner is not None)
        sharing = Sharing.of(next(trained, recipe.learner).on_ranks(count))
        chosen = sizes(recipe, geometry, sharing, device=device, engine=None)
        ranks.append(PlannedRanks(home, there, sharing, chosen))
    return tuple(ranks)


def ahead_bytes(recipe: Recipe) -> int:
    """Most bytes of samples of later steps (rollout.max_staleness), in the process of the loop and
    in a checkpoint: a token's number, its logprob, of four bytes each, and its sampling mask
    (rollout.pending).
    """
    if not isinstance(recipe, RLRecipe):
        return 0
    samples = recipe.batch.rollout_batch_size * recipe.batch.n_samples_per_prompt
    each = 8 + mask_bytes(recipe)
    return each * recipe.rollout.max_staleness * samples * longest_answer(recipe)


def mask_bytes(recipe: RLRecipe) -> int:
    """Most bytes of a token's sampling mask: how many ids it has, and ids, as far as top_k bounds
    them, of four bytes each. 0: masks are not kept.
    """
    return 4 + 4 * recipe.rollout.top_k if recipe.rollout.keep_sampling_mask else 0


def longest_sampled(recipe: Recipe) -> int:
    """Tokens of the longest sequence that an engine holds, of training or of evaluations."""
    return max(recipe.data.max_len, *(settings.max_len for settings in recipe.eval.sets), 0)


def engine_sequences(recipe: Recipe, geometry: BatchGeometry) -> int:
    """Sequences that the engine samples at once: of a step of RL, else of an evaluation or of the
    rows that SFT answers itself.
    """
    if recipe.trains_on_rollouts:
        return geometry.samples_per_step
    answered = geometry.train_batch_size if recipe.own_answers else 0
    return max(answered, EVALUATION_SEQUENCES if recipe.evaluates_answers else 0)
