"""The heads of student and teacher together, in chunks: the numbers and gradients of all logits."""

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from postgrad.models import head
from postgrad.models.distilled_head import (
    PARTS,
    LiveTeacher,
    StoredTeacher,
    divergences,
    top_logprobs,
)
from postgrad.ops.distillation import DivergenceKind, TeacherDivergence

ENTRIES, WIDTHS, VOCABULARIES = 23, (12, 20), (37, 40)  # of student and teacher


class OnlyHead(nn.Module):
    """A model that is nothing but its output head."""

    def __init__(self, width: int, vocabulary: int, **shaped: float) -> None:
        super().__init__()
        self.config = PreTrainedConfig(vocab_size=vocabulary, **shaped)
        self.head = nn.Linear(width, vocabulary)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def both(**shaped: float) -> tuple[OnlyHead, OnlyHead, Tensor, Tensor, Tensor, Tensor]:
    """Student, teacher, their hidden states, targets, and gradients that come back."""
    torch.manual_seed(0)
    student, teacher = (OnlyHead(w, v) for w, v in zip(WIDTHS, VOCABULARIES, strict=True))
    student.config = PreTrainedConfig(vocab_size=VOCABULARIES[0], **shaped)
    hidden, taught = (2 * torch.randn(ENTRIES, width) for width in WIDTHS)
    targets = torch.randint(0, min(VOCABULARIES), (ENTRIES,))
    return student, teacher, hidden, taught, targets, torch.randn(2, ENTRIES)


def at_once(
    student: OnlyHead,
    teacher: OnlyHead,
    hidden: Tensor,
    taught: Tensor,
    divergence: TeacherDivergence,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [E, V] and divergences from all logits, in float64."""
    wide = [w.detach().double() for w in (teacher.head.weight, teacher.head.bias)]
    of_teacher = nn.functional.linear(taught.double(), *wide)[:, : VOCABULARIES[0]]
    weight, bias = student.head.weight, student.head.bias
    logits = nn.functional.linear(hidden.double(), weight.double(), bias.double())
    cap = getattr(student.config, "final_logit_softcapping", None)
    logits = logits if cap is None else (logits / cap).tanh() * cap
    return logits.log_softmax(-1), divergence.of(logits, of_teacher)


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "with an adapter"])
@pytest.mark.parametrize("shaped", [{}, {"final_logit_softcapping": 2.0}])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_chunks_give_the_divergences_and_gradients_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, kind: DivergenceKind, shaped: dict[str, float], hooked: bool
) -> None:
    student, teacher, hidden, taught, targets, coming = both(**shaped)
    divergence = TeacherDivergence(kind, 0.3, 1.5)
    wanted_at, got_at = (hidden.clone().requires_grad_() for _ in range(2))
    log_q, apart = at_once(student, teacher, wanted_at, taught, divergence)
    logprobs = log_q.gather(-1, targets[:, None])[:, 0]
    (coming[0] * logprobs + coming[1] * apart).sum().backward()
    wanted = [wanted_at.grad, student.head.weight.grad, student.head.bias.grad]
    student.zero_grad()
    if hooked:
        student.head.register_forward_hook(lambda *_: None)  # as an adapter acts on it
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 4 * 5 * PARTS * VOCABULARIES[0])
    live = LiveTeacher(teacher, taught, divergence)
    read = divergences(student, got_at, targets=targets, taught=live)
    (coming[0] * read[0] + coming[1] * read[1]).sum().backward()
    torch.testing.assert_close(read[0], logprobs.detach().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(read[1], apart.detach().float(), rtol=1e-5, atol=1e-5)
    got = [got_at.grad, student.head.weight.grad, student.head.bias.grad]
    for actual, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-4, atol=1e-5)
    assert teacher.head.weight.grad is None


def test_an_empty_micro_batch_still_reaches_the_hidden_states() -> None:
    student, teacher, hidden, taught, targets, _ = both()
    hidden.requires_grad_()
    live = LiveTeacher(teacher, taught[:0], TeacherDivergence())
    read = divergences(student, hidden[:0], targets=targets[:0], taught=live)
    sum(column.sum() for column in read).backward()  # type: ignore[union-attr]
    assert [len(column) for column in read] == [0, 0]
    assert hidden.grad is not None


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "with an adapter"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_stored_tokens_give_the_divergences_of_them_and_all_others_together(
    monkeypatch: pytest.MonkeyPatch, kind: DivergenceKind, hooked: bool
) -> None:
    """Against float64 probabilities, added up by hand over what is not among the five."""
    student, teacher, hidden, taught, targets, coming = both()
    divergence, k = TeacherDivergence(kind, 0.3, 1.5), 5
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 4 * 5 * PARTS * VOCABULARIES[0])
    stored = top_logprobs(teacher, taught, top_k=k, temperature=1.5, vocabulary=VOCABULARIES[0])
    assert stored.shape == (ENTRIES, 2 * k + 1)
    wide = [w.detach().double() for w in (teacher.head.weight, teacher.head.bias)]
    p = (nn.functional.linear(taught.double(), *wide)[:, : VOCABULARIES[0]] / 1.5).softmax(-1)
    ids = p.topk(k).indices
    assert stored[:, :k].long().equal(ids)
    p = torch.cat([p.gather(-1, ids), 1 - p.gather(-1, ids).sum(-1, keepdim=True)], -1)
    torch.testing.assert_close(stored[:, k:], p.log().float(), rtol=1e-5, atol=1e-5)

    wanted_at, got_at = (hidden.clone().requires_grad_() for _ in range(2))
    weight, bias = student.head.weight.double(), student.head.bias.double()
    q = (nn.functional.linear(wanted_at.double(), weight, bias) / 1.5).softmax(-1)
    q = torch.cat([q.gather(-1, ids), 1 - q.gather(-1, ids).sum(-1, keepdim=True)], -1)
    apart = divergence.between(q.log(), p.log())
    (coming[1] * apart).sum().backward()
    wanted = [wanted_at.grad, student.head.weight.grad, student.head.bias.grad]
    student.zero_grad()
    if hooked:
        student.head.register_forward_hook(lambda *_: None)
    kept = StoredTeacher(stored, VOCABULARIES[0], divergence)
    _, read = divergences(student, got_at, targets=targets, taught=kept)
    (coming[1] * read).sum().backward()
    torch.testing.assert_close(read, apart.detach().float(), rtol=1e-5, atol=1e-5)
    got = [got_at.grad, student.head.weight.grad, student.head.bias.grad]
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
