"""Tensors of a device that lie in the host's memory for a while, bit for bit."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage, nn

from postgrad.parallel.sharding import local


class HostCopies:
    """Tensors that are offloaded and reloaded: the memory behind them is freed, and made anew
    with the same bytes.

    A tensor stays the object that it is, and so do all others that share its memory: a layer's
    matrices side by side, an optimizer's master weight, what FSDP2 keeps of its shard. While they
    are away nothing may read them but through `here`.

    Copies in the host's memory are pinned where the device is a GPU, and used again. Those of
    tensors that never change are kept, so that they are copied one way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._away: dict[int, tuple[UntypedStorage, Tensor]] = {}  # by storage
        self._frozen: dict[int, tuple[UntypedStorage, Tensor]] = {}  # kept copies, by storage
        self._spare: dict[int, list[Tensor]] = {}  # copies that are used again, by bytes

    @property
    def nbytes(self) -> int:
        """Bytes that are offloaded."""
        return sum(host.numel() for _, host in self._away.values())

    @torch.no_grad()
    def offload(
        self, tensors: Iterable[Tensor], *, frozen: bool = False, beside: Iterable[Tensor] = ()
    ) -> None:
        """Frees the device memory of `tensors`; those that are away already stay so. frozen: they
        never change. beside: tensors that stay; what shares memory with them does too.
        """
        staying = {key for key, _ in self._storages(beside)}
        leaving: dict[int, tuple[UntypedStorage, Tensor]] = {}
        copied = False
        for key, storage in self._storages(tensors):
            if not storage.nbytes() or key in leaving or key in staying:
                continue
            if (kept := self._frozen.get(key)) is None:
                host = self._host_memory(storage.nbytes())
                host.copy_(_bytes_of(storage), non_blocking=True)
                kept, copied = (storage, host), True
            leaving[key] = kept
        if copied and self._device.type == "cuda":  # until the copies are whole
            torch.cuda.synchronize(self._device)
        for storage, _ in leaving.values():
            storage.resize_(0)
        self._away |= leaving
        self._frozen |= leaving if frozen else {}

    @torch.no_grad()
    def reload(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Puts tensors back that are away; None: all of them."""
        if not self._away:
            return
        keys = list(self._away) if tensors is None else [key for key, _ in self._storages(tensors)]
        for key in keys:
            if (away := self._away.pop(key, None)) is None:
                continue
            storage, host = away
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
            if key not in self._frozen:
                self._spare.setdefault(host.numel(), []).append(host)

    def here(self, tensor: Tensor) -> Tensor:
        """The tensor, or where it is away its copy in the host's memory, until it comes back."""
        away = self._away.get(_key(tensor.untyped_storage()))
        if away is None:
            return tensor
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(away[1].untyped_storage(), *place)  # pyright: ignore[reportArgumentType]

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, UntypedStorage]]:
        """The memory of tensors that is on the device, this rank's part where FSDP2 divides one.
        What torch did not allocate, as an array of NumPy's on a CPU, is not its to free.
        """
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            if storage.device.type == self._device.type and storage.resizable():
                yield _key(storage), storage

    def _host_memory(self, size: int) -> Tensor:
        if spare := self._spare.get(size):
            return spare.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")


def _key(storage: UntypedStorage) -> int:
    """What tensors have in common that share memory, also while it is freed."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


class HostWeights:
    """Weights that never change, in the host's memory: on the device inside `with`."""

    def __init__(self, lm: nn.Module) -> None:
        self._tensors = [*lm.parameters(), *lm.buffers()]
        self._copies = HostCopies(next(lm.parameters()).device)
        self.__exit__()  # off the device

    def __enter__(self) -> None:
        self._copies.reload()

    def __exit__(self, *error: object) -> None:
        self._copies.offload(self._tensors, frozen=True)
