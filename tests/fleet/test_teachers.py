"""What graders read, and where their grades come back to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import RunError
from postgrad.core.process import Handle, done
from postgrad.core.ragged import Ragged
from postgrad.core.records import Hinted, PlacedImage, Prompt, Sequences
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.fleet.teachers import Teachers, behind_hints, shown_answers


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def prompt(tokens: Sequence[int], hinted: Sequence[int] | None, dataset: str = "rows") -> Prompt:
    read = None if hinted is None else Hinted(ids(*hinted))
    return Prompt(0, ids(*tokens), "?", None, dataset, 0, hinted=read)


def sequences_of(prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> Sequences:
    """One sample for each prompt, whose answer is trained on."""
    tokens = [np.concatenate([p.token_ids, ids(*a)]) for p, a in zip(prompts, answers, strict=True)]
    masks = [
        np.arange(len(row)) >= len(p.token_ids) for row, p in zip(tokens, prompts, strict=True)
    ]
    return Sequences(
        Ragged.of(tokens, np.int32), Ragged.of(masks, np.bool_), np.arange(len(prompts))
    )


def batch_of(
    sequences: Sequences, rewards: Sequence[float] | None = None, truncated: Sequence[int] = ()
) -> RolloutBatch:
    """truncated: rows that the token limit cut off."""
    nothing = sequences.tokens.like(np.zeros(len(sequences.tokens.values)))
    rows = np.arange(len(sequences))
    return RolloutBatch(
        sequences,
        nothing.like(nothing.values.astype(np.float32)),
        nothing,
        np.zeros(len(rows)) if rewards is None else np.array(rewards),
        rows,
        rows,
        np.isin(rows, truncated),
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
    read = behind_hints(sequences_of(prompts, [[5, 6], [7]]), prompts, {})
    assert [row.tolist() for row in read.tokens] == [[1, 2, 8, 9, 5, 6], [3, 7]]
    assert [row.tolist() for row in read.loss_mask] == [[False] * 4 + [True] * 2, [False, True]]
    assert read.group.tolist() == [0, 1]


def test_a_hint_needs_the_prompt_that_it_replaces() -> None:
    prompts = [prompt([1, 2], None), prompt([1, 2], [1, 9])]
    others = sequences_of([prompt([3], None)] * 2, [[4, 5], [4, 5]])  # began with 3
    with pytest.raises(RunError, match=r"its hint stands in place of the prompt, which the policy"):
        behind_hints(others, prompts, {})
    mixed = replace(others, tokens=Ragged.of([[3, 4, 5], [1, 2, 5]], np.int32))
    assert [row.tolist() for row in behind_hints(mixed, prompts, {}).tokens] == [
        [3, 4, 5], [1, 9, 5],
    ]  # fmt: skip


def test_without_hints_a_grader_reads_the_sequences_themselves() -> None:
    prompts = [prompt([1, 2], None)]
    sequences = sequences_of(prompts, [[5]])
    assert behind_hints(sequences, prompts, {}) is sequences


def test_images_of_an_environment_s_reply_move_with_their_tokens() -> None:
    prompts = [prompt([1, 2], [1, 2, 8, 9])]
    plain = sequences_of(prompts, [[5, 70, 70, 6]])
    shown = PlacedImage("0" * 64, np.array([3, 4]))
    read = behind_hints(
        Sequences(plain.tokens, plain.loss_mask, plain.group, None, ((shown,),)), prompts, {}
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
    grades = teachers.grade(batch_of(sequences), prompts).result()
    assert grades.graded.all()
    graded = grades.logprobs
    assert graded.offsets.tolist() == sequences.tokens.offsets.tolist()
    for (tokens, hinted, answer, dataset), of_row in zip(rows, graded, strict=True):
        wanted = [-token - (len(answer) - place) / 100 for place, token in enumerate(answer)]
        np.testing.assert_allclose(of_row, [0.0] * len(tokens) + wanted, rtol=1e-6)
        read = graders[dataset].read
        assert read is not None
        teacher_row = [*(tokens if hinted is None else hinted), *answer]
        assert teacher_row in [row.tolist() for row in read.tokens]


EOS = 99


def group_prompt(room: int = 9) -> Prompt:
    """A prompt [1, 2], whose grader reads [1, 2, 8, a right answer, 9]."""
    return Prompt(0, ids(1, 2), "?", None, "rows", 0, hinted=Hinted(ids(1, 2, 8, 9), 3, room))


def group_of(prompt: Prompt, answers: Sequence[Sequence[int]]) -> Sequences:
    """The samples of one prompt."""
    sequences = sequences_of([prompt] * len(answers), answers)
    return replace(sequences, group=np.zeros(len(answers), np.int64))


def test_a_grader_reads_the_first_other_right_answer_of_the_group_as_text() -> None:
    """Without the token that ends it."""
    prompt = group_prompt()
    answers = [[3, EOS], [4, 5, EOS], [6, EOS], [7, EOS]]
    batch = batch_of(group_of(prompt, answers), [0.0, 1.0, 1.0, 0.5])
    grader = Grader()
    teachers = Teachers([grader], {"rows": 0}, 1.0, [EOS])  # pyright: ignore[reportArgumentType]
    grades = teachers.grade(batch, [prompt]).result()
    assert grader.read is not None
    assert [row.tolist() for row in grader.read.tokens] == [
        [1, 2, 8, 4, 5, 9, 3, EOS],
        [1, 2, 8, 6, 9, 4, 5, EOS],
        [1, 2, 8, 4, 5, 9, 6, EOS],
        [1, 2, 8, 4, 5, 9, 7, EOS],
    ]
    assert grades.graded.all()
    for row, answer in zip(grades.logprobs, answers, strict=True):
        assert row[:2].tolist() == [0.0, 0.0]
        wanted = [-token - (len(answer) - place) / 100 for place, token in enumerate(answer)]
        np.testing.assert_allclose(row[2:], wanted, rtol=1e-6)


def test_a_sample_without_a_right_answer_to_see_is_not_graded_and_nobody_is_asked() -> None:
    """The only right one does not see itself; one that was cut off is no answer."""
    prompt, other = group_prompt(), prompt_without_place()
    sequences = group_of(prompt, [[3, EOS], [4, EOS], [5, 6]])
    both = Sequences(
        Ragged.of([*sequences.tokens, ids(1, 7)], np.int32),
        Ragged.of([*sequences.loss_mask, np.array([False, True])], np.bool_),
        np.array([0, 0, 0, 1]),
    )
    batch, grader = batch_of(both, [0.0, 1.0, 1.0, 0.0], truncated=[2]), Grader()
    teachers = Teachers([grader], {"rows": 0}, 1.0, [EOS])  # pyright: ignore[reportArgumentType]
    grades = teachers.grade(batch, [prompt, other]).result()
    assert grades.graded.tolist() == [True, False, True, True]
    assert grader.read is not None
    assert [row.tolist() for row in grader.read.tokens] == [
        [1, 2, 8, 4, 9, 3, EOS],
        [1, 2, 8, 4, 9, 5, 6],
        [1, 7],
    ]
    assert not grades.logprobs.row(1).any()
    wrong, unasked = batch_of(sequences), Grader()
    teachers = Teachers([unasked], {"rows": 0}, 1.0, [EOS])  # pyright: ignore[reportArgumentType]
    assert not teachers.grade(wrong, [prompt]).result().graded.any()
    assert unasked.read is None


def prompt_without_place() -> Prompt:
    return prompt([1], None)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(3, 7), min_size=0, max_size=5),
            st.sampled_from([0.0, 0.5, 1.0]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 5),
    st.sampled_from([0.5, 1.0]),
)
def test_no_sample_sees_itself_a_wrong_answer_or_one_that_finds_no_room(
    samples: list[tuple[list[int], float, bool]], room: int, correct_at: float
) -> None:
    prompt = group_prompt(room)
    answers = [[*answer, EOS] for answer, _, _ in samples]
    batch = batch_of(
        group_of(prompt, answers),
        [reward for _, reward, _ in samples],
        [row for row, (_, _, cut) in enumerate(samples) if cut],
    )
    shown = shown_answers(batch, [prompt], correct_at, [EOS])
    for row in range(len(samples)):
        fitting = [
            answer
            for other, (answer, reward, cut) in enumerate(samples)
            if other != row and reward >= correct_at and not cut and 0 < len(answer) <= room
        ]
        assert (shown[row].tolist() if row in shown else None) == (fitting[0] if fitting else None)
