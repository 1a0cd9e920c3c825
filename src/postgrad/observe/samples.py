"""Samples as people read them: the lines of samples.jsonl, with every sample of a step, trained on
or not; and answers on the terminal while they are written.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from rich.console import Console as Rich
from rich.console import ConsoleOptions
from rich.live import Live
from rich.table import Table
from rich.text import Text

from postgrad.algorithms.base import Credit
from postgrad.core.records import ScoredGroup
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.observe.console import visible
from postgrad.observe.report.selection import row_hash
from postgrad.observe.settings import KeptSamples
from postgrad.rollout.records_json import Decode, Json, group_to_json, nine_digits

WIDE = 100  # columns from which two answers stand beside each other
REFRESH = 8.0  # times a second
GAP = 2  # columns between them
SOME = 64  # samples of observe.samples = "some"
REST = 4  # lines of the screen that are not the answers'


def step_samples(
    groups: Sequence[ScoredGroup],
    reasons: Mapping[int, str],
    step: int,
    decode: Decode,
    batch: RolloutBatch,
    credit: Credit,
    learner_logprobs: NDArray[np.float32],
    kept: KeptSamples = "all",
) -> Iterator[Json]:
    """One line for each sample, in the order of the groups. kept: how many, see `thinned`; each
    line of a thinned step says in "of" how many samples the step had.

    reasons: ticket -> why its group was filtered. learner_logprobs: [T] over the experience's
    packed tokens, from before the step, NaN where they were not computed. Samples that were trained
    on have advantages, a mask and, where all were computed, the learner's logprobs: one value for
    each response token, and what was taken off their rewards. The others have none of these.
    """
    place = {
        (ticket, sample): number
        for number, (ticket, sample) in enumerate(
            zip(batch.ticket[credit.rows].tolist(), batch.sample[credit.rows].tolist(), strict=True)
        )
    }
    every, groups = sum(len(group.rollouts) for group in groups), thinned(groups, kept)
    thin = {"of": every} if sum(len(group.rollouts) for group in groups) < every else {}
    sampled = _sampled(groups)
    keys = ((rollout.ticket, rollout.sample) for group in groups for rollout in group.rollouts)
    columns = _Columns(credit, learner_logprobs, [place[key] for key in keys if key in place])
    for group in groups:
        sample_columns: list[dict[str, list[Any]]] = []
        for rollout in group.rollouts:
            number = place.get((rollout.ticket, rollout.sample))
            prompt = len(rollout.read_prompt(group.prompt))
            sample_columns.append({} if number is None else columns.of(number, prompt))
            sample_columns[-1]["logprobs"] = next(sampled)
        lines = group_to_json(group, step=step, decode=decode, columns=sample_columns)
        for line in lines:
            line.update(thin)
            number = place.get((line["ticket"], line["sample"]))
            if credit.length_penalty is not None and number is not None:
                line["length_penalty"] = float(credit.length_penalty[number])
        if reason := reasons.get(group.prompt.ticket):
            for line in lines:
                line["filtered"] = reason
        yield from lines


def thinned(groups: Sequence[ScoredGroup], kept: KeptSamples) -> list[ScoredGroup]:
    """The groups of a step or an evaluation that are recorded, in their order: whole ones, at least
    one, of up to `kept` samples. Those with the smallest hash of their row, so that a prompt which
    comes again is recorded again.
    """
    if kept == "all":
        return list(groups)
    most = SOME if kept == "some" else kept
    rows = [
        f"{json.dumps(group.prompt.dataset, ensure_ascii=False)} {group.prompt.row}"
        for group in groups
    ]
    order = sorted(
        range(len(groups)), key=lambda place: row_hash(rows[place].encode(errors="replace"))
    )
    chosen: list[int] = []
    samples = 0
    for place in order:
        size = len(groups[place].rollouts)
        if chosen and samples + size > most:
            break
        chosen.append(place)
        samples += size
    return [groups[place] for place in sorted(chosen)]


class _Columns:
    """Token columns of the samples that were trained on, ready for JSON. The tokens of all that are
    recorded are rounded in one call, which is faster.
    """

    def __init__(
        self, credit: Credit, learner_logprobs: NDArray[np.float32], recorded: Sequence[int]
    ) -> None:
        """recorded: the sequences of the experience that `of` is asked for."""
        of_step, rows = credit.experience.sequences.loss_mask, np.array(recorded, np.int64)
        mask = of_step.take_many(rows)
        logprobs = of_step.like(learner_logprobs).take_many(rows).values
        missing = np.isnan(logprobs)
        self._row_of = {number: row for row, number in enumerate(recorded)}
        self._ends = mask.offsets.tolist()
        self._has_logprobs = (mask.like(missing & mask.values).sums() == 0).tolist()
        self._columns: dict[str, NDArray[Any]] = {"mask": mask.values.astype(np.int8)}
        if (advantages := credit.experience.columns.get("advantages")) is not None:
            self._columns["advantages"] = nine_digits(advantages.take_many(rows).values)
        # 0 where there is no loss
        self._learned = nine_digits(np.where(missing, np.float32(0), logprobs))

    def of(self, number: int, prompt: int) -> dict[str, list[Any]]:
        """Name -> values over the response tokens of sequence `number`.

        prompt: how many of its tokens are the prompt's.
        """
        row = self._row_of[number]
        response = slice(self._ends[row] + prompt, self._ends[row + 1])
        columns = {name: values[response].tolist() for name, values in self._columns.items()}
        if self._has_logprobs[row]:
            columns["learner_logprobs"] = self._learned[response].tolist()
        return columns


def _sampled(groups: Sequence[ScoredGroup]) -> Iterator[list[float]]:
    """For each rollout in order, the sampler's logprobs over the tokens of all its turns."""
    turns = [
        [turn.logprobs for turn in rollout.turns] for group in groups for rollout in group.rollouts
    ]
    lengths = [sum(len(logprobs) for logprobs in rollout_turns) for rollout_turns in turns]
    flat = [logprobs for rollout_turns in turns for logprobs in rollout_turns]
    values: list[float] = nine_digits(np.concatenate(flat)).tolist() if flat else []
    end = 0
    for length in lengths:
        end += length
        yield values[end - length : end]


class AnswerDisplay:
    """Shows answers on a stream, piece by piece as they arrive."""

    def __init__(self, stream: TextIO) -> None:
        self._rich = Rich(file=stream, highlight=False, soft_wrap=True)

    def show(self, names: Sequence[str], answers: Sequence[Iterator[str]]) -> None:
        """Shows the pieces of each answer under its name, until all answers have ended."""
        terminal = self._rich.is_terminal and not self._rich.is_dumb_terminal
        if len(answers) > 1 and terminal and self._rich.width >= WIDE:
            self._beside(names, answers)
            return
        for name, pieces in zip(names, answers, strict=True):
            if len(answers) > 1:
                self._rich.print(self._text(f"[{name}]", "bold"))
            for piece in pieces:
                if piece:
                    self._rich.print(self._text(piece), end="")
                    self._rich.file.flush()
            self._rich.print()

    def _beside(self, names: Sequence[str], answers: Sequence[Iterator[str]]) -> None:
        columns = _SideBySide([self._text(name, "bold") for name in names])
        live = Live(columns, console=self._rich, refresh_per_second=REFRESH, transient=True)
        with live:  # the ends of both, while they grow
            under_way = dict(enumerate(answers))
            while under_way:
                for number, pieces in list(under_way.items()):
                    piece = next(pieces, None)
                    if piece is None:
                        del under_way[number]
                    else:
                        columns.texts[number] += self._text(piece).plain
        self._rich.print(columns.complete(self._rich.width))

    def _text(self, text: str, style: str = "") -> Text:
        return Text(visible(text, self._rich.encoding), style=style)


class _SideBySide:
    """Columns of growing texts under titles. While live, each shows the end of its text."""

    def __init__(self, titles: Sequence[Text]) -> None:
        self._titles = titles
        self.texts = [""] * len(titles)

    def __rich_console__(self, console: Rich, options: ConsoleOptions) -> Iterator[Table]:
        most, width = max(1, console.height - REST), self._each(options.max_width)
        ends = [Text(text).wrap(console, width, overflow="fold")[-most:] for text in self.texts]
        yield self._table(options.max_width, [Text("\n").join(lines) for lines in ends])

    def complete(self, width: int) -> Table:
        """The table with the complete texts, for when they have ended."""
        return self._table(width, [Text(text) for text in self.texts])

    def _table(self, width: int, cells: Sequence[Text]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for title in self._titles:
            table.add_column(title, width=self._each(width), overflow="fold")
        table.add_row(*cells)
        return table

    def _each(self, width: int) -> int:
        return (width - 1) // len(self._titles) - GAP
