"""Divergences of a student from its teacher against float64 loops over tokens."""

from math import exp, log

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from postgrad.ops.distillation import DivergenceKind, TeacherDivergence, with_rest

KINDS: tuple[DivergenceKind, ...] = ("forward_kl", "reverse_kl", "jsd")
LOGITS = st.lists(st.floats(-6.0, 6.0), min_size=4, max_size=4)


def softmax(logits: list[float], temperature: float) -> list[float]:
    powers = [exp(x / temperature) for x in logits]
    return [power / sum(powers) for power in powers]


def by_loop(
    kind: str, student: list[float], teacher: list[float], beta: float, heat: float
) -> float:
    q, p = softmax(student, heat), softmax(teacher, heat)
    total = 0.0
    for q_token, p_token in zip(q, p, strict=True):
        if kind == "forward_kl":
            total += p_token * log(p_token / q_token)
        elif kind == "reverse_kl":
            total += q_token * log(q_token / p_token)
        else:
            mixed = beta * p_token + (1 - beta) * q_token
            total += beta * p_token * log(p_token / mixed) + (1 - beta) * q_token * log(
                q_token / mixed
            )
    return total


@pytest.mark.parametrize("kind", KINDS)
@given(student=LOGITS, teacher=LOGITS, beta=st.floats(0.05, 0.95), heat=st.floats(0.5, 3.0))
def test_a_divergence_is_the_sum_over_tokens_and_never_negative(
    kind: DivergenceKind,
    student: list[float],
    teacher: list[float],
    beta: float,
    heat: float,
) -> None:
    rows = [torch.tensor([logits], dtype=torch.float64) for logits in (student, teacher)]
    value = float(TeacherDivergence(kind, beta, heat).of(*rows))
    assert value == pytest.approx(by_loop(kind, student, teacher, beta, heat), abs=1e-12)
    assert value > -1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_like_its_teacher_has_no_divergence_and_no_gradient(kind: DivergenceKind) -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    apart = TeacherDivergence(kind, 0.3).of(logits, logits.detach())
    apart.backward()
    assert float(apart.detach()) == pytest.approx(0.0, abs=1e-15)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad, 0.0, atol=1e-15)


def test_the_gradient_of_forward_kl_is_the_difference_of_probabilities() -> None:
    """By hand: d KL(P || Q) / d logits = (q - p) / T; T = 2."""
    student = torch.tensor([[2.0, 0.0, -2.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[0.0, 2.0, 0.0]], dtype=torch.float64)
    TeacherDivergence("forward_kl", temperature=2.0).of(student, teacher).backward()
    q, p = (softmax(row, 2.0) for row in ([2.0, 0.0, -2.0], [0.0, 2.0, 0.0]))
    wanted = [[(q_token - p_token) / 2 for q_token, p_token in zip(q, p, strict=True)]]
    assert student.grad is not None
    np.testing.assert_allclose(student.grad, wanted, rtol=1e-12)


def test_hardly_mixed_the_generalised_divergence_has_the_two_kl_at_its_ends() -> None:
    """D / (beta (1 - beta)) goes to KL(P || Q) as beta goes to 0, to KL(Q || P) as it goes to 1."""
    student, teacher = torch.tensor([[0.1, 1.0, -1.0]]), torch.tensor([[1.0, 0.2, 0.3]])
    student, teacher = student.double(), teacher.double()
    ends: tuple[tuple[float, DivergenceKind], ...] = (
        (1e-5, "forward_kl"),
        (1 - 1e-5, "reverse_kl"),
    )
    for beta, kind in ends:
        scaled = TeacherDivergence("jsd", beta).of(student, teacher) / (beta * (1 - beta))
        assert float(scaled) == pytest.approx(
            float(TeacherDivergence(kind).of(student, teacher)), rel=1e-4
        )


@pytest.mark.parametrize("kind", KINDS)
@given(student=LOGITS, teacher=LOGITS, heat=st.floats(0.5, 3.0))
def test_of_k_tokens_a_divergence_is_that_of_them_and_one_outcome_for_all_others(
    kind: DivergenceKind, student: list[float], teacher: list[float], heat: float
) -> None:
    """Tokens 2 and 0 of four, by hand; never more than the divergence of all four."""
    rows = [torch.tensor([logits], dtype=torch.float64) for logits in (student, teacher)]
    ids = torch.tensor([[2, 0]])
    divergence = TeacherDivergence(kind, 0.3, heat)
    value = float(divergence.of_top(rows[0], ids, with_rest(rows[1] / heat, ids)))
    q, p = softmax(student, heat), softmax(teacher, heat)
    q, p = [q[2], q[0], q[1] + q[3]], [p[2], p[0], p[1] + p[3]]
    wanted = by_loop(kind, [log(x) for x in q], [log(x) for x in p], 0.3, 1.0)
    assert value == pytest.approx(wanted, abs=1e-12)
    assert -1e-12 < value <= float(divergence.of(*rows)) + 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_like_its_stored_teacher_has_no_gradient(kind: DivergenceKind) -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 2]])
    stored = with_rest(logits.detach(), ids)
    apart = TeacherDivergence(kind, 0.3).of_top(logits, ids, stored)
    apart.backward()
    assert float(apart.detach()) == pytest.approx(0.0, abs=1e-15)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad, 0.0, atol=1e-15)
