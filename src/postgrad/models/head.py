"""The output head: from hidden states to logits and logprobs, never all of [T, V] at once.

The final soft-cap and logit scaling that some models have belong to the head. Logprobs and
entropies are computed in chunks of entries (`chunk_rows`). With more than one chunk,
logits are not kept for the backward pass but computed again there, and their gradient overwrites
them: memory is one chunk's [chunk, V], whatever the batch. Where layers are compiled, what lies
between the products is compiled too (models/compiled.py).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from postgrad.models.attention import text_config
from postgrad.models.linear import MatrixGradient, OneDNNLinear, from_outputs, project
from postgrad.models.sampling_mask import TAKEN_AWAY, LogitMask

if TYPE_CHECKING:
    from postgrad.models.compiled import HeadKernels

# Float32 logits that the output head has at a time, and rows, of which it takes at least so many.
# A GPU reads the output matrix and its gradient once for each chunk, which takes longer than the
# products of a few hundred rows.
CHUNK_BYTES = {"cpu": 2**26, "gpu": 2**29}
CHUNK_ROWS = {"cpu": 1, "gpu": 1024}
BLOCK_VALUES = 2**17  # of them in one elementwise step on a CPU: 512 KiB, half a second-level cache


def shaped_by(config: Any) -> tuple[float | None, float | None, float | None]:
    """What a config says of logits after the product: Cohere's factor, Granite's divisor, and
    Gemma's soft-cap.
    """
    keys = "logit_scale", "logits_scaling", "final_logit_softcapping"
    factor, divisor, cap = (getattr(config, key, None) for key in keys)
    return factor, divisor, cap


def full_logits(lm: nn.Module, hidden: Tensor) -> Tensor:
    """hidden: [N, hidden]; returns [N, V] float32 as the model's own forward would."""
    return finished_logits(lm.get_output_embeddings()(hidden), text_config(lm))  # pyright: ignore[reportCallIssue]


def finished_logits(logits: Tensor, config: Any) -> Tensor:
    """Float32 logits from the products with the output matrix."""
    scale, divisor, cap = shaped_by(config)
    if scale is not None:
        logits = logits * scale
    if divisor is not None:
        logits = logits / divisor
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits.float()


def scores(lm: nn.Module, hidden: Tensor) -> Tensor:
    """The outputs of the linear head `score` of a critic or reward model: [N, hidden] -> [N]
    float32, for the N rows that are read alone.
    """
    return lm.score(hidden)[:, 0]  # pyright: ignore[reportCallIssue]


def chunk_rows(vocabulary: int, *, cpu: bool) -> int:
    """Rows of logits [rows, vocabulary] that are computed at a time."""
    device = "cpu" if cpu else "gpu"
    return max(CHUNK_ROWS[device], CHUNK_BYTES[device] // (4 * vocabulary))


class _TokenLogprobs(torch.autograd.Function):
    """Logprobs of targets, and entropies, from logits.

    The backward pass needs only the logits and log Z, where autograd's small steps would keep three
    copies of [N, V]. It writes the gradient over the logits: it can run only once, and no earlier
    function may have saved the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, log_z, entropy = _read(logits, targets, temperature, with_entropy)
        ctx.save_for_backward(logits, targets, log_z, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, *read = ctx.saved_tensors
        return _write_gradient(logits, (*read, *gradients), ctx.temperature), None, None, None


def _read(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of targets [N], log Z [N], and entropies [N], or [0] without, of logits [N, V]."""
    log_z = logits.new_empty(len(logits))
    entropy = logits.new_zeros(len(logits) if with_entropy else 0)
    for rows in _blocks(logits):
        scaled = _scaled(logits[rows], temperature)
        log_z[rows] = torch.logsumexp(scaled, -1)
        if with_entropy:
            probs = torch.exp(scaled - log_z[rows, None])
            entropy[rows] = log_z[rows] - (probs * scaled).sum(-1)
    logprobs = _scaled(logits.gather(-1, targets[:, None])[:, 0], temperature) - log_z
    return logprobs, log_z, entropy


def _write_gradient(logits: Tensor, columns: Sequence[Tensor], temperature: float) -> Tensor:
    """The gradient of the logits [N, V], written over them. columns: targets, log Z and entropies
    as in `_read`, and the gradients of logprobs and entropies.
    """
    targets, log_z, entropy, of_logprob, of_entropy = columns
    of_logprob, of_entropy = of_logprob / temperature, of_entropy / temperature
    for rows in _blocks(logits):
        part = logits[rows]
        if len(entropy):
            log_p = _scaled(part, temperature) - log_z[rows, None]
            factor = -of_entropy[rows, None] * (log_p + entropy[rows, None])
            torch.mul(log_p.exp_(), factor.sub_(of_logprob[rows, None]), out=part)
        else:  # in place: a GPU takes the chunk at once
            scaled = part if temperature == 1.0 else part.div_(temperature)
            scaled.sub_(log_z[rows, None]).exp_().mul_(-of_logprob[rows, None])
    places = targets[:, None]
    return logits.scatter_(-1, places, logits.gather(-1, places) + of_logprob[:, None])


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Runs of rows whose temporaries stay in a CPU's cache; one run on other devices."""
    if logits.device.type != "cpu":
        yield slice(None)
        return
    size = max(1, BLOCK_VALUES // logits.shape[1])
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


def masked(logits: Tensor, mask: LogitMask | None, rows: slice) -> Tensor:
    """Float32 logits [rows, vocabulary] with TAKEN_AWAY written over those of tokens that are gone.
    mask: in which these are `rows`; None takes nothing away.
    """
    if mask is None:
        return logits
    return logits.masked_fill_(mask.taken_away(rows, logits.shape[1]), TAKEN_AWAY)


class _HeadLogprobs(torch.autograd.Function):
    """Logprobs of targets, and entropies, from hidden states and the output matrix, `size` rows at
    a time.

    Products that are kept (of a single chunk) are used again in the backward pass; others are
    computed anew there. Gradients of matrix and bias are summed over the chunks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        config: Any,
        temperature: float,
        with_entropy: bool,
        size: int,
        keep: bool,
        kernels: "HeadKernels | None",
        mask: LogitMask | None,
    ) -> tuple[Tensor, Tensor]:
        read: list[tuple[Tensor, Tensor, Tensor]] = []
        kept: list[Tensor] = []
        for rows in row_runs(len(hidden), size):
            products = project(hidden[rows], weight, bias)
            if kernels is None:
                logits = masked(finished_logits(products, config), mask, rows)
                read.append(_read(logits, targets[rows], temperature, with_entropy))
                del logits
            else:
                gone = None if mask is None else mask.taken_away(rows, products.shape[1])
                inputs = products, targets[rows], gone, shaped_by(config)
                read.append(kernels.read(*inputs, temperature, with_entropy))
            if keep:
                kept.append(products)
            del products  # before the next ones are there
        logprobs, log_z, entropy = (torch.cat(parts) for parts in zip(*read, strict=True))
        ctx.inputs = InputGradients(ctx.needs_input_grad[:3], len(hidden), weight)
        read_again = None if keep and not ctx.inputs.reads_hidden else hidden
        ctx.save_for_backward(read_again, weight, bias, targets, log_z, entropy, *kept)
        ctx.config, ctx.temperature, ctx.size = config, temperature, size
        ctx.kernels, ctx.mask = kernels, mask
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *read = ctx.saved_tensors
        log_z, entropy, *kept = read
        inputs, mask = ctx.inputs, ctx.mask
        # The last chunk first: the order that autograd has, and of which rounding depends.
        for rows in reversed(list(row_runs(len(targets), ctx.size))):
            products = kept[0] if kept else project(hidden[rows], weight, bias)
            columns = [column[rows] for column in (targets, log_z, entropy, *gradients)]
            if ctx.kernels is None:
                shaping = ctx.config, ctx.temperature
                gradient = _of_products(products, columns, *shaping, mask, rows)
            else:
                gone = None if mask is None else mask.taken_away(rows, products.shape[1])
                gradient = ctx.kernels.write_gradient(
                    products, columns, gone, shaped_by(ctx.config), ctx.temperature
                )
            del products
            inputs.add(rows, gradient, hidden, weight)
            del gradient
        return *inputs.rest(weight, bias), *[None] * 8


class InputGradients:
    """The gradients of hidden states, output matrix and bias from those of their products, a run of
    rows at a time; matrix and bias are summed in float32. Create it in the forward pass. needs:
    whether each of the three has a gradient; count: rows of all runs.
    """

    def __init__(self, needs: Sequence[bool], count: int, weight: Tensor) -> None:
        self._needs = needs
        self._count = count
        self._of_hidden: Tensor | None = None
        self._of_weight = MatrixGradient(weight) if needs[1] else None
        self._of_bias: list[Tensor] = []

    @property
    def reads_hidden(self) -> bool:
        """Whether `add` reads the hidden states."""
        return self._of_weight is not None

    def add(self, rows: slice, gradient: Tensor, hidden: Tensor | None, weight: Tensor) -> None:
        """gradient: [rows, V] of the products; hidden: [count, hidden] or None if not read."""
        narrow = gradient.to(weight.dtype)
        if gradient.device.type != "cpu":
            gradient = narrow  # what its products read
        if self._needs[0]:
            if self._of_hidden is None:
                self._of_hidden = weight.new_empty(self._count, weight.shape[1])
            self._of_hidden[rows] = from_outputs(narrow, weight)
        if self._of_weight is not None:
            assert hidden is not None
            self._of_weight.add(gradient, hidden[rows])
        if self._needs[2]:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._of_bias.append(gradient.sum(0, dtype=wide))

    def rest(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """What autograd gets for hidden states, matrix and bias; nothing is kept."""
        of_hidden, self._of_hidden = self._of_hidden, None
        for_weight = self._of_weight.rest() if self._of_weight is not None else None
        for_bias = None
        if self._of_bias:
            assert bias is not None
            for_bias = functools.reduce(torch.add, self._of_bias).to(bias.dtype)
            self._of_bias = []
        return of_hidden, for_weight, for_bias


def _of_products(
    products: Tensor,
    columns: Sequence[Tensor],
    config: Any,
    temperature: float,
    mask: LogitMask | None,
    rows: slice,
) -> Tensor:
    """The gradient of the output matrix's products [N, V], which are overwritten where they are the
    logits. columns: what `_write_gradient` takes after the logits. mask: in which these are `rows`.
    """
    if all(shape is None for shape in shaped_by(config)):
        return _write_gradient(masked(products.float(), mask, rows), columns, temperature)
    products = products.detach().requires_grad_()
    with torch.enable_grad():
        logits = finished_logits(products, config)
    gradient = _write_gradient(masked(logits.detach(), mask, rows), columns, temperature)
    return torch.autograd.grad(logits, products, gradient)[0]


def row_runs(count: int, size: int) -> Iterator[slice]:
    """Runs of at most `size` rows, in order."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _chunk(
    lm: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    mask: LogitMask | None,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """mask: in which these are `rows`."""
    logits = full_logits(lm, hidden)
    masked(logits.detach(), mask, rows)  # no earlier function has saved them
    return _TokenLogprobs.apply(logits, targets, temperature, with_entropy)  # pyright: ignore[reportReturnType]


def _by_module(
    lm: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    size: int,
    again: bool,
    mask: LogitMask | None,
) -> tuple[Tensor, Tensor]:
    """As _HeadLogprobs gives them, for a head that is more than a matrix and a bias (an adapter).
    again: chunks are computed anew in the backward pass.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    for rows in row_runs(len(targets), size):
        inputs = (lm, hidden[rows], targets[rows], temperature, with_entropy, mask, rows)
        if again:
            part = checkpoint(_chunk, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            part = _chunk(*inputs)
        parts.append(part)  # pyright: ignore[reportArgumentType]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def target_logprobs(
    lm: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    compiler: str | None = None,
    mask: LogitMask | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Logprobs of `targets` and, with_entropy, the entropies of the distributions over tokens.

    hidden: [E, hidden], one row for each loss entry; targets: [E] int64. Both results are [E]
    float32, at logits / temperature, whatever the model's dtype. compiler: as a Backbone has it.
    mask: of E rows; distributions are over the tokens that it leaves.
    """
    if not len(targets):
        empty = hidden.sum() * 0.0  # keeps the graph: all ranks take part in every collective
        return empty.expand(0), empty.expand(0) if with_entropy else None
    config: Any = text_config(lm)
    size = chunk_rows(config.vocab_size, cpu=hidden.device.type == "cpu")
    trains = torch.is_grad_enabled()
    matrix = output_head(lm)
    if is_plain(matrix):
        logprobs, entropy = _HeadLogprobs.apply(
            hidden, matrix.weight, matrix.bias, targets, config,
            temperature, with_entropy, size, trains and len(targets) <= size, _kernels(compiler),
            mask,
        )  # fmt: skip  # pyright: ignore[reportGeneralTypeIssues]
    else:
        again = trains and len(targets) > size
        logprobs, entropy = _by_module(
            lm, hidden, targets, temperature, with_entropy, size, again, mask
        )
    return logprobs, entropy if with_entropy else None


def _kernels(compiler: str | None) -> "HeadKernels | None":
    if compiler is None:
        return None
    from postgrad.models.compiled import head_kernels  # torch's compiler takes seconds

    return head_kernels(compiler)


def output_head(lm: Any) -> Any:
    """The module that gives logits: of one that trains whole beside an adapter (PEFT's wrapper),
    the copy that acts, or the frozen one.
    """
    head = lm.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return head
    return head.original_module if head.disable_adapters else copies[head.active_adapters[0]]


def is_plain(head: Any) -> bool:
    """Whether a head is its matrix and its bias, and nothing else acts on them."""
    hooked = head._forward_hooks or head._forward_pre_hooks
    return type(head) in (nn.Linear, OneDNNLinear) and not hooked
