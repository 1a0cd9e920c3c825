"""CUDA's driver as far as it shares memory between processes, in this process's own memory."""

import ctypes
from typing import Any

from postgrad.rollout.transport.ipc import IpcHandle


class FakeCuda:
    """The five calls, on this process's own memory; a handle is an address."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.open: list[int] = []
        self.fails: str = ""

    def cuMemAlloc_v2(self, pointer: Any, size: ctypes.c_size_t) -> int:
        block = (ctypes.c_ubyte * size.value)()
        address = ctypes.addressof(block)
        self.memory[address] = block
        pointer._obj.value = address
        return 2 if self.fails == "alloc" else 0

    def cuMemFree_v2(self, pointer: ctypes.c_uint64) -> int:
        del self.memory[pointer.value]
        return 0

    def cuIpcGetMemHandle(self, handle: Any, pointer: ctypes.c_uint64) -> int:
        raw = pointer.value.to_bytes(8, "little") + bytes(56)
        ctypes.memmove(handle._obj.reserved, raw, 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, pointer: Any, handle: IpcHandle, flags: Any) -> int:
        assert flags.value == 1
        address = int.from_bytes(bytes(handle.reserved)[:8], "little")
        if address not in self.memory:
            return 201
        pointer._obj.value = address
        self.open.append(address)
        return 0

    def cuIpcCloseMemHandle(self, pointer: ctypes.c_uint64) -> int:
        self.open.remove(pointer.value)
        return 0
