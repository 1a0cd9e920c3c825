"""Answers that verifiers disagree on, scored by a peer and by the recipe's [[rewards]]."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.peer_objectives.comparing import Row, translated
from postgrad.rewards.mixing import total
from postgrad.rewards.registry import build
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView, Score
from postgrad.translate.translate import Translation

CLOSE = 1e-6  # scores that are equal: some peers have float32


@dataclass(frozen=True)
class Answer:
    """A sample, and the reference answer of its prompt."""

    name: str
    text: str
    reference: str
    tokens: int = 5
    finish: str = "stop"
    columns: Mapping[str, Any] = field(default_factory=dict)  # others of its row


@dataclass(frozen=True)
class Scored:
    """A reward of a peer: the options, its score of an answer, and what is known to differ.

    differing: by the name of an answer, why its score is another here; "" stands for any answer.
    note: what the recipe says of it.
    """

    name: str
    words: Sequence[str]
    peer: Callable[[Answer], float | None]  # None: the row is skipped
    answers: Sequence[Answer]
    differing: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def compared(self, system: str, draws: int) -> Row:
        """Its row: mean scores, the share of answers that differ, and which do."""
        del draws
        translation = translated(system, self.words)
        rewards: list[dict[str, Any]] = translation.recipe["rewards"]
        theirs = [self.peer(answer) for answer in self.answers]
        ours = [scores(rewards, answer, translation) for answer in self.answers]
        other = [answer.name for answer, a, b in zip(self.answers, theirs, ours, strict=True)
                 if (a is None) != (b is None) or abs((a or 0.0) - (b or 0.0)) > CLOSE]  # fmt: skip
        verdict, why = self._verdict(other, translation)
        return Row(
            self.name, {"rewards": rewards}, _mean(ours), _mean(theirs),
            len(other) / len(self.answers), None, verdict, why,
        )  # fmt: skip

    def _verdict(self, other: Sequence[str], translation: Translation) -> tuple[str, str]:
        if unknown := [name for name in other if not {name, ""} & self.differing.keys()]:
            return "differs", f"nothing explains {', '.join(map(repr, unknown))}"
        if gone := [name for name in self.differing if name not in (*other, "")]:
            return "differs", f"equal after all: {', '.join(map(repr, gone))}"
        if not other:
            return "equal", ""
        draft = translation.draft
        texts = [*draft.comments.values(), *(option.why for option in draft.missing)]
        if not any(self.note and self.note in text for text in texts):
            return "differs", f"the recipe does not say {self.note!r}"
        reasons: dict[str, list[str]] = {}
        for name in other:
            why = self.differing.get(name) or self.differing[""]
            reasons.setdefault(why, []).append(name)
        return "told", "; ".join(f"{why} ({', '.join(names)})" for why, names in reasons.items())


def _mean(scores: Sequence[float | None]) -> float:
    """Of scores; 0 for rows that are skipped."""
    return sum(score or 0.0 for score in scores) / len(scores)


def scores(
    rewards: Sequence[Mapping[str, Any]], answer: Answer, translation: Translation
) -> float | None:
    """The sum of [[rewards]]; None for a row whose reference answer a verifier cannot read."""
    limit = translation.recipe.get("rollout", {}).get("max_new_tokens")
    settings = [RewardSettings(**entry) for entry in rewards]
    values: list[float] = []
    prompt = PromptView("?", answer.reference, answer.columns)
    for reward in settings:
        if reward.type == "overlong" and "max_new_tokens" not in reward.verifier_settings:
            reward = RewardSettings(**(reward.model_dump() | {"max_new_tokens": limit}))
        if reward.type == "reward_model":
            values.append(float(answer.text))
            continue
        verifier: Any = build(reward)
        verifier.prepare()
        if verifier.check(prompt) is not None:
            return None
        view = RolloutView(reward.read(answer.text), answer.finish, answer.tokens)
        score = verifier.score(prompt, view)
        values.append(score.value if isinstance(score, Score) else float(score))
    return total(settings, values)


def weighed(answers: Sequence[Answer], score: str) -> list[Answer]:
    """The answers, with a score that a reward model gives each of them."""
    return [replace(answer, name=f"{answer.name}, score {score}", text=score) for answer in answers]


def because(reasons: Mapping[str, str]) -> dict[str, str]:
    """By the name of an answer the reason: {reason: "name; name"}."""
    return {name: why for why, names in reasons.items() for name in names.split("; ")}


def answers_to(reference: str, *named: tuple[str, str]) -> list[Answer]:
    return [Answer(name, text, reference) for name, text in named]


NUMBERS = answers_to(
    "1234",
    ("marked", "1200 + 34 is it.\n#### 1234"), ("separators", "#### 1,234"),
    ("decimals", "#### 1234.0"), ("dollar", "#### $1234"), ("no space", "####1234"),
    ("two spaces", "####  1234"), ("period", "#### 1234."), ("unit", "#### 1234 apples"),
    ("percent", "#### 1234%"), ("wrong", "#### 1235"), ("last mark right", "#### 7\n#### 1234"),
    ("last mark wrong", "#### 1234\n#### 7"), ("mark far from the end", "#### 1234" + " ." * 200),
    ("negative", "#### -1234"), ("bold", "#### **1234**"), ("spaces inside", "#### 1 234"),
    ("fraction", "#### 1234/1"), ("plus", "#### +1234"), ("last number", "The answer is 1234."),
    ("last number, separators", "The answer is 1,234."), ("equation", "1200+34=1234"),
    ("another number last", "It is 1234. I checked 2 times."), ("box", r"\boxed{1234}"),
    ("last number, decimals", "It is 1234.00"), ("last number, dollar", "It is $1234."),
    ("number in words", "It is twelve."), ("empty", ""), ("mark alone", "####"),
)  # fmt: skip
FORMULAS = [
    *answers_to(r"\frac{1}{2}",
         ("fraction", r"So it is \boxed{\frac{1}{2}}."), ("dfrac", r"\boxed{\dfrac{1}{2}}"),
         ("short fraction", r"\boxed{\frac12}"), ("slash", r"\boxed{1/2}"),
         ("decimal", r"\boxed{0.5}"), ("no leading zero", r"\boxed{.5}"),
         ("wrong fraction", r"\boxed{\frac{1}{3}}"), ("spaces", r"\boxed{ \frac{1}{2} }"),
         ("dollars", r"The answer is $\frac{1}{2}$."), ("no LaTeX", "The answer is 1/2."),
         ("last box right", r"\boxed{7} no, \boxed{\frac{1}{2}}"),
         ("last box wrong", r"\boxed{\frac{1}{2}} no, \boxed{7}"),
         ("text after", r"\boxed{\frac{1}{2}} I hope it is correct."),
         ("number after", r"\boxed{\frac{1}{2}} from 3 steps"),
         ("long text after", r"\boxed{\frac{1}{2}}" + " Done." * 60),
         ("box not closed", r"\boxed{\frac{1}{2}"), ("box in dollars", r"$\boxed{\frac{1}{2}}$"),
         ("Answer line", r"Answer: \frac{1}{2}"), ("Answer line in dollars",
                                                   r"Answer: $\frac{1}{2}$"),
         ("Answer line, then another", "Answer: \\frac{1}{2}\nAnswer: 7"),
         ("final answer", r"Final Answer: The final answer is $\frac{1}{2}$. I hope it is."),
         ("empty", ""), ("words", "I do not know."), ("empty box", r"\boxed{}")),
    *answers_to("12",
         ("unit", r"\boxed{12\text{ cm}}"), ("unit without space", r"\boxed{12\text{cm}}"),
         ("unit of a number", "The answer is 12 cm."), ("name before", r"\boxed{x = 12}"),
         ("dollar sign", r"\boxed{\$12}"), ("decimals", r"\boxed{12.0}"),
         ("percent sign", r"\boxed{12\%}"), ("degrees", r"\boxed{12^\circ}"),
         ("number", r"\boxed{12}"), ("sum", r"\boxed{5+7}"), ("negative", r"\boxed{-12}"),
         ("fbox", r"\fbox{12}"), ("box without braces", r"\boxed 12"),
         ("text around", r"\boxed{\text{12}}"), ("bold", r"\boxed{\mathbf{12}}")),
    *answers_to("1234", ("thousands", r"\boxed{1,234}"), ("thousands in LaTeX", r"\boxed{1{,}234}"),
         ("thousands, thin space", r"\boxed{1\,234}"), ("number without commas", r"\boxed{1234}"),
         ("plain number", "The answer is 1234."), ("Answer line, number", "Answer: 1234"),
         ("Answer line, thousands", "Answer: 1,234")),
    *answers_to("2x+2", ("factored", r"\boxed{2(x+1)}"), ("other order", r"\boxed{2+2x}"),
         ("written alike", r"\boxed{2x+2}"), ("spaces in a sum", r"\boxed{2x + 2}")),
    *answers_to(r"\text{Monday}",
         ("word", r"\boxed{\text{Monday}}"), ("bare word", r"\boxed{Monday}"),
         ("other word", r"\boxed{\text{Tuesday}}")),
    *answers_to("(1,2)", ("tuple", r"\boxed{(1,2)}"), ("tuple with a space", r"\boxed{(1, 2)}"),
         ("left and right", r"\boxed{\left(1,2\right)}"), ("other tuple", r"\boxed{(2,1)}")),
    *answers_to(r"\sqrt{3}",
         ("root", r"\boxed{\sqrt{3}}"), ("root without braces", r"\boxed{\sqrt3}"),
         ("root as a decimal", r"\boxed{1.7320508}")),
]  # fmt: skip
LENGTHS = [Answer(f"{tokens} tokens, {finish}", "", "", tokens, finish)
           for tokens, finish in ((1, "stop"), (60, "stop"), (80, "stop"), (81, "stop"),
                                  (90, "stop"), (99, "stop"), (100, "stop"),
                                  (100, "length"))]  # fmt: skip
