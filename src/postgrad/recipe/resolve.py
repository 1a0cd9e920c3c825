"""Completes the raw tables of a recipe: what a section leaves out is taken from another one.

It is done before validation, so that a resolved recipe states everything and loads again to the
same recipe.
"""

from collections.abc import Mapping
from typing import Any, cast

from postgrad.core.settings import Settings
from postgrad.data.settings import WHICH_ROWS, DataSettings, PairSettings
from postgrad.recipe.eval_settings import SAMPLING, EvalSet, PairEvalSet
from postgrad.recipe.lines import KeyPath
from postgrad.rollout.settings import EnvironmentSettings

Table = dict[str, Any]
COMPARING = ("reward", "preference")  # jobs that read pairs
TAUGHT = ("sft", "rl")  # jobs that can have a teacher

# Keys of [data] that an evaluation set takes over: how rows are read, not which rows (split).
_READING = (
    "path",
    "prompt",
    "answer",
    "chosen",
    "rejected",
    "margin",
    "completion",
    "label",
    "completions",
    "labels",
    "separator",
    "step_mark",
    "neutral",
    "loss_turns",
    "speakers",
    "system",
    "strip",
    "chat_template",
    "chat_template_kwargs",
    "environment",
    "max_len",
)
# taken over unless the set names columns itself
_COLUMNS = ("messages", "text", "input", "template", "tools", "images", "map")
_SAME_PATH = ("task", "subset", "revision")  # taken over by a set with the path of [data]
TAKEN_OVER = frozenset((*_READING, *_COLUMNS, *_SAME_PATH))
_NAMES_ROWS = {"sets", "subset", *WHICH_ROWS} - {"name"}  # keys of an [eval] with rows of its own
_DECAY = {"decay_updates", "decay_ratio"}
# A role that states one of a set takes none of it over.
_WARM_UP = {"warmup_updates", "warmup_ratio"}
_EITHER = (_WARM_UP, _DECAY)


def resolve(raw: Table) -> Table:
    """The raw recipe with sets of data and [eval] completed from [data], and roles from [model] and
    [learner].

    A part that has the wrong shape is left as it is: validation says what is wrong with it.
    """
    result = dict(raw)
    data = raw.get("data")
    if isinstance(data, dict):
        result["data"] = _mixed(cast(Table, data), _kinds(raw)["data"])
    parts = _parts(cast(Table, result["data"]), _kinds(raw)) if isinstance(data, dict) else []
    if isinstance(evaluation := raw.get("eval", {} if parts else None), dict):
        training = cast(Table, data) if isinstance(data, dict) else {}
        stated, kind = cast(Table, evaluation), _kinds(raw)["eval"]
        if not _NAMES_ROWS & stated.keys():
            of_sets = {key: stated[key] for key in _keys_of_sets(kind) if key in stated}
            stated = {**stated, "sets": [{**part, **of_sets} for part in parts]}
        result["eval"] = _evaluation(stated, training, kind)
    if isinstance(environment := raw.get("environment"), dict):
        result["environment"] = _environments(cast(Table, environment))
    return {**result, **_roles(raw)}


def _keys_of_sets(kind: type[Settings]) -> list[str]:
    """The keys that in [eval] itself are those of its one set, or of all sets. How answers are
    sampled is not among them: [eval] has such keys of its own.
    """
    return [key for key in kind.model_fields if key not in SAMPLING]


def _kinds(raw: Table) -> dict[str | int, type[Settings]]:
    """The settings class of one dataset, in [data] and in [eval]."""
    if raw.get("job") in COMPARING:
        return {"data": PairSettings, "eval": PairEvalSet}
    return {"data": DataSettings, "eval": EvalSet}


def _parts(data: Table, kinds: Mapping[str | int, type[Settings]]) -> list[Table]:
    """An evaluation set for the part of each dataset that its `eval_fraction` holds out, with the
    same keys. They have names where they are several: those of their files.
    """
    sets = data.get("sets") or [data]
    listed = cast(list[Any], sets) if isinstance(sets, list) else []  # else a mistake, told later
    tables = [cast(Table, table) for table in listed if isinstance(table, dict)]
    held = [table for table in tables if table.get("eval_fraction")]
    parts: list[Table] = []
    for table in held:
        keys = {key: table[key] for key in kinds["data"].model_fields if key in table}
        keys.pop("hint", None)  # of what grades training samples
        part = {**keys, "subset": keys.pop("name", None)}
        part.pop("name", None)
        if len(held) > 1:
            name = str(keys.get("path")).rpartition("/")[2].partition(".")[0]
            taken = [named.get("name") for named in parts]
            part["name"] = name if name not in taken else f"{name}-{len(parts) + 1}"
        parts.append(part)
    return parts


def _roles(raw: Table) -> Table:
    """The tables of roles other than the policy, with what they leave out: the policy's own, but
    the weights of a critic are the reward model's where there is one.
    """
    model, learner = _table(raw, "model"), _table(raw, "learner")
    reward_model = _table(_table(raw, "reward_model"), "model")
    computing = {key: model[key] for key in ("dtype", "attention", "compile") if key in model}
    critic = model
    if "path" in reward_model:
        critic = {**model, **{key: reward_model.get(key) for key in ("path", "revision")}}
    defaults: dict[str, dict[str, Table]] = {"reference": {"model": model}}
    if raw.get("job") == "rl":
        defaults["critic"] = {"model": critic, "learner": learner}
        defaults["reward_model"] = {"model": computing}
    elif raw.get("job") != "preference":
        defaults = {}
    if raw.get("job") in TAUGHT and "teacher" in raw:
        defaults["teacher"] = {"model": computing}
    roles: Table = {}
    for role, tables in defaults.items():
        stated = raw.get(role, {})
        if isinstance(stated, dict) and (stated or any(tables.values())):
            roles[role] = _role(cast(Table, stated), tables)
    if isinstance(sets := _table(roles, "teacher").get("sets"), list):
        roles["teacher"]["sets"] = [_teacher(entry, computing) for entry in cast(list[Any], sets)]
    return roles


def _teacher(entry: Any, computing: Table) -> Any:
    """One of [[teacher.sets]], where it loads a model."""
    if not isinstance(entry, dict):
        return entry
    table = cast(Table, entry)
    return _role(table, {"model": computing}) if _table(table, "model") else table


def _table(raw: Table, key: str) -> Table:
    value = raw.get(key)
    return cast(Table, value) if isinstance(value, dict) else {}


def in_file(raw: Table, place: KeyPath) -> KeyPath:
    """The place in the file of a place in the resolved recipe: a file with one evaluation set, or
    one environment, may have that set's keys in the section itself.
    """
    section = place[0] if place else ""
    if place[:3] not in (("eval", "sets", 0), ("environment", "sets", 0)):
        return place
    table = raw.get(str(section))
    shorthand = isinstance(table, dict) and not cast(Table, table).get("sets")
    return (section, *place[3:]) if shorthand else place


def in_sets(resolved: Table, place: KeyPath) -> list[KeyPath]:
    """The places of a resolved recipe that an override of [eval], [data] or [environment] has to
    set: the key in each set. Other places are returned as they are.
    """
    kinds = _kinds(resolved)
    section, key = place[0], place[1] if len(place) > 1 else None
    if section == "environment" and key != "sets":
        sets = _table(resolved, "environment").get("sets", [])
        return [(section, "sets", number, *place[1:]) for number in range(len(sets))] or [place]
    if section not in kinds or key not in _keys_of_sets(kinds[section]):
        return [place]
    sets = resolved[str(section)]["sets"]
    each = [(section, "sets", number, *place[1:]) for number in range(len(sets))]
    return [place, *each] if section == "data" else each or [place]


def is_inherited(raw: Table, place: KeyPath) -> bool:
    """True where the value at `place` was taken from another section, where its error is reported
    already.
    """
    roles = (("eval",), ("reference",), ("critic",), ("reward_model",), ("teacher",))
    if place[:1] not in roles and place[:2] != ("data", "sets"):
        return False
    node: Any = raw
    for part in in_file(raw, place):
        if isinstance(node, dict) and part in node:
            node = cast(dict[Any, Any], node)[part]
        elif isinstance(node, list) and isinstance(part, int) and part < len(cast(list[Any], node)):
            node = cast(list[Any], node)[part]
        else:
            return isinstance(node, dict) or isinstance(part, int)  # else a kind that was tried
    return False


def _mixed(data: Table, kind: type[Settings]) -> Table:
    """Each of [[data.sets]] with the keys that [data] gives for all of them."""
    sets = data.get("sets")
    if not isinstance(sets, list):
        return data
    shared = {key: value for key, value in data.items() if key in kind.model_fields}
    completed = [
        _from(cast(Table, dataset), shared) if isinstance(dataset, dict) else dataset
        for dataset in cast(list[Any], sets)
    ]
    return {**data, "sets": completed}


def _evaluation(evaluation: Table, data: Table, kind: type[Settings]) -> Table:
    """[eval] with its sets completed; keys of a set in [eval] itself are one set, or what all of
    [[eval.sets]] share.
    """
    of_sets = {key: evaluation[key] for key in _keys_of_sets(kind) if key in evaluation}
    rest = {key: value for key, value in evaluation.items() if key not in of_sets}
    sets = rest.get("sets")
    if sets is None or sets == []:
        return {**rest, "sets": [_set(of_sets, {}, data)]} if of_sets else rest
    if not isinstance(sets, list):
        return rest
    entries = cast(list[Any], sets)
    completed = [
        _set(cast(Table, entry), of_sets, data) if isinstance(entry, dict) else entry
        for entry in entries
    ]
    return {**rest, "sets": completed}


def _set(eval_set: Table, shared: Table, data: Table) -> Table:
    """An evaluation set, completed from the keys that [eval] has for all sets, `shared`, then from
    how [data] reads rows.
    """
    stated = _from(eval_set, shared)
    keys: list[str] = list(_READING)
    if not stated.keys() & {"prompt", "answer", "input", "messages", "text", "template"}:
        keys.extend(_COLUMNS)
    if stated.get("path", data.get("path")) == data.get("path"):
        keys.extend(_SAME_PATH)
    training = {**data, "subset": data.get("name")}
    inherited = {key: training[key] for key in keys if training.get(key) is not None}
    return {**inherited, **stated}


def _environments(environment: Table) -> Table:
    """[environment] as sets: one, or [[environment.sets]] with the keys that it has for all."""
    if "sets" not in environment:
        return {"sets": [environment]}
    of_sets = EnvironmentSettings.model_fields.keys() - {"name"}
    shared = {key: value for key, value in environment.items() if key in of_sets}
    rest = {key: value for key, value in environment.items() if key not in of_sets}
    if isinstance(sets := rest["sets"], list):
        rest["sets"] = [
            {**shared, **cast(Table, entry)} if isinstance(entry, dict) else entry
            for entry in cast(list[Any], sets)
        ]
    return rest


def _role(role: Table, defaults: Table) -> Table:
    """A role's tables over the defaults, key by key within each."""
    merged = {**defaults, **role}
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(role.get(key), dict):
            stated, inherited = cast(Table, role[key]), cast(Table, default)
            left_out = {name for names in _EITHER if names & stated.keys() for name in names}
            if stated.get("schedule") == "constant":  # which has no decay
                left_out |= _DECAY
            if _WARM_UP & stated.keys() and not any(stated.get(name) for name in _WARM_UP):
                left_out |= {"warmup_start_ratio"}  # of a warm-up that this role has not
            kept = {name: value for name, value in inherited.items() if name not in left_out}
            merged[key] = _from(stated, kept)
    return merged


def _from(stated: Table, shared: Table) -> Table:
    """A table completed from another; a revision is not taken over beside another path."""
    if stated.get("path", shared.get("path")) != shared.get("path"):
        shared = {key: value for key, value in shared.items() if key != "revision"}
    return {**shared, **stated}
