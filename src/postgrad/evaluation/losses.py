"""The loss of held-out conversations: what an SFT job measures where no answer is scored."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences, column_of
from postgrad.data.account import RowAccount
from postgrad.data.conversations import Conversation, ConversationSet, load_conversations
from postgrad.data.overlap import Selection
from postgrad.evaluation.keys import keys_of
from postgrad.evaluation.results import Result
from postgrad.models.image_reader import ImageReader
from postgrad.ops.intervals import ratio_interval
from postgrad.recipe.recipe import Answering
from postgrad.rollout.environments.sets import as_played

LogprobsOf = Callable[[Sequences], Ragged]  # of every loss token, zeros elsewhere


def sequences_of(conversations: Sequence[Conversation]) -> Sequences:
    """Conversations as a learner reads them, each a group of its own."""
    weights: Ragged | None = None
    if any(conversation.loss_weights is not None for conversation in conversations):
        weights = Ragged.of(
            [
                each.loss_mask if each.loss_weights is None else each.loss_weights
                for each in conversations
            ],
            np.float32,
        )
    return Sequences(
        tokens=Ragged.of([conversation.token_ids for conversation in conversations], np.int32),
        loss_mask=Ragged.of([conversation.loss_mask for conversation in conversations], np.bool_),
        group=np.arange(len(conversations), dtype=np.int64),
        images=column_of(conversation.images for conversation in conversations),
        loss_weights=weights,
    )


def read_set(
    recipe: Answering, place: int, tokenizer: Any, reader: ImageReader | None = None
) -> ConversationSet:
    """Evaluation set `place`, read as training data is. Raises UsageError for rows that cannot
    be read or have no answer.
    """
    data = as_played(recipe.environment, recipe.eval.sets[place].data)
    selection = Selection(part="evaluation")
    with keys_of(recipe.eval, place, recipe.data):
        return load_conversations(data, tokenizer, selection=selection, reader=reader)


class LossEvaluator:
    """The evaluation sets of a recipe, read once.

    The loss of a set is -sum(logp) / tokens over its loss tokens, in nats, summed in float64 from
    float32 logprobs at temperature 1: every token counts the same, whatever is packed with it and
    whatever `algorithm.aggregation` and the weights of messages say. A conversation with a logprob
    that is not finite has failed: it is in no mean.
    """

    def __init__(
        self, recipe: Answering, tokenizer: Any, reader: ImageReader | None = None
    ) -> None:
        """Raises UsageError as read_set does."""
        self._sets = [
            (eval_set.name, read_set(recipe, place, tokenizer, reader))
            for place, eval_set in enumerate(recipe.eval.sets)
        ]

    @property
    def accounts(self) -> list[RowAccount]:
        """Where the rows of every set went."""
        return [conversations.account for _, conversations in self._sets]

    def __call__(self, logprobs: LogprobsOf) -> list[Result]:
        """The results of every set, in the recipe's order."""
        return [_result(name, held.all(), logprobs) for name, held in self._sets]


def _result(name: str | None, held: Sequence[Conversation], logprobs: LogprobsOf) -> Result:
    began = time.perf_counter()
    sequences = sequences_of(held)
    sums, counts = logprobs(sequences).sums(), sequences.loss_mask.sums()
    finite = np.isfinite(sums)
    tokens = int(counts[finite].sum())
    loss = -float(sums[finite].sum()) / tokens if tokens else math.nan
    with np.errstate(over="ignore"):  # infinity is what the perplexity of 800 nats is
        perplexity = float(np.exp(loss))
    by_row = -sums[finite].astype(np.float64), counts[finite].astype(np.float64)
    return Result(
        name=name,
        rows=len(held),
        failed=int((~finite).sum()),
        metrics={"loss": loss, "perplexity": perplexity},
        seconds=time.perf_counter() - began,
        intervals={"loss": ratio_interval(*by_row).within(0.0, math.inf)},
        more={"loss_rows": int(finite.sum()), "loss_tokens": tokens},
    )


def with_losses(answered: Sequence[Result], losses: Sequence[Result]) -> list[Result]:
    """The results of sampled answers with the losses of the same sets added."""
    return [
        replace(
            result,
            failed=result.failed + loss.failed,
            metrics={**result.metrics, **loss.metrics},
            seconds=result.seconds + loss.seconds,
            intervals={**result.intervals, **loss.intervals},
            more={**result.more, **loss.more},
        )
        for result, loss in zip(answered, losses, strict=True)
    ]
