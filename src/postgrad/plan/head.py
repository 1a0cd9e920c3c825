"""Memory of the output head: a few chunks of logits, and gradients of its matrix.

models.head computes logprobs in chunks of CHUNK logits. Where there are several chunks, each is
computed again in the backward pass. The gradient of a chunk overwrites its logits.
"""

from dataclasses import dataclass

from postgrad.models.shapes import ModelShape
from postgrad.plan.activations import FLOAT32

CHUNK = 2**24  # models.head.CHUNK_VALUES, which a test holds it to
PART = 2**24  # models.gradients.LARGE_WEIGHT, the same


@dataclass(frozen=True, slots=True)
class Head:
    """The output head of a model in one micro-batch."""

    shape: ModelShape
    width: int  # bytes of a number that the model computes in
    entries: int  # tokens whose logits are computed
    cpu: bool  # elementwise steps go block by block; on other devices they copy a chunk
    trains: bool  # its matrix has a gradient
    entropy: bool = False  # the policy's entropy is computed too
    heated: bool = False  # the temperature is not 1

    @property
    def _values(self) -> int:
        """Logits of one chunk, which has complete rows."""
        vocabulary = self.shape.vocab_size
        return vocabulary * min(self.entries, max(1, CHUNK // vocabulary))

    @property
    def _several(self) -> bool:
        return self.entries > max(1, CHUNK // self.shape.vocab_size)

    def forward(self) -> int:
        """Bytes of a chunk of logits and of what is computed from it, without a gradient."""
        copies = 1 if self.cpu else 2 + self.entropy + self.heated
        return self._values * (copies * FLOAT32 + self._narrow)

    def backward(self) -> tuple[int, int]:
        """Bytes of (a chunk's logits and their gradient, gradients of the matrix), at the moment
        when both together are most.

        That moment is one of three: the gradient of the logits is computed, while the sum of
        earlier chunks' gradients waits; the gradient of the matrix is computed from it; or the two
        are added to a new sum (only for a small float32 matrix on a CPU, where models.linear gives
        a view, so that the sum is not in place).
        """
        copies = 1 if self.cpu else 2 + 2 * self.entropy + self.heated
        gradient = self._values * (FLOAT32 + self._narrow)  # of a chunk's logits
        logits = self._values * (copies * FLOAT32 + self._narrow)
        if not self.trains or self._adds_in_place:
            return logits, 0
        sums = self._matrix if self._several else 0
        moments = [(logits, sums), (gradient, sums + self._matrix)]
        if sums and self.cpu and self.width == FLOAT32:
            moments.append((0, 3 * self._matrix))
        return max(moments, key=sum)

    @property
    def _narrow(self) -> int:
        """Bytes of a logit as the product gives it, beside its float32 copy; 0: it is float32."""
        return self.width if self.width != FLOAT32 else 0

    def waiting(self) -> int:
        """Bytes of the gradient of a tied matrix: it waits for the end of the backward pass."""
        waits = self.trains and self.shape.tied and not self._adds_in_place
        return self._matrix if waits else 0

    def ending(self) -> int:
        """Bytes when the embedding's gradient is computed and added to that of the head, and both
        in float32 to that of earlier micro-batches.
        """
        if not self.trains or self._adds_in_place:
            return 0
        wide = 0 if self.width == FLOAT32 else self._matrix // self.width * FLOAT32
        return self.waiting() + self._matrix + wide

    @property
    def _adds_in_place(self) -> bool:
        """Whether the matrix is so large that its gradient is added in place (models.gradients)."""
        return self.cpu and self.width == FLOAT32 and self.shape.embedding_parameters > PART

    @property
    def _matrix(self) -> int:
        return self.shape.embedding_parameters * self.width
