"""How long the rows of the data are: read from it where it is at hand, else assumed longest."""

from dataclasses import dataclass

from postgrad.data.settings import RowSettings, Share
from postgrad.recipe.recipe import Recipe

GYM = "reasoning-gym:"  # data.gym.PREFIX, whose module a plan does not import


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Mean lengths, in tokens, of the rows that data.max_len keeps."""

    prompt: float  # mean tokens that are only read
    answer: float  # mean tokens that are learned from
    spread: float  # mean squared length over squared mean length; 1.0 where all are equally long
    source: str  # where the figures are from, for people: "1000 rows of the data, counted with ..."
    # Samples of an epoch, duplicates and rows that evaluations hold out included; None: unknown.
    rows: int | None = None

    def computed(self, answers: int) -> float:
        """Tokens that are computed for a prompt with several answers: the prompt once."""
        return self.prompt + answers * self.answer

    def squares(self, answers: int) -> float:
        """Squared tokens, to which the cost of attention is proportional: twice the sum of all
        tokens' positions.
        """
        sequence = (self.prompt + self.answer) ** 2 * self.spread
        return self.prompt**2 + answers * (sequence - self.prompt**2)


def longest(recipe: Recipe) -> RowLengths:
    """Rows as long as data.max_len allows. Half of a row is the answer, in RL as many tokens as
    rollout.max_new_tokens.
    """
    row = recipe.data.max_len
    answer = recipe.sampled_tokens or row // 2
    source = "every row as long as data.max_len allows"
    return RowLengths(row - answer, answer, 1.0, source, rows=_generated_rows(recipe))


def _generated_rows(recipe: Recipe) -> int | None:
    """Rows of an epoch where all of them are generated; None where any are read from a dataset."""
    counts = [
        settings.draws(count) if isinstance(settings, Share) else count
        for settings in recipe.data.sources
        if (count := _problems(settings)) is not None
    ]
    return sum(counts) if len(counts) == len(recipe.data.sources) else None


def _problems(settings: RowSettings) -> int | None:
    """How many problems reasoning-gym generates for these settings; None: unknown, or no gym."""
    if not settings.path.startswith(GYM) or "[" in settings.split or settings.filter:
        return None
    return min(settings.size, settings.limit or settings.size)
