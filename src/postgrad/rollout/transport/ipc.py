"""Payloads on a GPU that sender and receiver share: CUDA's handles of 64 bytes.

The payload lies in memory of its own from the driver, not from torch's allocator, whose segments
may be expandable and have no such handle. The driver's library has one name and one interface for
all versions of CUDA and torch, so the two sides may differ in both. A handle names memory and
holds no object: raw bytes, as hex digits in JSON.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.parallel.device import make_current
from postgrad.rollout.transport.parcel import Parcel

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
PAYLOADS = 2  # one is packed while the other is read
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which the driver asks for


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class Driver:
    """The calls of CUDA's driver that share memory, in the context of torch's current device."""

    def __init__(self, library: Any = None) -> None:
        """library: that of the driver, loaded; None: this machine's. Raises RunError where it is
        missing or cannot share memory.
        """
        try:
            self._library: Any = ctypes.CDLL(LIBRARY) if library is None else library
            self._allocate = self._library.cuMemAlloc_v2
            self._free = self._library.cuMemFree_v2
            self._export = self._library.cuIpcGetMemHandle
            self._open = self._library.cuIpcOpenMemHandle_v2
            self._close = self._library.cuIpcCloseMemHandle
        except (OSError, AttributeError) as error:
            raise RunError(f"CUDA's driver cannot share memory: {error}") from error

    def allocate(self, size: int) -> int:
        """The address of new memory of `size` bytes."""
        pointer = ctypes.c_uint64()
        self._check("cuMemAlloc", self._allocate(ctypes.byref(pointer), ctypes.c_size_t(size)))
        return pointer.value

    def free(self, pointer: int) -> None:
        """Frees memory that `allocate` took."""
        self._check("cuMemFree", self._free(ctypes.c_uint64(pointer)))

    def handle_of(self, pointer: int) -> str:
        """The handle of memory that `allocate` took, as hex digits."""
        handle = IpcHandle()
        result = self._export(ctypes.byref(handle), ctypes.c_uint64(pointer))
        self._check("cuIpcGetMemHandle", result)
        return bytes(handle.reserved).hex()

    def open(self, handle: str) -> int:
        """The address in this process of the memory that a handle names."""
        raw = bytes.fromhex(handle)
        if len(raw) != HANDLE_BYTES:
            raise RunError(f"weights: a CUDA handle has {HANDLE_BYTES} bytes, this one {len(raw)}")
        pointer, shared = ctypes.c_uint64(), IpcHandle.from_buffer_copy(raw)
        result = self._open(ctypes.byref(pointer), shared, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._check("cuIpcOpenMemHandle", result)
        return pointer.value

    def close(self, pointer: int) -> None:
        """Gives up memory that `open` mapped."""
        self._check("cuIpcCloseMemHandle", self._close(ctypes.c_uint64(pointer)))

    def _check(self, call: str, result: int) -> None:
        if result:
            raise RunError(f"weights: {call} failed with CUDA's error {result}")


class IpcCarrier:
    """Carrier over memory of one GPU. card: its UUID, by which receivers know theirs."""

    way: str = "ipc"

    def __init__(self, device: torch.device, card: str, driver: Driver | None = None) -> None:
        self._device = device
        self._card = card
        _enter(device)
        self._driver = Driver() if driver is None else driver
        self._payloads: list[tuple[int, int]] = []  # (address, bytes)
        self._count = 0

    def room(self, size: int) -> Tensor:
        turn, self._count = self._count % PAYLOADS, self._count + 1
        if len(self._payloads) <= turn:
            self._payloads.append((self._driver.allocate(size), size))
        elif self._payloads[turn][1] < size:
            self._driver.free(self._payloads[turn][0])
            self._payloads[turn] = (self._driver.allocate(size), size)
        return tensor_at(self._payloads[turn][0], size, self._device)

    def where(self) -> dict[str, Any]:
        _wait(self._device)  # until the payload is packed
        pointer, _ = self._payloads[(self._count - 1) % PAYLOADS]
        return {"handles": {self._card: self._driver.handle_of(pointer)}}

    def pass_on(self, payload: Tensor) -> None: ...

    def close(self) -> None:
        _wait(self._device)
        while self._payloads:
            self._driver.free(self._payloads.pop()[0])


class IpcFetcher:
    """Fetcher over memory of the GPU `device`, whose UUID is `card`."""

    def __init__(self, device: torch.device, card: str, driver: Driver | None = None) -> None:
        self._device = device
        self._card = card
        _enter(device)
        self._driver = Driver() if driver is None else driver

    def fetch(self, parcel: Parcel) -> Tensor:
        """The payload, copied within the GPU: the sender fills its memory again."""
        handle = parcel.where["handles"].get(self._card)
        if handle is None:
            raise RunError(f"weights: parcel {parcel.number} is not on this engine's GPU")
        pointer = self._driver.open(handle)
        try:
            payload = tensor_at(pointer, parcel.size, self._device).clone()
            _wait(self._device)
        finally:
            self._driver.close(pointer)
        return payload

    def close(self) -> None: ...


def tensor_at(pointer: int, size: int, device: torch.device) -> Tensor:
    """[size] uint8 on `device`: memory that torch does not own."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(pointer), dtype=torch.uint8)
    memory = _Memory(pointer, size)
    return torch.as_tensor(memory, device=device)


class _Memory:
    """What torch reads memory of others by: no copy is made."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


def _enter(device: torch.device) -> None:
    """Makes the device's context, in which the driver works, this thread's."""
    if device.type == "cuda":
        make_current(device)
        torch.cuda.current_stream(device).synchronize()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
