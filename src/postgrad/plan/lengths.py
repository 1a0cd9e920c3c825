"""How long rows are: from the data where it is at hand, else as long as they may be."""

from dataclasses import dataclass

from postgrad.recipe.recipe import Recipe, RLRecipe


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
    answer = min(recipe.rollout.max_new_tokens, whole - 1) if isinstance(recipe, RLRecipe) else 0
    answer = answer or whole // 2
    return Lengths(whole - answer, answer, 1.0, "every row as long as data.max_len allows")
