"""verl's scores by data_source, and DAPO's punishment of long answers."""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.peer_objectives.answers import (
    FORMULAS,
    LENGTHS,
    NUMBERS,
    Answer,
    Scored,
    because,
    weighed,
)
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.verl import BASE, Verl


def cases(checkout: Path) -> Iterator[Scored]:
    """Those that a data set's name chooses, and the punishment."""
    Verl(checkout)  # makes its files importable
    score: Any = import_module("verl.utils.reward_score").default_compute_score
    for source, file, added, answers, differing, note in SOURCES:

        def peer(answer: Answer, source: str = source, added: float = added) -> float:
            their_score = score(source, answer.text, answer.reference)
            return (their_score["score"] if isinstance(their_score, dict) else their_score) + added

        words = [*BASE, f"data.train_files={file}"]
        name = f"{source}, plus {added:g}" if added else source
        yield Scored(name, words, peer, answers, differing, note)
    yield from _overlong(checkout)


def _overlong(checkout: Path) -> Iterator[Scored]:
    """DAPORewardManager's punishment, beside a reward model's score."""
    folder = checkout / "verl" / "experimental" / "reward_loop" / "reward_manager"
    run = statements(folder / "dapo.py", "if self.overlong_buffer_cfg is not None and "
                     "self.overlong_buffer_cfg.enable:\n    overlong_buffer_len")  # fmt: skip
    place = "reward.reward_kwargs."
    for longest, factor in ((100, 1.0), (100, 0.5), (90, 1.0)):

        def peer(answer: Answer, longest: int = longest, factor: float = factor) -> float:
            config = SimpleNamespace(enable=True, len=20, penalty_factor=factor, log=False)
            manager = SimpleNamespace(overlong_buffer_cfg=config, max_resp_len=longest)
            space = {"self": manager, "valid_response_length": answer.tokens,
                     "reward": float(answer.text)}  # fmt: skip
            run(space)
            return space["reward"]

        words = [
            *BASE, "data.max_response_length=100", "reward.reward_model.enable=True",
            "reward.reward_model.model_path=r", f"{place}overlong_buffer_cfg.enable=True",
            f"{place}overlong_buffer_cfg.len=20", f"{place}max_resp_len={longest}",
            f"{place}overlong_buffer_cfg.penalty_factor={factor}",
        ]  # fmt: skip
        beyond = {f"{n} tokens, {end}, score 1": "beyond max_resp_len the penalty grows on there"
                  for n, end in ((99, "stop"), (100, "stop"), (100, "length"))}  # fmt: skip
        yield Scored(f"overlong of {longest}, factor {factor}", words, peer, weighed(LENGTHS, "1"),
                     beyond if longest < 100 else {}, "there it grows on")  # fmt: skip


OF_NUMBERS = because({
    "a number is compared as text there": "decimals; dollar; period; plus",
    "the mark is read with one space behind it there": "no space; two spaces",
    "only the last 300 characters are read there": "mark far from the end",
    "the number before a slash is read there": "fraction",
})  # fmt: skip
OF_BOXES = because({
    "formulas are compared as text there, by their values here":
        "unit without space; decimals; sum; text around; bold; thousands; thousands in LaTeX; "
        "factored; other order; bare word; root as a decimal",
    "boxes of one paragraph are a set here": "last box right",
    "a box that is not closed is read here": "box not closed",
})  # fmt: skip
OF_DAPO = because({
    "the box is compared as text there, by its value here":
        "dfrac; short fraction; slash; decimal; no leading zero; spaces; unit; unit without space; "
        "name before; dollar sign; decimals; percent sign; degrees; sum; text around; bold; "
        "thousands; thousands in LaTeX; factored; other order; spaces in a sum; bare word; "
        "tuple with a space; left and right; root without braces; root as a decimal",
    "only a box and what follows Answer: are read there":
        "dollars; no LaTeX; unit of a number; plain number; box without braces",
    "boxes of one paragraph are a set here": "last box right",
    "a box that is not closed is read here": "box not closed",
    "a box is read in the last 100 characters there": "long text after",
})  # fmt: skip
# data_source, a file's name, what is added to its scores, answers, what differs, what is told of it
SOURCES: tuple[tuple[str, str, float, Sequence[Answer], Mapping[str, str], str], ...] = (
    ("openai/gsm8k", "gsm8k/train.parquet", 0.0, NUMBERS, OF_NUMBERS, "in the last 300"),
    ("DigitalLearningGmbH/MATH-lighteval", "math/train.parquet", 0.0, FORMULAS, OF_BOXES,
     "compared as text"),
    ("math_dapo", "dapo-math-17k.parquet", 1.0, FORMULAS, OF_DAPO, "there 1 or -1"),
)  # fmt: skip
