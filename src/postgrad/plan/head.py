"""What the output head holds: a few chunks of logits, and gradients of its matrix.

models.head computes logprobs in chunks of CHUNK logits. Where there are several, each is computed
again in the backward pass. Their gradient takes their place.
"""

from dataclasses import dataclass

from postgrad.models.shapes import ModelShape

FLOAT32 = 4
CHUNK = 2**24  # models.head.CHUNK_VALUES, which a test holds it to
PART = 2**24  # models.gradients.LARGE_WEIGHT, the same


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a model over so many entries. cpu: elementwise steps go block by block there,
    elsewhere they make copies of a chunk. entropy: of the policy is computed too; heated: at
    another temperature than 1. trains: its matrix has a gradient.
    """

    shape: ModelShape
    width: int
    entries: int
    cpu: bool
    trains: bool
    entropy: bool = False
    heated: bool = False

    @property
    def _values(self) -> int:
        """Logits of one chunk, of whole rows."""
        vocabulary = self.shape.vocab_size
        return vocabulary * min(self.entries, max(1, CHUNK // vocabulary))

    @property
    def _several(self) -> bool:
        return self.entries > max(1, CHUNK // self.shape.vocab_size)

    def forward(self) -> int:
        """Logits, and what is made of them without a gradient."""
        copies = 1 if self.cpu else 2 + self.entropy + self.heated
        return self._values * (copies * FLOAT32 + self._narrow)

    def backward(self) -> tuple[int, int]:
        """Of logits and their gradient, and of gradients of the matrix, when both together are
        most: while the logits' gradient is made, while the matrix's is made from that and, where
        several chunks are added up, waits for the next, or while a new sum is made (in float32 on a
        CPU, where that is small, not in place: models.linear gives a view).
        """
        copies = 1 if self.cpu else 2 + 2 * self.entropy + self.heated
        one = self._values * (FLOAT32 + self._narrow)
        logits = self._values * (copies * FLOAT32 + self._narrow)
        if not self.trains or self._adds_in_place:
            return logits, 0
        sums = self._matrix if self._several else 0
        moments = [(logits, sums), (one, sums + self._matrix)]
        if sums and self.cpu and self.width == FLOAT32:
            moments.append((0, 3 * self._matrix))
        return max(moments, key=sum)

    @property
    def _narrow(self) -> int:
        """The product's own output where that is not float32."""
        return self.width if self.width != FLOAT32 else 0

    def waiting(self) -> int:
        """Of a matrix that is the embedding too: its gradient waits until the end of the pass."""
        waits = self.trains and self.shape.tied and not self._adds_in_place
        return self._matrix if waits else 0

    def ending(self) -> int:
        """When the embedding's gradient is made and added to that of the head, and both in float32
        to that of earlier micro-batches.
        """
        if not self.trains or self._adds_in_place:
            return 0
        wide = 0 if self.width == FLOAT32 else self._matrix // self.width * FLOAT32
        return self.waiting() + self._matrix + wide

    @property
    def _adds_in_place(self) -> bool:
        """The gradient of a large matrix is added to where it lies (models.gradients)."""
        return self.cpu and self.width == FLOAT32 and self.shape.embedding_parameters > PART

    @property
    def _matrix(self) -> int:
        return self.shape.embedding_parameters * self.width
