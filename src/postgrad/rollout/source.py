"""Where a step's scored groups come from."""

from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

from postgrad.core.cursor import Cursor
from postgrad.core.records import Prompt, ScoredGroup
from postgrad.rollout.engine import Engine
from postgrad.rollout.environment import Environment, SingleTurn
from postgrad.rollout.sampling import Drawing, Scoring, sample_groups
from postgrad.rollout.settings import SamplingSettings


class Source(Protocol):
    """What the loop asks for the groups of a step."""

    def next(self, step: int, cursor: Cursor) -> tuple[list[ScoredGroup], Cursor]:
        """Groups in ticket order, and the cursor once they are trained on or filtered."""
        ...


class Prompts(Protocol):
    """The part of data.prompts.PromptSet that a source needs."""

    def draw(self, ticket: int, seed: int) -> Prompt:
        """The prompt of a ticket."""
        ...


class LiveSource:
    """Samples the first open tickets of every step with the engine's newest weights, and waits.

    Nothing is kept between steps: what a step returns depends on its cursor, the data, the weights
    and the settings, so a resumed run draws the same groups. `max_len` bounds prompt and turns.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        scorer: Scoring,
        *,
        seed: int,
        prompts_per_step: int,
        samples_per_prompt: int,
        sampling: SamplingSettings,
        tokenizer: Any,
        environment: Environment | None = None,
        max_len: int | None = None,
        on_done: Callable[[int], None] = lambda samples: None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._scorer = scorer
        self._seed = seed
        self._prompts_per_step = prompts_per_step
        self._drawing = Drawing(
            samples_per_prompt, sampling, seed, environment or SingleTurn(), max_len
        )
        self._tokenizer = tokenizer
        self._on_done = on_done

    def next(self, step: int, cursor: Cursor) -> tuple[list[ScoredGroup], Cursor]:
        """Source.next."""
        tickets = list(islice(cursor.open_tickets(), self._prompts_per_step))
        groups = sample_groups(
            self._engine,
            self._scorer,
            [self._prompts.draw(ticket, self._seed) for ticket in tickets],
            self._drawing,
            self._tokenizer,
            self._on_done,
        )
        return groups, cursor.settle(tickets)
