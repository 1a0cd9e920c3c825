"""TRL's reward functions."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peer_objectives.answers import FORMULAS, Answer, Scored, answers_to, because
from benchmarks.peer_objectives.trl import TRL

WORDS = ("grpo", "--model_name_or_path", "m", "--dataset_name", "d", "--max_completion_length",
         "100", "--reward_funcs")  # fmt: skip
THOUGHTS = answers_to(
    "",
    ("thoughts and an answer", "<think>\nA\n</think>\nB"), ("nothing after", "<think>A</think>"),
    ("text before", "B <think>A</think> C"), ("no end", "<think>A"), ("no start", "A</think> B"),
    ("two starts", "<think>A<think>B</think> C"), ("two ends", "<think>A</think>B</think>"),
    ("two thoughts", "<think>A</think> B <think>C</think>"), ("empty thoughts", "<think></think>B"),
    ("white space before", "\n<think>A</think> B"), ("no thoughts", "A"), ("empty", ""),
)  # fmt: skip
OVERLONG = [Answer(f"{n} tokens", "", "", n) for n in (1, 1000, 1024, 1025, 1200, 1280, 1281, 2000)]

OF_LATEX = because({
    "plain expressions are not read there":
        "no LaTeX; unit of a number; plain number; Answer line, number; Answer line, thousands",
    "LaTeX that is not well-formed is not read there":
        "short fraction; box not closed; box without braces; root without braces",
    "LaTeX before a plain number is read there": "Answer line, then another",
})  # fmt: skip


def cases(checkout: Path) -> Iterator[Scored]:
    """The functions that have a verifier here."""
    TRL(checkout)  # puts the checkout on the path
    rewards: Any = import_module("trl.rewards")

    def of(function: Any) -> Any:
        return lambda answer: function([[{"content": answer.text}]], solution=[answer.reference])[0]

    plain = [Answer(a.name, a.text, f"${a.reference}$") for a in FORMULAS]
    yield Scored("accuracy_reward", [*WORDS, "accuracy_reward"], of(rewards.accuracy_reward), plain,
                 OF_LATEX, "LaTeX alone counts there")  # fmt: skip
    thought = [Answer(a.name, f"<think>7</think>{a.text}", a.reference) for a in plain]
    thought.append(Answer("no thoughts", r"\boxed{12}", "$12$"))
    yield Scored("reasoning_accuracy_reward", [*WORDS, "reasoning_accuracy_reward"],
                 of(rewards.reasoning_accuracy_reward), thought, OF_LATEX,
                 "LaTeX alone counts there")  # fmt: skip
    yield Scored("think_format_reward", [*WORDS, "think_format_reward"],
                 of(rewards.think_format_reward), THOUGHTS)  # fmt: skip
    overlong = rewards.get_soft_overlong_punishment(1280, 256)
    yield Scored("get_soft_overlong_punishment", [*WORDS, "get_soft_overlong_punishment"],
                 lambda answer: overlong([[0] * answer.tokens])[0], OVERLONG)  # fmt: skip
