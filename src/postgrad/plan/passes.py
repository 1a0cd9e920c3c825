"""Memory of the passes of a role while they run, beside its weights: bytes by purpose.

One role computes at a time. Its peak is either in the output head, when all activations are kept,
or in the backward pass of the last layer. The second shows as what it takes beyond the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from postgrad.models.shapes import ModelShape
from postgrad.models.towers import ImageCost
from postgrad.plan import activations, towers
from postgrad.plan.activations import FLOAT32, Blocks
from postgrad.plan.lengths import RowLengths
from postgrad.plan.roles import PlannedRole, beside_student
from postgrad.plan.sizes import ALONE, Sharing, Sizes, width
from postgrad.plan.turns import longest_answer, most_turns
from postgrad.recipe.eval_settings import EvalSettings
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.grammar import KINDS
from postgrad.rollout.local.budget import LANES, align

# models.head.CHUNK_BYTES and CHUNK_ROWS, which a test holds them to: on a CPU, on a GPU
CHUNK_BYTES = {"cpu": 2**26, "gpu": 2**29}
CHUNK_ROWS = {"cpu": 1, "gpu": 1024}
# models.distilled_head.PARTS, the same; and float32 copies of a row's logits, of student and
# teacher together, while a divergence and its gradient are computed
COMPARED_PARTS, COMPARED_COPIES = 4, 12
PART = 2**24  # models.linear.LARGE_WEIGHT, the same

LOGITS = "logits of a chunk"  # a purpose

SAMPLED = 4  # bytes a logit while a token is drawn: its weight
FILTERED = 41  # and with top_k, top_p or min_p: it is sorted, ranked and summed up
SAMPLED_TOGETHER = 2**24  # rollout.local.sampler.CHUNK_VALUES

Bytes = Mapping[str, int]  # by purpose


@dataclass(frozen=True, slots=True)
class Head:
    """The output head of a model in one micro-batch."""

    shape: ModelShape
    width: int  # bytes of a number that the model computes in
    entries: int  # tokens whose logits are computed
    cpu: bool  # elementwise steps go block by block; on other devices they copy a chunk
    trains: bool  # its matrix has a gradient
    entropy: bool = False  # the policy's entropy is computed too
    heated: bool = False  # the temperature is not 1
    sharded: bool = False  # FSDP2 takes the matrix's gradient from autograd
    compiled: bool = False  # logits are float32 within kernels, and nowhere in memory

    @property
    def _rows(self) -> int:
        device = "cpu" if self.cpu else "gpu"
        fitting = CHUNK_BYTES[device] // (FLOAT32 * self.shape.vocab_size)
        return max(CHUNK_ROWS[device], fitting)

    @property
    def _values(self) -> int:
        """Logits of one chunk, which has complete rows."""
        return self.shape.vocab_size * min(self.entries, self._rows)

    def forward(self) -> int:
        """Bytes of a chunk of logits and of what is computed from it, without a gradient."""
        return self._chunk(1 if self.cpu else 2 + self.entropy + self.heated)

    def backward(self) -> tuple[int, int]:
        """Bytes of (a chunk's logits or their gradient, gradients of the matrix beside what is
        counted as the role's gradients), at the moment when both together are most.

        That moment is one of four: logits are read in the forward pass; their gradient is computed,
        while the float32 sum of earlier chunks waits; a chunk is added to that sum; or the sum is
        rounded for autograd.
        """
        several = self.entries > self._rows
        logits = self._chunk(4 if self.entropy and not self.cpu else 1)
        gradient = self._chunk(1)
        if not self.trains:
            return max(logits, self.forward()), 0
        wide = self.shape.embedding_parameters * FLOAT32
        adds = wide if self.cpu else 0  # on a GPU the product adds by itself
        if self._adds_in_place:
            small = self.shape.embedding_parameters <= PART
            return max([(max(logits, self.forward()), 0), (gradient, adds * small)], key=sum)
        added = wide + adds if several else wide
        rounded = 0 if self.width == FLOAT32 else wide + self._matrix
        sums = wide if several else 0
        moments = [(self.forward(), 0), (logits, sums), (gradient, added), (0, rounded)]
        return max(moments, key=sum)

    def _chunk(self, copies: int) -> int:
        """Bytes of a chunk's products with so many float32 copies."""
        if self.compiled:
            copies = 0 if self._narrow else 1
        return self._values * (copies * FLOAT32 + self._narrow)

    def compared(self) -> int:
        """Bytes of a chunk of logits beside a teacher's, and of what is computed from both."""
        rows = min(self.entries, max(1, self._rows // COMPARED_PARTS))
        return self.shape.vocab_size * rows * COMPARED_COPIES * FLOAT32

    @property
    def _narrow(self) -> int:
        """Bytes of a logit as the product gives it, beside its float32 copy; 0: it is float32."""
        return self.width if self.width != FLOAT32 else 0

    def waiting(self) -> int:
        """Bytes of the gradient of a tied matrix: it waits for the end of the backward pass."""
        waits = self.trains and self.shape.tied and not self._adds_in_place
        return self._matrix if waits else 0

    def ending(self) -> int:
        """Bytes when the embedding's gradient is computed, added to that of the head if that
        waited, and both in float32 to that of earlier micro-batches.
        """
        if not self.trains or (self.cpu and self.width == FLOAT32 and self._adds_in_place):
            return 0
        wide = 0
        if self.sharded and not self.cpu:  # FSDP2 reduces all outside of the layers at once
            matrices = 1 if self.shape.tied else 2
            reduced = matrices * self.shape.embedding_parameters * (self.width + FLOAT32)
            return max(self.waiting() + self._matrix, reduced)
        if self.sharded and self.width != FLOAT32:
            wide = self.shape.embedding_parameters * FLOAT32
        return self.waiting() + self._matrix + wide

    @property
    def _adds_in_place(self) -> bool:
        """Whether the matrix's gradient is added to where the learner keeps it, in float32: that of
        a large float32 matrix, and of a narrow one with a master (models.linear.MatrixGradient).
        """
        if self.width == FLOAT32:
            return self.shape.embedding_parameters > PART
        return not self.sharded

    @property
    def _matrix(self) -> int:
        return self.shape.embedding_parameters * self.width


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a run's roles on one device."""

    recipe: Recipe
    sizes: Sizes
    lengths: RowLengths  # mean lengths of the training data, with one turn (of_one_turn)
    cpu: bool  # whether the device is a CPU
    sharing: Sharing = ALONE  # the arrangement of the ranks that the device is of

    def learning(self, role: PlannedRole) -> Bytes:
        """Bytes of one forward and backward pass. The tower encodes before the layers compute, and
        its backward pass comes when theirs is over.
        """
        decoder = self._of_rank(self._decoder_learning(role))
        tower, cost = role.shape.tower, self._images()
        if tower is None or cost is None:
            return decoder
        b = width(role.model.dtype, cpu=self.cpu)
        working = towers.working(tower, cost, b, role)
        return {
            **decoder,
            "activations of the tower": towers.kept(tower, cost, b, role, cpu=self.cpu),
            "work on images": max(0, working - sum(decoder.values())),
        }

    def _of_rank(self, passing: Bytes) -> Bytes:
        """The bytes that are left of a pass of a decoder where tensor parallelism divides it."""
        return {purpose: count // self.sharing.tensor for purpose, count in passing.items()}

    def _images(self) -> ImageCost | None:
        """Of a rank in a micro-batch, which has complete rows; None: rows have none. Ranks that
        share them encode the images whose tokens they have: of one row one rank may have them all.
        """
        images, lengths = self.lengths.images, self.lengths
        if images is None:
            return None
        samples = self.recipe.geometry(lengths.rows).train_batch_size
        answers = self._answers if self.recipe.trains_on_rollouts else 1
        sharing = self.sharing
        most = samples / answers / sharing.replicas
        tokens = self.sizes.micro_tokens * sharing.context
        rows = min(tokens / max(1.0, lengths.computed(self._answers)), most)
        return images.times(max(1.0, rows / (sharing.tensor * sharing.context)))

    def _decoder_learning(self, role: PlannedRole) -> Bytes:
        kept, layer = self._of_layers(role)
        if role.scores:
            return {"activations": kept, "backward pass of a layer": layer}
        head = self._head(role, trains=role.trains_outside)
        # Activations are freed by the time of the embedding's gradient, which comes last. On a CPU
        # what is freed of them mostly stays with the process.
        ending = head.ending() - (0 if self.cpu else kept)
        inside = max(layer + head.waiting(), ending)
        logits, matrix = head.backward()
        if beside_student(self.recipe):
            logits = max(logits, head.compared())
        return {
            "activations": kept,
            LOGITS: logits,
            "gradient of the output matrix": matrix,
            "backward pass of a layer": max(0, inside - logits - matrix),
        }

    def _of_layers(self, role: PlannedRole) -> tuple[int, int]:
        """Bytes that all layers keep, and that the backward pass of one layer takes beside them."""
        b, tokens = width(role.model.dtype, cpu=self.cpu), self.sizes.micro_tokens
        model = role.shape, b, role.model.lora, self._blocks(role)
        how, compiled = role.model.gradient_checkpointing, self._compiled(role)
        kept, layer = (
            count(*model, checkpointing=how, cpu=self.cpu, compiled=compiled)
            for count in (activations.kept, activations.backward_of_layer)
        )
        return tokens * kept, tokens * layer

    def _compiled(self, role: PlannedRole) -> bool:
        """Whether the role's layers run compiled, as fleet.choices decides it."""
        model = role.model
        if self.cpu or model.compile != "auto":
            return not self.cpu and model.compile is True
        counted = role.shape.counted
        tested = counted is None or (
            role.shape.tower is not None and not counted.experts and not counted.states
        )
        plain = model.quantize == "none" and self.recipe.model.attention != "sdpa"
        return tested and plain

    def allocated(self, role: PlannedRole) -> int:
        """Bytes that the backward pass of a micro-batch needs of all layers, whether they are there
        at the same time or computed anew, and of the gradients in one layer.
        """
        without = role.model.model_copy(update={"gradient_checkpointing": False})
        layers = sum(self._of_layers(replace(role, model=without)))
        return layers + (self._encoded(role, each=False) if towers.encodes(role)[0] else 0)

    def encoded_frozen(self, role: PlannedRole) -> int:
        """Bytes that layers of a tower that does not train make and free of one image."""
        return 0 if towers.encodes(role)[0] else self._encoded(role, each=True)

    def _encoded(self, role: PlannedRole, *, each: bool) -> int:
        """Bytes that the layers of the tower make, of one image or of those of a micro-batch."""
        tower, cost = role.shape.tower, self._images()
        if tower is None or cost is None:
            return 0
        images = cost.times(1 / max(cost.images, 1.0)) if each else cost
        return towers.allocated(tower, images, width(role.model.dtype, cpu=self.cpu))

    def reading(self, role: PlannedRole) -> Bytes:
        """Bytes of one forward pass without gradients."""
        decoder = self._of_rank(self._decoder_reading(role))
        tower, cost = role.shape.tower, self._images()
        if tower is None or cost is None:
            return decoder
        b = width(role.model.dtype, cpu=self.cpu)
        working = towers.working(tower, cost, b, replace(role, learner=None))
        return {**decoder, "work on images": max(0, working - sum(decoder.values()))}

    def _decoder_reading(self, role: PlannedRole) -> Bytes:
        b = width(role.model.dtype, cpu=self.cpu)
        tokens = self.sizes.micro_tokens
        layer = tokens * activations.forward_only(role.shape, b, self._blocks(role), cpu=self.cpu)
        if role.scores:
            return {"activations": layer}
        stream = 2 * tokens * role.shape.hidden_size * b
        logits = self._head(role, trains=False).forward()
        return {"activations": layer, LOGITS: max(0, stream + logits - layer)}

    def cache(self, role: PlannedRole, b: int) -> int:
        """Bytes of the engine's cache. A CPU takes memory only for pages that are written: a prompt
        has its places once for all samples that share it.
        """
        engine, rollout = self.sizes.engine, self.recipe.rollout_settings
        assert engine is not None
        assert rollout is not None
        tokens = engine.cache_tokens
        if self.cpu:
            new = max(rollout.max_new_tokens, longest_answer(self.recipe))
            new = align(min(new, self.sizes.longest))
            prompts = -(-engine.slots // min(self._answers, LANES))
            old = align(max(self.sizes.longest - new, 1))
            tokens = min(tokens, engine.slots * new + prompts * old)
        return tokens * role.shape.cache_bytes_per_token(b)

    def sampling(self, role: PlannedRole, b: int) -> Bytes:
        """Bytes of sampling: prompts that are computed ahead, with their keys and values; then the
        logits of all slots.
        """
        engine, rollout = self.sizes.engine, self.recipe.rollout_settings
        assert engine is not None
        assert rollout is not None
        shape, prompts = role.shape, self._prompt_tokens()
        blocks = Blocks() if not self.cpu else self._geometry(1)
        inside = 4 * shape.intermediate_size + 4 * shape.hidden_size
        inside = max(inside * b, activations.forward_only(shape, b, blocks, cpu=self.cpu))
        logits = engine.slots * shape.vocab_size
        settings = self.recipe.eval
        filtered = rollout.sorts
        if isinstance(settings, EvalSettings) and self.recipe.evaluates_answers:
            filtered |= any(sampling.sorts for sampling in settings.samplings)
        each = SAMPLED + (FILTERED if filtered else 0)
        drawn = logits * (FLOAT32 + (b if b != FLOAT32 else 0))
        drawn += min(logits, max(SAMPLED_TOGETHER, shape.vocab_size)) * each
        if {*KINDS} & {*rollout.filters}:
            drawn += logits // 8  # a bit for each token that may come next
        return {
            "prompts computed ahead": prompts * (shape.cache_bytes_per_token(b) + inside),
            "logits": max(0, drawn - prompts * inside),
        }

    def _prompt_tokens(self) -> int:
        """Prompt tokens of one forward pass: as many as wait, up to a limit. Of later turns whole
        sequences may wait, where the cache has lost what was there.
        """
        recipe, most = self.recipe, self.sizes.prefill_tokens
        if not isinstance(recipe, RLRecipe):
            return most
        waiting = recipe.batch.rollout_batch_size * self.lengths.prompt
        if most_turns(recipe) > 1:
            waiting = recipe.geometry(self.lengths.rows).samples_per_step * self.sizes.longest
        return int(min(most, max(waiting, self.lengths.prompt)))

    @property
    def _answers(self) -> int:
        """How many answers share one prompt."""
        return self.recipe.answers_per_prompt

    def _blocks(self, role: PlannedRole) -> Blocks:
        chosen = role.model.attention
        if chosen == "flex" or (chosen == "auto" and not self.cpu):
            return Blocks()
        return self._geometry(self._answers)

    def _geometry(self, answers: int) -> Blocks:
        """Of a prompt with answers. With an environment the most of two: samples may end after a
        turn, or go on as far as data.max_len allows.
        """
        ended = Blocks.of(self.lengths, answers)
        if most_turns(self.recipe) == 1:
            return ended
        room = max(self.lengths.answer, self.sizes.longest - self.lengths.prompt)
        filled = Blocks.of(replace(self.lengths, answer=room), answers)
        return Blocks(max(ended.keys, filled.keys), max(ended.scores, filled.scores))

    def _head(self, role: PlannedRole, *, trains: bool) -> Head:
        recipe = self.recipe
        learner, needs = role.learner, recipe.algorithm.needs()
        return Head(
            role.shape,
            width(role.model.dtype, cpu=self.cpu),
            self.sizes.micro_tokens,
            cpu=self.cpu,
            trains=trains,
            sharded=learner is not None and learner.sharding != "none" and learner.ranks > 1,
            entropy=needs.entropy if trains else needs.old_entropy,
            heated=recipe.logprob_temperature != 1.0,
            compiled=self._compiled(role),
        )
