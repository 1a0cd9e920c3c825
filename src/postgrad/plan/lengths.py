"""How long rows are: from the data where it is at hand, else as long as they may be."""

from dataclasses import dataclass

from postgrad.data.settings import RowSettings, Share
from postgrad.recipe.recipe import Recipe

GYM = "reasoning-gym:"  # data.gym.PREFIX, whose module a plan does not import


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of what is read (prompt) and of what is learned from (answer), of the rows that
    data.max_len keeps; spread: the mean square of a sequence over the square of its mean, 1 where
    all are equal. source: where from, for people. rows: samples of an epoch, before those are left
    out that repeat others or the evaluation's; None where they were not counted.
    """

    prompt: float
    answer: float
    spread: float
    source: str
    rows: int | None = None

    def computed(self, answers: int) -> float:
        """Tokens of one prompt with several answers, the prompt once."""
        return self.prompt + answers * self.answer

    def squares(self, answers: int) -> float:
        """What attention over them costs: of each token's position, twice the sum."""
        whole = (self.prompt + self.answer) ** 2 * self.spread
        return self.prompt**2 + answers * (whole - self.prompt**2)


def longest(recipe: Recipe) -> Lengths:
    """Rows as long as they may be: half of a row is the answer where nothing says more."""
    whole = recipe.data.max_len
    answer = recipe.sampled_tokens or whole // 2
    source = "every row as long as data.max_len allows"
    return Lengths(whole - answer, answer, 1.0, source, rows=_made(recipe))


def _made(recipe: Recipe) -> int | None:
    """Rows of an epoch where all of them are made as the recipe says; None where any is read."""
    counts = [
        one.draws(made) if isinstance(one, Share) else made
        for one in recipe.data.sources
        if (made := _problems(one)) is not None
    ]
    return sum(counts) if len(counts) == len(recipe.data.sources) else None


def _problems(settings: RowSettings) -> int | None:
    if not settings.path.startswith(GYM) or "[" in settings.split or settings.filter:
        return None
    return min(settings.size, settings.limit or settings.size)
