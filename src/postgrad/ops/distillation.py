"""How far a student's distribution of the next token is from a teacher's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True, slots=True)
class TeacherDivergence:
    """P is the teacher's distribution, Q the student's, both of logits / temperature.

    "forward_kl": KL(P || Q), which covers all that the teacher does (Hinton et al. 2015,
    arXiv:1503.02531, without its factor of temperature squared). "reverse_kl": KL(Q || P), which
    keeps to what the teacher would do (MiniLLM, arXiv:2306.08543). "jsd": the generalised
    Jensen-Shannon divergence beta KL(P || M) + (1 - beta) KL(Q || M) with
    M = beta P + (1 - beta) Q and 0 < beta < 1 (GKD, arXiv:2306.13649).
    """

    kind: DivergenceKind = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0

    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        """[N] nats, from logits [N, V] of both."""
        log_q = (student / self.temperature).log_softmax(-1)
        log_p = (teacher / self.temperature).log_softmax(-1)
        if self.kind == "forward_kl":
            return _kl(log_p, log_q)
        if self.kind == "reverse_kl":
            return _kl(log_q, log_p)
        mixed = (log_p + math.log(self.beta)).logaddexp(log_q + math.log1p(-self.beta))
        return self.beta * _kl(log_p, mixed) + (1.0 - self.beta) * _kl(log_q, mixed)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(A || B) [N] from log-probabilities [N, V]."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)
