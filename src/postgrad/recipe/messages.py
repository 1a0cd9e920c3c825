"""Validation errors as lines for people: file, line, key, what is wrong, what is allowed."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError

from postgrad.algorithms.base import Algorithm
from postgrad.algorithms.registry import ALGORITHMS, algorithm_class
from postgrad.core.errors import UsageError
from postgrad.core.text import nearest
from postgrad.recipe.eval_settings import EvalSet, EvalSettings, PairEvalSet, PairEvalSettings
from postgrad.recipe.lines import KeyPath, line_of
from postgrad.recipe.overrides import Override
from postgrad.recipe.resolve import in_file, is_inherited
from postgrad.rollout.settings import EnvironmentSets, EnvironmentSettings

# What peers call a key, by its name here.
PEERS_NAMES = {
    "answer": "completion response output target reference ground_truth",
    "prompt": "question instruction query",
    "text": "dataset_text_field text_column",
    "max_len": "max_length max_seq_length max_seq_len",
    "lr": "learning_rate",
    "warmup_updates": "warmup_steps",
    "decay_updates": "decay_steps num_decay_steps lr_wsd_decay_steps",
    "max_grad_norm": "gradient_clipping",
    "keep_steps": "keep_interval",
    "steps": "max_steps total_steps",
    "epochs": "num_train_epochs num_epochs",
    "run_dir": "output_dir save_path",
    "n_samples_per_prompt": "num_generations group_size",
    "max_new_tokens": "max_completion_length generate_max_len",
}
NAMES = {peer: ours for ours, peers in PEERS_NAMES.items() for peer in peers.split()}
# What pydantic adds to the place of a problem for each type that a key may have.
_ALTERNATIVE = re.compile(
    r"constrained-\w+|(literal|dict|tuple|list|union)\[.*\]|bool|int|float|str", re.DOTALL
)
DEFAULTS = {"reward": "bradley_terry", "preference": "dpo"}  # algorithms where a job says none


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a raw recipe came from, to point at the file's line or the flag that is wrong."""

    name: str  # of the file, or of the class for a recipe made in Python
    raw: dict[str, Any]  # the tables, overrides applied, before sections take from each other
    lines: dict[KeyPath, int]  # of every key and table of the file, from 1
    overrides: Sequence[Override] = ()  # the flags that were applied, in their order

    def where(self, place: KeyPath) -> str:
        """`file:line` of a place, or the flag that set it."""
        for override in reversed(self.overrides):
            if place[: len(override.place)] == override.place:
                return override.flag
        line = line_of(self.lines, place)
        return f"{self.name}:{line}" if line else self.name


def explain(error: ValidationError, model: type[BaseModel], origin: Origin) -> UsageError:
    """One UsageError with a line for each problem of the recipe."""
    problems = _joined([dict(each) for each in error.errors(include_url=False)])
    not_inherited = [
        problem
        for problem in problems
        if not is_inherited(origin.raw, problem["loc"])
        or problem["type"] == "recipe"
        or _is_missing(problem)
    ]
    lines = [_line(problem, model, origin) for problem in not_inherited or problems]
    return UsageError("\n".join(dict.fromkeys(lines)))


Problem = Mapping[str, Any]


def _joined(problems: list[Problem]) -> list[Problem]:
    """One problem for each key that may have several types, of which pydantic gives one for each;
    none for a list whose items have problems.
    """
    inside = {problem["loc"][:-2] for problem in problems}
    inside |= {problem["loc"][:-1] for problem in problems}
    joined, alternatives = list[Problem](), dict[tuple[Any, ...], list[Problem]]()
    for each in problems:
        place = tuple(part for part in each["loc"] if part != "[key]")
        problem = {**each, "loc": place}
        at = next((n for n, part in enumerate(place) if n and _is_alternative(part)), None)
        if at is not None:
            if place[:at] not in alternatives:
                joined.append({"loc": place[:at], "type": "alternatives"})
            alternatives.setdefault(place[:at], []).append(problem)
        elif problem["type"] != "too_short" or place not in inside:
            joined.append(problem)
    return [
        alternative
        for problem in joined
        for alternative in _alternatives(alternatives.get(problem["loc"], [problem]), problem)
    ]


def _is_alternative(part: Any) -> bool:
    return isinstance(part, str) and _ALTERNATIVE.fullmatch(part) is not None


def _alternatives(problems: list[Problem], at: Problem) -> list[Problem]:
    """The problems of one key by its types: those within the value where one type fits that far,
    else one that names all types. at: the key.
    """
    if at["type"] != "alternatives":
        return problems
    depth = len(at["loc"])
    if len({problem["loc"][depth] for problem in problems}) == 1:
        return problems  # a key of the user's own that is called as a type is
    within = [problem for problem in problems if len(problem["loc"]) > depth + 1]
    if within:
        return _joined(
            [{**each, "loc": each["loc"][:depth] + each["loc"][depth + 1 :]} for each in within]
        )
    wanted = sorted(map(_of_type, problems), key=lambda text: not text.startswith("'"))
    text = " or ".join(filter(None, (", ".join(wanted[:-1]), wanted[-1])))
    return [{**problems[0], "loc": at["loc"], "type": "several", "msg": f"input should be {text}"}]


def _of_type(problem: Problem) -> str:
    kinds = {"dict_type": "a table of keys", "tuple_type": "a list", "list_type": "a list"}
    message = str(problem["msg"]).removeprefix("Input should be ")
    return kinds.get(problem["type"], message)


def _is_missing(problem: Problem) -> bool:
    """Whether a key of a table is missing; values of a list have no names."""
    return problem["type"] == "missing" and not isinstance(problem["loc"][-1], int)


def _line(problem: Mapping[str, Any], model: type[BaseModel], origin: Origin) -> str:
    place = in_file(origin.raw, problem["loc"])
    key = ".".join(str(part) for part in place)
    prefix = f"{origin.where(place)}: "
    if problem["type"] == "extra_forbidden":
        return f"{prefix}unknown key {key!r}: {_hint(place, model, origin.raw)}"
    if _is_missing(problem):
        return f"{prefix}{key} is missing: {_described(place, model)}"
    if problem["type"] == "missing":
        list_key = key.rpartition(".")[0]
        return f"{prefix}{list_key} = {list(problem['input'])}: more values are wanted"
    if problem["type"] in ("recipe", "value_error"):
        text = str(problem["msg"]).removeprefix("Value error, ")
        return f"{prefix}{key}: {text}" if key else f"{prefix}{text}"
    stated = problem["input"]
    shown = json.dumps(stated) if isinstance(stated, bool) else repr(stated)
    return f"{prefix}{key} = {shown}: {_wanted(problem, key)}"


def _wanted(problem: Mapping[str, Any], key: str) -> str:
    """What a key of another type should be, in the words of TOML."""
    stated = problem["input"]
    if problem["type"] in ("tuple_type", "list_type"):
        if isinstance(stated, dict):
            return f"several are wanted: each begins with [[{key}]], in two brackets"
        return f"a list is wanted: [{json.dumps(stated)}]"
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        if isinstance(stated, list) and isinstance(next(iter(cast(list[Any], stated)), None), dict):
            return f"one table alone is wanted: it begins with [{key}], in one bracket"
        return "a table of keys is wanted"
    if problem["type"] in ("too_long", "too_short"):
        limits = problem["ctx"]
        least, most = limits.get("min_length"), limits.get("max_length")
        bound = f"at most {most}" if problem["type"] == "too_long" else f"at least {least}"
        return f"{bound} values are wanted, not {limits['actual_length']}"
    message = str(problem["msg"])
    return message[:1].lower() + message[1:]


def _described(place: KeyPath, model: type[BaseModel]) -> str:
    """Where a missing key belongs; one that is a table itself is a section of its own."""
    field = model.model_fields.get(str(place[0])) if len(place) == 1 else None
    if field is not None and _model_in(field.annotation) is not None:
        return f"write a section that begins with [{place[0]}]"
    table = ".".join(str(part) for part in place[:-1])
    return f"say it in [{table}]" if table else "say it at the top of the recipe"


def _hint(place: KeyPath, model: type[BaseModel], raw: dict[str, Any]) -> str:
    """For an unknown key: a similar key of the same table, else the algorithms or a table that have
    the key, by our name or a peer's, else all keys of the table.
    """
    name = NAMES.get(str(place[-1]), str(place[-1]))
    fields = list(_fields(model, place[:-1], raw))
    close = nearest(name, fields)
    if close:
        return f"did you mean {'.'.join(map(str, (*place[:-1], close)))!r}?"
    table = raw.get(str(place[0]))
    if place[:-1] == ("environment",) and isinstance(table, dict) and "sets" in table:
        return "the settings of one type of environment stand in its own [[environment.sets]]"
    if place[:-1] == ("algorithm",):
        owners = [kind for kind in ALGORITHMS if name in algorithm_class(kind).model_fields]
        if owners:
            return f"{_algorithm_name(raw)} does not have it; it is a key of {', '.join(owners)}"
    elsewhere = [path for path in _paths(model, ()) if path[-1] == name or ".".join(path) == name]
    if elsewhere:
        return f"did you mean {'.'.join(elsewhere[0])!r}?"
    return f"known here: {', '.join(fields)}"


def _fields(model: type[BaseModel], place: KeyPath, raw: dict[str, Any]) -> Iterator[str]:
    """The keys that the table at `place` may have."""
    if place == ("algorithm",):
        yield "type"
        yield from _algorithm(raw).model_fields
        return
    inner: type[BaseModel] | None = model
    for part in place:
        if inner is None:
            return
        if isinstance(part, str):
            field = inner.model_fields.get(part)
            inner = _model_in(field.annotation) if field else None
    if inner is None:
        return
    yield from inner.model_fields
    sets: dict[type[BaseModel], type[BaseModel]] = {
        EnvironmentSets: EnvironmentSettings,
        EvalSettings: EvalSet,
        PairEvalSettings: PairEvalSet,
    }
    if inner in sets:  # one set is given by its own keys
        yield from (key for key in sets[inner].model_fields if key not in inner.model_fields)


def _algorithm(raw: dict[str, Any]) -> type[Algorithm]:
    return algorithm_class(_algorithm_name(raw))


def _algorithm_name(raw: dict[str, Any]) -> str:
    table = raw.get("algorithm")
    knobs = cast(dict[str, Any], table) if isinstance(table, dict) else {}
    return str(knobs.get("type", DEFAULTS.get(str(raw.get("job")), "sft")))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The settings class inside an annotation: itself, in a tuple, or beside None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for part in get_args(annotation) if (inner := _model_in(part))), None)


def _paths(model: type[BaseModel], place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every key of the settings and of the tables within them, but for an algorithm's knobs."""
    for name, field in model.model_fields.items():
        yield (*place, name)
        inner = _model_in(field.annotation)
        if inner is not None and not issubclass(inner, Algorithm):
            yield from _paths(inner, (*place, name))
