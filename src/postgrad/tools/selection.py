"""Rows to train on, selected from generated samples: the best answers (rejection sampling, RAFT:
Dong et al. 2023, arXiv:2304.06767), pairs of answers for preference losses, the difficulty of
prompts.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

from postgrad.core.errors import UsageError
from postgrad.core.files import left_behind, remove, whole_file
from postgrad.core.seeds import permutation
from postgrad.core.text import nearest
from postgrad.data.chat_format import Message, bears_loss
from postgrad.observe.sinks import fast_json
from postgrad.recipe.pipeline import PairKind, SelectedRows
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.environments.episode_messages import unlearned

Sample = Mapping[str, Any]  # a line of a shard
JSONL, PARQUET = ".jsonl", ".parquet"


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Which samples become rows."""

    kind: SelectedRows = "all"
    top: int = 1  # of "best": answers of a prompt
    threshold: float | None = None  # of "best" and "above": the lowest reward; None: any
    pairs: PairKind = "best_worst"  # of "pairs"
    margin: float = 0.0  # of "pairs": the difference of the rewards is larger
    # of "difficulty": the lowest and highest share of right answers
    pass_rate: tuple[float, float] = (0.0, 1.0)
    keep_truncated: bool = False  # answers that the token limit cut may be chosen
    component: str | None = None  # of "difficulty": the score that says what is right; None: first
    correct_at: float = 1.0  # of that score
    seed: int = 0  # of random pairs
    systems: tuple[str, ...] = ()  # the recipe's system messages, which rows do not repeat

    def __post_init__(self) -> None:
        """Raises UsageError for values that select nothing."""
        kinds_by_flag = {"select": (self.kind, SelectedRows), "pairs": (self.pairs, PairKind)}
        for flag, (value, kinds) in kinds_by_flag.items():
            if value not in get_args(kinds):
                close = nearest(value, get_args(kinds))
                hint = f"did you mean {close}?" if close else f"one of {', '.join(get_args(kinds))}"
                raise UsageError(f"--{flag} {value}: {hint}")
        low, high = self.pass_rate
        if not 0 <= low <= high <= 1:
            raise UsageError(f"--pass-rate {low:g} {high:g}: two shares from 0 to 1, lower first")
        if self.top < 1:
            raise UsageError(f"--top {self.top}: 1 or more is wanted")
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise UsageError(f"--margin {self.margin}: 0 or more is wanted")
        if self.kind == "above" and self.threshold is None:
            raise UsageError("--select above needs --threshold: the lowest reward of a row")


def selection_for(recipe: Recipe, **stated: Any) -> RowSelection:
    """The selection with the stated fields; the recipe says what is right, and the seed."""
    judged = {name: getattr(recipe.eval, name, None) for name in ("component", "correct_at")}
    of_recipe = {name: value for name, value in judged.items() if value is not None}
    systems = tuple(source.system for source in recipe.data.sources if source.system is not None)
    return RowSelection(**stated, **of_recipe, seed=recipe.seed, systems=systems)


@dataclass(frozen=True, slots=True)
class Selected:
    """What became of the samples."""

    path: Path
    counts: Mapping[str, int]  # prompts, samples, rows, and why prompts gave no row

    def table(self) -> list[tuple[str, str]]:
        """Rows for the console."""
        return [(name, f"{count:,}") for name, count in self.counts.items()]


def select(
    groups: Iterable[Sequence[Sample]], selection: RowSelection, to: Path, generated: str
) -> Selected:
    """Writes the selected rows to `to`, JSON lines or Parquet by its suffix, whole or not at all.

    groups: the samples of each prompt. generated: the name of the generation, which every row
    carries beside dataset, row and samples. Raises UsageError for another suffix and for rows that
    one Parquet column cannot hold.
    """
    require_rows_file(to)
    counts: Counter[str] = Counter(prompts=0, samples=0, rows=0)
    rows = _rows(groups, selection, counts, generated)
    for half in left_behind(to.parent, [to.name]) if to.parent.is_dir() else ():
        remove(half)  # of a command that was killed
    with whole_file(to) as written:
        if to.suffix == JSONL:
            with written.open("wb") as file:
                file.writelines(fast_json(row) + b"\n" for row in rows)
        else:
            _write_parquet(written, list(rows), to)
    return Selected(to, dict(counts))


def require_rows_file(to: Path) -> None:
    """Raises UsageError where rows cannot be written to a file of this name."""
    if to.suffix not in (JSONL, PARQUET):
        raise UsageError(f"{to}: rows are written as {JSONL} or {PARQUET}")


def _write_parquet(written: Path, rows: list[Sample], to: Path) -> None:
    import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]

    arrow: Any = pa  # their types are unknown
    parquet: Any = pq
    try:
        table = arrow.Table.from_pylist([dict(row) for row in rows])
    except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
        raise UsageError(
            f"{to}: a column has values of several types, which Parquet cannot hold ({error}): "
            f"name a {JSONL} file"
        ) from error
    parquet.write_table(table, written)


def _rows(
    groups: Iterable[Sequence[Sample]],
    selection: RowSelection,
    counts: Counter[str],
    generated: str,
) -> Iterator[dict[str, Any]]:
    for group in groups:
        counts["prompts"] += 1
        counts["samples"] += len(group)
        counts["samples without a reward"] += sum(sample["total"] is None for sample in group)
        sides = map(_side, group) if selection.kind == "pairs" else ()
        counts.update(f"samples in no pair: {side}" for side in sides if isinstance(side, str))
        rows, reason = _of_group(group, selection)
        if reason:
            counts[f"prompts without a row: {reason}"] += 1
        origin = {"dataset": group[0]["dataset"], "row": group[0]["row"]}
        for row in rows:
            counts["rows"] += 1
            # a column of the prompt may have such a name, and rewards may be chosen by it (`when`)
            more = {name: value for name, value in origin.items() if name not in row}
            yield {**row, **more, "generated": generated}


def _of_group(
    group: Sequence[Sample], selection: RowSelection
) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of one prompt, or why there is none."""
    if selection.kind == "all":
        return [row for sample in group for row in _answered(sample)], None
    scored = [sample for sample in group if sample["total"] is not None]
    if not scored:
        return [], "no sample has a reward"
    if selection.kind == "difficulty":
        return _difficulty(scored, selection)
    usable = scored
    if not selection.keep_truncated:
        usable = [sample for sample in scored if sample["finish_reason"] == "stop"]
    if not usable:
        return [], "every answer was truncated"
    if selection.kind == "pairs":
        return _pairs(scored, usable, selection)
    good = [s for s in usable if selection.threshold is None or s["total"] >= selection.threshold]
    if not good:
        return [], "no reward reaches the threshold"
    ranked = sorted(good, key=lambda sample: (-sample["total"], sample["sample"]))
    if selection.kind == "best":
        ranked = ranked[: selection.top]
    return [row for sample in ranked for row in _answered(sample)], None


def _answered(sample: Sample) -> list[dict[str, Any]]:
    """The conversations of a sample, as job = "sft" reads them with data.messages = "messages":
    one, or each of an episode. What the sample did not answer bears no loss.
    """
    about = {"reward": sample["total"], "rewards": sample["rewards"], "sample": sample["sample"]}
    if "conversations" not in sample:
        answered = [*unlearned(sample["messages"]), *_answer(sample)]
        return [{"messages": answered, **about}]
    return [
        {**{name: value for name, value in conversation.items() if value}, **about}
        for conversation in sample["conversations"]
        if any(message.get("weight", 1) for message in conversation["messages"]
               if message["role"] == "assistant")
    ]  # fmt: skip


def _answer(sample: Sample) -> list[dict[str, str]]:
    if "turns" in sample:
        raise UsageError(
            f"row {sample['row']} of {sample['dataset']} was played in an environment by an "
            "earlier version: its samples are neither rows nor pairs; --select difficulty reads "
            "them, and with another --to it is played again"
        )
    return [{"role": "assistant", "content": sample["text"]}]


@dataclass(frozen=True, slots=True)
class _Side:
    """A sample as one side of a pair."""

    sample: Sample
    prompt: list[Message]  # up to the policy's first turn
    answer: list[Message]  # from there on to its last turn
    tools: list[Any]  # JSON schemas that it was shown


def _side(sample: Sample) -> _Side | str:
    """A sample as a side of a pair, or why it is none. Of an episode it is the only conversation
    that the policy wrote in: a row has one conversation on each side.
    """
    if "conversations" not in sample:
        return _Side(sample, list(sample["messages"]), _answer(sample), [])
    answered = [
        (conversation, turns)
        for conversation in sample["conversations"]
        if (turns := [n for n, m in enumerate(conversation["messages"]) if bears_loss(m)])
    ]
    if not answered:
        return "no turn of the policy"
    if len(answered) > 1:
        return "several conversations"
    (conversation, turns), *_ = answered
    messages, first, end = conversation["messages"], turns[0], turns[-1] + 1
    return _Side(sample, messages[:first], messages[first:end], conversation["tools"])


def _compared(chosen: _Side | str, rejected: _Side | str) -> tuple[_Side, _Side] | str:
    """Two samples as a pair, or why they are none."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        return f"samples with {chosen if isinstance(chosen, str) else rejected}"
    if (chosen.prompt, chosen.tools) != (rejected.prompt, rejected.tools):
        return "episodes that begin with other messages or tools"
    # where one ends and the other goes on, no token of the shorter one differs
    if all(a == b for a, b in zip(chosen.answer, rejected.answer, strict=False)):
        return "samples with different rewards say the same"
    return chosen, rejected


def _pairs(
    scored: Sequence[Sample], usable: Sequence[Sample], selection: RowSelection
) -> tuple[list[dict[str, Any]], str | None]:
    """Pairs of samples as job = "preference" and "reward" read them. A truncated answer may be
    rejected, and is not chosen.
    """
    ordered = sorted(scored, key=lambda sample: (-sample["total"], sample["sample"]))
    chosen = {sample["sample"] for sample in usable}
    sides = {sample["sample"]: _side(sample) for sample in scored}
    compared: list[tuple[_Side, _Side] | str] = [
        _compared(sides[better["sample"]], sides[worse["sample"]])
        for better, worse in combinations(ordered, 2)
        if better["total"] - worse["total"] > selection.margin and better["sample"] in chosen
    ]
    if not compared:
        return [], "no two rewards differ by more than the margin"
    different: list[tuple[_Side, _Side]] = [p for p in compared if not isinstance(p, str)]
    if not different:
        return [], str(compared[0])
    if selection.pairs == "best_worst":
        best = different[0][0]
        of_best = (pair for pair in different if pair[0] is best)
        # the first of equals
        different = [min(of_best, key=lambda pair: pair[1].sample["total"])]
    elif selection.pairs == "random":
        ticket = scored[0]["ticket"]
        different = [different[permutation(len(different), selection.seed, "pairs", ticket)[0]]]
    return [_pair(*pair) for pair in different], None


def _pair(chosen: _Side, rejected: _Side) -> dict[str, Any]:
    better, worse = chosen.sample, rejected.sample
    return {
        "prompt": chosen.prompt,
        "chosen": chosen.answer,
        "rejected": rejected.answer,
        **({"tools": chosen.tools} if chosen.tools else {}),
        "margin": better["total"] - worse["total"],
        "chosen_reward": better["total"],
        "rejected_reward": worse["total"],
        "samples": [better["sample"], worse["sample"]],
    }


def _difficulty(
    scored: Sequence[Sample], selection: RowSelection
) -> tuple[list[dict[str, Any]], str | None]:
    """The row of the prompt itself, as job = "rl" reads it again, with its pass rate."""
    first = scored[0]
    component = selection.component or next(iter(first["rewards"]), None)
    scores = [sample["rewards"].get(component) for sample in scored]
    judged = [score for score in scores if score is not None]
    if not judged:
        return [], f"no sample has the score {component}"
    rate = sum(score >= selection.correct_at for score in judged) / len(judged)
    low, high = selection.pass_rate
    if not low <= rate <= high:
        return [], "its pass rate is outside the limits"
    row = {
        **first["metadata"],
        "question": _question(first, selection.systems),
        "answer": first["answer"],
        "pass_rate": rate,
        "mean_reward": sum(sample["total"] for sample in scored) / len(scored),
        "samples": len(judged),
    }
    return [row], None


def _question(sample: Sample, systems: Collection[str]) -> str | list[Any]:
    """The text of a prompt that is one question, beside a system message of the recipe. All
    messages of any other: with images, earlier turns, or a system message of its row.
    """
    messages = sample["messages"]
    first, *rest = messages
    alone = rest if first["role"] == "system" and first["content"] in systems else messages
    is_text = [m["role"] for m in alone] == ["user"] and isinstance(alone[0]["content"], str)
    has_tools = "tools" in first and "tools" not in sample["metadata"]  # of no column of the row
    return sample["question"] if is_text and not has_tools else [*messages]
