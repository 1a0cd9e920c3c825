"""What a run asks for its models, wherever they live.

A fleet is chosen once, at the start of a run: `LocalFleet` keeps every model in the run's own
process, `RankedFleet` on ranks and rollout workers of a cluster. Jobs cannot tell which.
"""

from contextlib import ExitStack
from typing import Protocol

from postgrad.core.batch import BatchGeometry
from postgrad.fleet.choices import Choices
from postgrad.learner.offload import KeptOnDevice
from postgrad.learner.protocols import (
    LogprobRole,
    MovingReferenceRole,
    PolicyRole,
    ScalarRole,
    ScoringRole,
    StoredTeacherRole,
)
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.engine import Engine


class RunContext(Protocol):
    """What a fleet reads of the run that it serves, and the choices that it settles there."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def geometry(self) -> BatchGeometry: ...

    choices: Choices  # gain the hashes of frozen weights, and the rollout engine's sizes


class Fleet(Protocol):
    """The models of a run. Each is loaded when it is asked for, at most once a run.

    path: a directory or hub id. Every method raises UsageError for a model that cannot be used, and
    RunError where frozen weights are not those that the run was started with.
    """

    def policy(self, path: str, temperature: float = 1.0) -> PolicyRole:
        """The policy with its optimizer. temperature: at which its logprobs are taken."""
        ...

    def critic(self, path: str) -> ScoringRole:
        """The critic with its optimizer: from [critic.model], else from the policy at `path` with a
        fresh head.
        """
        ...

    def reference(self, path: str) -> LogprobRole:
        """The frozen model that KL is measured from: [reference.model], else the policy's start
        `path`, which a policy with an adapter has under it. After `policy`.
        """
        ...

    def moving_reference(self, path: str) -> MovingReferenceRole:
        """A reference that starts where the policy does, and follows it. After `policy`."""
        ...

    def reward_model(self, path: str) -> ScoringRole:
        """The reward model that a job trains, with its optimizer."""
        ...

    def frozen_reward_model(self, path: str) -> ScalarRole:
        """The reward model that [[rewards]] ask. It shares the weights under the critic's adapter
        where both lie at the same path. After `critic`.
        """
        ...

    def frozen_policy(self, path: str) -> LogprobRole:
        """A policy that only computes logprobs, at a temperature of 1, with the settings of
        [reference.model].
        """
        ...

    def teacher(self, path: str, number: int | None = None) -> LogprobRole:
        """The frozen model that grades rollouts, at the sampling temperature, with the settings of
        [teacher.model], or of [[teacher.sets]] at `number`.
        """
        ...

    def reading_teacher(self, path: str, vocabulary: int) -> StoredTeacherRole:
        """The frozen model of [teacher.model] that reads rows before the first update. vocabulary:
        the tokens that it and its student have.
        """
        ...

    def release(self, role: str) -> None:
        """Frees a frozen role, by its method's name, that is not asked again."""
        ...

    def free_memory(self, keep: KeptOnDevice = "all") -> None:
        """Frees what the devices of all roles keep beside weights and states: where a phase
        ends, before an engine on the same devices takes its own. keep: what stays there of
        learners with `offload = "sampling"`; of others than the policy all or nothing.
        """
        ...

    def engine(self, path: str, stack: ExitStack, *, sequences: int, max_len: int) -> Engine:
        """The rollout engine, which is closed with `stack`.

        sequences: how many a step or an evaluation samples at once; max_len: tokens of the longest.
        """
        ...


def teacher_name(number: int | None) -> str:
    """The name of a teacher's role: that of [teacher.model], or of [[teacher.sets]] at `number`."""
    return "teacher" if number is None else f"teacher_{number + 1}"
