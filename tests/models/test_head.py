import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from postgrad.models import head
from postgrad.models.compiled import head_kernels
from postgrad.models.linear import sum_gradients_in

VOCABULARY, HIDDEN, ENTRIES = 37, 12, 23


class Model(nn.Module):
    """A model that is nothing but its output head."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig(vocab_size=VOCABULARY)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def by_small_steps(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies as autograd would have them."""
    logprobs = torch.log_softmax(logits / temperature, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def gradients(
    model: Model, hidden: Tensor, targets: Tensor, coming: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    hidden = hidden.clone().requires_grad_()
    model.zero_grad()
    logprobs, entropy = head.target_logprobs(
        model, hidden, targets, temperature=0.7, with_entropy=True
    )
    assert entropy is not None
    (coming[0] * logprobs + coming[1] * entropy).sum().backward()
    return logprobs.detach(), [hidden.grad, model.head.weight.grad, model.head.bias.grad]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("block", [1, 4 * VOCABULARY, 2**20])
def test_gradients_of_logprobs_and_entropies_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, block: int, with_entropy: bool, temperature: float
) -> None:
    monkeypatch.setattr(head, "BLOCK_VALUES", block)
    torch.manual_seed(0)
    logits = 3 * torch.randn(ENTRIES, VOCABULARY, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (ENTRIES,))
    reference_logits, our_logits = (logits.clone().requires_grad_() for _ in range(2))
    wanted, wanted_entropy = by_small_steps(reference_logits, targets, temperature)
    got, got_entropy = head._TokenLogprobs.apply(our_logits, targets, temperature, with_entropy)  # pyright: ignore[reportGeneralTypeIssues, reportPrivateUsage]
    torch.testing.assert_close(got, wanted)
    coming = torch.randn(2, ENTRIES, dtype=torch.float64)
    read, wanted_read = coming[0] * got, coming[0] * wanted
    if with_entropy:
        torch.testing.assert_close(got_entropy, wanted_entropy)
        read, wanted_read = read + coming[1] * got_entropy, wanted_read + coming[1] * wanted_entropy
    wanted_read.sum().backward()
    read.sum().backward()
    torch.testing.assert_close(our_logits.grad, reference_logits.grad)


def test_a_second_backward_pass_is_an_error_and_no_other_gradient() -> None:
    logits = torch.randn(ENTRIES, VOCABULARY, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (ENTRIES,))
    got, _ = head._TokenLogprobs.apply(logits * 1.0, targets, 1.0, False)  # pyright: ignore[reportGeneralTypeIssues, reportPrivateUsage]
    got.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.sum().backward()


def test_chunks_that_are_computed_again_give_the_gradients_of_one_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, hidden = Model(), torch.randn(ENTRIES, HIDDEN)
    targets, coming = torch.randint(0, VOCABULARY, (ENTRIES,)), torch.randn(2, ENTRIES)
    single, wanted = gradients(model, hidden, targets, coming)
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 4 * 5 * VOCABULARY)
    cut, got = gradients(model, hidden, targets, coming)
    torch.testing.assert_close(cut, single, rtol=1e-6, atol=1e-6)
    for actual, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-5, atol=1e-6)


def test_an_empty_micro_batch_still_reaches_the_hidden_states() -> None:
    hidden = torch.randn(3, HIDDEN, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    logprobs, _ = head.target_logprobs(Model(), hidden[:0], none)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert hidden.grad is not None


def of_narrow(rows: int, *, with_master: bool) -> float:
    """The relative error of the gradient of a bfloat16 output matrix, `rows` entries a chunk,
    against float64 from the same logits. with_master: a learner keeps the gradient in float32.
    """
    torch.manual_seed(0)
    entries, vocabulary, width = 1200, 64, 32
    model = Model().bfloat16()
    model.config = PreTrainedConfig(vocab_size=vocabulary)
    model.head = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)
    weight, master = model.head.weight, nn.Parameter(model.head.weight.detach().float())
    if with_master:
        sum_gradients_in(master, weight)
    hidden = torch.randn(entries, width, dtype=torch.bfloat16)
    targets, coming = torch.randint(0, vocabulary, (entries,)), torch.randn(entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(head.CHUNK_BYTES, "cpu", 4 * rows * vocabulary)
        (head.target_logprobs(model, hidden, targets)[0] * coming).sum().backward()
    probs = nn.functional.linear(hidden, weight).double().softmax(-1)
    of_logits = (nn.functional.one_hot(targets, vocabulary) - probs) * coming[:, None].double()
    exact = of_logits.T @ hidden.double()
    got = master.grad if with_master else weight.grad
    assert got is not None
    assert (weight.grad is None) == with_master
    return float((got.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize(("with_master", "most"), [(False, 2e-3), (True, 2e-6)])
def test_the_error_of_a_narrow_gradient_does_not_depend_on_the_chunks(
    with_master: bool, most: float
) -> None:
    errors = [of_narrow(rows, with_master=with_master) for rows in (1200, 110, 16)]
    assert max(errors) < most
    if not with_master:  # one rounding to bfloat16, at the end
        assert max(errors) == pytest.approx(min(errors), rel=1e-3)


@pytest.mark.parametrize("shaped", [{}, {"logit_scale": 0.5}, {"final_logit_softcapping": 2.0}])
def test_a_head_that_is_more_than_a_matrix_has_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, shaped: dict[str, float]
) -> None:
    torch.manual_seed(0)
    model, hidden = Model(), torch.randn(ENTRIES, HIDDEN)
    model.config = PreTrainedConfig(vocab_size=VOCABULARY, **shaped)
    targets, coming = torch.randint(0, VOCABULARY, (ENTRIES,)), torch.randn(2, ENTRIES)
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 4 * 5 * VOCABULARY)
    plain, wanted = gradients(model, hidden, targets, coming)
    model.head.register_forward_hook(lambda *_: None)  # as an adapter acts on it
    hooked, got = gradients(model, hidden, targets, coming)
    torch.testing.assert_close(hooked, plain)
    for actual, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(actual, other)


@pytest.mark.slow
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("shaped", [{}, {"final_logit_softcapping": 1.5}, {"logit_scale": 0.4}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_compiled_heads_give_what_plain_heads_give(
    dtype: torch.dtype, shaped: dict[str, float], with_entropy: bool
) -> None:
    """In bfloat16 their gradient is nearer to float64, for soft-caps are not rounded on the way."""
    torch._dynamo.reset()
    head_kernels.cache_clear()
    torch.manual_seed(0)
    plain = Model().to(dtype)
    plain.config = PreTrainedConfig(vocab_size=VOCABULARY, **shaped)
    rows = torch.randn(ENTRIES, HIDDEN, dtype=dtype)
    targets, coming = torch.randint(0, VOCABULARY, (ENTRIES,)), torch.randn(2, ENTRIES)

    def outcome(compiler: str | None, model: Model) -> list[Tensor]:
        hidden = rows.to(model.head.weight.dtype).requires_grad_()
        logprobs, entropy = head.target_logprobs(
            model, hidden, targets, temperature=0.7, with_entropy=with_entropy, compiler=compiler
        )
        read = (coming[0] * logprobs).sum()
        read = read if entropy is None else read + (coming[1] * entropy).sum()
        gradients = torch.autograd.grad(read, [hidden, model.head.weight])
        return [logprobs.detach(), *([] if entropy is None else [entropy.detach()]), *gradients]

    got, wanted = outcome("aot_eager", plain), outcome(None, plain)
    exact = outcome(None, plain.double())
    for actual, other, true in zip(got, wanted, exact, strict=True):
        assert actual.dtype == other.dtype
        tolerance = 1e-6 if dtype == torch.float32 else 0.02
        assert (actual - true).norm() <= tolerance * true.norm()
        assert (actual - true).norm() <= 1.5 * (other - true).norm() + 1e-6 * true.norm()
