"""Learning rates of every update, and what optimizers do: a peer's own beside the recipe's."""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.peer_objectives.comparing import Known, Row, translated, verdict
from postgrad.learner.settings import LearnerSettings, learning_rate, warmup_updates
from postgrad.models.matrices import is_matrix
from postgrad.translate.common import per_step
from postgrad.translate.translate import Translation

Rows = NDArray[np.float64]  # [updates]
STEPS = 50  # of the loop, each of which is one update or several
RATE = 1e-5
CLOSE = 1e-9  # relative: both sides compute in float64
AHEAD = "an update of the warm-up has the rate of the next one there, whose first rate is 0"


@dataclass(frozen=True)
class Rates:
    """A schedule of a peer: the rate of each of its ticks, which are updates, or whole steps."""

    name: str
    words: Sequence[str]
    peer: Callable[[int], Sequence[float]]  # of the number of ticks, as shares of the rate
    known_difference: Known | None = None
    in_steps: bool = False  # a tick is a step of the loop, and all its updates have one rate

    def compared(self, system: str, draws: int) -> Row:
        """Its row: the mean rates of the run, the greatest difference of an update, as shares of
        the rate.
        """
        del draws
        translation = translated(system, self.words)
        settings = learner(translation)
        updates = per_step(translation.draft)[1]
        total = STEPS * updates
        ticks = self.peer(STEPS if self.in_steps else total)
        theirs = np.repeat(ticks, updates if self.in_steps else 1)
        ours = np.array([learning_rate(settings, u, total) for u in range(total)]) / settings.lr
        assert len(theirs) == total
        worst = float(np.abs(ours - theirs).max())
        outcome = verdict(self.known_difference, 0.0, worst, translation)
        if worst <= CLOSE:
            outcome = "equal", ""
        elif self.known_difference is None and _ahead(
            ours, theirs, warmup_updates(settings, total)
        ):
            outcome = "known", AHEAD
        return Row(
            self.name, shown(settings), float(ours.mean()), float(theirs.mean()), worst, None,
            *outcome,
        )  # fmt: skip


def _ahead(ours: Rows, theirs: Rows, warm: int) -> bool:
    """Whether the rates of a warm-up are those of one update later there, and all others equal."""
    later = np.concatenate([theirs[1 : warm + 1], theirs[warm:]])
    return bool(np.abs(ours - later).max() <= 1e-7)  # prime-rl begins at 1e-8


@dataclass(frozen=True)
class Optimizes:
    """An optimizer of a peer on a small model: moments, decay of each weight, clipping."""

    name: str
    words: Sequence[str]
    peer: Callable[[nn.Module], tuple[torch.optim.Optimizer, float | None]]  # and the largest norm
    known_difference: Known | None = None

    def compared(self, system: str, draws: int) -> Row:
        """Its row: the shares of weights (by tensor) that decay, and of those with another decay;
        1 where the moments or the clipping are others.
        """
        del draws
        translation = translated(system, self.words)
        settings, model = learner(translation), small_model()
        optimizer, norm = self.peer(model)
        group = optimizer.param_groups[0]
        theirs = {id(weight): float(part["weight_decay"]) for part in optimizer.param_groups
                  for weight in part["params"]}  # fmt: skip
        ours = [settings.weight_decay if is_matrix(name, weight.ndim) else 0.0
                for name, weight in model.named_parameters()]  # fmt: skip
        their_decays = [theirs[id(weight)] for weight in model.parameters()]
        others = float(np.mean(~np.isclose(ours, their_decays)))
        stated = {"betas": (group["betas"], settings.betas), "eps": (group["eps"], settings.eps),
                  "max_grad_norm": (norm or 0.0, settings.max_grad_norm)}  # fmt: skip
        wrong = [name for name, (a, b) in stated.items() if not np.allclose(a, b, atol=0.0)]
        if wrong:
            outcome = "differs", "; ".join(f"{name} is {stated[name][0]} there" for name in wrong)
        else:
            outcome = (
                ("equal", "")
                if not others
                else verdict(self.known_difference, 0.0, others, translation)
            )
        return Row(
            self.name, shown(settings), float(np.mean(np.array(ours) > 0)),
            float(np.mean(np.array(their_decays) > 0)), 1.0 if wrong else others, None, *outcome,
        )  # fmt: skip


def learner(translation: Translation) -> LearnerSettings:
    """[learner] of a recipe."""
    return LearnerSettings(**translation.recipe["learner"])


def shown(settings: LearnerSettings) -> dict[str, Any]:
    """The settings that an update reads, where they are not the defaults."""
    read = ("schedule", "warmup_updates", "warmup_ratio", "warmup_start_ratio",
            "decay_updates", "decay_ratio", "min_lr_ratio", "betas", "eps", "weight_decay",
            "max_grad_norm")  # fmt: skip
    stated = settings.model_dump(include={*read}, exclude_defaults=True)
    return {name: list(value) if isinstance(value, tuple) else value
            for name, value in stated.items()}  # fmt: skip


def dummy() -> torch.optim.Optimizer:
    """An optimizer of one weight, for a schedule to set its rate."""
    return torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=RATE)


def ticks(scheduler: Any, count: int) -> list[float]:
    """The rates that a torch scheduler sets, as shares of RATE."""
    rates: list[float] = []
    for _ in range(count):
        rates.append(scheduler.get_last_lr()[0] / RATE)
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def constant(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """The schedule of a trainer that sets none."""
    return LambdaLR(optimizer, lambda _: 1.0)


def small_model() -> nn.Module:
    """A decoder with embeddings, biases and norms, by hub names."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    ))  # fmt: skip


def argument_defaults(path: Path, role: str = "actor") -> dict[str, Any]:
    """The defaults of a script's `add_argument` calls, by name; {prefix} in a name is `role`."""
    defaults: dict[str, Any] = {}
    for call in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("add_argument"):
            continue
        name = ast.unparse(call.args[0]).lstrip("f").strip("'\"").replace("{prefix}", role)
        for keyword in call.keywords:
            if keyword.arg == "default":
                defaults[name.lstrip("-")] = _literal(keyword.value)
    return defaults


def class_defaults(path: Path, name: str) -> dict[str, Any]:
    """The defaults of a class's fields, as far as they are written out."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {ast.unparse(field.target): _literal(field.value)
                    for field in node.body if isinstance(field, ast.AnnAssign)}  # fmt: skip
    raise LookupError(f"{path} has no class {name}")


def _literal(node: ast.expr | None) -> Any:
    """The value of an expression; of `field(default=...)`, or of pydantic's Field, its default."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "Field"):
        default_nodes = [word.value for word in node.keywords if word.arg == "default"]
        node = default_nodes[0] if default_nodes else node.args[0] if node.args else None
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def words_of(program: str, options: Mapping[str, Any]) -> list[str]:
    """A program and its flags: --name value ..."""
    words = [program]
    for name, value in options.items():
        words.append(f"--{name}")
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif value is not True:
            words += map(str, value if isinstance(value, list | tuple) else [value])
    return words
