"""The roles of a run and their weights, from its recipe and the shapes of its models alone."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from postgrad.cluster.settings import POLICY
from postgrad.learner.settings import LearnerSettings
from postgrad.models.refusals import (
    no_balance_loss,
    no_dropout,
    no_part_of_mixtures,
    no_replay,
    no_router_dtype,
    no_z_loss,
    several_matrices,
    tied_apart,
)
from postgrad.models.settings import (
    ROUTER,
    LoraSettings,
    ModelSettings,
    no_such_part,
)
from postgrad.models.shapes import ModelShape
from postgrad.plan.adapters import adapter_parameters, alike, named_stacks, require_targets
from postgrad.recipe.recipe import Recipe, RLRecipe, SFTRecipe

OUTPUT_HEADS = frozenset({"lm_head", "embed_out", "output"})  # names in transformers' models
Find = Callable[[ModelSettings], ModelShape]


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """A role and the weights that it holds."""

    name: str  # "policy", "reference", "critic", "reward_model", "teacher", "teacher 2" ...
    shape: ModelShape
    model: ModelSettings
    learner: LearnerSettings | None = None  # None: it is frozen
    scores: bool = False  # it has a `score` head in place of the output head
    on: str | None = None  # the role whose frozen weights it uses; of its own it has an adapter
    follows: bool = False  # it also holds a float32 average of the policy's weights
    home: str = POLICY  # the role on whose ranks it lies: its own name where it has some
    offload: bool = False  # frozen, and in the host's memory between its passes
    freed: bool = False  # it reads all rows before the first update, and is freed

    @property
    def parameters(self) -> int:
        """How many weights the model has, also those that it shares with another role."""
        count = self.shape.parameters()
        if not self.scores:
            return count
        return count - self.shape.head_parameters + self.shape.hidden_size

    @property
    def active_parameters(self) -> int:
        """Of these, those that one token uses: of a mixture's experts only those that it is sent
        to, as model cards count them. All of a dense model.
        """
        return self.parameters - self.shape.unused_parameters

    @property
    def judges(self) -> bool:
        """Whether it is the reward model of [[rewards]], which scores samples while others are
        still being sampled.
        """
        return self.scores and self.learner is None

    @property
    def balances(self) -> bool:
        """Whether its updates have the balance loss of a mixture of experts."""
        stated, counted = self.model.router_aux_loss_coef, self.shape.counted
        if stated is not None:
            return stated > 0
        return counted is not None and counted.balance > 0 and ROUTER not in self.model.freeze

    @property
    def trained(self) -> int:
        """How many weights an optimizer updates."""
        if self.learner is None:
            return 0
        if self.model.lora is None:
            return self.parameters - sum(map(self.shape.frozen, self.model.freeze))
        adapter = adapter_parameters(self.shape, self.model.lora)
        head = self.shape.hidden_size if self.scores else 0  # the score head trains too
        return adapter + self.copied + head

    @property
    def copied(self) -> int:
        """How many weights of embeddings and output head train as copies beside an adapter. A plan
        has no model to find modules in: it knows transformers' names of output heads.
        """
        lora = self.model.lora
        if self.learner is None or lora is None:
            return 0
        ends = {name.rpartition(".")[2] for name in lora.modules_to_save} - {"score"}
        embeddings = self.shape.embedding_parameters if ends - OUTPUT_HEADS else 0
        return embeddings + (self.shape.head_parameters if ends & OUTPUT_HEADS else 0)

    @property
    def trains_outside(self) -> bool:
        """Whether matrices outside the layers have a gradient."""
        return self.model.lora is None or self.copied > 0


def planned_roles(recipe: Recipe, find: Find) -> tuple[PlannedRole, ...]:
    """The roles of a run, the one that the job trains first. find: the shape of a [model] table.
    Raises UsageError for settings of [model], and of a replay of routers, that a run would refuse
    once it has loaded a model of this shape.
    """
    roles = _roles(recipe, find)
    for place, model in recipe.loaded_models.items():
        if model.router_dtype != "auto" and not (shape := find(model)).frozen(ROUTER):
            raise no_router_dtype(shape.model_type, f"{'.'.join(map(str, place))}.router_dtype")
    for role in roles:
        if role.learner is None:
            continue
        for part in role.model.freeze:
            if not role.shape.frozen(part):
                key = "critic.model.freeze" if role.name == "critic" else "model.freeze"
                raise no_such_part(part, role.shape.model_type, key)
        _require_routers(role.shape, role.model)
        _require_plain_matrices(role.shape, role.model)
        if role.model.lora is not None:
            require_targets(role.shape, role.model.lora)
            _require_adaptable(role, role.model.lora)
    replays = isinstance(recipe, RLRecipe) and recipe.rollout.router_replay != "off"
    if replays and not roles[0].shape.frozen(ROUTER):
        raise no_replay(roles[0].shape.model_type)
    return roles


def _require_routers(shape: ModelShape, model: ModelSettings) -> None:
    """Raises UsageError for losses of routers that a model does not have. That transformers has no
    balance loss for a mixture is found when it is loaded.
    """
    if model.router_z_loss_coef and not shape.frozen(ROUTER):
        raise no_z_loss(model.router_z_loss_coef, shape.model_type)
    if model.router_aux_loss_coef and shape.counted is None:  # a dense type
        raise no_balance_loss(model.router_aux_loss_coef, shape.model_type)


def _require_plain_matrices(shape: ModelShape, model: ModelSettings) -> None:
    """Raises UsageError for four bits of experts that lie in one weight."""
    if model.quantize == "4bit" and shape.counted is not None and shape.counted.routed:
        raise several_matrices("what holds the experts", shape.model_type)


def _require_adaptable(role: PlannedRole, lora: LoraSettings) -> None:
    """Raises UsageError for dropout beside layers that carry a state, for dropout and DoRA on
    experts and routers, and for a tied matrix that an adapter would train whole.
    """
    shape = role.shape
    named = [s[0] for layer in alike(shape, lora) for s in named_stacks(shape, lora, layer)]
    if stacks := list(dict.fromkeys(named)):
        for key in lora.linear_alone:
            raise no_part_of_mixtures(key, stacks)
    if lora.dropout and shape.counted is not None and shape.counted.states:
        raise no_dropout(shape.model_type)
    if shape.tied and not role.scores and lora.modules_to_save:
        raise tied_apart()


def _roles(recipe: Recipe, find: Find) -> tuple[PlannedRole, ...]:
    if recipe.trained_role == "reward_model":
        shape = find(recipe.model)
        return (PlannedRole("reward_model", shape, recipe.model, recipe.learner, scores=True),)
    policy = PlannedRole("policy", find(recipe.model), recipe.model, recipe.learner)
    if isinstance(recipe, RLRecipe):
        return policy, *_beside(recipe, policy, find)
    if (teacher := recipe.loaded_models.get(("teacher", "model"))) is not None:
        freed = not beside_student(recipe)
        return policy, PlannedRole("teacher", find(teacher), teacher, freed=freed)
    reference = recipe.loaded_models.get(("reference", "model"))
    moves = recipe.reference_moves
    if reference is not None and (moves or _is_another(recipe, reference)):
        role = PlannedRole("reference", find(reference), reference, follows=moves)
        return policy, _placed(recipe, role)
    return (policy,)


def beside_student(recipe: Recipe) -> bool:
    """Whether a teacher computes with its student in each micro-batch of an update: that of SFT,
    unless it read the rows before.
    """
    if not isinstance(recipe, SFTRecipe) or recipe.teacher.top_k is not None:
        return False
    return ("teacher", "model") in recipe.loaded_models


def stored_bytes(recipe: Recipe) -> int:
    """Bytes of what a teacher of SFT with `top_k` says of a token, in float32: ids and
    log-probabilities of k tokens, and that of all others (models.distilled_head.top_logprobs). 0
    where there is none.
    """
    top_k = recipe.teacher.top_k if isinstance(recipe, SFTRecipe) else None
    return 0 if top_k is None else 4 * (2 * top_k + 1)


def _placed(recipe: Recipe, role: PlannedRole) -> PlannedRole:
    """The role where [cluster] puts it. Weights under another role's adapter are on its ranks."""
    kind = role.name.partition(" ")[0]
    table = recipe.cluster.side_roles.get(kind)
    if table is None:
        return role
    home = recipe.cluster.home(kind)
    together = role.on is not None and home == recipe.cluster.home(role.on)
    return replace(role, home=home, on=role.on if together else None, offload=table.offload)


def _beside(recipe: RLRecipe, policy: PlannedRole, find: Find) -> list[PlannedRole]:
    """The other roles of reinforcement learning, beside the policy."""
    needs, roles = recipe.algorithm.needs(), list[PlannedRole]()
    if needs.critic:
        critic = recipe.critic
        roles.append(PlannedRole("critic", find(critic.model), critic.model, critic.learner, True))
    if needs.loads_reference:
        model, moves = recipe.reference.model, recipe.reference.moves
        shared = policy.model.lora is not None and not _is_another(recipe, model)
        on = policy.name if shared else None
        roles.append(PlannedRole("reference", find(model), model, on=on, follows=moves))
    if recipe.asks_reward_model:
        model, critic = recipe.reward_model.model, recipe.critic.model
        shared = needs.critic and recipe.shares_critic_base and critic.source == model.source
        on = "critic" if shared else None
        roles.append(PlannedRole("reward_model", find(model), model, scores=True, on=on))
    for number, model in enumerate(recipe.teacher.models.values() if needs.teacher else ()):
        name = f"teacher {number + 1}" if number else "teacher"
        roles.append(PlannedRole(name, find(model), model))
    return [_placed(recipe, role) for role in roles]


def _is_another(recipe: Recipe, reference: ModelSettings) -> bool:
    """Whether the reference is not what the policy starts from."""
    return reference.source not in (None, recipe.model.source)


def mixture_notes(roles: Iterable[PlannedRole]) -> Iterator[str]:
    """A sentence for each mixture of experts: all of its weights, and those that a token uses.
    Roles of the same shape share one, which counts the output head.
    """
    names: dict[ModelShape, list[str]] = {}
    for role in roles:
        if role.shape.unused_parameters:
            names.setdefault(role.shape, []).append(role.name)
    for shape, sharing in names.items():
        every = shape.parameters()
        active = every - shape.unused_parameters
        yield (
            f"{', '.join(sharing)}: a mixture of experts with {billions(every)} parameters, of "
            f"which a token uses {billions(active)}: memory holds all of them, products take the "
            "active ones"
        )


def parameters_json(roles: Iterable[PlannedRole]) -> dict[str, dict[str, int]]:
    """By role: how many weights its model has, how many of these a token uses, how many train."""
    return {
        role.name: {
            "total": role.parameters,
            "active": role.active_parameters,
            "trained": role.trained,
        }
        for role in roles
    }


def billions(count: int) -> str:
    """A number of parameters as model names have it: "30.5B", "596M"."""
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
