"""The scorers of reasoning-gym's tasks, with their partial credit."""

import json
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from typing import Any, ClassVar

from postgrad.rewards.math import formula_names
from postgrad.rewards.sandbox.guard import NotAFormula
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier


class ReasoningGym(Verifier):
    """The task's own score of the answer, usually in [0, 1].

    Works on rows of "reasoning-gym:TASK". A prompt's metadata has the `task`, its `parameters` and
    the `index` of the problem, which is generated again from them: some scorers need tuples, which
    JSON does not keep.
    """

    sandboxed: ClassVar[bool] = True  # nine of its scorers call eval or sympy's parser
    imports_bytes: ClassVar[int] = 115_000_000

    # "answer": scores the text between the last <answer> and </answer>, 0 where there is none.
    # None: the whole sample is the answer, without white space at its ends.
    answer_tag: str | None = None

    def prepare(self) -> None:
        import reasoning_gym  # noqa: F401  # takes a second

    def formulas(self) -> Collection[str]:
        return formula_names()

    def look_up(self, prompt: PromptView) -> None:
        with suppress(KeyError):  # a row of another kind, which `check` reports
            _problem(prompt)

    def check(self, prompt: PromptView) -> str | None:
        try:
            _, entry = _problem(prompt)
        except KeyError as error:
            return (
                f"its metadata has no {error.args[0]!r}: "
                "the reasoning_gym verifier needs rows of 'reasoning-gym:TASK'"
            )
        if _as_json(entry["answer"]) != prompt.answer:
            return (
                f"reasoning-gym now generates answer {entry['answer']!r} where the row "
                f"has {prompt.answer!r}: the installed version is not the row's"
            )
        return None

    def right_answer(self, prompt: PromptView) -> str | None:
        tag, answer = self.answer_tag, prompt.answer
        return answer if tag is None else f"<{tag}>{answer}</{tag}>"

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        dataset, entry = _problem(prompt)
        answer = self._answer(rollout.text)
        if answer is None:
            return Score(0.0, {"answer": None})
        try:
            value = dataset.score_answer(answer, entry)
        except NotAFormula:  # code in place of an answer is a wrong answer
            value = 0.0
        return Score(value, {"answer": answer[:200]})

    def _answer(self, text: str) -> str | None:
        if self.answer_tag is None:
            return text.strip()
        _, opened, rest = text.rpartition(f"<{self.answer_tag}>")
        answer, closed, _ = rest.partition(f"</{self.answer_tag}>")
        return answer.strip() if opened and closed else None


def _problem(prompt: PromptView) -> tuple[Any, dict[str, Any]]:
    metadata = prompt.metadata
    parameters = json.dumps(metadata["parameters"], sort_keys=True)
    return _generate(metadata["task"], parameters, metadata["index"])


@lru_cache(maxsize=256)
def _generate(task: str, parameters: str, index: int) -> tuple[Any, dict[str, Any]]:
    dataset = _dataset(task, parameters)
    return dataset, dataset[index]


@lru_cache(maxsize=16)
def _dataset(task: str, parameters: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(parameters))


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
