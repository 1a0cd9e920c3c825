"""Checks of where things run: cluster placement and rollout engines. Each yields (place, what is
wrong).
"""

from collections.abc import Iterator

from postgrad.cluster.settings import (
    POLICY,
    ClusterSettings,
    RolePlacement,
    RolloutPlacement,
    SidePlacement,
)
from postgrad.recipe.lines import RecipeProblem
from postgrad.recipe.settings import AnsweringSections, CommonSections

TABLES = ("vllm", "openai")  # of engines that have settings of their own


def placement_problems(recipe: CommonSections, job: str) -> Iterator[RecipeProblem]:
    """Placements that no cluster has room for."""
    settings, ranks = recipe.cluster, recipe.learner.ranks
    for role, table in settings.side_roles.items():
        if (role, "model") not in recipe.loaded_models:
            yield ("cluster", role), "this job asks no such role: leave it out"
        elif table.offload and (problem := _cannot_offload(recipe, settings, role)):
            yield ("cluster", role, "offload"), problem
    if settings.type == "local":
        yield from _unread(settings)
        return
    policy, rollout = settings.policy, settings.rollout
    if policy.gpus not in (None, 0, ranks):
        yield (
            ("cluster", "policy", "gpus"),
            f"{policy.gpus} beside learner.ranks = {ranks}: every rank has one GPU; state one of "
            "the two, or the same number",
        )
    yield from _spread("policy", policy, ranks, f"learner.ranks = {ranks}")
    for role, table in settings.side_roles.items():
        if (role, "model") in recipe.loaded_models:  # else it is refused above
            yield from _side_role(recipe, settings, role, table)
    workers = settings.engines(ranks)
    if not workers:
        return
    if recipe.rollout_settings is None:
        place = ("cluster", "rollout") if rollout else ("cluster", "policy", "colocate")
        yield place, f'job = "{job}" samples nothing: leave it out'
        return
    if policy.colocate is not None:
        yield from _colocated(recipe, rollout, workers)
    elif rollout is not None:
        yield from _later(rollout, workers)
        yield from _spread("rollout", rollout, workers, f"workers = {workers}")
        if rollout.gpus and rollout.gpus % workers:
            yield (
                ("cluster", "rollout", "gpus"),
                f"{rollout.gpus} GPUs cannot be divided evenly over {workers} workers",
            )


def _unread(settings: ClusterSettings) -> Iterator[RecipeProblem]:
    """Placements that a local run would not read."""
    for key in ("policy", "critic", "reference", "reward_model", "teacher", "rollout"):
        stated = getattr(settings, key)
        if key in settings.side_roles and stated == SidePlacement(offload=stated.offload):
            continue  # of one process too
        if stated != ClusterSettings.model_fields[key].default:
            yield (
                ("cluster", key),
                'with cluster.type = "local" everything runs in one process: --cluster.type ray, '
                "or leave this out",
            )


def _side_role(
    recipe: CommonSections, settings: ClusterSettings, role: str, table: SidePlacement
) -> Iterator[RecipeProblem]:
    """A place that a role beside the policy cannot have."""
    place, other, processes = ("cluster", role), table.colocate, table.processes
    if other is not None:
        stated = [key for key in ("ranks", "gpus", "cpus", "machines") if getattr(table, key)]
        if stated:
            yield (*place, stated[0]), f'is that of {other} (colocate = "{other}"): leave it out'
        if other == role or (other != POLICY and settings.home(other) != other):
            yield (
                (*place, "colocate"),
                f'"{other}" has no processes of its own (cluster.{other}.ranks): name one that '
                'has, or "policy"',
            )
    elif table.gpus not in (None, 0, processes):
        yield (
            (*place, "gpus"),
            f"{table.gpus} beside ranks = {processes}: every rank has one GPU; state one of the "
            "two, or the same number",
        )
    elif not processes and (table.cpus or table.machines):
        yield place, "cpus and machines are of processes of its own: say how many with ranks"
    else:
        yield from _spread(role, table, processes, f"ranks = {processes}")
    if settings.home(role) == POLICY:
        return
    if role == "teacher" and not recipe.trains_on_rollouts:
        yield (
            place,
            "distillation compares whole distributions, so this teacher computes beside its "
            "student, on its ranks: leave this out",
        )
    if role == "reference" and recipe.reference_moves:
        yield (
            place,
            "a reference that follows the policy (refresh_steps, ema_decay) is on its ranks: "
            "leave this out",
        )
    frozen = recipe.model_tables.get(("reference", "model")) if role == "reference" else None
    own_start = frozen is not None and frozen.source == recipe.model.source
    if own_start and not recipe.trains_on_rollouts:
        yield (
            place,
            "without a reference.model.path of its own the policy computes these logprobs "
            "itself, before its first update: leave this out",
        )


def _cannot_offload(recipe: CommonSections, settings: ClusterSettings, role: str) -> str | None:
    """Why a role's weights cannot lie in the host's memory between its passes; None: they can."""
    if role == "critic":
        return "is for frozen roles, and the critic learns: critic.learner.offload"
    if role == "reference" and recipe.reference_moves:
        return "is for frozen roles, and this reference follows the policy: leave it out"
    if role == "teacher":  # no adapter is trained on its weights
        if recipe.trains_on_rollouts:
            return None
        return "this teacher computes in every micro-batch of an update: leave it out"
    over = ("model",) if role == "reference" else ("critic", "model")
    trained, frozen = recipe.loaded_models.get(over), recipe.model_tables[role, "model"]
    if trained is None or trained.lora is None or not trained.loads_as(frozen):
        return None
    start = trained.source or recipe.model.source
    together = settings.home(role) == (POLICY if role == "reference" else settings.home("critic"))
    if together and (frozen.source or recipe.model.source) == start:
        return "these are the weights under an adapter that is trained on them: leave it out"
    return None


def _spread(
    role: str, placement: RolePlacement, processes: int, stated: str
) -> Iterator[RecipeProblem]:
    """Processes that do not divide evenly over machines. stated: the key that says how many."""
    if placement.machines and processes % placement.machines:
        yield (
            ("cluster", role, "machines"),
            f"{stated} cannot be divided evenly over {placement.machines} machines",
        )


def _colocated(
    recipe: CommonSections, rollout: RolloutPlacement | None, workers: int
) -> Iterator[RecipeProblem]:
    """Engines on the ranks' devices: how many fit, and keys that are then the ranks'."""
    ranks, engine = recipe.learner.ranks, recipe.rollout_settings
    each = engine.vllm.devices if engine is not None and engine.type == "vllm" else 1
    machines = max(1, recipe.cluster.policy.machines)
    if ranks // machines % each:
        yield (
            ("learner", "ranks"),
            f"{ranks} on {machines} machines: engines of {each} devices (rollout.vllm) share those "
            f'of as many ranks of a machine (policy.colocate = "rollout"): a multiple of {each} on '
            "each",
        )
    elif workers * each > ranks:
        most = f"one on each {each} (workers = {ranks // each})" if each > 1 else "one on each"
        yield (
            ("cluster", "rollout", "workers"),
            f'{workers} on the devices of {ranks} ranks (policy.colocate = "rollout"): at most '
            f"{most}",
        )
    keys = ("gpus", "cpus", "machines", "least")
    stated = [key for key in keys if rollout and getattr(rollout, key)]
    for key in stated:
        yield (
            ("cluster", "rollout", key),
            'is the ranks\', whose devices the engines share (policy.colocate = "rollout"): leave '
            "it out",
        )


def _later(rollout: RolloutPlacement, workers: int) -> Iterator[RecipeProblem]:
    """A number of engines to start with that is none, or that cannot be kept to."""
    least = rollout.least
    if least is None:
        return
    if least > workers:
        yield (
            ("cluster", "rollout", "least"),
            f"{least} of {workers} workers: at most all of them",
        )
    elif rollout.machines:
        yield (
            ("cluster", "rollout", "machines"),
            "spreads workers that start together, and beside least the others come where there is "
            "room: leave one of the two out",
        )


def engine_problems(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Keys that this engine cannot take, and tables of engines that the recipe does not use."""
    rollout = recipe.rollout
    for name in TABLES:
        stated = getattr(rollout, name)
        if rollout.type != name and stated != type(stated)():
            yield ("rollout", name), f'is read only where rollout.type = "{name}"'
    if rollout.type != "local" and rollout.slots == "auto":
        yield (
            ("rollout", "slots"),
            f'"auto" tries the built-in engine: give a number, or leave it out for {rollout.type}',
        )
    model = recipe.model
    if rollout.type == "local" and model.quantize != "none" and rollout.dtype != "auto":
        yield (
            ("rollout", "dtype"),
            f'"{rollout.dtype}": the engine reads the policy\'s weights in four bits and computes '
            "in model.dtype: leave it out",
        )
    yield from _adapter_alone(recipe)
    yield from _schedule(recipe)
    workers = recipe.cluster.type != "local" and recipe.cluster.engines(recipe.learner.ranks)
    if rollout.transport != "auto" and not workers and rollout.type != "vllm":
        yield (
            ("rollout", "transport"),
            f'"{rollout.transport}" is for engines in processes of their own (vLLM, rollout '
            "workers), and this one has none: leave it out",
        )
    if rollout.type == "openai":
        yield from _openai(recipe)


def _schedule(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Engines that shall go as soon as they can, or as they went, and cannot."""
    rollout = recipe.rollout
    if rollout.schedule_path is not None and rollout.schedule != "replay":
        yield ("rollout", "schedule_path"), 'is read only where schedule = "replay"'
    if rollout.schedule == "fixed":
        return
    place, stated = ("rollout", "schedule"), f'"{rollout.schedule}"'
    if not recipe.samples_while_learning:
        yield (
            place,
            f"{stated} is of engines that sample while the policy learns, and these do not: give "
            "rollout.max_staleness of 1 or more, [cluster.rollout] and devices that are not the "
            "ranks', or leave it out",
        )
    if not rollout.in_flight_updates:
        yield (
            place,
            f"{stated} cuts samples where they are when the policy has learned, and "
            "in_flight_updates = false lets none be cut: leave one of the two out",
        )
    if rollout.schedule == "replay" and rollout.type != "local":
        yield (
            place,
            f'"replay" with type = "{rollout.type}": no engine but the built-in one samples the '
            'same tokens again; source = "replay" trains on those that were recorded',
        )
    if rollout.schedule == "replay" and rollout.schedule_path is None:
        yield (
            ("rollout", "schedule_path"),
            'schedule = "replay" needs the run directory whose schedule.jsonl is repeated',
        )
    workers = recipe.cluster.rollout
    if rollout.schedule == "replay" and workers is not None and workers.least is not None:
        yield (
            ("cluster", "rollout", "least"),
            "a replay repeats what each of all workers did: leave this out",
        )


def _adapter_alone(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    rollout, model = recipe.rollout, recipe.model
    if rollout.sends_adapter and model.lora is None:
        yield (
            ("rollout", "vllm", "lora"),
            '"adapter" sends the policy\'s adapter, and it has none: give [model.lora]',
        )
    elif rollout.sends_adapter and model.quantize != "none":
        yield (
            ("rollout", "vllm", "lora"),
            f'"adapter" beside model.quantize = "{model.quantize}": vLLM would apply it to other '
            'weights than those that it is trained on: use "merged"',
        )
    elif rollout.sends_adapter and model.lora is not None and model.lora.dora:
        yield (
            ("rollout", "vllm", "lora"),
            '"adapter" beside model.lora.dora: vLLM applies no lengths of rows: use "merged"',
        )
    elif rollout.sends_adapter and model.lora is not None and model.lora.keeps_start:
        yield (
            ("rollout", "vllm", "lora"),
            f'"adapter" beside model.lora.init = "{model.lora.init}", whose change of the base has '
            'twice the rank: use "merged"',
        )
    elif rollout.sends_adapter and model.lora is not None and model.lora.modules_to_save:
        yield (
            ("rollout", "vllm", "lora"),
            '"adapter" beside model.lora.modules_to_save: vLLM takes no whole modules with an '
            'adapter: use "merged"',
        )


def _openai(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    server = recipe.rollout.openai
    if server.base_url is None:
        yield ("rollout", "openai", "base_url"), "which server? such as http://127.0.0.1:8000/v1"
    if server.endpoint == "chat" and recipe.environment is not None:
        yield (
            ("rollout", "openai", "endpoint"),
            "an environment's turns are rendered here, and a chat server renders its own: take "
            '"completions"',
        )
