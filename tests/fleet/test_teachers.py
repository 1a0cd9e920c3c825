"""What graders read, and where their grades come back to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.process import Handle, done
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Prompt, Sequences
from postgrad.fleet.teachers import Teachers, behind_hints


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def prompt(tokens: Sequence[int], hinted: Sequence[int] | None, dataset: str = "rows") -> Prompt:
    read = None if hinted is None else ids(*hinted)
    return Prompt(0, ids(*tokens), "?", None, dataset, 0, hinted_ids=read)


def sequences_of(prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> Sequences:
    """One sample for each prompt, whose answer is trained on."""
    tokens = [np.concatenate([p.token_ids, ids(*a)]) for p, a in zip(prompts, answers, strict=True)]
    masks = [
        np.arange(len(row)) >= len(p.token_ids) for row, p in zip(tokens, prompts, strict=True)
    ]
    return Sequences(
        Ragged.of(tokens, np.int32), Ragged.of(masks, np.bool_), np.arange(len(prompts))
    )


@dataclass
class Grader:
    """Grades a token by its number and its distance from the end of the sequence."""

    name: str = ""
    read: Sequences | None = None

    def logprobs(self, sequences: Sequences) -> Handle[Ragged]:
        self.read = sequences
        rows = [
            np.where(mask, -row - np.arange(len(row), 0, -1) / 100, 0.0)
            for row, mask in zip(sequences.tokens, sequences.loss_mask, strict=True)
        ]
        return done(Ragged.of(rows, np.float32))


def test_a_grader_reads_the_hint_before_the_answer_and_only_the_answer_bears_grades() -> None:
    prompts = [prompt([1, 2], [1, 2, 8, 9]), prompt([3], None)]
    read = behind_hints(sequences_of(prompts, [[5, 6], [7]]), prompts)
    assert [row.tolist() for row in read.tokens] == [[1, 2, 8, 9, 5, 6], [3, 7]]
    assert [row.tolist() for row in read.loss_mask] == [[False] * 4 + [True] * 2, [False, True]]
    assert read.group.tolist() == [0, 1]


def test_without_hints_a_grader_reads_the_sequences_themselves() -> None:
    prompts = [prompt([1, 2], None)]
    sequences = sequences_of(prompts, [[5]])
    assert behind_hints(sequences, prompts) is sequences


def test_images_of_an_environment_s_reply_move_with_their_tokens() -> None:
    prompts = [prompt([1, 2], [1, 2, 8, 9])]
    plain = sequences_of(prompts, [[5, 70, 70, 6]])
    shown = PlacedImage("0" * 64, np.array([3, 4]))
    read = behind_hints(
        Sequences(plain.tokens, plain.loss_mask, plain.group, None, ((shown,),)), prompts
    )
    (moved,) = read.images_of(0)
    assert read.tokens.row(0)[moved.at].tolist() == [70, 70]


cases = st.lists(
    st.tuples(
        st.lists(st.integers(1, 99), min_size=1, max_size=5),
        st.none() | st.lists(st.integers(1, 99), min_size=1, max_size=9),
        st.lists(st.integers(1, 99), min_size=1, max_size=6),
        st.sampled_from(["a", "b"]),
    ),
    min_size=1,
    max_size=6,
)


@given(cases)
def test_every_token_of_an_answer_gets_the_grade_of_its_dataset_s_teacher_and_no_other_token_one(
    rows: list[tuple[list[int], list[int] | None, list[int], str]],
) -> None:
    """Shorter hints than prompts too: rows of a template that writes them differently."""
    prompts = [prompt(tokens, hinted, dataset) for tokens, hinted, _, dataset in rows]
    sequences = sequences_of(prompts, [answer for _, _, answer, _ in rows])
    graders = {"a": Grader("a"), "b": Grader("b")}
    teachers = Teachers(list(graders.values()), {"a": 0, "b": 1})  # pyright: ignore[reportArgumentType]
    graded = teachers.logprobs(sequences, prompts).result()
    assert graded.offsets.tolist() == sequences.tokens.offsets.tolist()
    for (tokens, hinted, answer, dataset), grades in zip(rows, graded, strict=True):
        wanted = [-token - (len(answer) - place) / 100 for place, token in enumerate(answer)]
        np.testing.assert_allclose(grades, [0.0] * len(tokens) + wanted, rtol=1e-6)
        read = graders[dataset].read
        assert read is not None
        whole = [*(tokens if hinted is None else hinted), *answer]
        assert whole in [row.tolist() for row in read.tokens]
