"""The models of a run in this process: loaded, given an adapter or a head, divided over ranks."""

import gc
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from postgrad.core.seeds import integer
from postgrad.core.settings import ShardingStage
from postgrad.fleet import loading
from postgrad.fleet.choices import Choices
from postgrad.fleet.engines import build_engine, require_trainable
from postgrad.fleet.fleet import RunContext, teacher_name
from postgrad.learner.backbone import Backbone
from postgrad.learner.learner import Learner
from postgrad.learner.offload import KeptOnDevice, offload_between_passes
from postgrad.learner.policy import Policy, PolicyLearner
from postgrad.learner.reference import MovingReference
from postgrad.learner.score import ScoreLearner, ScoreRole
from postgrad.learner.settings import LearnerSettings, horizon
from postgrad.models.adapters import add_adapter
from postgrad.models.embedding_noise import EmbeddingNoise
from postgrad.models.frozen_parts import freeze_parts
from postgrad.models.routers import routers_of
from postgrad.models.settings import ModelSettings
from postgrad.parallel.device import compute_dtype, empty_cache
from postgrad.parallel.ranks import ALONE, Ranks
from postgrad.recipe.lines import KeyPath
from postgrad.recipe.recipe import PreferenceRecipe, Recipe, RLRecipe, SFTRecipe
from postgrad.rollout.engine import Engine

if TYPE_CHECKING:
    from postgrad.learner.distilled import ReadingTeacher

Load = Callable[[Recipe, ModelSettings, str, Choices, Ranks], Backbone]
Frozen = TypeVar("Frozen", Policy, ScoreRole)


class LocalFleet:
    """Every role in this process: the whole of a small run, or one rank's part of a large one.

    See `postgrad.fleet.fleet.Fleet`. `roles` has what was loaded, by the name of its method; both
    kinds of reference are "reference".
    """

    def __init__(self, context: RunContext, ranks: Ranks = ALONE, logs: Path | None = None) -> None:
        """ranks: those that share each role's weights. logs: a folder for what engines write."""
        self._context = context
        self._ranks = ranks
        self._logs = logs
        self.roles: dict[str, Any] = {}

    def policy(self, path: str, temperature: float = 1.0) -> PolicyLearner:
        recipe = self._context.recipe
        rollout = recipe.rollout_settings if isinstance(recipe, RLRecipe) else None
        replays = rollout is not None and rollout.router_replay != "off"
        backbone = self._trained(
            "policy", recipe.model, recipe.learner, path, loading.causal, replays=replays
        )
        if alpha := recipe.algorithm.needs().embedding_noise:
            backbone.noise = EmbeddingNoise(backbone.lm, alpha, recipe.seed)
        updates = horizon(recipe.algorithm, self._context.geometry)
        assert updates is not None  # known once the data is read
        if isinstance(recipe, SFTRecipe) and recipe.algorithm.needs().teacher:
            policy = self._student(backbone, updates)
        else:
            policy = PolicyLearner(backbone, recipe.learner, updates, temperature)
        self.roles["policy"] = policy
        return policy

    def reward_model(self, path: str) -> ScoreLearner:
        recipe = self._context.recipe
        backbone = self._trained(
            "reward_model", recipe.model, recipe.learner, path, loading.scoring
        )
        model = ScoreLearner("reward_model", backbone, "at", recipe.learner, self._updates)
        self.roles["reward_model"] = model
        return model

    def critic(self, path: str) -> ScoreLearner:
        settings = self._rl_recipe.critic
        start = settings.model.source or path
        backbone = self._trained("critic", settings.model, settings.learner, start, loading.scoring)
        critic = ScoreLearner("critic", backbone, "before", settings.learner, self._updates)
        self.roles["critic"] = critic
        return critic

    def reference(self, path: str) -> Policy:
        recipe = self._rl_recipe
        policy: PolicyLearner | None = self.roles.get("policy")  # elsewhere, if the recipe says so
        start = recipe.reference.model.source or path
        loading.require_same_frozen_weights(self._context, "reference", start)
        reference = policy.under_adapter() if policy is not None and start == path else None
        if reference is None:
            backbone = self._frozen_backbone("reference", start)
            reference = Policy(backbone, recipe.logprob_temperature)
            reference = self._offloaded(reference, "reference")
        self.roles["reference"] = reference
        return reference

    def moving_reference(self, path: str) -> MovingReference:
        recipe, policy = self._context.recipe, self._policy
        assert isinstance(recipe, RLRecipe | PreferenceRecipe)
        start = recipe.reference.model.source or path
        loading.require_same_frozen_weights(self._context, "reference", start)
        choices = self._context.choices
        backbone = loading.causal(recipe, recipe.reference.model, start, choices, self._ranks)
        backbone.lm.requires_grad_(False)
        # As the policy's, row for row. Weights that stay float32 beside narrow ones are divided
        # where nothing is trained, but not in a policy.
        pieces = policy.optimizer.pieces.items()
        undivided = {name for name, piece in pieces if not piece.sharded}
        self._divide(backbone, recipe.learner, undivided=undivided)
        reference = MovingReference(
            backbone,
            policy.temperature,
            refresh_steps=recipe.reference.refresh_steps,
            ema_decay=recipe.reference.ema_decay,
            policy=policy.weights(),
        )
        self.roles["reference"] = reference
        return reference

    def frozen_reward_model(self, path: str) -> ScoreRole:
        recipe = self._rl_recipe
        loading.require_same_frozen_weights(self._context, "reward_model", path)
        critic: ScoreLearner | None = self.roles.get("critic")
        frozen = self._context.choices.frozen
        same = frozen.get("critic") == frozen["reward_model"] and recipe.shares_critic_base
        model = critic.under_adapter() if critic is not None and same else None
        if model is None:
            settings, choices = recipe.reward_model.model, self._context.choices
            backbone = loading.scoring(
                recipe, settings, path, choices, self._ranks, fresh_head=False
            )
            self._freeze(backbone, "reward_model")
            model = self._offloaded(ScoreRole(backbone, "at"), "reward_model")
        self.roles["frozen_reward_model"] = model
        return model

    def frozen_policy(self, path: str) -> Policy:
        policy = Policy(self._frozen_backbone("reference", path))
        self.roles["frozen_policy"] = policy = self._offloaded(policy, "reference")
        return policy

    def teacher(self, path: str, number: int | None = None) -> Policy:
        temperature, name = self._context.recipe.logprob_temperature, teacher_name(number)
        table = ("teacher", "model") if number is None else ("teacher", "sets", number, "model")
        teacher = Policy(self._frozen_backbone("teacher", path, table, name), temperature)
        self.roles[name] = teacher = self._offloaded(teacher, "teacher")
        return teacher

    def reading_teacher(self, path: str, vocabulary: int) -> "ReadingTeacher":
        from postgrad.learner.distilled import ReadingTeacher  # few runs have a teacher

        teacher = ReadingTeacher(self._frozen_backbone("teacher", path), vocabulary)
        self.roles["reading_teacher"] = teacher
        return teacher

    def release(self, role: str) -> None:
        del self.roles[role]
        gc.collect()  # FSDP2's hooks and modules refer to each other: nothing else frees them
        self.free_memory()

    def free_memory(self, keep: KeptOnDevice = "all") -> None:
        for name, role in self.roles.items() if keep != "all" else ():
            if isinstance(role, Learner) and role.offload:  # a publish reads the policy alone
                role.offload.offload(self._kept_of_policy(keep) if name == "policy" else "nothing")
        empty_cache(torch.device(self._context.choices.device))

    def _kept_of_policy(self, keep: KeptOnDevice) -> KeptOnDevice:
        """What of the policy stays where the built-in engine in this process reads its tensors: in
        float32 those that the optimizer moves (WeightIntake).
        """
        recipe, dtype = self._context.recipe, self._context.choices.rollout_dtype
        rollout = recipe.rollout_settings
        if rollout is None or (rollout.type, recipe.cluster.type) != ("local", "local"):
            return keep
        assert dtype is not None  # of every job that answers
        wide = compute_dtype(dtype, torch.device(self._context.choices.device)) == torch.float32
        return "weights" if wide or keep == "weights" else "computing weights"

    def engine(self, path: str, stack: ExitStack, *, sequences: int, max_len: int) -> Engine:
        """Fleet.engine: it borrows the weights of the policy, which is in this process too; those
        in four bits, and the adapter on them, it reads where they are.
        """
        settings, model = self._context.recipe.rollout_settings, self._context.recipe.model
        assert settings is not None  # of every job that samples
        require_trainable(settings)
        engine, self._context.choices = build_engine(
            settings, path, self._context.choices, stack,
            sequences=sequences, max_len=max_len, logs=self._logs, borrows=True,
            policy=self._policy.backbone.lm if self._ranks.size == 1 else None,
            beside_learner=True, lora=model.lora, eos_token=model.eos_token,
            router_dtype=model.router_dtype,
        )  # fmt: skip
        return engine

    @property
    def _policy(self) -> PolicyLearner:
        return self.roles["policy"]

    @property
    def _rl_recipe(self) -> RLRecipe:
        recipe = self._context.recipe
        assert isinstance(recipe, RLRecipe)  # only those have a critic, a reference in each step
        return recipe

    @property
    def _updates(self) -> int:
        updates = self._context.geometry.total_updates
        assert updates is not None  # known once the data is read
        return updates

    def _trained(
        self,
        role: str,
        settings: ModelSettings,
        learner: LearnerSettings,
        path: str,
        load: Load,
        *,
        replays: bool = False,
    ) -> Backbone:
        """With an adapter where the settings say so. replays: its routers use experts again that
        were chosen elsewhere.
        """
        recipe = self._context.recipe
        backbone = load(recipe, settings, path, self._context.choices, self._ranks)
        backbone.routers = routers_of(backbone.lm, settings, replays=replays)
        if settings.freeze:
            key = "critic.model.freeze" if role == "critic" else "model.freeze"
            freeze_parts(backbone.lm, settings, key)
        if settings.freeze or settings.lora is not None:
            loading.require_same_frozen_weights(self._context, role, path)
        if settings.lora is not None:
            seed = integer(recipe.seed, "adapter")
            backbone.adapter = add_adapter(backbone.lm, settings.lora, seed=seed, name=role)
        self._divide(backbone, learner)
        return backbone

    def _student(self, backbone: Backbone, updates: int) -> PolicyLearner:
        """The policy with the teacher of [teacher.model] beside it, or with what it said before."""
        from postgrad.learner import distilled  # few runs have a teacher

        recipe = self._context.recipe
        assert isinstance(recipe, SFTRecipe)
        path, top_k = recipe.teacher.model.source, recipe.teacher.top_k
        assert path is not None  # a recipe without it is refused
        if top_k is None:
            teacher = self._frozen_backbone("teacher", path)
            return distilled.LiveDistillation(backbone, recipe.learner, updates, teacher)
        both = distilled.shared_vocabulary(backbone.lm.config, path)
        return distilled.StoredDistillation(backbone, recipe.learner, updates, top_k, both)

    def _frozen_backbone(
        self, role: str, path: str, table: KeyPath | None = None, name: str | None = None
    ) -> Backbone:
        """Weights of their own that never change, as the role's [model] or another table says.
        name: in the run's choices, where it is not the role's.
        """
        recipe = self._context.recipe
        loading.require_same_frozen_weights(self._context, name or role, path)
        settings = recipe.model_tables[table or (role, "model")]
        backbone = loading.causal(recipe, settings, path, self._context.choices, self._ranks)
        self._freeze(backbone, role)
        return backbone

    def _freeze(self, backbone: Backbone, role: str) -> None:
        """Weights without an optimizer are divided where computing ones are. role: in [cluster]."""
        backbone.lm.requires_grad_(False)
        learner = self._context.recipe.learner
        divided = learner.sharding == "zero3"
        if divided and self._offloads(role):  # its shards lie there
            learner = learner.model_copy(update={"offload": True})
        self._divide(backbone, learner, "zero3" if divided else "none")

    def _offloads(self, role: str) -> bool:
        """Whether a frozen role's weights lie in the host's memory between its passes."""
        table = self._context.recipe.cluster.side_roles.get(role)
        return table is not None and table.offload and self._context.choices.device == "cuda"

    def _offloaded(self, frozen: Frozen, role: str) -> Frozen:
        """A frozen role, offloaded between its passes where the recipe says so."""
        if self._context.recipe.learner.sharding != "zero3" and self._offloads(role):
            offload_between_passes(frozen.backbone)
        return frozen

    def _divide(
        self,
        backbone: Backbone,
        learner: LearnerSettings,
        stage: ShardingStage | None = None,
        undivided: Collection[str] = (),
    ) -> None:
        offload = learner.offload is True
        stage = stage or learner.sharding
        backbone.divide(self._ranks, stage, offload=offload, undivided=undivided)
