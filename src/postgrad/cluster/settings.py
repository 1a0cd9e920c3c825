"""The [cluster] section of a recipe: where ranks and engines run. Free of ray."""

from typing import Literal

from pydantic import Field

from postgrad.core.settings import Settings

POLICY = "policy"  # the role whose places the ranks take
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
    """The ranks, on which the policy lies, and every role without a place: `learner.ranks` says how
    many. colocate = "rollout": the engines work on the same devices, while the ranks do not.
    """

    colocate: Literal["rollout"] | None = None


class SidePlacement(RolePlacement):
    """Critic, reference, the reward model of [[rewards]] or a teacher beside the policy. With
    `ranks` it has processes of its own. Where left out it lies on the ranks of the policy.
    """

    # Processes of its own, with a GPU each; where left out, as many as `gpus` says.
    ranks: int | None = Field(default=None, ge=1)
    # Another role, on whose processes it lies instead; "policy": as if the table were not there.
    colocate: Literal["policy", "critic", "reference", "reward_model", "teacher"] | None = None
    # A frozen role lies in the host's memory between its passes; GPUs alone.
    offload: bool = False

    @property
    def processes(self) -> int:
        """How many it has of its own; 0: it lies with another role."""
        return 0 if self.colocate else self.ranks or self.gpus or 0


class RolloutPlacement(RolePlacement):
    """Engines in processes of their own. workers: how many; each samples its share of a step's
    prompts with all of the weights. Where left out one, or one on each device of the ranks that
    they share; it has to be stated where vLLM engines over several devices share those of as many
    ranks. least: how many have to be there for the run to start; the others join when the cluster
    has room for them. Where left out all of them.
    """

    workers: int | None = Field(default=None, ge=1)
    least: int | None = Field(default=None, ge=1)


class ClusterSettings(Settings):
    """Where ranks run: in this process ("local"), or behind Ray, on one machine too.

    address: of a Ray cluster that runs already ("auto", HOST:PORT); none: one is made of this
    machine. policy, critic, reference, reward_model, teacher, rollout: where what runs; with
    neither `rollout` nor `colocate` the engine is in the first process, on CPUs alone: on GPUs it
    needs a place.
    port: at which the ranks meet on the first one's machine; 0: any that is free. start_seconds:
    until every process has to be there. limit_seconds: how long a rank waits for another in one
    collective, before the run ends with the name of the one that did not come. max_restarts: how
    often the run goes on from its last checkpoint after a process was lost, without a newer
    checkpoint in between.
    """

    type: Literal["local", "ray"] = "local"
    address: str | None = Field(default=None, pattern=ADDRESS)
    policy: PolicyPlacement = PolicyPlacement()
    critic: SidePlacement | None = None
    reference: SidePlacement | None = None
    reward_model: SidePlacement | None = None
    teacher: SidePlacement | None = None
    rollout: RolloutPlacement | None = None
    port: int = Field(default=0, ge=0, le=65535)
    start_seconds: float = Field(default=120.0, gt=0.0)
    limit_seconds: float = Field(default=600.0, gt=0.0)
    max_restarts: int = Field(default=3, ge=0)

    def home(self, role: str) -> str:
        """The role on whose processes a role's weights lie: its own name where it has some."""
        table = self.side_roles.get(role)
        if table is None:
            return POLICY
        return table.colocate or (role if table.processes else POLICY)

    @property
    def side_roles(self) -> dict[str, SidePlacement]:
        """The tables of roles beside the policy that the recipe has."""
        tables = {
            "critic": self.critic,
            "reference": self.reference,
            "reward_model": self.reward_model,
            "teacher": self.teacher,
        }
        return {role: table for role, table in tables.items() if table is not None}

    @property
    def homes(self) -> dict[str, int]:
        """The roles with processes of their own beside the policy, and how many they have."""
        return {
            role: table.processes
            for role, table in self.side_roles.items()
            if self.home(role) == role
        }

    def engines(self, ranks: int) -> int:
        """How many processes have an engine; 0: it is in the first process."""
        if self.rollout is not None and self.rollout.workers is not None:
            return self.rollout.workers
        if self.policy.colocate is not None:
            return ranks
        return 0 if self.rollout is None else 1

    def first_engines(self, ranks: int) -> int:
        """How many of these processes have to be there for the run to start."""
        least = None if self.rollout is None else self.rollout.least
        return self.engines(ranks) if least is None else least
