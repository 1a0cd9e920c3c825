"""The [cluster] section of a recipe: where ranks and engines run. Free of ray."""

from typing import Any, Literal

from pydantic import Field, model_validator

from postgrad.core.settings import Settings

ON_THE_RANKS = ("critic", "reference", "reward_model")
ADDRESS = r"^(auto|[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:.%]+\]:\d{1,5})$"


class RolePlacement(Settings):
    """Where a role's processes run."""

    # GPUs of all processes together, evenly divided; where left out: one each on a GPU machine,
    # none on a CPU.
    gpus: int | None = Field(default=None, ge=0)
    # Cores that are kept for each process; 0: they share what there is.
    cpus: int = Field(default=0, ge=0)
    # How many machines the processes are spread over, evenly; 0: as few as have room.
    machines: int = Field(default=0, ge=0)


class PolicyPlacement(RolePlacement):
    """The ranks, on which policy, critic, reference and reward model lie: `learner.ranks` says how
    many. colocate = "rollout": the engines work on the same devices, while the ranks do not.
    """

    colocate: Literal["rollout"] | None = None


class RolloutPlacement(RolePlacement):
    """Engines in processes of their own. workers: how many; each samples its share of a step's
    prompts with all of the weights. Where left out one, or one on each device of the ranks that
    they share.
    """

    workers: int | None = Field(default=None, ge=1)


class ClusterSettings(Settings):
    """Where ranks run: in this process ("local"), or behind Ray, on one machine too.

    address: of a Ray cluster that runs already ("auto", HOST:PORT); none: one is made of this
    machine. policy, rollout: where what runs; with neither `rollout` nor `colocate` the engine is
    in the first process, on CPUs alone: on GPUs it needs a place.
    port: at which the ranks meet on the first one's machine; 0: any that is free. start_seconds:
    until every process has to be there. limit_seconds: how long a rank waits for another in one
    collective, before the run ends with the name of the one that did not come. max_restarts: how
    often the run goes on from its last checkpoint after a process was lost, without a newer
    checkpoint in between.
    """

    type: Literal["local", "ray"] = "local"
    address: str | None = Field(default=None, pattern=ADDRESS)
    policy: PolicyPlacement = PolicyPlacement()
    rollout: RolloutPlacement | None = None
    port: int = Field(default=0, ge=0, le=65535)
    start_seconds: float = Field(default=120.0, gt=0.0)
    limit_seconds: float = Field(default=600.0, gt=0.0)
    max_restarts: int = Field(default=3, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _on_the_ranks(cls, stated: Any) -> Any:
        for role in ON_THE_RANKS if isinstance(stated, dict) else ():
            if role in stated:
                raise ValueError(
                    f"{role} has no place of its own: it lies on the ranks of the policy, which "
                    "learner.sharding and learner.offload divide it over; leave it out, and say in "
                    "cluster.policy where the ranks are"
                )
        return stated

    def engines(self, ranks: int) -> int:
        """How many processes have an engine; 0: it is in the first process."""
        if self.rollout is not None and self.rollout.workers is not None:
            return self.rollout.workers
        if self.policy.colocate is not None:
            return ranks
        return 0 if self.rollout is None else 1
