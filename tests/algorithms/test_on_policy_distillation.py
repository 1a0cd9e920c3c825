"""On-policy distillation against float64 loops over samples and tokens."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from postgrad.algorithms.base import Credit, Grades
from postgrad.algorithms.on_policy_distillation import OnPolicyDistillation
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.ops.advantages import over_segments

LENGTHS = [2, 3, 1, 2]
GROUP, REWARDS = [0, 0, 1, 1], [1.0, 0.0, 0.5, 1.0]


def random_rows(seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    rows = [(-rng.exponential(1.0, n)).astype(np.float32) for n in LENGTHS]
    return [[float(value) for value in row] for row in rows]


def credit_of(
    algorithm: OnPolicyDistillation,
    batch: Any,
    teacher: Ragged | None = None,
    graded: list[bool] | None = None,
    segments: Ragged | None = None,
    **columns: Any,
) -> Credit:
    """graded: by sample; left out, all are."""
    arguments = {"old": None, "ref": None, "values": None, **columns}
    if teacher is not None:
        which = np.ones(len(batch), np.bool_) if graded is None else np.array(graded)
        arguments["teacher"] = Grades(teacher, which, segments)
    return algorithm.credit(batch, **arguments, state={})


@pytest.mark.parametrize(("teacher_coef", "reward_coef"), [(1.0, 0.0), (0.5, 2.0)])
def test_a_token_s_advantage_is_the_teacher_s_logprob_minus_the_student_s_beside_the_reward(
    teacher_coef: float, reward_coef: float, make_batch: Any, over_responses: Any
) -> None:
    batch = make_batch(GROUP, REWARDS, LENGTHS)
    old, teacher = random_rows(1), random_rows(2)
    algorithm = OnPolicyDistillation(teacher_coef=teacher_coef, reward_coef=reward_coef)
    result = credit_of(algorithm, batch, old=over_responses(old), teacher=over_responses(teacher))
    advantages = list(result.experience.columns["advantages"])
    gaps = list[float]()
    for sample, (student_logprobs, teacher_logprobs) in enumerate(zip(old, teacher, strict=True)):
        group = [r for r, g in zip(REWARDS, GROUP, strict=True) if g == GROUP[sample]]
        mean = sum(group) / 2
        std = sum((r - mean) ** 2 for r in group) ** 0.5  # n - 1 = 1
        earned = reward_coef * (REWARDS[sample] - mean) / (std + 1e-6)
        gaps += [b - a for a, b in zip(student_logprobs, teacher_logprobs, strict=True)]
        wanted = [earned + teacher_coef * gap for gap in gaps[-len(student_logprobs) :]]
        np.testing.assert_allclose(advantages[sample], [0.0, 0.0, *wanted], rtol=1e-6)
    assert result.metrics["teacher/reverse_kl"] == pytest.approx(-sum(gaps) / sum(LENGTHS))
    grades = [value for row in teacher for value in row]
    assert result.metrics["teacher/logprob"] == pytest.approx(sum(grades) / sum(LENGTHS))


def test_a_difference_beyond_its_bound_counts_as_the_bound(
    make_batch: Any, over_responses: Any
) -> None:
    batch = make_batch([0, 1], [0.0, 0.0], [2, 1])
    old, teacher = over_responses([[-1.0, -2.0], [-9.0]]), over_responses([[-31.0, -2.5], [-1.0]])
    algorithm = OnPolicyDistillation(teacher_coef=0.5, teacher_clip=4.0)
    result = credit_of(algorithm, batch, old=old, teacher=teacher)
    first, second = result.experience.columns["advantages"]
    assert (first.tolist(), second.tolist()) == ([0.0, 0.0, -2.0, -0.25], [0.0, 0.0, 2.0])
    assert result.metrics["teacher/clipped_fraction"] == pytest.approx(2 / 3)
    assert result.metrics["teacher/reverse_kl"] == pytest.approx((30.0 + 0.5 - 8.0) / 3)  # before


def segments_of(numbers: list[list[int]]) -> Ragged:
    """Numbers of segments over prompts of two tokens and the responses."""
    return Ragged.of([[-1, -1, *row] for row in numbers], np.int64)


def test_each_token_of_a_segment_gets_all_of_its_difference(
    make_batch: Any, over_responses: Any
) -> None:
    """Worked out by hand: three tokens of which the teacher read the first two as one, at -0.5, and
    the third alone; of another sample one token, and one behind what it read.
    """
    batch = make_batch([0, 1], [0.0, 0.0], [3, 2])
    old = over_responses([[-1.0, -2.0, -0.5], [-1.0, -4.0]])
    teacher = over_responses([[-0.5, 0.0, -1.5], [-9.0, 0.0]])
    segments = segments_of([[0, 0, 1], [0, -1]])
    algorithm = OnPolicyDistillation(teacher_coef=2.0, teacher_clip=3.0)
    result = credit_of(algorithm, batch, old=old, teacher=teacher, segments=segments)
    first, second = result.experience.columns["advantages"]
    assert first.tolist() == [0.0, 0.0, 5.0, 5.0, -2.0]  # 2 * (-0.5 + 3), 2 * (-1.5 + 0.5)
    assert second.tolist() == [0.0, 0.0, -6.0, 0.0]  # -8 is clipped at -3
    metrics = result.metrics
    assert metrics["teacher/reverse_kl"] == pytest.approx(-(2.5 - 1.0 - 8.0) / 4)
    assert metrics["teacher/logprob"] == pytest.approx((-0.5 - 1.5 - 9.0) / 4)
    assert metrics["teacher/clipped_fraction"] == 1 / 4
    shares = [metrics[f"teacher/{name}_fraction"] for name in ("alone", "segment", "unread")]
    assert shares == pytest.approx([2 / 5, 2 / 5, 1 / 5])


@pytest.mark.parametrize("seed", range(5))
def test_segments_of_one_token_have_the_bits_of_tokens(
    seed: int, make_batch: Any, over_responses: Any
) -> None:
    batch = make_batch(GROUP, REWARDS, LENGTHS)
    old, teacher = over_responses(random_rows(seed)), over_responses(random_rows(seed + 9))
    algorithm = OnPolicyDistillation(teacher_coef=0.7, teacher_clip=1.5, reward_coef=0.3)
    segments = segments_of([[*range(n)] for n in LENGTHS])
    plain, cut = (
        credit_of(algorithm, batch, old=old, teacher=teacher, segments=each)
        for each in (None, segments)
    )
    by_token, by_segment = (
        result.experience.columns["advantages"].values for result in (plain, cut)
    )
    assert by_token.tobytes() == by_segment.tobytes()
    for name, value in plain.metrics.items():
        assert cut.metrics[name] == value, name


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=4), st.integers(0, 9))
def test_a_segment_s_difference_is_the_sum_over_its_tokens(
    joins: list[list[int]], seed: int
) -> None:
    """joins: 0 where a token begins a segment, 1 where it goes on with it, 2 where it is unread."""
    rows = list[list[int]]()
    for row in joins:
        numbers = list[int]()
        for join in row:
            last = numbers[-1] if numbers else -1
            numbers.append(-1 if join == 2 else last if join and last >= 0 else len(numbers))
        rows.append(numbers)
    segments = Ragged.of(rows, np.int64)
    values = np.random.default_rng(seed).normal(size=len(segments.values))
    sums, lengths = over_segments(values, segments)
    starts = np.cumsum([0, *map(len, rows)])
    for start, numbers in zip(starts, rows, strict=False):
        for number in {*numbers} - {-1}:
            members = [start + n for n in range(len(numbers)) if numbers[n] == number]
            wanted = math.fsum(values[members])
            np.testing.assert_allclose(sums[members], wanted, rtol=1e-12, atol=1e-12)
            assert lengths[members].tolist() == [len(members)] * len(members)


def test_on_average_the_gradient_of_segments_is_that_of_the_reverse_kl_of_texts(
    make_inputs: Any,
) -> None:
    """Texts of two tokens that the teacher reads as one: over all of them with their probabilities
    q(a) q(b | a), in float64, against the gradient of KL(q || p) by torch.
    """
    rng = np.random.default_rng(3)
    first = torch.tensor(rng.normal(size=3), requires_grad=True)
    second = torch.tensor(rng.normal(size=(3, 3)), requires_grad=True)  # by the first token
    p = torch.tensor(rng.dirichlet(np.ones(9)).reshape(3, 3)).log()
    text = first.log_softmax(0)[:, None] + second.log_softmax(1)
    (text.exp() * (text - p)).sum().backward()
    wanted = first.grad, second.grad
    first, second = (each.detach().requires_grad_() for each in (first, second))
    a, b = first.log_softmax(0), second.log_softmax(1)
    q = (a[:, None] + b).exp().detach()
    gap = (p - q.log()).flatten().numpy()
    logprobs = torch.cat([a[:, None].expand(3, 3).flatten(), b.flatten()])
    weight = np.concatenate([q.flatten().numpy()] * 2)
    inputs = make_inputs(logprobs, weight, advantages=np.concatenate([gap, gap]))
    OnPolicyDistillation().policy_loss(inputs).loss.backward()
    for ours, theirs in zip((first.grad, second.grad), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_teacher_like_the_student_moves_nothing(make_batch: Any, over_responses: Any) -> None:
    batch, same = make_batch(GROUP, REWARDS, LENGTHS), over_responses(random_rows(1))
    result = credit_of(OnPolicyDistillation(), batch, old=same, teacher=same)
    assert not result.experience.has_gradient.any()
    assert not result.experience.columns["advantages"].values.any()
    assert result.metrics["teacher/reverse_kl"] == 0.0


def test_what_was_not_graded_moves_nothing_and_is_in_no_mean_over_the_graded(
    make_batch: Any, over_responses: Any
) -> None:
    batch = make_batch(GROUP, REWARDS, LENGTHS)
    old, teacher = random_rows(1), random_rows(2)
    columns = {"old": over_responses(old), "teacher": over_responses(teacher)}
    result = credit_of(OnPolicyDistillation(), batch, graded=[True, False, False, True], **columns)
    advantages = list(result.experience.columns["advantages"])
    gaps = [[b - a for a, b in zip(*rows, strict=True)] for rows in zip(old, teacher, strict=True)]
    for sample in (0, 3):
        np.testing.assert_allclose(advantages[sample], [0.0, 0.0, *gaps[sample]], rtol=1e-6)
    assert not advantages[1].any()
    assert not advantages[2].any()
    assert result.experience.has_gradient.tolist() == [True, False, False, True]
    graded, tokens = gaps[0] + gaps[3], LENGTHS[0] + LENGTHS[3]
    assert result.metrics["teacher/graded_fraction"] == 0.5
    assert result.metrics["teacher/reverse_kl"] == pytest.approx(-sum(graded) / tokens)
    grades = teacher[0] + teacher[3]
    assert result.metrics["teacher/logprob"] == pytest.approx(sum(grades) / tokens)


def test_where_nothing_was_graded_there_is_no_mean_of_grades(
    make_batch: Any, over_responses: Any
) -> None:
    batch, rows = make_batch(GROUP, REWARDS, LENGTHS), over_responses(random_rows(1))
    result = credit_of(OnPolicyDistillation(), batch, old=rows, teacher=rows, graded=[False] * 4)
    assert result.metrics["teacher/graded_fraction"] == 0.0
    assert not {"teacher/reverse_kl", "teacher/logprob"} & result.metrics.keys()


def test_of_a_step_whose_samples_were_all_dropped_no_fraction_is_told(make_batch: Any) -> None:
    batch, nothing = make_batch([], [], []), Ragged.of([], np.float32)
    result = credit_of(OnPolicyDistillation(), batch, old=nothing, teacher=nothing)
    assert not [name for name in result.metrics if name.startswith("teacher/")]


def test_on_average_the_gradient_is_that_of_the_reverse_kl(make_inputs: Any) -> None:
    """Over all tokens with their probabilities, which is the mean over samples: q_j (log q_j / p_j
    - KL), the gradient of KL(Q || P) on the logits, worked out in float64.
    """
    student_logits = np.array([0.5, 1.0, -1.0, 0.2])
    q = np.exp(student_logits) / np.exp(student_logits).sum()
    p = np.array([0.1, 0.4, 0.3, 0.2])
    logits = torch.tensor(student_logits, requires_grad=True)
    inputs = make_inputs(logits.log_softmax(0), q, advantages=np.log(p / q))
    OnPolicyDistillation().policy_loss(inputs).loss.backward()
    gap = np.log(q / p)
    np.testing.assert_allclose(logits.grad, q * (gap - (q * gap).sum()), rtol=1e-10)


def test_with_samples_of_older_weights_the_sampler_s_logprobs_are_the_student_s(
    make_batch: Any, over_responses: Any
) -> None:
    algorithm = OnPolicyDistillation(old_logprobs="sampled")
    assert not algorithm.needs().old_logprobs
    teacher = random_rows(2)
    batch = make_batch(GROUP, REWARDS, LENGTHS)  # every token was sampled at -1
    result = credit_of(algorithm, batch, teacher=over_responses(teacher))
    np.testing.assert_allclose(
        list(result.experience.columns["advantages"])[1], [0.0, 0.0, *(v + 1.0 for v in teacher[1])]
    )


def test_without_the_teacher_s_logprobs_credit_is_refused(
    make_batch: Any, over_responses: Any
) -> None:
    batch = make_batch(GROUP, REWARDS, LENGTHS)
    with pytest.raises(ValueError, match="'teacher' logprobs"):
        credit_of(OnPolicyDistillation(), batch, old=over_responses(random_rows(1)))


def test_what_acts_on_advantages_without_the_teacher_is_refused() -> None:
    with pytest.raises(UsageError, match="covariance"):
        OnPolicyDistillation(covariance="kl")
    with pytest.raises(UsageError, match="kl_in"):
        OnPolicyDistillation(kl_in="reward", kl_coef=0.1)
