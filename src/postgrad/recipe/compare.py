"""Two recipes of one run: which keys changed, and which may change without another result."""

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

from postgrad.core.errors import UsageError
from postgrad.recipe.arrangement import SHARED
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.vllm.settings import VLLMSettings

# How long, where to save and log, what is watched: none of it changes a weight. A key stands for
# everything below it. Two ways to state one quantity (steps, epochs) change together: the one that
# is left out is None.
ALLOWED = (
    "steps",
    "total_episodes",
    "epochs",
    "run_dir",
    "checkpoint",
    "sentinels",
    "observe",
    "scoring.workers",
    "data.cache",
    "scoring.waiting_workers",
    "eval.every",
    "eval.at_end",
    *(
        f"{role}learner.{key}"
        for role in ("", "critic.")
        for key in ("sharding", "offload", *SHARED)
    ),
    "cluster",
    *(f"rollout.vllm.{key}" for key in VLLMSettings.model_fields if key != "engine_args"),
    "rollout.transport",
)

# Where the inputs of layers are between the passes: neither bits nor a checkpoint depend on it.
_SAME_BITS = {"model.gradient_checkpointing": (True, "offload")}

# Read by estimates alone.
_ESTIMATED = re.compile(r"environment\.sets\.\d+\.reply_tokens")

# Keys that sections take from another where the file states none of its own: `recipe/resolve.py`.
_TAKEN_OVER = {
    re.compile(r"(?:eval|data)\.sets\.\d+\.(?P<key>.+)"): "data",
    re.compile(r"critic\.learner\.(?P<key>.+)"): "learner",
    re.compile(r"(?:reference|critic)\.model\.(?P<key>.+)"): "model",
    re.compile(r"(?:reward_model|teacher)\.model\.(?P<key>dtype|attention|compile)"): "model",
}
_LONGEST = 72  # characters of a value in a message


def differences(before: Any, after: Any, place: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted keys at which two resolved recipes differ. Tables of a list ([[eval.sets]]) are
    compared one by one, under their numbers, if there are as many before as after.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = cast(dict[str, Any], before), cast(dict[str, Any], after)
        for key in dict.fromkeys([*old, *new]):
            yield from differences(old.get(key), new.get(key), (*place, key))
    elif _are_tables(before) and _are_tables(after) and len(before) == len(after):
        for number, (entry_before, entry_after) in enumerate(zip(before, after, strict=True)):
            yield from differences(entry_before, entry_after, (*place, str(number)))
    elif before != after:
        yield ".".join(place)


def compare(
    before: Recipe,
    after: Recipe,
    allowed: Sequence[str],
    run_dir: Path | str,
    ways_out: str = "choose another --run_dir, replace it with --overwrite true, or ",
) -> list[str]:
    """The keys that changed; UsageError for each that may not, unless it is in `allowed`.

    allowed: the keys of --allow-change; a key allows everything below it, and what other
    sections take over from it. run_dir: or the URL of a mirror. ways_out: what else the command
    lets a person do, for the message.
    """
    old, new = before.dump(), after.dump()
    changed = list(differences(old, new))
    may_change = (*ALLOWED, *allowed)
    stated = {key: _stated(key, changed, old, new) for key in changed}
    refused = dict.fromkeys(
        stated[key]
        for key in changed
        if not any(covers(above, name) for above in may_change for name in (key, stated[key]))
        and not _same_bits(key, old, new)
    )
    if refused:
        lines = [
            f"  {key}: {_brief(value_at(old, key))} there, {_brief(value_at(new, key))} here"
            for key in refused
        ]
        raise UsageError(
            f"{run_dir} already holds another run; its recipe differs:\n"
            + "\n".join(lines)
            + f"\n{ways_out}continue it all the same with "
            + " ".join(f"--allow-change {key}" for key in refused)
        )
    return changed


def changes(before: Recipe, after: Recipe, keys: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """(value before, value after) of each of the dotted `keys`."""
    old, new = before.dump(), after.dump()
    return {key: (value_at(old, key), value_at(new, key)) for key in keys}


def value_at(recipe: dict[str, Any], key: str) -> Any:
    """The value of a dotted key of `differences`, None where it is not there."""
    node: Any = recipe
    for part in key.split("."):
        if isinstance(node, list):
            entries = cast(list[Any], node)
            node = entries[int(part)] if part.isdecimal() and int(part) < len(entries) else None
        else:
            node = cast(dict[str, Any], node).get(part) if isinstance(node, dict) else None
    return node


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 of a resolved recipe, to tell whether a summary is of this one."""
    return hashlib.sha256(json.dumps(recipe.dump(), sort_keys=True).encode()).hexdigest()


def require_known(
    allowed: Sequence[str], before: Recipe, after: Recipe, choices: Iterable[str]
) -> None:
    """UsageError for a key of --allow-change that would allow nothing: it is in neither recipe, nor
    among `choices`, what a run chooses at its start.
    """
    keys = {*_keys(before.dump()), *_keys(after.dump()), *choices}
    for key in allowed:
        if key not in keys:
            last = key.rpartition(".")[2]
            near = sorted(path for path in keys if path.rpartition(".")[2] == last)
            near = near or difflib.get_close_matches(key, keys, 1)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(f"--allow-change {key}: neither recipe nor run has such a key{hint}")


def _keys(node: Any, place: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted keys of a resolved recipe, of tables and of values."""
    if place:
        yield ".".join(place)
    inner = cast(dict[str, Any], node) if isinstance(node, dict) else {}
    for key, child in enumerate(node) if _are_tables(node) else inner.items():
        yield from _keys(child, (*place, str(key)))


def covers(allowed: str, key: str) -> bool:
    """Whether `--allow-change allowed` allows `key`: itself and everything below it."""
    return key == allowed or key.startswith(f"{allowed}.")


def _same_bits(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a key has changed between two values that compute the same, in any role's section."""
    if _ESTIMATED.fullmatch(key):
        return True
    alike = (values for end, values in _SAME_BITS.items() if f".{key}".endswith(f".{end}"))
    return any(value_at(old, key) in values and value_at(new, key) in values for values in alike)


def _stated(key: str, changed: Sequence[str], old: dict[str, Any], new: dict[str, Any]) -> str:
    """The key from which this one's section has taken over the change, else the key itself."""
    for section, above in _TAKEN_OVER.items():
        if taken := section.fullmatch(key):
            name = "name" if taken["key"] == "subset" else taken["key"]
            source = f"{above}.{name}"
            values = [(value_at(old, place), value_at(new, place)) for place in (key, source)]
            if source in changed and values[0] == values[1]:
                return source
    return key


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-12:]}"


def _are_tables(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(
        isinstance(entry, dict) for entry in cast(list[Any], value)
    )
