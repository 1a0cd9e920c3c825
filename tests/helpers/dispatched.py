"""The aten operations that code calls, backward passes included."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Call(NamedTuple):
    """operation: "aten.cumsum.default"; words: its arguments that are text, as a scatter's
    reduction.
    """

    operation: str
    reads: tuple[torch.dtype, ...]
    gives: tuple[torch.dtype, ...]
    words: tuple[str, ...]


class Recorded(TorchDispatchMode):
    """A context that keeps every kind of call once, in the order in which they first came."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[Call, None] = {}

    @property
    def calls(self) -> list[Call]:
        return list(self._calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named_arguments = kwargs or {}
        result = func(*args, **named_arguments)
        leaves = tree_leaves((args, named_arguments))
        words = tuple(leaf for leaf in leaves if isinstance(leaf, str))
        self._calls[Call(str(func), _dtypes(leaves), _dtypes(tree_leaves(result)), words)] = None
        return result


def _dtypes(leaves: list[Any]) -> tuple[torch.dtype, ...]:
    return tuple(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor))
