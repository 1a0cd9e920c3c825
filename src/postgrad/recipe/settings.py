"""The sections of a recipe that join rooms, then which sections each kind of job has."""

from abc import abstractmethod
from typing import Any, Literal

from pydantic import Field

from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.cluster.settings import ClusterSettings
from postgrad.core.batch import BatchGeometry, BatchSettings, Parallel, RunLength
from postgrad.core.errors import UsageError
from postgrad.core.geometry import geometry
from postgrad.core.settings import Settings
from postgrad.data.settings import MixSettings, PairMixSettings
from postgrad.learner.settings import LearnerSettings
from postgrad.models.settings import ModelSettings
from postgrad.observe.settings import ObserveSettings, SentinelSettings
from postgrad.recipe.eval_settings import (
    EvalSettings,
    PairEvalSettings,
)
from postgrad.recipe.lines import KeyPath
from postgrad.rewards.learned import REWARD_MODELS
from postgrad.rewards.mixing import ENVIRONMENT
from postgrad.rewards.registry import component_names
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rollout.environments.base import environment_rewards
from postgrad.rollout.settings import EnvironmentSets, RolloutSettings

# What a row of the training data becomes: the records of data/.
RowKind = Literal["conversation", "prompt", "pair", "labelled", "steps"]


class ReferenceSettings(Settings):
    """The model that KL is measured from; what is left out is taken from the policy's.

    Frozen, unless it follows the policy: `refresh_steps` takes the policy's weights every so many
    steps, `ema_decay` keeps a moving average of them, one step at a time; with both the average
    moves every so many steps (TR-DPO, arXiv:2404.09656).
    """

    model: ModelSettings = ModelSettings()
    refresh_steps: int = Field(default=0, ge=0)  # 0: never
    ema_decay: float = Field(default=0.0, ge=0.0, lt=1.0)  # 0: no average

    @property
    def moves(self) -> bool:
        """True where it follows the policy."""
        return bool(self.refresh_steps or self.ema_decay)


class CriticSettings(Settings):
    """The critic of PPO; what is left out is taken from the policy's, its weights from the reward
    model where there is one.
    """

    model: ModelSettings = ModelSettings()
    learner: LearnerSettings = LearnerSettings()


class RewardModelSettings(Settings):
    """The model that [[rewards]] of type "reward_model" ask."""

    model: ModelSettings = ModelSettings()


class CommonSections(Settings):
    """What every job says, and the questions that any recipe answers about its job.

    Exactly one of steps, total_episodes and epochs says how long the run is.
    """

    run_dir: str = Field(min_length=1)  # where the run writes
    seed: int = Field(default=0, ge=0)  # of fresh weights, the order of rows, samples
    steps: int | None = Field(default=None, ge=1)  # passes of the loop
    total_episodes: int | None = Field(default=None, ge=1)  # a budget of samples
    epochs: float | None = Field(default=None, gt=0.0)  # passes over the data
    model: ModelSettings = ModelSettings()
    batch: BatchSettings = BatchSettings()
    learner: LearnerSettings = LearnerSettings()
    cluster: ClusterSettings = ClusterSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    sentinels: SentinelSettings = SentinelSettings()
    observe: ObserveSettings = ObserveSettings()

    @property
    def parallel(self) -> Parallel:
        """How the ranks that train are arranged: all roles share them."""
        learner = self.learner
        return Parallel(learner.ranks, learner.tensor_parallel, learner.context_parallel)

    def length(self, rows: int | None = None) -> RunLength:
        """How long the run is; rows of the training data turn epochs into steps."""
        return RunLength(self.steps, self.total_episodes, self.epochs, rows)

    def geometry(self, rows: int | None = None) -> BatchGeometry:
        """Every batch number; `rows` of the training data are needed where epochs are stated."""
        return geometry(self.batch, self.length(rows), self.parallel)

    def dump(self) -> dict[str, Any]:
        """The resolved recipe as JSON values; it loads again to an equal recipe."""
        return self.model_dump(mode="json")

    @property
    @abstractmethod
    def row_kind(self) -> RowKind:
        """What a row of the training data becomes."""

    @property
    @abstractmethod
    def min_micro_tokens(self) -> int:
        """The fewest tokens that one forward pass has to hold: a row of data.max_len tokens, or the
        two sequences of a pair.
        """

    @property
    def trained_role(self) -> Literal["policy", "reward_model"]:
        """The role whose weights are [model] and which the job is about."""
        return "policy"

    @property
    def model_tables(self) -> dict[KeyPath, ModelSettings]:
        """Every [model] table by its place, ("critic", "model") say, also of roles that the
        algorithm does not use. That of the trained role comes first.
        """
        return {("model",): self.model}

    @property
    def loaded_models(self) -> dict[KeyPath, ModelSettings]:
        """Those of `model_tables` whose role the job uses."""
        return {("model",): self.model}

    @property
    def learner_tables(self) -> dict[KeyPath, LearnerSettings]:
        """Every [learner] table by its place: that of the trained role first, then the critic's."""
        return {("learner",): self.learner}

    @property
    def trained_models(self) -> dict[KeyPath, ModelSettings]:
        """Those of `model_tables` whose role has a [learner]."""
        learners = self.learner_tables
        return {
            place: model
            for place, model in self.model_tables.items()
            if (*place[:-1], "learner") in learners
        }

    @property
    def reference_moves(self) -> bool:
        """True where the reference follows the policy."""
        return False

    @property
    def trains_on_rollouts(self) -> bool:
        """True where the loop samples the answers that it learns from: RL."""
        return False

    @property
    def rollout_settings(self) -> RolloutSettings | None:
        """[rollout]; None where the recipe has no such section: jobs on pairs."""
        return None

    @property
    def samples_while_learning(self) -> bool:
        """True where the engine is in processes of its own, on devices that the learner does not
        use, and samples may be older than the weights that they train (docs/async.md).
        """
        rollout, settings = self.rollout_settings, self.cluster
        if rollout is None or not self.trains_on_rollouts or rollout.source != "live":
            return False
        apart = settings.type != "local" and settings.policy.colocate is None
        return rollout.max_staleness > 0 and apart and settings.engines(self.learner.ranks) > 0

    @property
    def samples_answers(self) -> bool:
        """True where the policy answers questions in this run: to learn, or to be evaluated."""
        return False

    @property
    def evaluates_answers(self) -> bool:
        """True where held-out questions are answered, and the answers scored."""
        return False

    @property
    def own_answers(self) -> float:
        """The share of the rows that the policy answers itself, to learn from its own answers in
        place of theirs: SFT, algorithm.on_policy.
        """
        return 0.0

    @property
    def measures_loss(self) -> bool:
        """True where held-out conversations are evaluated by their loss."""
        return False

    @property
    def sampled_tokens(self) -> int | None:
        """The most tokens of an answer that is sampled to learn from; None where rows hold the
        answers.
        """
        return None

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by before the loss reads logprobs: the sampling temperature, and
        1 where nothing is sampled to learn from.
        """
        return 1.0

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of one training sample, as train_batch_size counts samples: 2 for a pair."""
        return 2 if self.row_kind == "pair" else 1

    @property
    def answers_per_prompt(self) -> int:
        """Training sequences that share the tokens of one prompt."""
        return self.sequences_per_sample


class AnsweringSections(CommonSections):
    """Jobs whose policy answers questions: while it learns, or when it is evaluated."""

    data: MixSettings
    eval: EvalSettings = EvalSettings()
    rewards: tuple[RewardSettings, ...] = ()
    scoring: ScoringSettings = ScoringSettings()
    environment: EnvironmentSets | None = None
    rollout: RolloutSettings = RolloutSettings()

    @property
    def min_micro_tokens(self) -> int:
        return self.data.max_len

    @property
    def rollout_settings(self) -> RolloutSettings:
        return self.rollout

    @property
    def evaluates_answers(self) -> bool:
        """An SFT job without anything that scores answers evaluates none."""
        return bool(self.eval.sets) and self.reward_components != []

    @property
    def samples_answers(self) -> bool:
        return self.trains_on_rollouts or self.evaluates_answers

    @property
    def asks_reward_model(self) -> bool:
        """True where one of [[rewards]] is a score of the model in [reward_model]."""
        return any(reward.type in REWARD_MODELS for reward in self.rewards)

    @property
    def environment_weight(self) -> float | None:
        """The weight of the environments' rewards; None where none gives any. Raises UsageError
        where one of them cannot be built.
        """
        weights = [played.weight for played in environment_rewards(self.environment).values()]
        return next((weight for weight in weights if weight is not None), None)

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each component of the reward, the environment's too, in a recipe without
        errors.
        """
        names, environment = self.reward_components or [], self.environment_weight
        weights = [reward.weight for reward in self.rewards]
        return dict(zip(names, [*weights, environment or 0.0], strict=False))

    @property
    def reward_components(self) -> list[str] | None:
        """The names of a sample's rewards, the environment's last; None where [[rewards]] or
        [environment] have an error, which the checks report.
        """
        try:
            names = component_names(self.rewards) if self.rewards else []
            weight = self.environment_weight
        except UsageError:
            return None
        return names if weight is None else [*names, ENVIRONMENT]


class ComparingSections(CommonSections):
    """Jobs that learn which of two answers is preferred: a sample is a pair, or one answer with a
    label, or with a label for each of its steps.
    """

    data: PairMixSettings
    eval: PairEvalSettings = PairEvalSettings()

    @property
    def min_micro_tokens(self) -> int:
        return (1 if self.row_kind == "steps" else 2) * self.data.max_len


Sections = AnsweringSections | ComparingSections
