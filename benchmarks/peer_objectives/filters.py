"""Groups of samples that a peer trains on, beside those that the recipe's [rollout] keeps."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peer_objectives.comparing import Known, Row, translated, verdict
from postgrad.rollout.curriculum import reason_to_filter
from postgrad.rollout.settings import RolloutSettings

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """The scores of a prompt's samples: of its first reward, and of all together."""

    name: str
    first: Scores  # [n]
    total: Scores  # [n]


def _of(name: str, first: Sequence[float], total: Sequence[float] | None = None) -> Group:
    scores = np.array(first)
    return Group(name, scores, scores if total is None else np.array(total))


GROUPS = (
    _of("all right", [1, 1, 1, 1]), _of("all wrong", [0, 0, 0, 0]), _of("one right", [1, 0, 0, 0]),
    _of("one wrong", [1, 1, 1, 0]), _of("half right", [1, 0, 1, 0]), _of("all half", [0.5] * 4),
    _of("various", [0.25, 0.5, 0.75, 1.0]), _of("nearly all right", [1, 1, 1, 0.9]),
    _of("all right, one too long", [1, 1, 1, 1], [1, 1, 1, 0.5]),
    _of("all wrong, one too long", [0, 0, 0, 0], [0, 0, -0.5, 0]),
    _of("mean at the lower bound", [0.4, 0, 0.4, 0]), _of("mean at the upper", [1, 0.6, 1, 0.6]),
)  # fmt: skip


@dataclass(frozen=True)
class Filters:
    """A filter of a peer: which samples of a group it trains on."""

    name: str
    words: Sequence[str]
    peer: Callable[[Group], Any]  # whether, or [n] which
    groups: Sequence[Group] = GROUPS
    known_difference: Known | None = None

    def compared(self, system: str, draws: int) -> Row:
        """Its row: the shares of samples that are trained on, and of those treated otherwise."""
        del draws
        translation = translated(system, self.words)
        table = translation.recipe.get("rollout", {})
        read = ("dynamic_sampling", "filter_on", "keep_above", "keep_below")
        chosen = {name: table[name] for name in read if name in table}
        settings = RolloutSettings(**chosen)
        ours = np.concatenate([np.full(len(group.first), _kept(group, settings))
                               for group in self.groups])  # fmt: skip
        theirs = np.concatenate(
            [
                np.broadcast_to(np.asarray(self.peer(group), bool), len(group.first))
                for group in self.groups
            ]
        )
        others = float((ours != theirs).mean())
        outcome = (
            ("equal", "")
            if not others
            else verdict(self.known_difference, 0.0, others, translation)
        )
        return Row(self.name, chosen, float(ours.mean()), float(theirs.mean()), others, None,
                   *outcome)  # fmt: skip


def _kept(group: Group, settings: RolloutSettings) -> bool:
    """Whether the recipe trains on it; groups of equal rewards have no gradient in any case."""
    scored: Any = SimpleNamespace(
        rewards={"first": group.first}, total=group.total, rollouts=group.first,
        kept=np.ones(len(group.first), bool),
    )  # fmt: skip
    return reason_to_filter(scored, settings, settings.filter_on) is None


def condition(path: Path, start: str) -> Callable[[dict[str, Any]], bool]:
    """The test of the first `if` of a file that begins with `start`, in a namespace. Raises
    LookupError where there is none.
    """
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.If) and ast.unparse(node).startswith(start):
            code = compile(ast.Expression(node.test), str(path), "eval")
            return lambda space: bool(eval(code, space))
    raise LookupError(f"{path} has no condition that begins with {start!r}")
