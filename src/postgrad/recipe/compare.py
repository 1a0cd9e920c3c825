"""Two recipes of one run: which keys changed, and which may change without another result."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.recipe.placement import SHARED
from postgrad.recipe.recipe import Recipe

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
    "rollout.vllm",
    "rollout.transport",
)


def differences(before: Any, after: Any, place: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted keys at which two resolved recipes differ, list entries by number."""
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = cast(dict[str, Any], before), cast(dict[str, Any], after)
        for key in dict.fromkeys([*old, *new]):
            yield from differences(old.get(key), new.get(key), (*place, key))
    elif before != after:
        yield ".".join(place)


def compare(
    before: Recipe,
    after: Recipe,
    allowed: Sequence[str],
    run_dir: Path,
    ways_out: str = "choose another --run_dir, replace it with --overwrite true, or ",
) -> list[str]:
    """The keys that changed; UsageError for each that may not, unless it is in `allowed`.

    allowed: the keys of --allow-change; a key allows everything below it. ways_out: what else the
    command lets a person do, for the message.
    """
    old, new = before.dump(), after.dump()
    changed = list(differences(old, new))
    may_change = (*ALLOWED, *allowed)
    refused = [key for key in changed if not any(covers(above, key) for above in may_change)]
    if refused:
        lines = [
            f"  {key}: {_value(old, key)!r} there, {_value(new, key)!r} here" for key in refused
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
    return {key: (_value(old, key), _value(new, key)) for key in keys}


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 of a resolved recipe, to tell whether a summary is of this one."""
    return hashlib.sha256(json.dumps(recipe.dump(), sort_keys=True).encode()).hexdigest()


def covers(allowed: str, key: str) -> bool:
    """Whether `--allow-change allowed` allows `key`: itself and everything below it."""
    return key == allowed or key.startswith(f"{allowed}.")


def _value(recipe: dict[str, Any], key: str) -> Any:
    node: Any = recipe
    for part in key.split("."):
        node = cast(dict[str, Any], node).get(part) if isinstance(node, dict) else None
    return node
