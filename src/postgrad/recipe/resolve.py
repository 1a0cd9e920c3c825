"""What a recipe's sections take from each other where they say nothing, on the raw tables.

It is done before validation, so that a resolved recipe states everything and loads again to the
same recipe.
"""

from typing import Any, cast

from postgrad.core.settings import Settings
from postgrad.data.pair_settings import PairSettings
from postgrad.data.settings import DataSettings
from postgrad.recipe.lines import Place
from postgrad.recipe.settings import EvalSet, PairEvalSet

Table = dict[str, Any]
COMPARING = ("reward", "preference")  # jobs that read pairs

# How rows are read is the same for evaluation unless it says otherwise; which rows never is.
_READING = (
    "path",
    "prompt",
    "answer",
    "chosen",
    "rejected",
    "margin",
    "completion",
    "label",
    "loss_turns",
    "speakers",
    "system",
    "strip",
    "chat_template",
    "chat_template_kwargs",
    "max_len",
)
_COLUMNS = ("messages", "template", "map")  # they go by columns, so not where a set names its own
_SAME_PATH = ("task", "subset", "revision")
_EITHER = {"warmup_updates", "warmup_ratio"}  # a role that says one does not take the other over


def resolve(raw: Table) -> Table:
    """The raw recipe with sets of data and [eval] completed from [data], and roles from [model] and
    [learner].

    A part that has the wrong shape is left as it is: validation says what is wrong with it.
    """
    result = dict(raw)
    data = raw.get("data")
    if isinstance(data, dict):
        result["data"] = _mixed(cast(Table, data), _kinds(raw)["data"])
    if isinstance(evaluation := raw.get("eval"), dict):
        given = cast(Table, data) if isinstance(data, dict) else {}
        result["eval"] = _evaluation(cast(Table, evaluation), given, _kinds(raw)["eval"])
    return {**result, **_roles(raw)}


def _kinds(raw: Table) -> dict[str | int, type[Settings]]:
    """The settings of one set, in [data] and in [eval]."""
    if raw.get("job") in COMPARING:
        return {"data": PairSettings, "eval": PairEvalSet}
    return {"data": DataSettings, "eval": EvalSet}


def _roles(raw: Table) -> Table:
    """The tables of roles other than the policy, with what they leave out: the policy's own, but
    the weights of a critic are the reward model's where there is one.
    """
    model, learner = _table(raw, "model"), _table(raw, "learner")
    trained = _table(_table(raw, "reward_model"), "model")
    computing = {key: model[key] for key in ("dtype", "attention") if key in model}
    scoring = model
    if "path" in trained:
        scoring = {**model, **{key: trained.get(key) for key in ("path", "revision")}}
    given: dict[str, dict[str, Table]] = {"reference": {"model": model}}
    if raw.get("job") == "rl":
        given["critic"] = {"model": scoring, "learner": learner}
        given["reward_model"] = {"model": computing}
    elif raw.get("job") != "preference":
        given = {}
    found: Table = {}
    for role, defaults in given.items():
        own = raw.get(role, {})
        if isinstance(own, dict) and (own or any(defaults.values())):
            found[role] = _role(cast(Table, own), defaults)
    return found


def _table(raw: Table, key: str) -> Table:
    value = raw.get(key)
    return cast(Table, value) if isinstance(value, dict) else {}


def in_file(raw: Table, place: Place) -> Place:
    """Where the file says what the resolved recipe has at `place`: one set's keys are in [eval]."""
    if place[:3] != ("eval", "sets", 0):
        return place
    evaluation = raw.get("eval")
    shorthand = isinstance(evaluation, dict) and not cast(Table, evaluation).get("sets")
    return ("eval", *place[3:]) if shorthand else place


def in_sets(resolved: Table, place: Place) -> list[Place]:
    """The places of a resolved recipe that a key of [eval] or [data] stands for."""
    kinds = _kinds(resolved)
    section, key = place[0], place[1] if len(place) > 1 else None
    if section not in kinds or key not in kinds[section].model_fields:
        return [place]
    sets = resolved[str(section)]["sets"]
    each = [(section, "sets", number, *place[1:]) for number in range(len(sets))]
    return [place, *each] if section == "data" else each or [place]


def is_inherited(raw: Table, place: Place) -> bool:
    """True where a value at `place` came from another section, which is told of its own errors."""
    roles = (("eval",), ("reference",), ("critic",), ("reward_model",))
    if place[:1] not in roles and place[:2] != ("data", "sets"):
        return False
    node: Any = raw
    for part in in_file(raw, place):
        if isinstance(node, dict) and part in node:
            node = cast(dict[Any, Any], node)[part]
        elif isinstance(node, list) and isinstance(part, int) and part < len(cast(list[Any], node)):
            node = cast(list[Any], node)[part]
        else:
            return True
    return False


def _mixed(data: Table, kind: type[Settings]) -> Table:
    """Each of [[data.sets]] with what [data] says for all of them."""
    sets = data.get("sets")
    if not isinstance(sets, list):
        return data
    shared = {key: value for key, value in data.items() if key in kind.model_fields}
    completed = [
        _from(cast(Table, one), shared) if isinstance(one, dict) else one
        for one in cast(list[Any], sets)
    ]
    return {**data, "sets": completed}


def _evaluation(evaluation: Table, data: Table, kind: type[Settings]) -> Table:
    own = {key: value for key, value in evaluation.items() if key in kind.model_fields}
    rest = {key: value for key, value in evaluation.items() if key not in own}
    sets = rest.get("sets")
    if sets is None or sets == []:
        return {**rest, "sets": [_set(own, {}, data)]} if own else rest
    if not isinstance(sets, list):
        return rest
    entries = cast(list[Any], sets)
    completed = [
        _set(cast(Table, one), own, data) if isinstance(one, dict) else one for one in entries
    ]
    return {**rest, "sets": completed}


def _set(one: Table, shared: Table, data: Table) -> Table:
    """A set with what [eval] says for all sets, then with how [data] reads rows."""
    said = _from(one, shared)
    keys: list[str] = list(_READING)
    if not said.keys() & {"prompt", "answer", "messages", "template"}:
        keys.extend(_COLUMNS)
    if said.get("path", data.get("path")) == data.get("path"):
        keys.extend(_SAME_PATH)
    given = {**data, "subset": data.get("name")}
    known = {key: given[key] for key in keys if given.get(key) is not None}
    return {**known, **said}


def _role(role: Table, given: Table) -> Table:
    """Tables merged key by key; where a path is stated, a fresh model is not taken over."""
    merged = {**given, **role}
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(role.get(key), dict):
            own, other = cast(Table, role[key]), cast(Table, value)
            left = _EITHER if _EITHER & own.keys() else ()
            merged[key] = _from(own, {k: v for k, v in other.items() if k not in left})
    return merged


def _from(one: Table, shared: Table) -> Table:
    """What one table says over what others share; a revision goes with the path that it is of."""
    if one.get("path", shared.get("path")) != shared.get("path"):
        shared = {key: value for key, value in shared.items() if key != "revision"}
    return {**shared, **one}
