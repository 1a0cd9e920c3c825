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
    """replicas: of the batch. divided: parts that weights, masters and moments are cut into, beside
    tensor parallelism's, within each group that holds all of them. scatters: gradients are added in
    every micro-batch. gathers: weights are gathered layer by layer. offloads: what is divided lies
    in the host's memory.
    """

    replicas: int
    tensor: int
    context: int
    divided: int
    scatters: bool
    gathers: bool
    offloads: bool = False

    @classmethod
    def of(cls, learner: LearnerSettings) -> "Sharing":
        """What the learner's settings say; ranks have to divide, as core.geometry checks."""
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
        """All of them."""
        return self.replicas * self.context * self.tensor


ALONE = Sharing(replicas=1, tensor=1, context=1, divided=1, scatters=False, gathers=False)
