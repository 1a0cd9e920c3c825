"""A store in memory that fails at a chosen change: "failing://NAME/folder"."""

from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class StoreKilled(BaseException):
    """The process ended at this change."""


class FailingStore(MemoryFileSystem):
    """Counts changes and fails at one, or from one on. What was being written stays half written,
    as on a file system without whole objects.
    """

    protocol = "failing"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    changes = 0
    reads = 0
    fails_at = 0  # the number of the change, from 1; 0: none
    fails_on = False  # also at every change after it
    error: type[BaseException] = OSError

    @classmethod
    def reset(cls) -> None:
        cls.store, cls.pseudo_dirs = {}, [""]
        cls.calm()

    @classmethod
    def calm(cls) -> None:
        cls.changes, cls.reads, cls.fails_at, cls.fails_on, cls.error = 0, 0, 0, False, OSError

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("failing://").strip("/") if path.strip("/") else ""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if self._fails():
            super().pipe_file(path, value[: len(value) // 2])
            raise self.error("the network is down")
        super().pipe_file(path, value)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode and "data" not in kwargs and self._fails():  # else it is of pipe_file
            super().pipe_file(path, b"half")
            raise self.error("the network is down")
        return super().open(path, mode, **kwargs)

    def rm_file(self, path: str) -> None:
        if self._fails():
            raise self.error("the network is down")
        super().rm_file(path)

    def _fails(self) -> bool:
        cls = type(self)
        cls.changes += 1
        return cls.changes == cls.fails_at or (cls.fails_on and cls.changes > cls.fails_at > 0)


fsspec.register_implementation("failing", FailingStore, clobber=True)
