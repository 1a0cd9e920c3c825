"""Seconds in which engines sample a step, and in which they take new weights."""

from dataclasses import dataclass, replace
from math import ceil

from postgrad.core.batch import BatchGeometry
from postgrad.layout.tree import NO_SHARING
from postgrad.models.shapes import ModelShape
from postgrad.plan.costs import CostModel
from postgrad.plan.engines import EnginePlaces, engine_width
from postgrad.plan.lengths import RowLengths
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import ALONE, Sizes
from postgrad.plan.towers import tower_seconds
from postgrad.recipe.recipe import RLRecipe, SFTRecipe
from postgrad.rollout.local.budget import LANES, EngineSizes, places_for

# Of a layer's overhead, what is left where decoding is a CUDA graph: kernels follow each other
# without the host. A guess.
GRAPHED = 0.1


@dataclass(frozen=True, slots=True)
class SampledShare:
    """What one engine samples in a step, and how its passes divide it into waves."""

    prompts: int
    sequences: int
    together: int  # sequences that are decoded at once
    mean: float  # tokens of an answer, in an environment of all turns
    longest: float  # tokens of the longest answer
    ahead: int = 0  # steps whose prompts fill rows that would be empty

    @classmethod
    def of(
        cls,
        geometry: BatchGeometry,
        lengths: RowLengths,
        sizes: EngineSizes,
        places: EnginePlaces,
        answers: int,
        longest: int,
        ahead: int = 0,
    ) -> "SampledShare":
        """answers: of each prompt. longest: most tokens of an answer, in an environment of a turn.
        ahead: max_staleness.
        """
        prompts = ceil((geometry.rollout_batch_size or 0) / places.engines)
        sequences = prompts * answers
        together = min(sequences * (1 + ahead), sizes.slots)
        most = max(lengths.written, longest)
        if places.is_vllm:  # its cache has a prompt once for all its answers
            held = lengths.prompt / answers + lengths.answer
            together = max(1, min(together, int(sizes.cache_tokens / held)))
        else:  # its cache has room for the longest answer of every sequence
            needed = places_for(ceil(lengths.prompt + most + lengths.replies))
            together = max(1, min(together, sizes.cache_tokens // needed))
        return cls(prompts, sequences, together, lengths.written, most, ahead)

    @property
    def at_once(self) -> bool:
        """Whether all sequences under way are decoded at once."""
        return self.sequences * (1 + self.ahead) <= self.together

    @property
    def waves(self) -> int:
        """How often all slots are filled."""
        return ceil(self.sequences / self.together)

    @property
    def passes(self) -> float:
        """Decoding passes: a wave takes as many as a mean answer has tokens, since a sequence that
        ends is replaced at once; the last one as many as the longest, which nothing replaces. With
        samples ahead no wave is the last.
        """
        if self.ahead:
            return self.sequences * self.mean / self.together
        return (self.waves - 1) * self.mean + self.longest


def reduced_bytes(shape: ModelShape, b: int, each: int) -> float:
    """Bytes that a card sends for one token of a pass over tensor parallel cards: the sums after
    attention and feed-forward of every layer, by a ring.
    """
    return 2 * shape.layers * shape.hidden_size * b * 2 * (each - 1) / each


def behind_replies(lengths: RowLengths, sequences: int, *, keeps: bool) -> tuple[float, float]:
    """Tokens that an engine computes before later turns begin, and their squares, as
    ModelShape.flops takes them.

    keeps: the cache has all but the newest token and the reply. Else each turn computes its whole
    prefix: the built-in engine mostly has lost it where more sequences are under way than it has
    slots, and some layers start over several tokens from an empty state alone.
    """
    later = sequences * (lengths.turns - 1)
    if later <= 0:
        return 0.0, 0.0
    if keeps:
        new = sequences * lengths.replies + later
        return new, 2 * new * (lengths.prompt + lengths.answer / 2)
    reply = sequences * lengths.replies / later
    prefix = lengths.prompt + (lengths.answer + reply) / 2
    return later * prefix, later * prefix**2


@dataclass(frozen=True, slots=True)
class DecodingPace:
    """Seconds of decoding passes, which grow with the sequences and with their tokens. A simulation
    asks for half a million passes, so what is the same in all of them is computed once.
    """

    alone: float  # seconds of a pass, whatever it decodes
    row: float  # more for each sequence
    cached: float  # more for each token that the sequences have

    def __call__(self, rows: int, cached: float) -> float:
        """Seconds of a pass over `rows` sequences that have `cached` tokens in all."""
        return self.alone + rows * self.row + cached * self.cached


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Seconds of one engine's work; its cards divide it and add up their sums."""

    recipe: RLRecipe | SFTRecipe
    policy: PlannedRole
    sizes: EngineSizes
    lengths: RowLengths
    costs: CostModel
    places: EnginePlaces

    @classmethod
    def of(
        cls,
        recipe: RLRecipe | SFTRecipe,
        policy: PlannedRole,
        sizes: Sizes,
        lengths: RowLengths,
        costs: CostModel,
        places: EnginePlaces,
    ) -> "EngineCosts | None":
        """None where nothing is sampled on these cards."""
        if sizes.engine is None:
            return None
        shared = replace(costs, sharing=replace(ALONE, tensor=places.each))
        return cls(recipe, policy, sizes.engine, lengths, shared, places)

    def sampling(self, geometry: BatchGeometry) -> float:
        """Seconds in which each engine samples its share of the prompts, all of them at once.

        Every prompt is computed once. Then each pass reads the weights, and of every sequence it
        reads keys and values and computes one token; on a CPU core the times of the two add up
        (benchmarks.growth). Later turns are computed behind a reply. With samples ahead each new
        version of the weights also computes again what is under way.
        """
        lengths, answers = self.lengths, self.recipe.answers_per_prompt
        longest, ahead = self._longest, self.recipe.rollout.max_staleness
        share = SampledShare.of(geometry, lengths, self.sizes, self.places, answers, longest, ahead)
        tokens, squares = share.prompts * lengths.prompt, share.prompts * lengths.prompt**2
        if ahead:
            again = lengths.prompt / answers + lengths.answer / 2
            tokens += share.together * again
            squares += share.together * again**2
        images = None if lengths.images is None else lengths.images.times(share.prompts)
        later = share.sequences * (lengths.turns - 1)
        continues = self.policy.shape.min_shared != NO_SHARING
        keeps = self.places.is_vllm or (continues and share.at_once)
        new, more = behind_replies(lengths, share.sequences, keeps=keeps)
        return (
            self._prefill(tokens + new, squares + more, share.prompts + later)
            + tower_seconds(self.policy, images, self._b, self.costs, updating=False)
            + share.passes * self._pass
            + share.sequences * share.mean * self._token(self._held, self._seen)
        )

    def longest(self) -> float:
        """Seconds in which the longest answer is decoded, with nothing beside it."""
        most = max(self.lengths.written, self._longest)
        return most * self.decoding(1, self.lengths.prompt + (most + self.lengths.replies) / 2)

    @property
    def decoding(self) -> DecodingPace:
        """Seconds of a pass over any sequences."""
        costs, shape, b, each = self.costs, self.policy.shape, self._b, self.places.each
        attention = costs.as_products(shape.flops(0, 2, 0))
        read = costs.reads(shape.cache_bytes_per_token(b) / each)
        return DecodingPace(self._pass, self._token(0.0, 0.0), read + costs.products(attention, b))

    def prefill(self, tokens: float) -> float:
        """Seconds in which so many tokens of prompts, or of samples that were cut, are computed;
        what attention costs is left out.
        """
        return self._prefill(tokens, 0.0, 1)

    @property
    def _longest(self) -> int:
        """Most tokens of an answer, in an environment of a turn."""
        return self.recipe.sampled_tokens or self.recipe.rollout.max_new_tokens

    @property
    def _b(self) -> int:
        return engine_width(self.recipe.rollout, self.policy, cpu=self.costs.device.is_cpu)

    @property
    def _seen(self) -> float:
        """Tokens before the mean token of an answer."""
        return self.lengths.prompt + self.lengths.answer / 2

    @property
    def _held(self) -> float:
        """Bytes of keys and values that one token of an answer reads."""
        lengths = self.lengths
        alone = self.places.is_vllm or lengths.turns > 1  # later turns read places of their own
        readers = 1 if alone else min(self.recipe.answers_per_prompt, LANES)
        token_bytes = self.policy.shape.cache_bytes_per_token(self._b)
        return (lengths.prompt / readers + lengths.answer / 2) * token_bytes

    def _prefill(self, tokens: float, squares: float, prompts: float) -> float:
        costs, shape, b = self.costs, self.policy.shape, self._b
        first = shape.flops(tokens, squares, prompts)
        seconds = costs.products(costs.as_products(first), b) + costs.between(shape, tokens, b)
        return seconds + costs.sends(tokens * reduced_bytes(shape, b, self.places.each))

    @property
    def _pass(self) -> float:
        """Seconds of a decoding pass, whatever the number of sequences."""
        costs, shape = self.costs, self.policy.shape
        overhead = costs.overhead(shape)
        if not costs.device.is_cpu and not (self.places.is_vllm and self.recipe.rollout.vllm.eager):
            overhead *= GRAPHED
        return costs.reads(shape.parameters() * self._b / self.places.each) + overhead

    def _token(self, held: float, seen: float) -> float:
        """Seconds of one sequence's token beside those of the pass. held: bytes of its keys and
        values. seen: how many tokens they are of.
        """
        costs, shape, b, each = self.costs, self.policy.shape, self._b, self.places.each
        seconds = costs.reads(held / each) + costs.sends(reduced_bytes(shape, b, each))
        return seconds + costs.products(costs.as_products(shape.flops(1, 2 * seen, 1)), b)
