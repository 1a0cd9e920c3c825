"""Tensors that stay in their files until a part of them is needed.

A model that several ranks divide is built of `StoredTensor`s: shapes and dtypes without numbers.
transformers renames and converts them, adapters are put beside them, tensor parallelism cuts them
and FSDP2 divides them, as if they were ordinary. Only the copy into a rank's own part reads, and
that from where it is stored: the rows and columns of that part alone. `realise` reads what is left.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from postgrad.core.errors import RunError

Box = tuple[tuple[int, int], ...]  # (first index, count) of a block, by dimension
ReadBlock = Callable[[Box], Tensor]  # a block, in CPU memory

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
aten: Any = torch.ops.aten
NEW = (aten.new_zeros, aten.new_empty, aten.new_full, aten.new_ones, aten.zeros_like,
       aten.empty_like, aten.ones_like, aten.full_like)  # fmt: skip


class StoredTensor(Tensor):
    """A tensor of which blocks can be read, and nothing is held.

    An operation on such tensors alone is noted, not run. Blocks of the result of a slice, split,
    concatenation, stack, transposition or change of dtype are read from the same places of its
    inputs; those of any other operation from its whole inputs. An operation that has an ordinary
    tensor too, or gives no tensor, reads all that it needs and runs at once: so a forward pass
    works, and reads each weight where it is used. Nothing can be written into such a tensor, which
    is a TypeError, and it stays on the device that it is to be read to.
    """

    _read: ReadBlock

    @staticmethod
    def __new__(
        cls: type["StoredTensor"],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        read: ReadBlock,
    ) -> "StoredTensor":
        """read: gives blocks of a tensor of this shape and dtype. device: where it will lie."""
        make: Any = Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        tensor = make(cls, torch.Size(shape), dtype=dtype, device=device)
        tensor._read = read
        return tensor

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        stored = [tensor for tensor in tensors if isinstance(tensor, StoredTensor)]
        if func.overloadpacket in NEW:
            like = {"device": kwargs.get("device") or stored[0].device}
            return func(*_on_meta(args), **{**_on_meta(kwargs), **like})
        if func._schema.is_mutable and isinstance(args[0], StoredTensor):
            raise TypeError(f"{func} would write into a tensor that lies in its file")
        if len(stored) == len(tensors) and _gives_tensors(func):
            return _noted(func, args, kwargs, stored[0].device)
        args, kwargs = tree_map_only(StoredTensor, StoredTensor._operand, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:
        return f"StoredTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def block(self, box: Box) -> Tensor:
        """A block of the numbers, in CPU memory. Raises RunError where they cannot be read."""
        if any(count == 0 for _, count in box):
            return torch.empty([count for _, count in box], dtype=self.dtype)
        return self._read(box).to(self.dtype).contiguous()

    def _operand(self) -> Tensor:
        """The whole tensor, in the layout that an ordinary one would have in an operation: torch
        rounds a product otherwise where a matrix is transposed in memory.
        """
        return self._read(whole_box(self.shape)).to(self.device, self.dtype)

    def real(self) -> Tensor:
        """The whole tensor, on its device."""
        return self.block(whole_box(self.shape)).to(self.device)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "StoredTensor":
        """function(the whole tensor), which has the same shape; computed whenever it is read."""

        def read(box: Box) -> Tensor:
            return function(self.real()).to("cpu", self.dtype)[_slices(box)]

        return StoredTensor(self.shape, self.dtype, self.device, read)


def stored_tensors(files: Iterable[Path], device: torch.device) -> dict[str, StoredTensor]:
    """All tensors of safetensors files by name, to be read onto `device`. Raises OSError or
    SafetensorError where a file cannot be opened.
    """
    tensors: dict[str, StoredTensor] = {}
    device = torch.empty(0, device=device).device  # "cuda" gets its number
    for path in files:
        file: Any = safe_open(path, "pt")
        for name in file.keys():  # noqa: SIM118  # not a mapping
            part = file.get_slice(name)
            dtype = DTYPES.get(part.get_dtype())
            if dtype is None:
                raise RunError(f"{path}: {name} is of dtype {part.get_dtype()}: save it in another")
            tensors[name] = StoredTensor(
                part.get_shape(), dtype, device, _from_file(path, file, name)
            )
    return tensors


def _from_file(path: Path, file: Any, name: str) -> ReadBlock:
    def read(box: Box) -> Tensor:
        try:
            return file.get_slice(name)[_slices(box)] if box else file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path}: {name} cannot be read: {error}; check the disk") from error

    return read


def real(tensor: Tensor) -> Tensor:
    """A tensor that is in memory, read where it was stored."""
    return tensor.real() if isinstance(tensor, StoredTensor) else tensor


@torch.no_grad()
def realise(module: nn.Module) -> None:
    """Reads all parameters of a module that are still stored; tied ones stay tied."""
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, StoredTensor):
                if parameter not in parameters:
                    numbers = parameter.real().detach()  # of a file on a CPU: mapped, not copied
                    parameters[parameter] = nn.Parameter(numbers, parameter.requires_grad)
                owner._parameters[name] = parameters[parameter]


def of_tensors(
    kind: Any,
    config: Any,
    dtype: torch.dtype,
    weights: Mapping[str, Tensor],
    attention: str,
) -> tuple[Any, dict[str, Any]]:
    """A model of a class of transformers with the given weights, which may be stored, and its
    report of the names that it lacks. weights: by the names of files or of parameters. attention:
    the name of its implementation.
    """
    return kind.from_pretrained(
        None,
        config=config,
        dtype=dtype,
        state_dict=dict(weights),
        attn_implementation=attention,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report
    )


def whole_box(shape: Sequence[int]) -> Box:
    """The block that is all of a tensor."""
    return tuple((0, size) for size in shape)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in box)


def _on_meta(values: Any) -> Any:
    def shape_alone(tensor: StoredTensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return tree_map_only(StoredTensor, shape_alone, values)


def _gives_tensors(func: Any) -> bool:
    returned = [str(result.type) for result in func._schema.returns]
    return returned in (["Tensor"], ["List[Tensor]"])


def _noted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """The results of an operation on stored tensors, to be read later."""
    kwargs = {key: value for key, value in kwargs.items() if key != "device"}
    results = func(*_on_meta(args), **_on_meta(kwargs))
    by_blocks = _BY_BLOCKS.get(func.overloadpacket)
    several = isinstance(results, list | tuple)
    shapes: list[Tensor] = list(results) if several else [results]
    reads: list[ReadBlock] | None = None if by_blocks is None else by_blocks(*args, **kwargs)
    if reads is None:
        reads = [_from_whole(func, args, kwargs, n, several) for n in range(len(shapes))]
    noted = [
        StoredTensor(shape.shape, shape.dtype, device, read)
        for shape, read in zip(shapes, reads, strict=True)
    ]
    return noted if several else noted[0]


def _from_whole(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, several: bool
) -> ReadBlock:
    def in_memory(tensor: StoredTensor) -> Tensor:
        return tensor.block(whole_box(tensor.shape))

    def read(box: Box) -> Tensor:
        results = func(
            *tree_map_only(StoredTensor, in_memory, args),
            **tree_map_only(StoredTensor, in_memory, kwargs),
        )
        return (results[number] if several else results)[_slices(box)].clone()

    return read


def _same(source: StoredTensor, **_: Any) -> list[ReadBlock]:
    return [source.block]


def _cast(source: StoredTensor, *, dtype: torch.dtype | None = None, **_: Any) -> list[ReadBlock]:
    return [lambda box: source.block(box).to(dtype or source.dtype)]


def _part(source: StoredTensor, dim: int, start: int) -> ReadBlock:
    """Blocks of the part that begins at `start` of a dimension."""

    def read(box: Box) -> Tensor:
        first, count = box[dim]
        return source.block((*box[:dim], (start + first, count), *box[dim + 1 :]))

    return read


def _slice(
    source: StoredTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> list[ReadBlock] | None:
    dim %= source.ndim
    first = slice(start, end).indices(source.shape[dim])[0]
    return [_part(source, dim, first)] if step == 1 else None


def _split(source: StoredTensor, size: int | list[int], dim: int = 0) -> list[ReadBlock]:
    dim %= source.ndim
    if isinstance(size, int):
        return [_part(source, dim, start) for start in range(0, source.shape[dim], size)]
    starts = [sum(size[:number]) for number in range(len(size))]
    return [_part(source, dim, start) for start in starts]


def _select(source: StoredTensor, dim: int, index: int) -> list[ReadBlock]:
    dim, index = dim % source.ndim, index % source.shape[dim]
    return [lambda box: source.block((*box[:dim], (index, 1), *box[dim:])).squeeze(dim)]


def _unbind(source: StoredTensor, dim: int = 0) -> list[ReadBlock]:
    return [_select(source, dim, index)[0] for index in range(source.shape[dim])]


def _permute(source: StoredTensor, dims: Sequence[int]) -> list[ReadBlock]:
    order = [dim % source.ndim for dim in dims]

    def read(box: Box) -> Tensor:
        place = sorted(zip(order, box, strict=True))
        return source.block(tuple(sizes for _, sizes in place)).permute(order)

    return [read]


def _transpose(source: StoredTensor, dim: int = 0, other: int = 1) -> list[ReadBlock]:
    order = list(range(source.ndim))
    if order[1:]:
        order[dim], order[other] = order[other], order[dim]
    return _permute(source, order)


def _cat(tensors: Sequence[StoredTensor], dim: int = 0) -> list[ReadBlock] | None:
    if len({tensor.ndim for tensor in tensors}) > 1:  # torch leaves out empty vectors
        return None
    dim %= tensors[0].ndim
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))

    def read(box: Box) -> Tensor:
        first, count = box[dim]
        places: list[tuple[StoredTensor, Box]] = []
        start = 0
        for tensor in tensors:
            low, high = max(first - start, 0), min(first + count - start, tensor.shape[dim])
            if low < high:
                places.append((tensor, (*box[:dim], (low, high - low), *box[dim + 1 :])))
            start += tensor.shape[dim]
        if len(places) == 1:
            tensor, part = places[0]
            return tensor.block(part)
        joined = torch.empty([size for _, size in box], dtype=dtype)
        at = 0
        for tensor, part in places:  # one is in memory beside the whole, not all of them
            joined.narrow(dim, at, part[dim][1]).copy_(tensor.block(part))
            at += part[dim][1]
        return joined

    return [read]


def _stack(tensors: Sequence[StoredTensor], dim: int = 0) -> list[ReadBlock]:
    dim %= tensors[0].ndim + 1

    def read(box: Box) -> Tensor:
        first, count = box[dim]
        inner = (*box[:dim], *box[dim + 1 :])
        return torch.stack([t.block(inner) for t in tensors[first : first + count]], dim)

    return [read]


_BY_BLOCKS: dict[Any, Callable[..., list[ReadBlock] | None]] = {
    **dict.fromkeys((aten.detach, aten.alias, aten.clone, aten.lift_fresh), _same),
    aten._to_copy: _cast, aten.slice: _slice, aten.split: _split, aten.split_with_sizes: _split,
    aten.select: _select, aten.unbind: _unbind, aten.permute: _permute,
    aten.transpose: _transpose, aten.t: _transpose, aten.cat: _cat, aten.stack: _stack,
}  # fmt: skip
