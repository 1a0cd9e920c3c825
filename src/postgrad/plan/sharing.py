"""How a role's state is divided over the learner's ranks, stage by stage.

What postgrad.parallel.sharding makes of the stages with FSDP2: master weights and moments are
divided in all of them (ZeRO-1, Rajbhandari et al. 2020, arXiv:1910.02054), gradients are added in
every micro-batch from ZeRO-2 on, and in ZeRO-3 the weights that compute are gathered one layer at a
time, the next one while this one works. Tensor parallelism divides every matrix before that.
"""

from dataclasses import dataclass

from postgrad.learner.settings import LearnerSettings


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
            offloads=learner.offload and divided > 1,
        )

    @property
    def ranks(self) -> int:
        """How many ranks train."""
        return self.replicas * self.context * self.tensor


ALONE = Sharing(replicas=1, tensor=1, context=1, divided=1, scatters=False, gathers=False)
