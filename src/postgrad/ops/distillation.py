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
        return self.between(log_q, (teacher / self.temperature).log_softmax(-1))

    def of_top(self, student: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
        """[N] nats between distributions over k + 1 outcomes: each of k tokens, and any other.

        student: logits [N, V]; ids: [N, k] of the teacher's most likely tokens; log_p: [N, k + 1]
        its log-probabilities of these and of all others together, at this temperature. At most the
        divergence of the whole distributions, and 0 where they are the same.
        """
        return self.between(with_rest(student / self.temperature, ids), log_p)

    def between(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        """[N] nats, from log-probabilities of student and teacher, [N, outcomes]."""
        if self.kind == "forward_kl":
            return _kl(log_p, log_q)
        if self.kind == "reverse_kl":
            return _kl(log_q, log_p)
        mixed = (log_p + math.log(self.beta)).logaddexp(log_q + math.log1p(-self.beta))
        return self.beta * _kl(log_p, mixed) + (1.0 - self.beta) * _kl(log_q, mixed)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(A || B) [N] from log-probabilities [N, V]."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def with_rest(logits: Tensor, ids: Tensor) -> Tensor:
    """[N, k + 1] the log-probabilities of k < V tokens, and of all others together, from logits
    [N, V].
    """
    import torch

    others = logits.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    outcomes = torch.cat([logits.gather(-1, ids), others], -1)
    return outcomes - logits.logsumexp(-1, keepdim=True)
