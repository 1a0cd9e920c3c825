"""The sources of prime-rl's configs: tasksets as datasets and the environments that play them."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from postgrad.data.settings import NO_ENVIRONMENT
from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.nested import nested
from postgrad.translate.rules import Options, decimal, flag, non_negative
from postgrad.translate.tables.prime_rl import SOURCE_RULES

TRAIN = "orchestrator.train.source"
_EVAL = "orchestrator.eval.source"
# Where a source says nothing and the first one does: what nothing means.
_OFF = {"eval.temperature": 1.0, "eval.top_p": 1.0, "eval.top_k": 0, "eval.min_p": 0.0}
_RENDERER = "orchestrator.renderer"
_PARSERS = ("inference.vllm.tool_call_parser", f"{_RENDERER}.tool_parser")
_ROWS = "postgrad.rollout.environments.verifiers:rows"


def _sources(options: Options, prefix: str) -> list[dict[str, Any]]:
    """The options of each source, by what stands after its number."""
    rows: dict[int, dict[str, Any]] = {}
    for name in [name for name in options.stated if name.startswith(f"{prefix}.")]:
        number, _, rest = name.removeprefix(f"{prefix}.").partition(".")
        if number.isdigit() and rest:
            rows.setdefault(int(number), {})[rest] = options.take(name)
    return [rows[number] for number in sorted(rows)]


def tasks(draft: Draft, options: Options) -> None:
    """The sources as [data] and [eval], and their tasksets as environments: one, or several sets
    of each, which name the environment that plays them.
    """
    trained, held_out = _sources(options, TRAIN), _sources(options, _EVAL)
    played: dict[str, dict[str, Any]] = {}  # tasksets by the name of their environment
    names = [_environment(played, source) for source in (*trained, *held_out)]
    places = {name: f"environment.sets.{number}" for number, name in enumerate(played)}
    if len(played) == 1:
        places = dict.fromkeys(played, "environment")
    for name, task in played.items():
        draft.put(f"{places[name]}.type", "verifiers")
        draft.put(f"{places[name]}.name", name if len(played) > 1 else None)
        draft.put(f"{places[name]}.taskset", task["taskset"],
                  "environment.python: an interpreter with verifiers and this taskset")  # fmt: skip
        draft.put(f"{places[name]}.settings", task.get("settings"))
    _tool_format(draft, options, [places[name] for name in played])
    _thoughts(draft, options, [places[name] for name in played])
    for number, (source, name) in enumerate(zip(trained, names, strict=False)):
        where = f"data.sets.{number}" if len(trained) > 1 else "data"
        _rows(draft, source, where, name, played)
        _limits(draft, f"{TRAIN}.{number}", source, places[name])
        _rest(draft, f"{TRAIN}.{number}", source)
    sets: list[str] = []  # of [eval]
    for number, (source, name) in enumerate(zip(held_out, names[len(trained) :], strict=True)):
        where = "eval"
        if len(held_out) > 1:
            where = f"eval.sets.{number}"
            sets.append(_new_name(source.pop("name", name), sets))
            draft.put(f"{where}.name", sets[number])
        _held_out(draft, options, source, where)
        _rows(draft, source, where, name, played)
        if name not in names[: len(trained)]:
            _limits(draft, f"{_EVAL}.{number}", source, places[name])
        _rest(draft, f"{_EVAL}.{number}", source)
    for name in ("interval", "num_examples", "group_size", "skip_first_step",
                 "sampling.temperature", "sampling.max_completion_tokens"):  # fmt: skip
        name = f"orchestrator.eval.{name}"
        if options.states(name) and not held_out:
            draft.miss(name, options.take(name), "there is no [eval]")


def _tool_format(draft: Draft, options: Options, places: Sequence[str]) -> None:
    """How the policy calls tools, in each environment."""
    for name in _PARSERS:
        if not options.states(name):
            continue
        parser = str(options.take(name))
        if parser not in common.TOOL_FORMATS:
            draft.miss(name, parser, "environment.tool_format has no such format of calls")
            continue
        for place in places:
            draft.put(f"{place}.tool_format", common.TOOL_FORMATS[parser])


def _thoughts(draft: Draft, options: Options, places: Sequence[str]) -> None:
    """Whether tasks read answers without their thoughts. Renderers of a model take them out; the
    default one does where it has a parser.
    """
    name = options.take(f"{_RENDERER}.name")
    parser = options.take(f"{_RENDERER}.reasoning_parser", "none")
    if name == "default" and str(parser).lower() == "none":
        return
    for place in places:
        draft.put(f"{place}.thoughts", "reasoning_content")


def _rows(
    draft: Draft,
    source: dict[str, Any],
    where: str,
    environment: str,
    played: Mapping[str, Mapping[str, Any]],
) -> None:
    """The rows of a source, at `where` in the recipe."""
    trained, one_of_several = where.startswith("data"), ".sets." in where
    draft.put(f"{where}.path", _ROWS)
    draft.put(f"{where}.task", dict(played[environment]),
              f"{where}.size says how many of its tasks are rows" if trained else "")  # fmt: skip
    if len(played) > 1:
        source.pop("name", None)
        draft.put(f"{where}.environment", environment)
    if trained and one_of_several and "ratio" in source:
        share = decimal(source.pop("ratio"))
        draft.put(f"{where}.weight", share, "of prompts: sets have the same `size`")
    if trained and source.get("group_size") == draft.get("batch.n_samples_per_prompt"):
        source.pop("group_size", None)


def _environment(played: dict[str, dict[str, Any]], source: dict[str, Any]) -> str:
    """The name of the environment that plays a source, which is added where no other source has
    its taskset.
    """
    task = _task(source)
    for name, other in played.items():
        if other == task:
            return name
    name = _new_name(source.get("name", task["taskset"]), played)
    played[name] = task
    return name


def _new_name(stated: Any, taken: Collection[str]) -> str:
    """A name as [[environment.sets]] may have it, which none of the others has."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", str(stated)) or "tasks"
    return name if name not in (*taken, NO_ENVIRONMENT) else f"{name}-{len(taken) + 1}"


def _task(source: dict[str, Any]) -> dict[str, Any]:
    """A taskset and its settings, as data.task has them; taken out of its source's options."""
    names = [name for name in source if name.startswith("env.taskset.")]
    settings = nested({name.removeprefix("env.taskset."): source.pop(name) for name in names})
    taskset = str(settings.pop("id", ""))
    return {"taskset": taskset, **({"settings": settings} if settings else {})}


def _limits(draft: Draft, prefix: str, source: dict[str, Any], environment: str) -> None:
    """What of a source is said here: the time of a task, and groups without gradient. environment:
    its place in the recipe.
    """
    agents = {match[1] for name in source if (match := re.match(r"env\.(\w+)\.harness\.", name))}
    if len(agents) > 1:
        draft.miss(f"{prefix}.env", ", ".join(sorted(agents)), "the environment has one agent")
    for name in [name for name in source if re.fullmatch(r"env\.\w+\.timeout\.rollout", name)]:
        place, seconds = f"{environment}.episode_seconds", decimal(source[name])
        if draft.get(place, seconds) == seconds:  # else another source has the same environment
            draft.put(place, seconds)
            source.pop(name)
    for name in [name for name in source if re.fullmatch(r"curriculum\.gates\.\w+\.type", name)]:
        gate = name.removesuffix("type")
        bounds = [source.get(f"{gate}{side}", 0.0) for side in ("reject_min", "reject_max")]
        if source[name] == "advantage_range" and bounds == [0.0, 0.0]:
            draft.put("rollout.dynamic_sampling", True, "advantage_range; in up to max_rounds")
            draft.put("rollout.filter_on", "total", "advantages are of all rewards")
            for key in ("type", "reject_min", "reject_max"):
                source.pop(f"{gate}{key}", None)


def _rest(draft: Draft, prefix: str, source: Mapping[str, Any]) -> None:
    """The rules for what a source states beside its taskset."""
    for name, value in source.items():
        rule = next(
            (rule for pattern, rule in SOURCE_RULES.items() if re.fullmatch(pattern, name)), None
        )
        if rule is None:
            draft.miss_always(f"{prefix}.{name}", value, "not an option that this translator knows")
        else:
            rule(draft, f"{prefix}.{name}", value, "")


def _held_out(draft: Draft, options: Options, source: dict[str, Any], where: str) -> None:
    """How a source is evaluated. [eval] has what the first source says, and a set what is another
    there; when to evaluate, all sets have in common.
    """

    def take(key: str, default: Any = None) -> Any:
        shared = options.take(f"orchestrator.eval.{key}", default)
        of_source = source.get(key)
        return shared if of_source is None else of_source

    count = int(take("num_examples", -1))
    source.pop("num_examples", None)
    draft.put(f"{where}.size", count if count > 0 else None)
    temperature, new = take("sampling.temperature"), take("sampling.max_completion_tokens")
    shared = {
        "interval": ("eval.every", int(take("interval", 100))),
        "group_size": ("eval.n_samples", int(take("group_size", 1))),
        "sampling.temperature": (
            "eval.temperature", None if temperature is None else decimal(temperature)
        ),
        "sampling.max_completion_tokens": (
            "eval.max_new_tokens", None if new is None else int(new)
        ),
        **{
            f"sampling.{name}": (f"eval.{name}", None if value is None else read(value))
            for name, read in (("top_p", decimal), ("top_k", non_negative), ("min_p", decimal))
            for value in (take(f"sampling.{name}"),)
        },
    }  # fmt: skip
    first = draft.get("eval.every") is None
    for key, (place, value) in shared.items():
        if first:
            draft.put(place, value)
        elif draft.get(place) != value:
            key_of_set, off = place.removeprefix("eval."), _OFF.get(place)
            if key_of_set == "every" or (value is None and off is None):
                continue  # all sets are evaluated together
            draft.put(f"{where}.{key_of_set}", off if value is None else value)
        source.pop(key, None)
    draft.put("eval.at_start", not flag(options.take("orchestrator.eval.skip_first_step", False)))
