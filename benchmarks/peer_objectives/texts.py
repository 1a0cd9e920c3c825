"""Pairs of answers, and rows of SFT, with the logits of a small vocabulary.

Answers of one token, a pair of equal answers but for their length, pairs that the policy ranks the
wrong way round, and a reference far away. Logits are float64 and the leaves of every loss, because
some losses read more of a distribution than the token that was written. Rows with an odd number are
the rejected answers of the pairs before them; read one by one they have labels.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.peer_objectives.samples import Rows
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences

WORDS = 7  # of the vocabulary
IGNORED = -100  # the label of a token without loss


@dataclass(frozen=True)
class Texts:
    """S sequences of prompt and answer, [L] tokens each; pair k has the sequences 2k and 2k + 1."""

    tokens: list[NDArray[np.int64]]
    mask: list[NDArray[np.bool_]]  # True at the answer's tokens
    logits: list[NDArray[np.float64]]  # [L, WORDS] of the token after each
    ref: list[NDArray[np.float64]]  # the same of the reference, or of the teacher
    desirable: NDArray[np.bool_]  # [S] labels of the answers one by one
    margins: NDArray[np.float64]  # [S / 2] by which the chosen answer is better
    scores: NDArray[np.float64]  # [S] of a reward model
    crossed: NDArray[np.float64]  # [S] log(policy / reference) of prompts with another's answer

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return max(map(len, self.tokens))

    def leaf(self) -> Tensor:
        """[S, longest, WORDS] the policy's logits, with gradient."""
        return self._padded_logits(self.logits).requires_grad_()

    def ref_logits(self) -> Tensor:
        """[S, longest, WORDS] the reference's logits."""
        return self._padded_logits(self.ref)

    def _padded_logits(self, rows: list[NDArray[np.float64]]) -> Tensor:
        padded_rows = np.zeros((len(rows), self.longest, WORDS))
        for i, row in enumerate(rows):
            padded_rows[i, : len(row)] = row
        return torch.from_numpy(padded_rows)

    @property
    def ids(self) -> Tensor:
        """[S, longest] int64, zeros behind each sequence."""
        return torch.from_numpy(_padded(self.tokens, self.longest))

    @property
    def attention(self) -> Tensor:
        """[S, longest] int64, 1 at each sequence's tokens."""
        return torch.from_numpy(_padded([row * 0 + 1 for row in self.tokens], self.longest))

    @property
    def answers(self) -> Tensor:
        """[S, longest] int64, 1 at each answer's tokens."""
        return torch.from_numpy(_padded([row.astype(np.int64) for row in self.mask], self.longest))

    @property
    def labels(self) -> Tensor:
        """[S, longest] int64: the answer's tokens, IGNORED elsewhere."""
        return self.ids.masked_fill(self.answers == 0, IGNORED)

    def sequences(self, pairs: bool) -> Sequences:
        """As a learner has them: in pairs, or one by one."""
        mask = Ragged.of(self.mask, np.bool_)
        group = np.arange(len(self)) // 2 if pairs else np.arange(len(self))
        return Sequences(Ragged.of(self.tokens, np.int32), mask, group)


def fully_learned(seed: int) -> Texts:
    """`written`, where every token but the first bears loss, as data.loss_turns = "everything" and
    data.text say.
    """
    texts = written(seed)
    return replace(texts, mask=[np.arange(len(row)) > 0 for row in texts.mask])


def _padded(rows: list[NDArray[np.int64]], longest: int) -> NDArray[np.int64]:
    padded_rows = np.zeros((len(rows), longest), np.int64)
    for i, row in enumerate(rows):
        padded_rows[i, : len(row)] = row
    return padded_rows


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """[S, L] of each token, and 0 at the first, which nothing predicts."""
    logprobs = (logits[:, :-1] / temperature).log_softmax(-1)
    return torch.nn.functional.pad(
        logprobs.gather(-1, ids[:, 1:, None])[..., 0], (1, 0)
    )  # fmt: skip


def written(seed: int, pairs: int = 8, alike: bool = False) -> Texts:
    """Texts by chance: an update of two micro-batches. alike: prompts of one token, answers of
    five, so that a mean over tokens is one over answers.
    """
    chance = np.random.default_rng(seed)
    prompts = np.repeat(chance.integers(1, 4, pairs), 2)
    lengths = chance.integers(2, 9, 2 * pairs)
    lengths[:4] = 1, 6, 5, 1
    if alike:
        prompts, lengths = prompts * 0 + 1, lengths * 0 + 5
    tokens, mask = [], []
    for k in range(pairs):
        prompt = chance.integers(0, WORDS, prompts[2 * k])
        for n in lengths[2 * k : 2 * k + 2]:
            tokens.append(np.concatenate([prompt, chance.integers(0, WORDS, n)]))
            mask.append(np.arange(len(tokens[-1])) >= len(prompt))
    logits = [chance.normal(0.0, 1.0, (len(row), WORDS)) for row in tokens]
    ref = [row + chance.normal(0.0, 0.7, row.shape) for row in logits]
    ref[5] = logits[5] + chance.normal(0.0, 2.5, logits[5].shape)  # far away
    desirable = chance.random(2 * pairs) < 0.6
    desirable[:2] = True, False
    return Texts(
        tokens, mask, logits, ref, desirable,
        margins=chance.choice([0.0, 0.5, 2.0], pairs), scores=chance.normal(0.3, 1.5, 2 * pairs),
        crossed=chance.normal(0.4, 1.0, 2 * pairs),
    )  # fmt: skip


def likely(seed: int, by: float = 4.0) -> Texts:
    """Texts whose every token the policy finds likely, as one that it wrote itself. by: what is
    added to their logits.
    """
    texts = written(seed)
    for row, tokens in zip(texts.logits, texts.tokens, strict=True):
        row[np.arange(len(row) - 1), tokens[1:]] += by
    return texts


def unlikely(seed: int) -> Texts:
    """Texts whose every token the policy finds unlikely."""
    return likely(seed, by=-1.5)


def alike(seed: int) -> Texts:
    """Texts of equal lengths."""
    return written(seed, alike=True)


def micro_batches(texts: Texts, parts: int = 2) -> list[NDArray[np.int64]]:
    """The rows of each micro-batch, chosen ones first."""
    pairs = np.arange(len(texts) // 2)
    return [np.concatenate([2 * part, 2 * part + 1]) for part in np.split(pairs, parts)]


def rows_of(leaf: Tensor, texts: Texts) -> Rows:
    """The gradient of a padded leaf [S, longest, WORDS] or [S] by sequence."""
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    if gradient.ndim == 1:
        return [gradient.numpy()]
    pairs = zip(gradient, texts.tokens, strict=True)
    return [grad[: len(row)].flatten().numpy() for grad, row in pairs]
