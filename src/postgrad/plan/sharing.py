"""How a role's state is divided over the learner's ranks, stage by stage.

What FSDP2 makes of the stages: master weights and moments are divided in all of them (ZeRO-1,
Rajbhandari et al. 2020, arXiv:1910.02054), gradients from ZeRO-2 on, and in ZeRO-3 the weights that
compute as well, which are then gathered one layer at a time, the next one while this one works.
Tensor parallelism divides every matrix before that.
"""

from dataclasses import dataclass

from postgrad.learner.settings import LearnerSettings


@dataclass(frozen=True, slots=True)
class Sharing:
    """Into how many parts each kind of state is divided."""

    replicas: int  # of the batch
    tensor: int
    context: int
    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, learner: LearnerSettings) -> "Sharing":
        """What the learner's settings say; ranks have to divide, as core.geometry checks."""
        tensor, context = learner.tensor_parallel, learner.context_parallel
        replicas = max(1, learner.ranks // (tensor * context))
        stage = ("none", "zero1", "zero2", "zero3").index(learner.sharding)
        sharded = replicas * context  # ranks of a sequence hold the same weights
        return cls(
            replicas=replicas,
            tensor=tensor,
            context=context,
            weights=tensor * (sharded if stage >= 3 else 1),
            gradients=tensor * (sharded if stage >= 2 else 1),
            optimizer=tensor * (sharded if stage >= 1 else 1),
        )

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered to compute with."""
        return self.weights > self.tensor
