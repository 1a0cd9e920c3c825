"""Both fleets keep the contract of `Fleet`, and a rank does what the controller asks of it."""

import gc
import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_ranks import FakeContext, FakeGroup, fleet_on
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import RunError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.fleet.fleet import Fleet
from postgrad.fleet.loading import frozen_hash
from postgrad.fleet.local import LocalFleet
from postgrad.fleet.ranked import RankedFleet, RankedRole, recipe_on
from postgrad.learner import protocols
from postgrad.learner.distilled import ReadingTeacher
from postgrad.learner.offload import offload_between_passes
from postgrad.learner.policy import Policy, PolicyLearner
from postgrad.learner.reference import MovingReference
from postgrad.learner.score import ScoreLearner, ScoreRole
from postgrad.models.decoder import joined
from postgrad.observe.console import Console
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import RLRecipe
from postgrad.tools.export import export
from postgrad.training.start import train

LOADERS = {  # method of Fleet -> the role's name on a rank, and its class there
    "policy": ("policy", PolicyLearner),
    "critic": ("critic", ScoreLearner),
    "reference": ("reference", Policy),
    "moving_reference": ("reference", MovingReference),
    "frozen_reward_model": ("frozen_reward_model", ScoreRole),
    "frozen_policy": ("frozen_policy", Policy),
    "teacher": ("teacher", Policy),
    "reading_teacher": ("reading_teacher", ReadingTeacher),
}
MORE: dict[str, tuple[Any, ...]] = {"teacher": (None,), "reading_teacher": (99,)}  # arguments
CLUSTER = {"type": "ray"}


def methods_of(kind: type) -> dict[str, Any]:
    """Public methods of a class by name, those of its bases included."""
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {name: method for name, method in functions if not name.startswith("_")}


def parameters(method: Any) -> list[tuple[str, Any, Any]]:
    stated = inspect.signature(method).parameters.values()
    return [(each.name, each.kind, each.default) for each in stated]


def in_protocols() -> list[tuple[str, str, Any]]:
    """(protocol, name, member) of everything that a protocol of the learner asks for."""
    kinds = [
        kind
        for _, kind in inspect.getmembers(protocols, inspect.isclass)
        if kind.__module__ == protocols.__name__
    ]
    return [
        (kind.__name__, name, member)
        for kind in kinds
        for name, member in vars(kind).items()
        if not name.startswith("_")
    ]


@pytest.mark.parametrize("kind", [LocalFleet, RankedFleet])
def test_a_fleet_has_exactly_the_methods_of_the_protocol_with_the_same_parameters(
    kind: type,
) -> None:
    asked, there = methods_of(Fleet), methods_of(kind)
    assert there.keys() == asked.keys()
    for name, method in asked.items():
        assert parameters(there[name]) == parameters(method), name


def test_a_role_on_ranks_has_every_member_of_the_protocols_with_the_same_parameters() -> None:
    assert len({kind for kind, *_ in in_protocols()}) == 7
    for kind, name, member in in_protocols():
        label = f"{kind}.{name}"
        if name == "temperature":  # an attribute of its own
            assert RankedRole(None, "policy", 0.7).temperature == 0.7  # type: ignore[arg-type]
        elif isinstance(member, property):
            assert isinstance(vars(RankedRole)[name], property), label
        else:
            assert parameters(getattr(RankedRole, name)) == parameters(member), label


@pytest.fixture
def context(make_recipe: MakeRecipe, models: Callable[[int], str]) -> FakeContext:
    """A PPO run in which every role of an RL job can be asked for."""
    recipe = make_recipe(
        "rl",
        model={"path": models(0), "init": None},
        algorithm={"type": "ppo", "kl_coef": 0.05},
        reference={"ema_decay": 0.5},
        rollout={"temperature": 0.7},
        cluster=CLUSTER,
    )
    return FakeContext.of(recipe)


@pytest.fixture
def reward_model(make_recipe: MakeRecipe, models: Callable[[int], str], tmp_path: Path) -> str:
    """A directory with a reward model."""
    recipe = make_recipe("reward", "rm", model={"path": models(0), "init": None}, steps=1)
    train(recipe, Console("quiet"))
    return str(export(tmp_path / "rm", "latest", tmp_path / "reward-model"))


def some_sequences() -> Sequences:
    rows = [np.array([1, 2, 3, 4]), np.array([5, 6])]
    masks = [np.array([False, True, True, True]), np.array([False, True])]
    return Sequences(Ragged.of(rows, np.int32), Ragged.of(masks, np.bool_), np.arange(2))


def test_every_role_that_a_fleet_loads_is_loaded_by_the_fleet_of_the_rank(
    context: FakeContext, models: Callable[[int], str], reward_model: str
) -> None:
    fleet, group = fleet_on(context)
    loads = methods_of(Fleet).keys() - {"release", "free_memory", "engine", "reward_model"}
    assert loads == LOADERS.keys()
    for method, (name, kind) in LOADERS.items():
        path = reward_model if method == "frozen_reward_model" else models(0)
        arguments = (path, *MORE.get(method, ()))
        role = getattr(fleet, method)(*arguments)
        assert group.calls[-1] == ("load_role", method, context.geometry, arguments) or (
            method == "policy"
        )
        assert role.name == name
        assert type(group.local.roles[name]) is kind
    # the controller's record names what never changes
    for role in ("reference", "reward_model", "teacher"):
        path = reward_model if role == "reward_model" else models(0)
        assert context.choices.frozen[role] == frozen_hash(path)


def test_the_reward_model_that_a_job_trains_is_loaded_by_the_fleet_of_the_rank(
    make_recipe: MakeRecipe, models: Callable[[int], str]
) -> None:
    recipe = make_recipe("reward", model={"path": models(0), "init": None}, cluster=CLUSTER)
    fleet, group = fleet_on(FakeContext.of(recipe))
    role = fleet.reward_model(models(0))
    assert role.name == "reward_model"
    assert role.updates == 0
    assert type(group.local.roles["reward_model"]) is ScoreLearner


def test_roles_on_a_rank_compute_the_bits_of_roles_here(
    context: FakeContext, models: Callable[[int], str]
) -> None:
    sequences = some_sequences()
    ranked, here = fleet_on(context)[0], LocalFleet(FakeContext.of(context.recipe))
    for fleets in (ranked, here):
        fleets.policy(models(0), 0.7)
    for method in ("critic", "moving_reference", "reference", "frozen_policy"):
        column = "scores" if method == "critic" else "logprobs"
        there, at_home = (getattr(fleet, method)(models(0)) for fleet in (ranked, here))
        values = [getattr(role, column)(sequences).result().values for role in (there, at_home)]
        assert values[0].tobytes() == values[1].tobytes(), method
        if column == "logprobs":
            assert there.temperature == at_home.temperature, method


def test_the_start_of_a_policy_on_a_rank_is_a_role_of_its_own(
    context: FakeContext, models: Callable[[int], str]
) -> None:
    fleet, group = fleet_on(context)
    start = fleet.policy(models(0), 0.7).start()
    assert start.temperature == 0.7
    assert start.name in group.local.roles
    assert start.logprobs(some_sequences()).result().values.dtype == np.float32


def test_a_frozen_model_whose_files_changed_is_refused_through_the_ranks(
    context: FakeContext, models: Callable[[int], str]
) -> None:
    context.choices = replace(context.choices, frozen={"reference": "another hash"})
    fleet, _ = fleet_on(context)
    with pytest.raises(RunError, match=r"\(reference\) is not the one"):
        fleet.frozen_policy(models(0))


@pytest.mark.parametrize("behind", ["this process", "ranks"])
def test_a_role_that_was_released_is_gone(
    behind: str, context: FakeContext, models: Callable[[int], str]
) -> None:
    group: FakeGroup | None = None
    fleet: Fleet = LocalFleet(context)
    if behind == "ranks":
        fleet, group = fleet_on(context)
    role: Any = fleet.frozen_policy(models(0))
    held = group.local if group else fleet
    assert isinstance(held, LocalFleet)
    backbone = weakref.ref(held.roles["frozen_policy"].backbone)
    del role
    gc.collect()
    assert backbone() is not None  # the fleet holds it
    fleet.release("frozen_policy")
    gc.collect()
    assert "frozen_policy" not in held.roles
    assert backbone() is None


def test_roles_on_ranks_of_their_own_compute_the_bits_of_roles_beside_the_policy(
    make_recipe: MakeRecipe, models: Callable[[int], str], reward_model: str
) -> None:
    """Critic and reward model on one group, the reference on another, the policy alone."""
    sequences, asked = some_sequences(), ("critic", "reference", "frozen_reward_model")
    paths = {"critic": models(0), "reference": models(0), "frozen_reward_model": reward_model}
    base = {
        "model": {"path": models(0), "init": None},
        "algorithm": {"type": "ppo", "kl_coef": 0.05},
        "rewards": [{"type": "reward_model"}],
        "reward_model": {"model": {"path": reward_model}},
        "rollout": {"temperature": 0.7},
    }
    places = {
        "critic": {"ranks": 1},
        "reference": {"ranks": 1, "offload": True},
        "reward_model": {"colocate": "critic"},
    }
    together = FakeContext.of(make_recipe("rl", cluster=CLUSTER, **base))
    apart = FakeContext.of(make_recipe("rl", cluster={**CLUSTER, **places}, **base))
    groups = {
        role: FakeGroup(recipe_on(apart.recipe, count), apart.choices)
        for role, count in apart.recipe.cluster.homes.items()
    }
    policy = FakeGroup(apart.recipe, apart.choices)
    nothing: Any = None
    spread = RankedFleet(apart, policy, nothing, nothing, nothing, Path(), groups)
    values: list[dict[str, bytes]] = []
    for fleet in (fleet_on(together)[0], spread):
        fleet.policy(models(0), 0.7)
        roles = {method: getattr(fleet, method)(paths[method]) for method in asked}
        columns = {
            method: getattr(role, "logprobs" if method == "reference" else "scores")
            for method, role in roles.items()
        }
        values.append(
            {m: column(sequences).result().values.tobytes() for m, column in columns.items()}
        )
        assert roles["reference"].temperature == 0.7
    assert values[0] == values[1]
    assert together.choices.frozen == apart.choices.frozen
    assert policy.local.roles.keys() == {"policy"}
    assert groups["critic"].local.roles.keys() == {"critic", "frozen_reward_model"}
    assert groups["reference"].local.roles.keys() == {"reference"}
    spread.free_memory()
    assert all(group.calls[-1] == ("free_memory", "all") for group in (policy, *groups.values()))
    spread.release("reference")
    assert "reference" not in groups["reference"].local.roles


def test_ranks_of_another_role_share_neither_matrices_nor_sequences(
    make_recipe: MakeRecipe,
) -> None:
    sharing = {"ranks": 4, "tensor_parallel": 2, "sharding": "zero3"}
    recipe = make_recipe(
        "rl",
        learner=sharing,
        algorithm={"type": "ppo", "kl_coef": 0.05},
        cluster={**CLUSTER, "critic": {"ranks": 1}, "reference": {"ranks": 2}},
    )
    for ranks, sharding in ((1, "none"), (2, "zero3")):
        there = recipe_from_json(recipe_on(recipe, ranks).dump())
        assert isinstance(there, RLRecipe)
        for learner in (there.learner, there.critic.learner):
            grid = (learner.ranks, learner.tensor_parallel, learner.sharding)
            assert grid == (ranks, 1, sharding)


def test_offloaded_weights_are_on_the_device_only_while_their_role_computes(
    context: FakeContext, models: Callable[[int], str]
) -> None:
    """Inside the weights have memory there, and nothing is left of it afterwards."""
    fleet = LocalFleet(context)
    role = fleet.frozen_policy(models(0))
    expected = role.logprobs(some_sequences()).result().values.tobytes()
    parameters, inside = list(role.backbone.lm.parameters()), list[int]()
    for parameter in parameters:
        parameter.data = parameter.data.clone()  # out of the file, as on a GPU

    def there() -> list[int]:
        return [parameter.untyped_storage().nbytes() for parameter in parameters]

    held = there()
    column = role.backbone.column

    def seen(*arguments: Any, **how: Any) -> Any:
        inside.extend(there())
        return column(*arguments, **how)

    role.backbone.column = seen
    offload_between_passes(role.backbone)
    assert not any(there())
    assert role.logprobs(some_sequences()).result().values.tobytes() == expected
    assert inside == held
    assert all(held)
    assert not any(there())


def test_a_teacher_on_a_rank_reads_rows_as_one_here_does_and_is_freed(
    context: FakeContext, models: Callable[[int], str]
) -> None:
    (ranked, group), here = fleet_on(context), LocalFleet(FakeContext.of(context.recipe))
    read = [
        fleet.reading_teacher(models(0), 40).top_logprobs(some_sequences(), 3, 1.5).result().values
        for fleet in (ranked, here)
    ]
    assert read[0].shape == (6, 2 * 3 + 1)
    assert read[0].tobytes() == read[1].tobytes()
    assert not read[0][[0, 4]].any()  # no loss there
    assert (read[0][[1, 2, 3, 5], :3] < 40).all()
    mass = np.exp(read[0][[1, 2, 3, 5], 3:]).sum(1)
    np.testing.assert_allclose(mass, 1.0, rtol=1e-5)
    ranked.release("reading_teacher")
    assert "reading_teacher" not in group.local.roles


@pytest.mark.parametrize("method", ["policy", "critic"])
def test_matrices_under_adapters_that_run_compiled_lie_side_by_side_from_the_start(
    method: str, make_recipe: MakeRecipe, models: Callable[[int], str]
) -> None:
    """Joined later they would leave holes on a GPU, which nothing can use."""
    model = {"path": models(0), "init": None, "lora": {"rank": 4}, "compile": "auto"}
    context = FakeContext.of(
        make_recipe("rl", algorithm={"type": "ppo"}, model=model, critic={"model": model})
    )
    context.choices = replace(context.choices, compiled=True)
    role: Any = getattr(LocalFleet(context), method)(models(0))
    attention = role.backbone.lm.get_decoder().layers[1].self_attn
    matrices = [getattr(attention, f"{name}_proj").base_layer.weight for name in "qkv"]
    before = [matrix.data_ptr() for matrix in matrices]
    assert joined(matrices).data_ptr() == before[0]
    assert [matrix.data_ptr() for matrix in matrices] == before
