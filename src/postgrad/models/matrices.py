"""Which weights are matrices, by their names: Muon, AdamW's moments in eight bits and weight decay
tell them from norms and biases. And all weights of a model in groups, for plans.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

# In a decoder's layer (of gpt2 transformer.h.0, of dbrx transformer.blocks.0), but not A and B of
# all experts, which are 2-D.
_LAYER = r"(^|\.)(layers|transformer\.(h|blocks))\.\d+\."
_HIDDEN = re.compile(_LAYER + r"(?!(.*\.)?experts(\.base_layer)*\.lora_[AB]\.)")
_PLAIN = re.compile(r"(bias|norm\.weight)$")


def is_matrix(name: str, dimensions: int) -> bool:
    """False for norms and biases, which do not decay. They have one dimension, or two: a bias of
    each expert (gpt_oss), a norm of each head (cohere).
    """
    return dimensions >= 2 and not _PLAIN.search(name)


def is_hidden_matrix(name: str, dimensions: int) -> bool:
    """True for the 2-D weights inside a decoder's layers, the A and B of an adapter among them.

    Embeddings and heads lie outside; norms and biases are no matrices; those of an adapter on
    experts are many in one, and AdamW trains them as it does experts.
    """
    return dimensions == 2 and is_matrix(name, dimensions) and bool(_HIDDEN.search(name))


@dataclass(frozen=True, slots=True)
class MatrixGroup:
    """Matrices of a model that have one shape and that an optimizer treats alike."""

    shape: tuple[int, ...]  # [rows, columns], or more dimensions: [experts, rows, columns]
    count: int
    part: str  # which part of model.freeze they belong to; "": to none
    hidden: bool  # is_hidden_matrix

    @property
    def columns(self) -> int:
        """Numbers in a row."""
        return self.shape[-1]

    @property
    def size(self) -> int:
        """Numbers in one of them."""
        return math.prod(self.shape)


def matrix_groups(lm: Any) -> tuple[MatrixGroup, ...]:
    """All matrices of a model, which may be on the meta device, in groups; a shared one once."""
    from postgrad.models.images import image_part
    from postgrad.models.routers import router_weights
    from postgrad.models.settings import ROUTER

    routers = router_weights(lm)
    counted = Counter(
        (
            tuple(weight.shape),
            ROUTER if name in routers else image_part(name) or "",
            is_hidden_matrix(name, weight.ndim),
        )
        for name, weight in lm.named_parameters()
        if is_matrix(name, weight.ndim)
    )
    return tuple(
        MatrixGroup(shape, n, part, hidden) for (shape, part, hidden), n in counted.items()
    )
